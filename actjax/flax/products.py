"""The operators of actjax with the arguments that layers of Flax pass to products."""

import functools
import math
import string
from collections.abc import Sequence
from typing import Any

import jax

from actjax.codecs import Codec
from actjax.ops import conv, layer_norm, linear, rms_norm


def dot_general(
    x: jax.Array,
    w: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    codec: Codec,
    key: jax.Array | None,
    name: str,
    **options: Any,
) -> jax.Array:
    """As `jax.lax.dot_general`, with `x` stored by a codec.

    A product with batch axes, or over axes that are not the last of `x` and the first of `w`, is
    not a linear layer: JAX computes it.

    Args:
      x: [..., *in].
      w: [*in, *out].
      dimension_numbers: as in JAX.
      precision: as in JAX.
      preferred_element_type: as in JAX.
      codec: stores `x`.
      key: randomness of the encoding.
      name: the name of `x` in `actjax.explain`.
      **options: further arguments of `jax.lax.dot_general`.
    """
    (x_axes, w_axes), batch = dimension_numbers
    count = len(x_axes)
    is_layer = (
        not any(map(len, batch))
        and precision is None
        and tuple(x_axes) == tuple(range(x.ndim - count, x.ndim))
        and tuple(w_axes) == tuple(range(count))
    )
    if not is_layer:
        return jax.lax.dot_general(
            x, w, dimension_numbers, precision, preferred_element_type, **options
        )
    tokens, out = x.shape[: x.ndim - count], w.shape[count:]
    if count != 1 or len(out) != 1:
        # Only a weight of two axes is passed on as it is, so that it may have a factored gradient.
        x, w = x.reshape(*tokens, -1), w.reshape(math.prod(w.shape[:count]), -1)
    y = linear(x, w, codec=codec, key=key, name=name)
    return y.reshape(*tokens, *out).astype(preferred_element_type or y.dtype)


def einsum(
    spec: str,
    x: jax.Array,
    w: jax.Array,
    *,
    precision: Any = None,
    codec: Codec,
    key: jax.Array | None,
    name: str,
    **options: Any,
) -> jax.Array:
    """As `jax.numpy.einsum` of an input and a weight, with `x` stored by a codec.

    JAX computes products that are not a linear layer, such as one weight for each example.

    Args:
      spec: subscripts, such as "BTD,NDH->BTNH".
      x: the input.
      w: the weight.
      precision: as in JAX.
      codec: stores `x`.
      key: randomness of the encoding.
      name: the name of `x` in `actjax.explain`.
      **options: further arguments of `jax.numpy.einsum`.
    """
    if not is_linear(spec, x.ndim) or precision is not None:
        return jax.numpy.einsum(spec, x, w, precision=precision, **options)
    input_axes, weight_axes, result_axes = subscripts(spec, x.ndim)
    summed = [a for a in input_axes if a in weight_axes]
    tokens, out = ([a for a in axes if a in result_axes] for axes in (input_axes, weight_axes))
    x = x.transpose([input_axes.index(a) for a in (*tokens, *summed)])
    w = w.transpose([weight_axes.index(a) for a in (*summed, *out)])
    last = tuple(range(len(tokens), x.ndim)), tuple(range(len(summed)))
    # Axes of explicit meshes are given for the result of `einsum`, not of the product.
    sharding = options.pop("out_sharding", None)
    options.setdefault("preferred_element_type", None)
    y = dot_general(x, w, (last, ((), ())), codec=codec, key=key, name=name, **options)
    y = y.transpose([[*tokens, *out].index(a) for a in result_axes])
    return y if sharding is None else jax.sharding.reshard(y, sharding)


def is_linear(spec: str, ndim: int) -> bool:
    """Returns whether an `einsum` of an input and a weight is a linear layer.

    It is one if each axis belongs to two of input, weight and result, and some axis to the first
    two.

    Args:
      spec: subscripts.
      ndim: number of axes of the input.
    """
    if spec.count("->") != 1 or spec.split("->")[0].count(",") != 1:
        return False
    parts = subscripts(spec, ndim)
    joined = "".join(parts)
    return (
        all(len(set(part)) == len(part) for part in parts)
        and all(joined.count(a) == 2 for a in joined)
        and not set(parts[0]).isdisjoint(parts[1])
    )


