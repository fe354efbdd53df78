"""Optax transforms whose large moments are stored in few bits between steps."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from actjax._core.flax import in_structure_of, register_fields, without_variables
from actjax.formats.blockwise import Blockwise
from actjax.formats.four_bit import RankOneFourBit, SignedFourBit
from actjax.optim.paths import map_state

FIRST_MOMENTS = ("mu", "trace", "m1", "m2")
"""Means of gradients."""
SECOND_MOMENTS = ("nu", "nu_max", "sum_of_squares", "e_g", "e_x")
"""Means of squares, which are never negative."""
Code = Blockwise | SignedFourBit | RankOneFourBit
"""A moment in 8 or 4 bits. `decode()` returns the array, `encode(x)` another one in its form."""
_KEPT = (optax.ScaleByRStdDevState, optax.ScaleBySM3State, optax.contrib.SophiaState)
"""States that use the names of moments for something else. The first subtracts the square of one
field from the other, which leaves only rounding errors of few bits; in the second `nu` is a
momentum, and in the third a curvature, which may be negative."""

ZerosOf = Callable[[tuple[int, ...], Any, bool], Code | None]
"""From shape and dtype of a moment, and whether it has no negative values, to zeros in its form;
None for moments that stay as they are."""


def is_code(x: Any) -> bool:
    """Returns whether `x` is a moment in few bits: for `is_leaf` of `jax.tree` functions."""
    return isinstance(x, Code)


def decoded(state: Any) -> Any:
    """Returns a state with every moment as an array."""
    return jax.tree.map(lambda x: x.decode() if is_code(x) else x, state, is_leaf=is_code)


def encoded_like(old: Any, new: Any) -> Any:
    """Returns the arrays of `new` in the form of those in `old`."""
    return jax.tree.map(lambda a, b: a.encode(b) if is_code(a) else b, old, new, is_leaf=is_code)


def store_moments(
    inner: optax.GradientTransformation,
    zeros_of: ZerosOf,
    make_state: Callable[[Any], Any],
    *,
    min_size: int,
    signed: Sequence[str],
    unsigned: Sequence[str],
) -> optax.GradientTransformationExtraArgs:
    """Returns a transform that decodes the moments of another, runs it, and encodes them again.

    Args:
      inner: the transform.
      zeros_of: the form of a moment.
      make_state: from the state of `inner`, with codes in it, to the state of the wrapper, which
        has it as its field `inner`.
      min_size: arrays with fewer elements stay as they are.
      signed: names of the fields that hold moments with a sign.
      unsigned: names of the fields that hold moments without negative values.
    """
    inner = optax.with_extra_args_support(inner)

    def compress(fields: list[str], _: str | None, x: Any) -> Any:
        if isinstance(x, _KEPT) or x.ndim == 0 or x.size < min_size:
            return x
        is_unsigned = any(field in unsigned for field in fields)
        is_moment = is_unsigned or any(field in signed for field in fields)
        if not is_moment or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        zeros = zeros_of(x.shape, x.dtype, is_unsigned)
        if zeros is None:
            return x
        register_fields(type(zeros), *zeros.arrays)
        # Without the barrier, XLA computes the codes of these constants while it compiles.
        return zeros.encode(jax.lax.optimization_barrier(x))

    def init(params: optax.Params) -> Any:
        params = without_variables(params)
        state = inner.init(params)
        return make_state(map_state(compress, state, params, lambda x: isinstance(x, _KEPT)))

    def update(
        updates: optax.Updates, state: Any, params: Any = None, **extra: Any
    ) -> tuple[optax.Updates, Any]:
        arguments = without_variables(updates), decoded(state.inner), without_variables(params)
        changes, new = inner.update(*arguments, **extra)
        return in_structure_of(changes, updates), make_state(encoded_like(state.inner, new))

    return optax.GradientTransformationExtraArgs(init, cast(Any, update))
