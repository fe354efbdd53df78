"""Layers of Flax linen whose backward passes store codes of their inputs.

They are subclasses of those of Flax, with the same parameters and arguments, and `codec`. A codec
that draws random numbers takes them from the stream `codes`:
`model.apply(params, x, rngs={"codes": key})`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import linen

from actjax.codecs import Codec, Exact
from actjax.flax import products
from actjax.flax.rules import Rules, check_rules, codec_of


class Dense(linen.Dense):
    """`linen.Dense` that stores its input by a codec."""

    codec: Codec = Exact()

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """As in Flax."""
        _set_product(self, self.codec)
        return super().__call__(inputs)


class DenseGeneral(linen.DenseGeneral):
    """`linen.DenseGeneral` that stores its input by a codec; with batch axes it is that of Flax."""

    codec: Codec = Exact()

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """As in Flax."""
        _set_product(self, self.codec)
        return super().__call__(inputs)


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
        """As in Flax, which computes norms over other axes, of several devices or masked."""
        plain = functools.partial(super().__call__, mask=mask)
        return _norm(self, self.codec, plain, x, mask is None)


class RMSNorm(linen.RMSNorm):
    """`linen.RMSNorm` that stores its input, or a code of it, and nothing else."""

    codec: Codec = Exact()

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """As in Flax, which computes norms over other axes, of several devices or masked."""
        plain = functools.partial(super().__call__, mask=mask)
        return _norm(self, self.codec, plain, x, mask is None)


_LINEAR = (linen.Dense, linen.DenseGeneral, linen.Conv)
_NORMS = (linen.LayerNorm, linen.RMSNorm)
_OWN = (Dense, DenseGeneral, Conv, LayerNorm, RMSNorm)


def interceptor(rules: Rules) -> Callable[..., Any]:
    """Returns an interceptor with which a model of linen that exists stores codes.

        with linen.intercept_methods(actjax.flax.linen.interceptor(actjax.Quantized(4))):
            logits = model.apply(params, ids)

    Layers that are `Dense`, `DenseGeneral`, `Conv`, `LayerNorm` or `RMSNorm` of Flax, or subclasses
    that do not change their product, behave as their twins here.

    Args:
      rules: as for `actjax.flax.replace`.

    Raises:
      TypeError: `rules` are none.
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
        if codec is None:
            return next_fun(*args, **kwargs)
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
    if isinstance(layer, linen.Conv):
        name, product = "conv_general_dilated", products.conv_general_dilated
    else:
        name, product = "dot_general", products.dot_general
    object.__setattr__(layer, name, functools.partial(product, **_settings(layer, codec)))


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
