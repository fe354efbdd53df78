"""The definition of `adam_4bit`: plain JAX, never tuned."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from actjax.formats.blockwise import largest_of_blocks, largest_of_steps
from actjax.formats.four_bit import RankOneFourBit, SignedFourBit

TILE = 256
"""Columns of which `maxima` takes the maximum."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Means:
    """A second moment that is a product of the means of rows and of columns, as in Adafactor.

    Attributes:
      rows: means of the squares of each row, [..., d, 1].
      columns: means of the squares of each column, [..., 1, n].
    """

    rows: Any
    columns: Any

    @property
    def dtype(self) -> Any:
        """Dtype of the product."""
        return jnp.result_type(self.rows, self.columns)

    def decode(self) -> jax.Array:
        """Returns the moment, [..., d, n]."""
        rows, columns = self.factors()
        return product(rows, columns)

    def factors(self) -> tuple[jax.Array, jax.Array]:
        """Returns the factors of the moment: the columns, and the rows over their mean."""
        return self.rows / jnp.mean(self.rows, axis=-2, keepdims=True), self.columns


def product(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Returns the product of factors; inf where squares overflow, so that the update is zero."""
    moment = rows * columns
    return jnp.where(jnp.isfinite(moment), moment, jnp.inf)


Second = RankOneFourBit | Means


def maxima(
    grad: jax.Array, mu: SignedFourBit, nu: RankOneFourBit | None, *, b1: float, b2: float
) -> tuple[jax.Array, ...]:
    """As `actjax.kernels.adam_4bit.api.MAXIMA`."""
    # Apart from the second pass: otherwise XLA for CPUs writes the new moments to memory.
    grad, mu, nu = jax.lax.optimization_barrier((grad, mu, nu))
    g = grad.astype(jnp.float32)
    largest = _largest(_first(g, mu, b1))
    if nu is None:
        return *largest, *_sums_of_squares(grad, *largest)
    return *largest, *_largest(_second(g, nu, b2))


def adam_4bit(
    grad: jax.Array,
    mu: SignedFourBit,
    nu: Second,
    scales: tuple[jax.Array, ...],
    corrections: jax.Array,
    *,
    b1: float,
    b2: float,
    eps: float,
    eps_root: float,
) -> tuple[jax.Array, SignedFourBit, RankOneFourBit | None]:
    """As `actjax.kernels.adam_4bit.api.KERNEL`."""
    g = grad.astype(jnp.float32)
    first = _first(g, mu, b1)
    second = product(nu.rows, nu.columns) if isinstance(nu, Means) else _second(g, nu, b2)
    root = jnp.sqrt(second / corrections[1] + eps_root)
    update = (first / corrections[0]) / (root + eps)
    new_mu, new_nu = mu.encode_with(scales[0], scales[1], first), None
    if isinstance(nu, RankOneFourBit):
        new_nu = nu.encode_with(scales[2], scales[3], second)
    return update, new_mu, new_nu


def _largest(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return largest_of_blocks(x, TILE), largest_of_steps(x)


def _sums_of_squares(grad: jax.Array, rows: jax.Array, columns: jax.Array) -> list[jax.Array]:
    """Returns sums of the squares of rows and of columns in the shapes of other arrays.

    Each sum is in one tile, and the others have zeros.
    """
    sums = []
    for axis, like in ((-1, rows), (-2, columns)):
        # Each sum reads the gradient itself: XLA for CPUs would write the squares that both share
        # to memory, which takes longer than all else.
        grad, *sums = jax.lax.optimization_barrier((grad, *sums))
        total = jnp.sum(jnp.square(grad.astype(jnp.float32)), axis, keepdims=True)
        width = [(0, size - 1 if i == like.ndim + axis else 0) for i, size in enumerate(like.shape)]
        sums.append(jnp.pad(total, width))
    return sums


def _first(g: jax.Array, mu: SignedFourBit, b1: float) -> jax.Array:
    return b1 * mu.decode().astype(jnp.float32) + (1 - b1) * g


def _second(g: jax.Array, nu: RankOneFourBit, b2: float) -> jax.Array:
    return b2 * nu.decode().astype(jnp.float32) + (1 - b2) * (g * g)
