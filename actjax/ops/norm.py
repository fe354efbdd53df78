"""RMS normalization (Zhang and Sennrich, 2019) that keeps its input, or a code of it."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax

from actjax._core.checks import all_exact, check_codecs, check_floating
from actjax._core.coded_call import coded_call
from actjax._core.reverse_mode import ReverseMode
from actjax._core.tags import keep
from actjax.codecs import Codec, Exact
from actjax.formats.code import Format, QuantizedCode, QuantizeInputs
from actjax.kernels.rms_norm_backward.api import rms_norm_backward
from actjax.kernels.rms_norm_encode import reference
from actjax.kernels.rms_norm_encode.api import rms_norm_encode


def rms_norm(
    x: jax.Array,
    scale: jax.Array,
    *,
    eps: float = 1e-6,
    codec: Codec = Exact(),
    key: jax.Array | None = None,
    name: str = "norm input",
) -> jax.Array:
    """Returns `x / sqrt(mean(x²) + eps) * scale` over the last axis, computed in float32.

    The value is exact. The backward pass holds only `x`, in its dtype or as `codec` stores it. It
    computes the inverse root mean square again (a pass over `x`, no product); autodiff would keep
    the normalized copy and float32 copies of both. The gradients are those at the decoded `x`. They
    are biased even if the codec is not, and the error of `dx` propagates upstream (Wei et al.,
    2026, Theorems 3.2 and 3.3).

    Args:
      x: [..., d].
      scale: [d].
      eps: added to the mean square.
      codec: stores `x`.
      key: randomness of the encoding; consumed. Needed if `codec.needs_key`.
      name: the name of the kept input in `actjax.explain`.

    Returns:
      [..., d] in the dtype of `x`.

    Raises:
      ValueError: `scale` does not fit `x`, or a missing key.
      TypeError: `x` is not floating point, or `codec` is not a codec.
    """
    check_norm(x, scale)
    codecs = check_codecs(codec, ("x",), key)
    if all_exact(codecs):
        return _rms_norm(eps, name, x, scale)
    return coded_call(Normalize(eps), (x,), scale, codecs, key, "rms_norm", (name,))


def check_norm(x: jax.Array, scale: jax.Array) -> None:
    """Raises unless `x` and `scale` are floating point arrays that fit each other."""
    check_floating("x", x)
    check_floating("scale", scale)
    if x.ndim < 1 or scale.shape != x.shape[-1:]:
        raise ValueError(f"`scale` must be {x.shape[-1:]} for x{x.shape}, got {scale.shape}.")


@dataclasses.dataclass(frozen=True)
class Normalize:
    """The norm of an activation, which writes its code, and whose backward pass can read it.

    Attributes:
      eps: as for `rms_norm`.
    """

    eps: float
    reads_arrays: ClassVar[bool] = True

    def __call__(self, activations: tuple[jax.Array], scale: jax.Array) -> jax.Array:
        return _rms_norm(self.eps, "", *activations, scale)

    def with_codes(
        self, inputs: Sequence[QuantizeInputs], formats: Sequence[Format], scale: jax.Array
    ) -> tuple[jax.Array, Sequence[QuantizedCode]]:
        """As `actjax._core.coded_call.WritesCodes`."""
        value, code = rms_norm_encode(inputs[0], scale, format=formats[0], eps=self.eps)
        return value, (code,)

    def from_codes(
        self,
        codes: tuple[QuantizedCode | jax.Array],
        scale: jax.Array,
        cotangent: jax.Array,
        with_value: bool,
    ) -> tuple[jax.Array | None, tuple[jax.Array], jax.Array]:
        """As `actjax._core.coded_call.FromCodes`."""
        settings = {"eps": self.eps, "with_value": with_value}
        value, dx, dscale = rms_norm_backward(*codes, scale, cotangent, **settings)
        return value, (dx,), dscale


@functools.partial(ReverseMode, nondiff_argnums=(0, 1))
def _rms_norm(eps: float, name: str, x: jax.Array, scale: jax.Array) -> jax.Array:
    del name
    return reference.value(x, scale, eps)


def _rms_norm_fwd(eps, name, x, scale):
    with jax.named_scope("actjax.rms_norm"):
        x, held = keep(x, Exact(), None, "rms_norm", name)
        return _rms_norm(eps, name, x, scale), (held, scale)


def _rms_norm_bwd(eps, name, residuals, dy):
    del name
    x, scale = residuals
    with jax.named_scope("actjax.rms_norm"):
        _, dx, dscale = rms_norm_backward(x, scale, dy, eps=eps, with_value=False)
    return dx, dscale


_rms_norm.defvjp(_rms_norm_fwd, _rms_norm_bwd)
