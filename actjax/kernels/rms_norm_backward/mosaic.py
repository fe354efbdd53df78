"""`rms_norm_backward` for TPUs: codes are decoded by Mosaic, and XLA fuses what follows."""

from typing import Any

import jax

from actjax.formats.code import QuantizedCode
from actjax.kernels.dequantize import mosaic
from actjax.kernels.rms_norm_backward import reference


def refuses(x: QuantizedCode | jax.Array, *args: jax.Array | None, **options: Any) -> str | None:
    """Returns why the program cannot take the arguments; None if it can."""
    del args, options
    return mosaic.refuses(x) if isinstance(x, QuantizedCode) else "takes codes on TPUs"


def rms_norm_backward(
    x: QuantizedCode, *args: Any, interpret: bool, **options: Any
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """As `actjax.kernels.rms_norm_backward.api.rms_norm_backward`."""
    decoded = mosaic.dequantize(x, interpret=interpret)
    return reference.rms_norm_backward(decoded, *args, **options)
