"""`adam_8bit` for TPUs, some rows at a time.

At once, XLA would hold ten float32 arrays of the size of an embedding: decoded moments, scales by
number, and copies of them in other layouts.
"""

import functools

import jax

from actjax.formats.blockwise import Blockwise
from actjax.kernels.adam_8bit import reference

_NUMBERS = 2**21
"""Most numbers of a piece: 8 MiB in float32."""


def refuses(
    grad: jax.Array, mu: Blockwise, nu: Blockwise, corrections: jax.Array, **hyper: float
) -> str | None:
    """Returns why the arguments are not computed in pieces; None if they are."""
    del mu, nu, corrections, hyper
    if grad.ndim != 2 or grad.size <= 4 * _NUMBERS or _rows(grad) == 0:
        return f"takes large matrices on TPUs, got {grad.shape}"
    return None


def adam_8bit(
    grad: jax.Array, mu: Blockwise, nu: Blockwise, corrections: jax.Array, *,
    interpret: bool, **hyper: float,
) -> tuple[jax.Array, Blockwise, Blockwise]:  # fmt: skip
    """As `actjax.kernels.adam_8bit.api.adam_8bit`."""
    del interpret  # No kernel of ours.
    update = functools.partial(reference.adam_8bit, corrections=corrections, **hyper)
    rows = _rows(grad)
    pieces = jax.tree.map(lambda x: x.reshape(-1, rows, x.shape[-1]), (grad, mu, nu))
    result = jax.lax.map(lambda piece: update(*piece), pieces)
    return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), result)


def _rows(grad: jax.Array) -> int:
    """Returns the rows of a piece: the largest divisor with few enough numbers; 0 if none has."""
    count, columns = grad.shape
    return max((n for n in range(1, count + 1) if count % n == 0 and n * columns <= _NUMBERS),
               default=0)  # fmt: skip
