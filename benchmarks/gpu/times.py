"""Times of kernels beside XLA's program for the same definition and a copy of as many bytes."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from actjax.kernels.dispatch import Kernel
from benchmarks.device_time import interleaved, medians
from benchmarks.gpu.config import Config, case_units, find_case, on_gpu, takes_triton
from benchmarks.gpu.parts import alone
from benchmarks.kernel_cases.case import Case

_LEAST_BYTES = 600_000_000
"""Enough that a call takes longer than its launch and does not fit into a cache."""


class _Timed(NamedTuple):
    """Programs to time.

    Attributes:
      least: bytes of the arguments and results.
      make: returns the arguments for a key.
      source: returns an array of half as many bytes, to copy.
      programs: by name, functions of the arguments, or of the source for the copy.
    """

    least: int
    make: Callable[..., Any]
    source: Callable[..., Any]
    programs: dict[str, Any]


def _timed(kernel: Kernel, case: Case) -> _Timed:
    longer = case.longer(-(-_LEAST_BYTES // case.least_bytes(kernel.reference)))
    least = longer.least_bytes(kernel.reference)
    asked = {"kernel": "pallas"} | ({"triton": "triton"} if takes_triton(kernel, case) else {})
    return _Timed(
        least,
        jax.jit(longer.make),
        # Words: XLA's copy of bytes reaches half the bandwidth.
        jax.jit(lambda key: jax.random.bits(key, (least // 8,), jnp.uint32)),
        {
            **{
                name: jax.jit(functools.partial(kernel, implementation=own, **case.options))
                for name, own in asked.items()
            },
            "xla": jax.jit(functools.partial(kernel.reference, **case.options)),
            "copy": jax.jit(lambda x: x ^ 1),
        },
    )


def time_units(config: Config) -> list[dict[str, str]]:
    """Returns kernels and large cases; none without a GPU."""
    return [unit for unit in case_units(config) if on_gpu() and not find_case(unit)[1].small]


def compile_kernel(config: Config, unit: dict[str, str]) -> dict[str, Any]:
    """Compiles what `time_kernel` runs."""
    del config
    one, key = _timed(*find_case(unit)), jax.random.key(0)
    one.make.lower(key).compile()
    one.source.lower(key).compile()
    _compiled(one)
    return {}


def time_kernel(config: Config, unit: dict[str, str]) -> dict[str, Any]:
    """Returns times of a kernel, of its program in Triton if it has one, of XLA's and of a copy."""
    del config
    one, key = _timed(*find_case(unit)), jax.random.key(0)
    make, draw = one.make.lower(key).compile(), one.source.lower(key).compile()
    run = _compiled(one)
    with alone():
        args, copied = make(key), (draw(key),)
        seconds = interleaved(
            {
                name: functools.partial(program, *(copied if name == "copy" else args))
                for name, program in run.items()
            }
        )
    middle = medians(seconds)
    own = {"triton_of_pallas": middle["triton"] / middle["kernel"]} if "triton" in run else {}
    return {
        "bytes": one.least,
        "seconds": seconds,
        "bandwidth": one.least / middle["kernel"],
        "share_of_copy": middle["copy"] / middle["kernel"],
        "of_xla": middle["kernel"] / middle["xla"],
        **own,
    }


def _compiled(one: _Timed) -> dict[str, Any]:
    key = jax.random.key(0)
    args, source = jax.eval_shape(one.make, key), jax.eval_shape(one.source, key)
    return {
        name: program.lower(*((source,) if name == "copy" else args)).compile()
        for name, program in one.programs.items()
    }
