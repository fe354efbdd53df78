"""The assignment of each token to the most similar point (PAMM, arXiv 2506.02939, section 3)."""

import math
from typing import Any

import jax

from actjax._shards import Dims
from actjax.formats.code import token_names
from actjax.kernels.checks import check_floating
from actjax.kernels.dispatch import Implementation, Kernel
from actjax.kernels.point_assignment import reference


def point_assignment(
    x: jax.Array,
    points: jax.Array,
    *,
    tolerance: float = float("inf"),
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns `f(i) = argmax_j |cos(x_i, C_j)|`, `α_i = <x_i, C_f(i)> / |C_f(i)|²`, and a mask.

    It reads `x` once (twice with a tolerance), and forms no matrix of tokens by points.

    Args:
      x: tokens, [..., d].
      points: `C`, [k, d], of the same dtype.
      tolerance: ε; tokens with `|x_i - α_i C_f(i)| > ε |x_i|` are dropped.
      implementation: what computes it; None for the best one that applies.

    Returns:
      Indices, int32; coefficients, in the accumulation dtype; whether a token is kept, bool. Each
      is [...].

    Raises:
      TypeError: an argument is not floating point.
      ValueError: shapes do not fit; an implementation that cannot take the arguments.
    """
    check_floating("point_assignment", "x", x)
    check_floating("point_assignment", "points", points)
    if points.ndim != 2 or points.shape[0] == 0 or points.shape[1:] != x.shape[-1:]:
        raise ValueError(
            f"`points` of point_assignment must be [k, {x.shape[-1:]}] with at least one point, got"
            f" {points.shape}."
        )
    return KERNEL(x, points, tolerance=tolerance, implementation=implementation)


def _dims(
    result: Any, x: jax.Array, points: jax.Array, *, tolerance: float
) -> tuple[tuple, tuple[Dims, Dims, Dims]]:
    del result, tolerance
    tokens = token_names(x.ndim - 1)
    by_token = Dims(tokens)
    return (Dims((*tokens, None)), Dims.whole(points)), (by_token, by_token, by_token)


def _slower(x: jax.Array, points: jax.Array, *, tolerance: float) -> bool:
    # On an H100, 16 points in float32 take 3.8 of XLA's time, and with a tolerance 1.3 in bfloat16;
    # 128 points take 0.7 in float32 and 0.2 in bfloat16.
    second_pass = not math.isinf(tolerance)
    return points.shape[0] < 64 and (x.dtype.itemsize > 2 or second_pass)


KERNEL = Kernel(
    "point_assignment",
    reference.point_assignment,
    _dims,
    pallas="actjax.kernels.point_assignment.pallas",
    triton="actjax.kernels.point_assignment.triton",
    slower=_slower,
)
