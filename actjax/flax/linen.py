"""Layers of Flax linen whose backward passes store codes of their inputs.

Each is a subclass of a layer of Flax, with the same parameters and one more argument, `codec`. A
codec that draws random numbers takes them from the stream `codes`:
`model.apply(params, x, rngs={"codes": key})`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import linen

from actjax._rules import Rules, check_rules, codec_of
from actjax.codecs import Codec, Exact
from actjax.flax import products


class Dense(linen.Dense):
    """`linen.Dense` that stores its input by a codec."""

    codec: Codec = Exact()

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """As in Flax."""
        _set_product(self, self.codec)
        return super().__call__(inputs)


class DenseGeneral(linen.DenseGeneral):
    """`linen.DenseGeneral` that stores its input by a codec, unless it has batch axes."""

    codec: Codec = Exact()

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """As in Flax."""
        _set_product(self, self.codec)
        return super().__call__(inputs)


class Einsum(linen.Einsum):
    """`linen.Einsum` that stores its input by a codec, where the product is a linear layer."""

    codec: Codec = Exact()

    def __call__(self, inputs: jax.Array, einsum_str: str | None = None) -> jax.Array:
        """As in Flax."""
        return _einsum(self, self.codec, super().__call__, inputs, einsum_str)


class Conv(linen.Conv):
    """`linen.Conv` that stores its input by a codec."""

    codec: Codec = Exact()

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """As in Flax."""
        _set_product(self, self.codec)
        return super().__call__(inputs)


class LayerNorm(linen.LayerNorm):
    """`linen.LayerNorm` that stores its input, or a code of it, and nothing else."""

    codec: Codec = Exact()

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """As in Flax, which computes norms over other axes, across devices or with a mask."""
        plain = functools.partial(super().__call__, mask=mask)
        return _norm(self, self.codec, plain, x, mask is None)


class RMSNorm(linen.RMSNorm):
    """`linen.RMSNorm` that stores its input, or a code of it, and nothing else."""

    codec: Codec = Exact()

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """As in Flax, which computes norms over other axes, across devices or with a mask."""
        plain = functools.partial(super().__call__, mask=mask)
        return _norm(self, self.codec, plain, x, mask is None)


class MultiHeadDotProductAttention(linen.MultiHeadDotProductAttention):
    """`linen.MultiHeadDotProductAttention` whose projections store their inputs by a codec.

    `attention_fn` decides what the attention itself stores.
    """

    codec: Codec = Exact()

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """As in Flax."""
        with linen.intercept_methods(interceptor(self.codec)):
            return super().__call__(*args, **kwargs)


_LINEAR = (linen.Dense, linen.DenseGeneral, linen.Einsum, linen.Conv)
_NORMS = (linen.LayerNorm, linen.RMSNorm)
_OWN = (Dense, DenseGeneral, Einsum, Conv, LayerNorm, RMSNorm)


def interceptor(rules: Rules) -> Callable[..., Any]:
    """Returns an interceptor that makes an existing model of linen store codes.

        with linen.intercept_methods(actjax.flax.linen.interceptor(actjax.Quantized(4))):
            logits = model.apply(params, ids)

    Layers that are `Dense`, `DenseGeneral`, `Einsum`, `Conv`, `LayerNorm` or `RMSNorm` of Flax, or
    subclasses that do not change their product, behave as their twins here. Layers with a product
    of the user (`dot_general=...`) are left alone.

    Args:
      rules: as for `actjax.flax.replace`.

    Raises:
      TypeError: `rules` has another type.
    """
    check_rules(rules, "interceptor")

    def intercept(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        layer = context.module
        is_linear = isinstance(layer, _LINEAR)
        if (
            context.method_name != "__call__"
            or isinstance(layer, _OWN)
            or not (is_linear or isinstance(layer, _NORMS))
        ):
            return next_fun(*args, **kwargs)
        codec = codec_of(rules, "/".join(layer.path), layer, is_linear)
        if codec is None or (is_linear and products.has_users_product(layer)):
            return next_fun(*args, **kwargs)
        if isinstance(layer, linen.Einsum):
            return _einsum(layer, codec, next_fun, *args, **kwargs)
        if is_linear:
            _set_product(layer, codec)
            return next_fun(*args, **kwargs)
        if len(args) != 1 or kwargs:
            return next_fun(*args, **kwargs)
        return _norm(layer, codec, next_fun, args[0], True)

    return intercept


def _settings(layer: Any, codec: Codec) -> dict[str, Any]:
    key = layer.make_rng("codes") if codec.needs_key else None
    return {"codec": codec, "key": key, "name": "/".join(layer.path) or type(layer).__name__}


def _set_product(layer: Any, codec: Codec) -> None:
    """Gives a layer another product for the present call. Its fields are frozen for users."""
    if products.has_users_product(layer):
        products.refuse("dot_general")
    if isinstance(layer, linen.Conv):
        name, product = "conv_general_dilated", products.conv_general_dilated
    else:
        name, product = "dot_general", products.dot_general
    object.__setattr__(layer, name, functools.partial(product, **_settings(layer, codec)))


def _einsum(
    layer: Any, codec: Codec, plain: Any, inputs: jax.Array, einsum_str: str | None = None
) -> jax.Array:
    # The call of Flax makes the parameters, and refuses wrong subscripts.
    spec = einsum_str or layer.einsum_str or ""
    if layer.is_initializing() or not products.is_linear(spec, inputs.ndim):
        return plain(inputs, einsum_str)
    kernel = layer.get_variable("params", "kernel")
    bias = layer.get_variable("params", "bias") if layer.use_bias else None
    x, w, bias = layer.promote_dtype(inputs, kernel, bias, dtype=layer.dtype)
    y = products.einsum(
        spec, x, w, precision=layer.precision, **_settings(layer, codec),
        preferred_element_type=layer.preferred_element_type,
    )  # fmt: skip
    input_axes, _, result_axes = products.subscripts(spec, x.ndim)
    if bias is None:
        return y
    bias_shape = (1 if a in input_axes else n for a, n in zip(result_axes, y.shape, strict=True))
    return y + bias.reshape(*bias_shape)


def _norm(layer: Any, codec: Codec, plain: Any, x: jax.Array, is_plain: bool) -> jax.Array:
    axes = (layer.reduction_axes, layer.feature_axes)
    is_over_last_axis = all(axis in (-1, x.ndim - 1, (-1,), (x.ndim - 1,)) for axis in axes)
    # The call of Flax makes the parameters.
    if not is_plain or not is_over_last_axis or layer.axis_name or layer.is_initializing():
        return plain(x)
    kind = "layer" if isinstance(layer, linen.LayerNorm) else "rms"
    scale, bias = (
        layer.get_variable("params", name) if layer.has_variable("params", name) else None
        for name in ("scale", "bias")
    )
    settings = _settings(layer, codec)
    return products.normalized(
        kind, x, scale, bias, eps=layer.epsilon, dtype=layer.dtype, **settings
    )
