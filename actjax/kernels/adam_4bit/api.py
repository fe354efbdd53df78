"""An update of Adam on moments in 4 bits, which are decoded in registers only."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from actjax._shards import Dims
from actjax.formats.blockwise import STEP
from actjax.formats.four_bit import RankOneFourBit, SignedFourBit
from actjax.kernels.adam_4bit import reference
from actjax.kernels.adam_4bit.reference import Means, Second
from actjax.kernels.checks import check_floating, check_shape
from actjax.kernels.dispatch import Implementation, Kernel


def adam_4bit(
    grad: jax.Array,
    mu: SignedFourBit,
    nu: Second,
    corrections: jax.Array,
    *,
    b1: float,
    b2: float,
    eps: float,
    eps_root: float = 0.0,
    eps_squared: float = 0.0,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, SignedFourBit, Second]:
    """Returns `m / (1 - b1^t) / (sqrt(v / (1 - b2^t) + eps_root) + eps)` and the new moments.

    The moments are those of `adam_8bit`. Their scales are the largest magnitudes of rows and
    columns, which are known only after a pass over everything: a first program computes the new
    moments to find them, a second one computes them again with everything else. Each reads the
    gradient and the codes once.

    Args:
      grad: `g`, [..., d, n].
      mu: `m`, of the same shape.
      nu: `v`, of the same shape, in 4 bits or as `Means`: then the new means are `b2` times the
        old ones, plus `1 - b2` times those of `g² + eps_squared`.
      corrections: `1 - b1^t` and `1 - b2^t`, float32 [2].
      b1: decay of the first moment.
      b2: decay of the second.
      eps: added to the root.
      eps_root: added under the root.
      eps_squared: added to the squares whose means are taken.
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
    options = {"implementation": implementation, **decays}
    # Across devices too, where they divide rows or columns.
    if isinstance(nu, RankOneFourBit):
        largest = MAXIMA(grad, mu, nu, **options)
        scales = tuple(jnp.max(x, axis=-1 - i % 2, keepdims=True) for i, x in enumerate(largest))
        args = grad, mu, nu, scales, corrections
        update, new_mu, new_nu = KERNEL(*args, **options, eps=eps, eps_root=eps_root)
        return update, _with_scales(new_mu, *scales[:2]), _with_scales(new_nu, *scales[2:])
    *largest, row_sums, column_sums = MAXIMA(grad, mu, None, **options)
    scales = tuple(jnp.max(x, axis=-1 - i, keepdims=True) for i, x in enumerate(largest))

    def mean(old: jax.Array, sums: jax.Array, axis: int, count: int) -> jax.Array:
        new = jnp.sum(sums, axis, keepdims=True) / count + eps_squared
        return b2 * old + (1 - b2) * new

    means = Means(mean(nu.rows, row_sums, -1, n), mean(nu.columns, column_sums, -2, d))
    args = grad, mu, Means(*means.factors()), scales, corrections
    update, new_mu, _ = KERNEL(*args, **options, eps=eps, eps_root=eps_root)
    return update, _with_scales(new_mu, *scales), means


def _with_scales(moment: Any, rows: jax.Array, columns: jax.Array) -> Any:
    """Returns a new moment whose scales are known as arrays that no kernel computes.

    So one kernel writes those of all moments into their stacks.
    """
    return dataclasses.replace(moment, rows=rows, columns=columns)


def _dims_maxima(
    result: Any, grad: jax.Array, mu: SignedFourBit, nu: RankOneFourBit | None, **_: float
) -> tuple:
    *stack, d, n = grad.shape
    axes = _axes(len(stack), d % STEP == 0, n % reference.TILE == 0)
    return (axes[0], *_moments(mu, nu, *axes)), (axes[0],) * len(result)


def _dims(
    result: Any,
    grad: jax.Array,
    mu: SignedFourBit,
    nu: Second,
    scales: tuple[jax.Array, ...],
    corrections: jax.Array,
    **_: float,
) -> tuple:
    # Groups must not cross devices.
    apart = grad.shape[-1] % mu.group == 0
    apart &= not isinstance(nu, RankOneFourBit) or mu.group == nu.group
    axes = _axes(grad.ndim - 2, True, apart)
    matrix, of_rows, of_columns = axes
    moments = _moments(mu, nu, *axes)
    largest = tuple((of_rows, of_columns)[i % 2] for i in range(len(scales)))
    new_nu = moments[1] if isinstance(nu, RankOneFourBit) else None
    return (matrix, *moments, largest, Dims.whole(corrections)), (matrix, moments[0], new_nu)


def _axes(stack: int, rows: bool, columns: bool) -> tuple[Dims, Dims, Dims]:
    """Returns the dims of a matrix, of its row scales and of its column scales."""
    names = tuple(f"stack{i}" for i in range(stack))
    row, column = "rows" if rows else None, "columns" if columns else None
    return Dims((*names, row, column)), Dims((*names, row, None)), Dims((*names, None, column))


def _moments(
    mu: SignedFourBit, nu: Second | None, matrix: Dims, rows: Dims, columns: Dims
) -> tuple[SignedFourBit, Second | None]:
    """Returns the moments with dims in the place of their arrays."""
    scales: dict[str, Any] = {"rows": rows, "columns": columns}
    new_mu = dataclasses.replace(mu, codes=matrix, scales=matrix, **scales)
    if nu is None:
        return new_mu, None
    codes = {"codes": matrix} if isinstance(nu, RankOneFourBit) else {}
    return new_mu, dataclasses.replace(nu, **codes, **scales)


_FOLDER = "actjax.kernels.adam_4bit"

MAXIMA = Kernel(
    "adam_4bit_maxima",
    reference.maxima,
    _dims_maxima,
    triton=f"{_FOLDER}.triton_maxima",
    converts=True,
    reads_layers=True,
)
"""From `grad`, `mu`, `nu` and the options `b1` and `b2` to the largest magnitudes of the new
moments, first `mu`, then `nu`: of each row in every `reference.TILE` columns, [..., d, tiles], and
of each column in every `blockwise.STEP` rows, [..., steps, n]. If `nu` is None, parts of the sums
of the squares of rows and of columns of `grad` are in the place of those of `nu`."""

KERNEL = Kernel(
    "adam_4bit",
    reference.adam_4bit,
    _dims,
    triton=f"{_FOLDER}.triton",
    converts=True,
    reads_layers=True,
    writes_layers="operands",
    takes_tail=True,
)
"""From `grad`, `mu`, `nu`, the largest magnitudes of rows and columns of the new `mu` and of a new
`nu` in 4 bits, and `corrections`, with the options of `adam_4bit`, to its results. A `nu` that is
`Means` has the factors of the new moment, and None is in its place among the results."""
