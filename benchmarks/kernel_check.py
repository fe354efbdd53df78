"""Comparison of a kernel with its definition in float64."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from actjax.formats.blockwise import Blockwise
from actjax.formats.code import QuantizedCode, QuantizeInputs
from actjax.formats.four_bit import RankOneFourBit, SignedFourBit
from actjax.kernels.dispatch import Implementation, Kernel
from benchmarks.kernel_cases.case import Case

_HALF = 2.0**-8
"""Largest relative error of a result in 16 bits: roundings of the decoded input and itself."""
_SINGLE = 1e-5
"""The same in float32: sums of thousands of terms, each with a few roundings of 2^-24."""
_TIES = 0.005
"""Largest share of bytes that may differ: numbers on the coarse grid of bfloat16 are often halfway
between two levels, where the rounding of float32 decides."""


_SCALE = _HALF * _TIES**0.5
"""The same for float32 scales of rotated groups. Their numbers are rounded to 16 bits before the
rotation, and a share of `_TIES` of them may round to the other neighbor, which is `_HALF` away."""


def check(
    kernel: Kernel, case: Case, seed: int, implementation: Implementation | None
) -> dict[str, Any]:
    """Computes a case on random inputs, and compares every result with the definition.

    The memory of the results is filled with NaN before, so that missing writes show.

    Returns:
      `error`, the largest relative error of a result in floating point; `differing`, the largest
      share of differing bytes of an integer result; `repeats`, whether a second run gave the same
      bits; and `ok`.
    """
    args = nearest(jax.jit(case.make)(jax.random.key(seed)))
    run = jax.jit(functools.partial(kernel, implementation=implementation, **case.options))
    _poison(jax.eval_shape(run, *args))
    results = jax.block_until_ready(run(*args))
    again = run(*args)
    exact = definition(kernel, case, args)
    joined = case.joined or (lambda results: results)
    result = compared(joined(results), joined(exact))
    repeats = all(
        np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
        for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(again), strict=True)
    )
    return result | {"repeats": repeats, "ok": bool(result["ok"] and repeats)}


def compared(results: Any, exact: Any) -> dict[str, Any]:
    """Compares results with those of the definition in float64.

    Returns:
      `error`, `differing` and `ok`, as `check`.
    """
    errors, shares, ok = [0.0], [0.0], True
    is_code = lambda x: isinstance(x, QuantizedCode)  # noqa: E731
    codes = filter(is_code, jax.tree.leaves(results, is_leaf=is_code))
    rotated = [jax.tree.leaves(code) for code in codes if code.format.rotate]
    of_rotated = {id(leaf) for leaves in rotated for leaf in leaves}
    pairs = zip(jax.tree.leaves(results), jax.tree.leaves(exact), strict=True)
    for result, want in pairs:
        got, single = np.asarray(result), _SCALE if id(result) in of_rotated else _SINGLE
        if np.issubdtype(got.dtype, np.integer) or got.dtype == bool:
            share = float(np.mean(got != want.astype(got.dtype)))
            shares.append(share)
            ok &= share <= _TIES
        else:
            error = relative_error(got.astype(np.float64), want.astype(np.float64))
            errors.append(error)
            ok &= error <= (_HALF if got.dtype.itemsize == 2 else single)
    return {"error": max(errors), "differing": max(shares), "ok": bool(ok)}


def definition(kernel: Kernel, case: Case, args: Any) -> Any:
    """Returns the results of the definition of a kernel, in float64."""
    with jax.enable_x64(True):
        exact = jax.jit(lambda args: kernel.reference(*_in_float64(args), **case.options))(args)
        return jax.tree.map(np.asarray, exact)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Returns `|got - want| / |want|`; infinite where something is not finite."""
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


def nearest(args: Any) -> Any:
    """Returns arguments whose moments are rounded to the nearest level.

    Stochastic rounding depends on the last bit of a float32, which float64 does not have.
    """
    kinds = SignedFourBit | RankOneFourBit
    return jax.tree.map(
        lambda x: dataclasses.replace(x, stochastic=False) if isinstance(x, kinds) else x,
        args,
        is_leaf=lambda x: isinstance(x, kinds),
    )


def _in_float64(args: Any) -> Any:
    """Returns arguments in float64; codes are changed to decode to float64."""
    coded = QuantizedCode | Blockwise | SignedFourBit | RankOneFourBit

    def widen(x: Any) -> Any:
        if isinstance(x, coded):
            return dataclasses.replace(x, dtype=jnp.dtype("float64"))
        if isinstance(x, QuantizeInputs):  # Means and spreads are as a code stores them.
            return dataclasses.replace(x, x=widen(x.x))
        return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(widen, args, is_leaf=lambda x: isinstance(x, coded | QuantizeInputs))


def _poison(shapes: Any) -> None:
    """Fills as much memory as these arrays take with NaN, and frees it."""
    fillings = [
        np.full(x.shape, np.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0x55, x.dtype)
        for x in jax.tree.leaves(shapes)
    ]
    for array in jax.block_until_ready(jax.device_put(fillings)):
        array.delete()
