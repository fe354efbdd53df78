"""Layer normalization (Ba et al., 2016) that keeps its input, or a code of it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from actjax._core.checks import all_exact, check_codecs, check_floating
from actjax._core.coded_call import coded_call
from actjax._core.reverse_mode import ReverseMode
from actjax._core.tags import keep
from actjax._math.precision import accumulation_dtype, by_feature
from actjax.codecs import Codec, Exact


def layer_norm(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    eps: float = 1e-6,
    codec: Codec = Exact(),
    key: jax.Array | None = None,
    name: str = "norm input",
) -> jax.Array:
    """Returns `(x - mean(x)) / sqrt(var(x) + eps) * scale + bias` over the last axis, in float32.

    The value is exact. Besides the parameters the backward pass holds only `x`, in its dtype or as
    `codec` stores it. It computes mean and inverse deviation again (a pass over `x`, no product);
    autodiff would keep the normalized copy and float32 copies of both. The gradients are those at
    the decoded `x`. The gradients of `x` and `scale` are biased even if the codec is not, and the
    error of `dx` propagates upstream (Wei et al., 2026, Theorems 3.2 and 3.3). The gradient of
    `bias` is exact.

    Source: Ba et al., arXiv:1607.06450, equations 3 and 4, with `eps` in the root. The variance
    divides by d, not by d - 1.

    Args:
      x: [..., d].
      scale: [d]; None for ones.
      bias: [d]; None for zeros.
      eps: added to the variance.
      codec: stores `x`.
      key: randomness of the encoding; consumed. Needed if `codec.needs_key`.
      name: the name of the kept input in `actjax.explain`.

    Returns:
      [..., d] in the dtype of `x`.

    Raises:
      ValueError: `scale` or `bias` does not fit `x`, or a missing key.
      TypeError: an array that is not floating point, or a `codec` that is not a codec.
    """
    check_floating("x", x)
    for parameter, array in (("scale", scale), ("bias", bias)):
        if array is None:
            continue
        check_floating(parameter, array)
        if x.ndim < 1 or array.shape != x.shape[-1:]:
            raise ValueError(
                f"`{parameter}` must be {x.shape[-1:]} for x{x.shape}, got {array.shape}:"
                " pass one number for each feature, or None."
            )
    if x.ndim < 1:
        raise ValueError("`x` must have features, [..., d], got shape ().")
    codecs = check_codecs(codec, ("x",), key)
    if all_exact(codecs):
        return _layer_norm(eps, name, x, scale, bias)
    return coded_call(_Normalize(eps), (x,), (scale, bias), codecs, key, "layer_norm", (name,))


@dataclasses.dataclass(frozen=True)
class _Normalize:
    """The norm as a function of activations and parameters.

    Attributes:
      eps: as for `layer_norm`.
    """

    eps: float

    def __call__(
        self, activations: tuple[jax.Array], others: tuple[jax.Array | None, jax.Array | None]
    ) -> jax.Array:
        return _layer_norm(self.eps, "", *activations, *others)


@functools.partial(ReverseMode, nondiff_argnums=(0, 1))
def _layer_norm(
    eps: float, name: str, x: jax.Array, scale: jax.Array | None, bias: jax.Array | None
) -> jax.Array:
    del name
    y, _ = _normalize(x, eps)
    y = y if scale is None else y * by_feature(scale, y)
    return (y if bias is None else y + by_feature(bias, y)).astype(x.dtype)


def _normalize(x: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """Returns `x` without its mean and over its deviation, and the inverse of the deviation."""
    x = x.astype(accumulation_dtype(x.dtype))
    centered = x - jnp.mean(x, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(centered * centered, axis=-1, keepdims=True) + eps)
    return centered * inverse, inverse


def _layer_norm_fwd(eps, name, x, scale, bias):
    with jax.named_scope("actjax.layer_norm"):
        x, held = keep(x, Exact(), None, "layer_norm", name)
        return _layer_norm(eps, name, x, scale, bias), (held, scale, bias)


def _layer_norm_bwd(eps, name, residuals, dy):
    del name
    x, scale, bias = residuals
    with jax.named_scope("actjax.layer_norm"):
        unit, inverse = _normalize(x, eps)
        dy = dy.astype(unit.dtype)
        tokens = tuple(range(dy.ndim - 1))
        dunit = dy if scale is None else dy * by_feature(scale, dy)
        along = unit * jnp.mean(dunit * unit, axis=-1, keepdims=True)
        dx = inverse * (dunit - jnp.mean(dunit, axis=-1, keepdims=True) - along)
        dscale = None if scale is None else jnp.sum(dy * unit, tokens).astype(scale.dtype)
        dbias = None if bias is None else jnp.sum(dy, tokens).astype(bias.dtype)
    return dx.astype(x.dtype), dscale, dbias


_layer_norm.defvjp(_layer_norm_fwd, _layer_norm_bwd)
