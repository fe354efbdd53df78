"""Tests of benchmarks/kernel_check.py."""

import dataclasses
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernel_cases import KERNELS
from benchmarks.kernel_check import check

FAST = ("quantize", "adam_8bit", "adam_4bit")
"""Kernels of each kind of code."""


def small_cases():
    """The small cases of each kernel, most of them slow: `tests/kernels` tests kernels."""
    for name, (kernel, cases) in KERNELS.items():
        if kernel.pallas is None:
            continue
        for i, case in enumerate(case for case in cases if case.small):
            marks = pytest.mark.slow if i or name not in FAST else ()
            yield pytest.param(name, case, id=f"{name}-{case.name}", marks=marks)


@pytest.mark.parametrize(("name", "case"), [*small_cases()])
def test_every_kernel_agrees_with_its_definition_in_float64(name, case):
    result = check(KERNELS[name].kernel, case, seed=3, implementation="interpreted")
    assert result["ok"], result


PLANTED = {
    "an unwritten result": lambda x: jnp.full_like(x, jnp.nan),
    "a tenth of a percent too large": lambda x: x * 1.001,
}


def with_program(kernel, program, monkeypatch):
    """Returns a kernel with another program for GPUs."""
    module = types.SimpleNamespace(refuses=lambda *args, **options: None)
    setattr(module, kernel.reference.__name__, program)
    monkeypatch.setitem(sys.modules, "other_program", module)
    return dataclasses.replace(kernel, pallas="other_program")


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_is_found(fault, monkeypatch):
    kernel, cases = KERNELS["rms_norm_backward"]
    case = next(case for case in cases if case.name == "three groups, dither")

    def wrong(*args, interpret, **options):
        del interpret
        return jax.tree.map(PLANTED[fault], kernel.reference(*args, **options))

    broken = with_program(kernel, wrong, monkeypatch)
    assert not check(broken, case, seed=3, implementation="interpreted")["ok"]
