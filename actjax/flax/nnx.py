"""Layers of Flax nnx whose backward passes store codes of their inputs.

Each is a subclass of a layer of Flax, with the same parameters and one more argument, `codec`. A
codec that draws random numbers takes them from the stream `codes` of `rngs`:
`nnx.Rngs(params=0, codes=1)`.
"""

import functools
from typing import Any

import jax
from flax import nnx

from actjax.checkpoint import checkpoint
from actjax.codecs import Codec, Exact
from actjax.flax import products
from actjax.flax.attention import CodedAttention


class _Coded(nnx.Module):
    """Mixin of all layers; each layer also inherits from a layer of Flax.

    Attributes:
      codec: how the input is stored.
      codes: the stream of keys; None if the codec draws no random numbers.
      code_name: the name of the input in `actjax.explain`.
    """

    def __init__(
        self, *args: Any, codec: Codec = Exact(), code_name: str = "", rngs: nnx.Rngs, **kwargs: Any
    ) -> None:
        """Takes the arguments of the layer of Flax, and a codec."""
        of_flax: Any = super()
        of_flax.__init__(*args, rngs=rngs, **kwargs)
        self.set_codec(codec, code_name, rngs)

    def set_codec(self, codec: Codec, name: str, rngs: nnx.Rngs | None) -> None:
        """Stores the input by a codec.

        Raises:
          TypeError: `codec` is not a codec.
          ValueError: it draws random numbers, and `rngs` has no stream for them.
        """
        if not isinstance(codec, Codec):
            raise TypeError(f"`codec` of a layer must be an actjax.Codec, got {codec!r}.")
        stream = None
        if codec.needs_key:
            if rngs is None or "codes" not in rngs:
                raise ValueError(
                    f"`codec` {codec} draws random numbers: pass `rngs` with a stream `codes`, for"
                    " example nnx.Rngs(params=0, codes=1)."
                )
            stream = rngs["codes"]
        self.codec = codec
        self.codes = nnx.data(stream)
        self.code_name = name or type(self).__name__

    def _settings(self) -> dict[str, Any]:
        key = None if self.codes is None else self.codes()
        return {"codec": self.codec, "key": key, "name": self.code_name}


class _Product(_Coded):
    @property
    def dot_general(self) -> Any:
        """The product of this layer."""
        return functools.partial(products.dot_general, **self._settings())

    @dot_general.setter
    def dot_general(self, value: Any) -> None:
        if products.is_users_product("dot_general", value):
            products.refuse("dot_general")


class Linear(_Product, nnx.Linear):
    """`nnx.Linear` that stores its input by a codec."""


class LinearGeneral(_Product, nnx.LinearGeneral):
    """`nnx.LinearGeneral` that stores its input by a codec, unless it has batch axes."""


class Einsum(_Coded, nnx.Einsum):
    """`nnx.Einsum` that stores its input by a codec, where the product is a linear layer."""

    @property
    def einsum_op(self) -> Any:
        """The product of this layer."""
        return functools.partial(products.einsum, **self._settings())

    @einsum_op.setter
    def einsum_op(self, value: Any) -> None:
        if products.is_users_product("einsum_op", value):
            products.refuse("einsum_op")


class Conv(_Coded, nnx.Conv):
    """`nnx.Conv` that stores its input by a codec."""

    @property
    def conv_general_dilated(self) -> Any:
        """The convolution of this layer."""
        return functools.partial(products.conv_general_dilated, **self._settings())

    @conv_general_dilated.setter
    def conv_general_dilated(self, value: Any) -> None:
        if products.is_users_product("conv_general_dilated", value):
            products.refuse("conv_general_dilated")


class _Norm(_Coded):
    kind = ""

    def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        """As in Flax, which computes norms over other axes, across devices or with a mask."""
        layer: Any = self
        if args or kwargs or not is_over_last_axis(layer, x):
            return super().__call__(x, *args, **kwargs)
        scale, bias = (
            None if (p := getattr(layer, name, None)) is None else p[...]
            for name in ("scale", "bias")
        )
        return products.normalized(
            self.kind, x, scale, bias, eps=layer.epsilon, dtype=layer.dtype, **self._settings()
        )


class LayerNorm(_Norm, nnx.LayerNorm):
    """`nnx.LayerNorm` that stores its input, or a code of it, and nothing else."""

    kind = "layer"


class RMSNorm(_Norm, nnx.RMSNorm):
    """`nnx.RMSNorm` that stores its input, or a code of it, and nothing else."""

    kind = "rms"


class GroupNorm(_Coded, nnx.GroupNorm):
    """`nnx.GroupNorm` that stores its input, or a code of it, and nothing else."""

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """As in Flax."""
        normalized: Any = super().__call__
        run = checkpoint(lambda x: normalized(x, mask=mask), **self._settings())
        return run(x)


class MultiHeadAttention(nnx.MultiHeadAttention):
    """`nnx.MultiHeadAttention` whose projections store their inputs by a codec.

    `attention_fn` decides what the attention itself stores.
    """

    def __init__(self, *args: Any, codec: Codec = Exact(), rngs: nnx.Rngs, **kwargs: Any) -> None:
        """Takes the arguments of the layer of Flax, and a codec."""
        super().__init__(*args, rngs=rngs, **kwargs)
        for name in ("query", "key", "value", "out"):
            twin(getattr(self, name), codec, name, rngs)


class StoredHeads(_Coded, nnx.MultiHeadAttention):
    """`nnx.MultiHeadAttention` that stores queries, keys and values by a codec, and no weights.

    Its projections are separate layers. `replace` makes it.

    Attributes:
      plain_attention_fn: the attention of the replaced layer.
    """

    plain_attention_fn: Any

    @property
    def attention_fn(self) -> Any:
        """The attention of this layer."""
        return CodedAttention(self.plain_attention_fn, **self._settings())

    @attention_fn.setter
    def attention_fn(self, value: Any) -> None:
        self.plain_attention_fn = value


def is_over_last_axis(layer: Any, x: jax.Array) -> bool:
    """Returns whether a norm of Flax, of either kind, is over the last axis of `x` alone."""
    axes = [layer.reduction_axes, layer.feature_axes]
    flat = [
        {a % x.ndim for a in (axis if isinstance(axis, tuple | list) else (axis,))} for axis in axes
    ]
    return layer.axis_name is None and flat == [{x.ndim - 1}] * 2


_TWINS: dict[type, type[_Coded]] = {
    nnx.Linear: Linear,
    nnx.LinearGeneral: LinearGeneral,
    nnx.Einsum: Einsum,
    nnx.Conv: Conv,
    nnx.LayerNorm: LayerNorm,
    nnx.RMSNorm: RMSNorm,
    nnx.GroupNorm: GroupNorm,
    nnx.MultiHeadAttention: StoredHeads,
}
LINEAR = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv)
"""Layers that are linear in their input."""


def has_twin(layer: Any) -> bool:
    """Returns whether a layer of Flax, with the product of Flax, has a twin here."""
    return type(layer) in _TWINS and not products.has_users_product(layer)


def twin(layer: Any, codec: Codec, name: str, rngs: nnx.Rngs | None) -> None:
    """Turns a layer of Flax into its twin in place, so that it stays shared between modules."""
    own = vars(layer)
    if "attention_fn" in own:
        own["plain_attention_fn"] = own.pop("attention_fn")
    for plain in products.NAMES:
        own.pop(plain, None)
    layer.__class__ = _TWINS[type(layer)]
    layer.set_codec(codec, name, rngs)
