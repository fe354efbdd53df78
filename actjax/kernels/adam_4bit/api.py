"""An update of Adam on moments in 4 bits, which are decoded in registers only."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from actjax._shards import Dims
from actjax.formats.blockwise import STEP
from actjax.formats.four_bit import RankOneFourBit, SignedFourBit
from actjax.kernels.adam_4bit import reference
from actjax.kernels.checks import check_floating, check_shape
from actjax.kernels.dispatch import Implementation, Kernel


def adam_4bit(
    grad: jax.Array,
    mu: SignedFourBit,
    nu: RankOneFourBit,
    corrections: jax.Array,
    *,
    b1: float,
    b2: float,
    eps: float,
    eps_root: float = 0.0,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, SignedFourBit, RankOneFourBit]:
    """Returns `m / (1 - b1^t) / (sqrt(v / (1 - b2^t) + eps_root) + eps)` and the new moments.

    The moments are those of `adam_8bit`. Their scales are the largest magnitudes of rows and
    columns, which are known only after a pass over everything: a first program computes the new
    moments to find them, a second one computes them again with everything else. Each reads the
    gradient and the codes once.

    Args:
      grad: `g`, [..., d, n].
      mu: `m`, of the same shape.
      nu: `v`, of the same shape.
      corrections: `1 - b1^t` and `1 - b2^t`, float32 [2].
      b1: decay of the first moment.
      b2: decay of the second.
      eps: added to the root.
      eps_root: added under the root.
      implementation: what computes it; None for the best one that applies.

    Returns:
      The update, float32 [..., d, n], without a learning rate, and the new `mu` and `nu`.

    Raises:
      TypeError: `grad` is not floating point.
      ValueError: shapes differ; an implementation that cannot take the arguments.
    """
    check_floating("adam_4bit", "grad", grad)
    *stack, d, n = (*nu.rows.shape[:-1], nu.columns.shape[-1])
    check_shape("adam_4bit", "grad", grad, (*stack, d, n))
    width = jax.ShapeDtypeStruct((*mu.scales.shape[:-1], mu.width), mu.dtype)
    check_shape("adam_4bit", "mu", width, (*stack, d, n))
    check_shape("adam_4bit", "corrections", corrections, (2,))
    decays = {"b1": b1, "b2": b2}
    maxima = MAXIMA(grad, mu, nu, implementation=implementation, **decays)
    # Across devices too, where they divide rows or columns.
    scales = [jnp.max(x, axis=-1 - i % 2, keepdims=True) for i, x in enumerate(maxima)]
    args = grad, mu, nu, *scales, corrections
    return KERNEL(*args, implementation=implementation, **decays, eps=eps, eps_root=eps_root)


def _dims_maxima(
    result: Any, grad: jax.Array, mu: SignedFourBit, nu: RankOneFourBit, **_: float
) -> tuple:
    *stack, d, n = grad.shape
    matrix, of_rows, of_columns = _axes(len(stack), d % STEP == 0, n % reference.TILE == 0)
    return (matrix, *_moments(mu, nu, matrix, of_rows, of_columns)), (matrix,) * 4


def _dims(
    result: Any,
    grad: jax.Array,
    mu: SignedFourBit,
    nu: RankOneFourBit,
    *args: jax.Array,
    **_: float,
) -> tuple:
    # Groups must not cross devices.
    apart = grad.shape[-1] % mu.group == 0 and mu.group == nu.group
    matrix, of_rows, of_columns = _axes(grad.ndim - 2, True, apart)
    moments = _moments(mu, nu, matrix, of_rows, of_columns)
    scales = of_rows, of_columns, of_rows, of_columns
    return (matrix, *moments, *scales, Dims.whole(args[-1])), (matrix, *moments)


def _axes(stack: int, rows: bool, columns: bool) -> tuple[Dims, Dims, Dims]:
    """Returns the dims of a matrix, of its row scales and of its column scales."""
    names = tuple(f"stack{i}" for i in range(stack))
    row, column = "rows" if rows else None, "columns" if columns else None
    return Dims((*names, row, column)), Dims((*names, row, None)), Dims((*names, None, column))


def _moments(
    mu: SignedFourBit, nu: RankOneFourBit, matrix: Dims, rows: Dims, columns: Dims
) -> tuple[SignedFourBit, RankOneFourBit]:
    """Returns the moments with dims in the place of their arrays."""
    scales = {"codes": matrix, "rows": rows, "columns": columns}
    return (
        dataclasses.replace(mu, scales=matrix, **scales),
        dataclasses.replace(nu, **scales),
    )


_PALLAS = "actjax.kernels.adam_4bit.pallas"

MAXIMA = Kernel("adam_4bit_maxima", reference.maxima, _dims_maxima, pallas=_PALLAS, converts=True)
"""From `grad`, `mu`, `nu` and the options `b1` and `b2` to the largest magnitudes of the new
moments, first `mu`, then `nu`: of each row in every `reference.TILE` columns, [..., d, tiles], and
of each column in every `blockwise.STEP` rows, [..., steps, n]."""

KERNEL = Kernel(
    "adam_4bit",
    reference.adam_4bit,
    _dims,
    pallas=_PALLAS,
    converts=True,
    reads_layers=True,
    writes_layers="operands",
    takes_tail=True,
)
"""From `grad`, `mu`, `nu`, the largest magnitudes of rows and columns of the new `mu` and of the
new `nu`, and `corrections`, with the options of `adam_4bit`, to its results."""
