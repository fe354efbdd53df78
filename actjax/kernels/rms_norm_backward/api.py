"""The backward pass of RMS normalisation from a code of its input."""

import jax

from actjax.kernels import tiles
from actjax.kernels.dispatch import Implementation, Kernel
from actjax.kernels.format import QuantizedCode
from actjax.kernels.rms_norm_backward import pallas, reference


def rms_norm_backward(
    x: QuantizedCode,
    scale: jax.Array,
    dy: jax.Array,
    *,
    eps: float = 1e-6,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns `x / sqrt(mean(x²) + eps) * scale` and the gradients, at what the code stands for.

    Reads the code and `dy` once, and writes each result once; the gradient of `scale` is summed in
    a fixed order. The value is what a linear operator after it takes for its own gradient.

    Args:
      x: code of [..., d].
      scale: [d].
      dy: gradient of the value, [..., d].
      eps: added to the mean square.
      implementation: what computes it; None for the best that applies.

    Returns:
      The value and the gradient of `x`, [..., d] in the dtype of `x`, and the gradient of `scale`,
      [d] in its dtype; computed in float32.

    Raises:
      ValueError: an implementation that cannot.
    """
    return KERNEL(x, scale, dy, eps=eps, implementation=implementation)


def _refuses(x: QuantizedCode, scale: jax.Array, dy: jax.Array, *, eps: float) -> str | None:
    del scale, eps
    if dy.shape[-1] > pallas.LARGEST:
        return f"holds whole rows, of up to {pallas.LARGEST} features, got {dy.shape[-1]}"
    if dy.shape[-1] % x.format.group:
        return f"takes whole groups, got {dy.shape[-1]} features in groups of {x.format.group}"
    return tiles.refuses(x.format, x.dtype, dy.shape)


KERNEL = Kernel(
    "rms_norm_backward", reference.rms_norm_backward, pallas.rms_norm_backward, _refuses
)
