"""An update of Adam on moments in 8 bits, which are decoded in registers only."""

import dataclasses
from typing import Any

import jax

from actjax._shards import Dims
from actjax.formats.blockwise import Blockwise
from actjax.kernels.adam_8bit import reference
from actjax.kernels.checks import check_floating, check_shape
from actjax.kernels.dispatch import Implementation, Kernel


def adam_8bit(
    grad: jax.Array,
    mu: Blockwise,
    nu: Blockwise,
    corrections: jax.Array,
    *,
    b1: float,
    b2: float,
    eps: float,
    eps_root: float = 0.0,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, Blockwise, Blockwise]:
    """Returns `m / (1 - b1^t) / (sqrt(v / (1 - b2^t) + eps_root) + eps)` and the new moments.

    Kingma and Ba, "Adam" (2015), Algorithm 1, with `m <- b1 m + (1 - b1) g` and
    `v <- b2 v + (1 - b2) g²`. It reads the gradient and the codes once, and writes the update and
    the new codes once.

    Args:
      grad: `g`, [..., n].
      mu: `m`, signed, of the same shape.
      nu: `v`, unsigned, of the same shape and block.
      corrections: `1 - b1^t` and `1 - b2^t`, float32 [2].
      b1: decay of the first moment.
      b2: decay of the second.
      eps: added to the root.
      eps_root: added under the root.
      implementation: what computes it; None for the best one that applies.

    Returns:
      The update, float32 [..., n], without a learning rate, and the new `mu` and `nu`.

    Raises:
      TypeError: `grad` is not floating point.
      ValueError: shapes differ; an implementation that cannot take the arguments.
    """
    check_floating("adam_8bit", "grad", grad)
    check_shape("adam_8bit", "grad", grad, mu.codes.shape)
    check_shape("adam_8bit", "nu", nu.codes, mu.codes.shape)
    check_shape("adam_8bit", "corrections", corrections, (2,))
    hyper = {"b1": b1, "b2": b2, "eps": eps, "eps_root": eps_root}
    return KERNEL(grad, mu, nu, corrections, implementation=implementation, **hyper)


def _dims(
    result: Any, grad: jax.Array, mu: Blockwise, nu: Blockwise, corrections: jax.Array, **_: float
) -> tuple[tuple, tuple[Dims, Blockwise, Blockwise]]:
    names = tuple(f"rows{i}" for i in range(grad.ndim - 1))
    # Blocks must not cross devices.
    columns = "columns" if grad.shape[-1] % mu.block == 0 and mu.block == nu.block else None
    dims = Dims((*names, columns))
    first, second = (dataclasses.replace(x, codes=dims, scales=dims) for x in (mu, nu))
    return (dims, first, second, Dims.whole(corrections)), (dims, first, second)


KERNEL = Kernel(
    "adam_8bit",
    reference.adam_8bit,
    _dims,
    mosaic="actjax.kernels.adam_8bit.rows",
    triton="actjax.kernels.adam_8bit.triton",
    converts=True,
    reads_layers=True,
    writes_layers="operands",
    takes_tail=True,
)
