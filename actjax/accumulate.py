"""Gradients of a large batch from micro-batches that run in sequence."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from actjax._math.precision import accumulation_dtype, promoted
from actjax.factored.low_rank import LowRank, is_low_rank


def accumulate(
    loss_and_grad: Callable[[Any, Any], tuple[jax.Array, Any]],
    params: Any,
    batches: Any,
    *,
    weights: jax.Array | None = None,
    max_rank: int | None = None,
) -> tuple[jax.Array, Any]:
    """Returns the weighted mean of value and gradient over micro-batches, which run in sequence.

    Dense gradients, and factored gradients in a shared basis, are summed in float32: the mean is
    exact. Other factored gradients are concatenated, so ranks add; this is exact too unless
    `max_rank` truncates the sum.

    Args:
      loss_and_grad: from parameters and a micro-batch to a value and its gradient, such as
        `actjax.value_and_grad(loss)`.
      params: the parameters.
      batches: a pytree of arrays [count, ...], one micro-batch for each index.
      weights: weights of the micro-batches, [count]; by default `1 / count` each.
      max_rank: truncates summed factors to this rank. The error in Frobenius norm is the root of
        the sum of squares of the dropped singular values, the least possible (`LowRank.truncate`).

    Raises:
      ValueError: the arrays of `batches` have no common leading axis of at least 1, `weights` has
        another length, or the value is not a scalar.
    """
    lengths = {x.shape[0] if jnp.ndim(x) else 0 for x in jax.tree.leaves(batches)}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            "arrays of `batches` must share a leading axis of micro-batches, but its lengths are"
            f" {sorted(lengths)}."
        )
    (count,) = lengths
    weights = jnp.full((count,), 1 / count) if weights is None else jnp.asarray(weights)
    if weights.shape != (count,):
        raise ValueError(
            f"`weights` must be [{count}], one for each micro-batch, got {list(weights.shape)}."
        )
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), batches)
    loss, _ = jax.eval_shape(loss_and_grad, params, first)
    if getattr(loss, "shape", None) != ():
        raise ValueError(
            f"`loss_and_grad` must return a scalar and its gradient, but returned {loss} first."
            " Drop the auxiliary output: it cannot be averaged."
        )

    def weighted(slices: Any) -> tuple[Any, None]:
        batch, weight = slices
        result = loss_and_grad(params, batch)
        return jax.tree.map(lambda g: _scaled(g, weight), result, is_leaf=is_low_rank), None

    return sum_gradients(weighted, (batches, weights), max_rank)[0]


def sum_gradients(
    run: Callable[[Any], tuple[Any, Any]], slices: Any, max_rank: int | None = None
) -> tuple[Any, Any]:
    """Returns the sum of gradients that are computed in sequence, and the stacked other outputs.

    Args:
      run: from a slice to a gradient, with `LowRank` for factored ones, and other arrays.
      slices: a pytree of arrays [count, ...].
      max_rank: as for `accumulate`.
    """
    first = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), slices)
    shapes, _ = jax.eval_shape(run, first)
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=is_low_rank)
    apart = [is_low_rank(g) and g.basis_name is None for g in leaves]

    def add(sums: list[Any], inputs: Any) -> tuple[Any, Any]:
        gradient, others = run(inputs)
        parts = treedef.flatten_up_to(gradient)
        sums = [
            s if alone else _add(s, _wide(g))
            for s, g, alone in zip(sums, parts, apart, strict=True)
        ]
        return sums, ([g for g, alone in zip(parts, apart, strict=True) if alone], others)

    zeros = [None if alone else _zeros(g) for g, alone in zip(leaves, apart, strict=True)]
    total, (stacked, others) = jax.lax.scan(add, zeros, slices)
    factored = iter(stacked)
    merged = [
        _side_by_side(next(factored), max_rank) if alone else s
        for s, alone in zip(total, apart, strict=True)
    ]
    return jax.tree.unflatten(treedef, merged), others


def _wide(g: Any) -> Any:
    """Returns a gradient in the dtype of the sum; a shared basis keeps its dtype."""
    wide = accumulation_dtype(g.dtype)
    return dataclasses.replace(g, right=g.right.astype(wide)) if is_low_rank(g) else g.astype(wide)


def _scaled(g: Any, weight: jax.Array) -> Any:
    """Returns a gradient times a weight, in the dtype of the sum."""
    if is_low_rank(g):
        return (g if g.basis_name is None else _wide(g)) * weight
    wide = _wide(g)
    return jnp.multiply(*promoted(wide, weight)).astype(wide.dtype)


def _zeros(g: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(_wide, g))


def _add(total: Any, g: Any) -> Any:
    # All micro-batches have the same basis, which is unknown before the first one.
    if not is_low_rank(g):
        return total + g
    return dataclasses.replace(g, right=total.right + g.right)


def _side_by_side(stacked: LowRank, max_rank: int | None) -> LowRank:
    """Returns the sum of a stack [count] of `LowRank`s, truncated to `max_rank`."""
    left, right = jnp.moveaxis(stacked.left, 0, -2), jnp.moveaxis(stacked.right, 0, -3)
    total = LowRank(
        left.reshape(*left.shape[:-2], -1), right.reshape(*right.shape[:-3], -1, right.shape[-1])
    )
    return total if max_rank is None or total.rank <= max_rank else total.truncate(max_rank)
