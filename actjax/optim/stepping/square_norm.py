"""The squared norm of an update, whose sums of squares kernels can take over."""

from typing import Any

import jax
import jax.numpy as jnp

from actjax._math.squares import PARTS, in_parts
from actjax.kernels import primitive
from actjax.kernels.layers import value_of


def square_norm(tree: Any) -> jax.Array:
    """Returns the sum of squares of all arrays in parts: [PARTS] float32, whose sum it is.

    The sum of a matrix with 1,024 rows or more is estimated from every sixteenth row: XLA for GPUs
    would read all updates and weights again for this number (7 GB in a step of `llama_1b`).
    """
    squares = (primitive.call(SQUARES, None, (), x) for x in jax.tree.leaves(tree))
    return sum(squares, no_square())


def no_square() -> jax.Array:
    """Returns the `square_norm` of nothing."""
    return jnp.zeros(PARTS, jnp.float32)


def sampled_rows(shape: tuple[int, ...]) -> int:
    """Returns that one of so many rows is read for the `square_norm` of an array."""
    rows = shape[-2] if len(shape) > 1 else 0
    return 16 if rows >= 1024 and rows % 16 == 0 else 1


class _Squares:
    """The sum of squares of an array: one equation, which a kernel can take over."""

    name = "sum_of_squares"
    addend = None
    converts = takes_tail = False
    writes_layers: primitive.Writes = "nothing"

    @staticmethod
    def reference(x: jax.Array) -> jax.Array:
        stride = sampled_rows(x.shape)
        if stride > 1:
            x = x.reshape(*x.shape[:-2], -1, stride, x.shape[-1])[..., 0, :]
        return in_parts(stride * jnp.sum(jnp.square(x.astype(jnp.float32)))[None])

    def compute(
        self, platform: str | None, chosen: Any, static: primitive.Static, *args: Any,
        into: Any = None,
    ) -> jax.Array:  # fmt: skip
        del platform, chosen, static, into
        return self.reference(*map(value_of, args))


SQUARES = _Squares()