_PLAIN = {
    "dot_general": jax.lax.dot_general,
    "conv_general_dilated": jax.lax.conv_general_dilated,
    "einsum_op": jax.numpy.einsum,
}
NAMES = tuple(_PLAIN)
"""Attributes of layers of Flax that hold their product."""


def is_users_product(name: str, product: Any) -> bool:
    """Returns whether a product of a layer is from the user, such as a product in 8 bits.

    Args:
      name: the attribute that holds it.
      product: the product.
    """
    is_coded = isinstance(product, functools.partial) and product.func in (
        dot_general, einsum, conv_general_dilated,
    )  # fmt: skip
    return product is not None and product is not _PLAIN[name] and not is_coded


def has_users_product(layer: Any) -> bool:
    """Returns whether a layer of Flax, nnx or linen, has a product of the user."""
    if getattr(layer, "dot_general_cls", None) is not None:
        return True
    return any(is_users_product(name, getattr(layer, name, None)) for name in NAMES)


def refuse(name: str) -> None:
    """Raises because a layer that stores codes cannot take another product."""
    raise ValueError(
        f"`{name}` of a layer of actjax.flax is that of actjax, which stores codes: leave it out,"
        " or use the layer of Flax."
    )


def subscripts(spec: str, ndim: int) -> tuple[str, str, str]:
    """Returns the axes of the input, the weight and the result of an `einsum`, a letter each.

    Args:
      spec: subscripts with an arrow; "..." stands for leading axes of the input.
      ndim: number of axes of the input.
    """
    operands, result = spec.replace(" ", "").split("->")
    input_axes, weight_axes = operands.split(",")
    unused = [a for a in string.ascii_letters if a not in spec]
    leading = "".join(unused[: ndim - len(input_axes.replace("...", ""))])
    return input_axes.replace("...", leading), weight_axes, result.replace("...", leading)


def conv_general_dilated(
    x: jax.Array,
    w: jax.Array,
    window_strides: Sequence[int],
    padding: Any,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    precision: Any = None,
    *,
    codec: Codec,
    key: jax.Array | None,
    name: str,
    **options: Any,
) -> jax.Array:
    """As `jax.lax.conv_general_dilated` as Flax calls it, with `x` stored by a codec.

    JAX computes convolutions with a dilated input or a precision.

    Args:
      x: [N, *spatial, C].
      w: [*window, C / groups, O].
      window_strides: as in JAX.
      padding: as in JAX.
      lhs_dilation: as in JAX.
      rhs_dilation: as in JAX.
      dimension_numbers: as in JAX.
      feature_group_count: as in JAX.
      precision: as in JAX.
      codec: stores `x`.
      key: randomness of the encoding.
      name: the name of `x` in `actjax.explain`.
      **options: further arguments of `jax.lax.conv_general_dilated`.
    """
    if any(n != 1 for n in lhs_dilation or ()) or precision is not None:
        return jax.lax.conv_general_dilated(
            x, w, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers,
            feature_group_count, precision=precision, **options,
        )  # fmt: skip
    return conv(
        x,
        w,
        strides=tuple(window_strides),
        padding=padding if isinstance(padding, str) else [tuple(pair) for pair in padding],
        dilation=tuple(rhs_dilation or (1,) * len(window_strides)),
        feature_group_count=feature_group_count,
        codec=codec,
        key=key,
        name=name,
    )


def normalized(
    kind: str,
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    eps: float,
    dtype: Any,
    codec: Codec,
    key: jax.Array | None,
    name: str,
) -> jax.Array:
    """Returns the layer or RMS norm of the last axis, in the dtype that Flax returns.

    Args:
      kind: "layer" or "rms".
      x: [..., d].
      scale: [d] or None.
      bias: [d] or None.
      eps: added to the variance or the mean square.
      dtype: dtype of the result; None for the common dtype of the arguments.
      codec: stores `x`.
      key: randomness of the encoding.
      name: the name of `x` in `actjax.explain`.
    """
    arrays = [a for a in (x, scale, bias) if a is not None]
    dtype = dtype or jax.numpy.result_type(*arrays)
    x, settings = x.astype(dtype), {"eps": eps, "codec": codec, "key": key, "name": name}
    if kind == "layer":
        return layer_norm(x, scale, bias, **settings)
    return rms_norm(x, jax.numpy.ones(x.shape[-1]) if scale is None else scale, **settings)
