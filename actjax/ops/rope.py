"""Rotary position embedding (Su et al., "RoFormer", 2021); its backward pass holds two tables."""

import jax

from actjax._core.checks import check_floating
from actjax._core.reverse_mode import ReverseMode
from actjax.kernels.rope_encode.reference import value


def rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Returns `x` with the pairs (i, i + D/2) of each head rotated by the angles of its position.

    Value and gradient are exact. A rotation is linear and its transpose is the opposite rotation,
    so the backward pass holds the tables, not broadcast to the shape of `x`, and nothing of `x`.

    Args:
      x: [B, S, H, D].
      cos: cosines of the angles, [S, D / 2]. They have no gradient.
      sin: sines of the angles, [S, D / 2]. They have no gradient.

    Returns:
      [B, S, H, D] in the dtype of `x`, rotated in float32.

    Raises:
      ValueError: tables that do not fit `x`.
      TypeError: `x` is not floating point.
    """
    check_floating("x", x)
    check_tables(x.shape, cos, sin)
    return _rope(x, cos, sin)


def check_tables(shape: tuple[int, ...], cos: jax.Array, sin: jax.Array) -> None:
    """Raises a `ValueError` unless tables fit an array of this shape."""
    expected = (shape[1], shape[-1] // 2) if len(shape) == 4 and shape[-1] % 2 == 0 else None
    if cos.shape != expected or sin.shape != expected:
        raise ValueError(
            "`x` must be [B, S, H, D] with D even, and `cos` and `sin` [S, D / 2],"
            f" got x{shape}, cos{cos.shape}, sin{sin.shape}."
        )


@ReverseMode
def _rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    return value(x, cos, sin)


def _rope_fwd(x, cos, sin):
    return _rope(x, cos, sin), (cos, sin)


def _rope_bwd(tables, dy):
    cos, sin = tables
    return _rope(dy, cos, -sin), None, None


_rope.defvjp(_rope_fwd, _rope_bwd)
