"""Tests of benchmarks/kernel_check.py. Programs run on a GPU, or interpreted by Triton, alone."""

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
    for name, (_, cases) in KERNELS.items():
        for i, case in enumerate(case for case in cases if case.small):
            marks = pytest.mark.slow if i or name not in FAST else ()
            yield pytest.param(name, case, id=f"{name}-{case.name}", marks=marks)


@pytest.mark.parametrize(("name", "case"), [*small_cases()])
def test_every_definition_agrees_with_itself_in_float64(name, case):
    result = check(KERNELS[name].kernel, case, seed=3, implementation="reference")
    assert result["ok"], result


PLANTED = {
    "an unwritten result": lambda x: jnp.full_like(x, jnp.nan),
    "a tenth of a percent too large": lambda x: x * 1.001,
}


def with_program(kernel, program, monkeypatch):
    """Returns a kernel with another program."""
    module = types.SimpleNamespace(refuses=lambda *args, **options: None)
    setattr(module, kernel.reference.__name__, program)
    monkeypatch.setitem(sys.modules, "other_program", module)
    return dataclasses.replace(kernel, mosaic="other_program")


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_is_found(fault, monkeypatch):
    kernel, cases = KERNELS["dequantize"]
    case = next(case for case in cases if case.name == "balanced, rotated, 5 bits")

    def wrong(*args, interpret, **options):
        del interpret
        return jax.tree.map(PLANTED[fault], kernel.reference(*args, **options))

    broken = with_program(kernel, wrong, monkeypatch)
    assert not check(broken, case, seed=3, implementation="mosaic")["ok"]
