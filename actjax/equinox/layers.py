"""Linear layers and norms of Equinox that store codes of their inputs."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from actjax._core.tokenwise import tokenwise
from actjax.codecs import Codec, Exact
from actjax.ops import layer_norm, linear, rms_norm
from actjax.weights.transposed import TransposedWeight


@dataclasses.dataclass(frozen=True)
class _TokenFunction:
    """An operator with its settings, from tokens, a weight, and perhaps a bias and a key.

    Attributes:
      kind: "linear", "layer" or "rms".
      codec: how the input is stored.
      name: the name of the input in `actjax.explain`.
      bias: whether there is a bias.
      key: name of the random number generator of the key; None without a key.
      eps: of a norm.
    """

    kind: str
    codec: Codec
    name: str
    bias: bool
    key: Any
    eps: float = 0.0

    def __call__(self, x: jax.Array, /, weight: jax.Array, *bias_and_key: jax.Array) -> jax.Array:
        left = iter(bias_and_key)
        bias = next(left) if self.bias else None
        key = jax.random.wrap_key_data(next(left), impl=self.key) if self.key else None
        if self.kind == "linear":
            return linear(
                x, TransposedWeight(weight), bias=bias, codec=self.codec, key=key, name=self.name
            )
        settings: Any = {"eps": self.eps, "codec": self.codec, "key": key, "name": self.name}
        if self.kind == "layer":
            return layer_norm(x, weight, bias, **settings)
        normalized = rms_norm(x, weight, **settings)
        if bias is None:
            return normalized
        return normalized + jax.lax.broadcast_to_rank(bias, normalized.ndim)


class Coded(eqx.Module):
    """Mixin of all layers; each layer also inherits from a layer of Equinox.

    Attributes:
      codec: how the input is stored.
      code_name: the name of the input in `actjax.explain`.
      codes: a key for the codec, used if the layer is called without one; None for none.
    """

    codec: Codec = eqx.field(static=True)
    code_name: str = eqx.field(static=True)
    codes: jax.Array | None
    weight_axes = 1

    def __init__(
        self,
        *args: Any,
        codec: Codec = Exact(),
        code_name: str = "",
        codes: jax.Array | None = None,
        **kwargs: Any,
    ) -> None:
        """Takes the arguments of the layer of Equinox, a codec, and a key for it."""
        of_equinox: Any = super()
        of_equinox.__init__(*args, **kwargs)
        if not isinstance(codec, Codec):
            raise TypeError(f"`codec` of a layer must be an actjax.Codec, got {codec!r}.")
        self.codec, self.codes = codec, codes
        self.code_name = code_name or type(self).__name__

    def stacked(self) -> tuple[int, ...]:
        """Returns the leading axes of the parameters of a stack of layers."""
        weight: Any = self.weight  # pyright: ignore[reportAttributeAccessIssue]
        return () if weight is None else weight.shape[: weight.ndim - self.weight_axes]

    def _key(self, key: jax.Array | None) -> jax.Array | None:
        """Returns the key of a call, or that of the layer; None if the codec needs none."""
        if not self.codec.needs_key:
            return None
        return self.codec.required_key(self.codes if key is None else key)

    def _compute(
        self, kind: str, x: jax.Array, weight: jax.Array, bias: Any, key: Any, eps: float = 0.0
    ) -> jax.Array:
        key = self._key(key)
        impl = None if key is None else str(jax.random.key_impl(key))
        words = None if key is None else jax.random.key_data(key)
        operator = _TokenFunction(kind, self.codec, self.code_name, bias is not None, impl, eps)
        return tokenwise(operator, x, weight, *(y for y in (bias, words) if y is not None))


class Linear(Coded, eqx.nn.Linear):
    """`equinox.nn.Linear` that stores its input by a codec."""

    weight_axes = 2

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        """Returns `weight @ x + bias`.

        Args:
          x: [in_features], or [] for "scalar" features, as in Equinox.
          key: randomness of the encoding; by default the key of the layer.

        Raises:
          ValueError: `x` has another shape.
        """
        shape = () if self.in_features == "scalar" else (self.in_features,)
        if x.shape != shape:
            raise ValueError(
                f"`x` of Linear must be one token, {list(shape)}, got {list(x.shape)}: map the"
                " layer over tokens by jax.vmap."
            )
        x = x.reshape(self.weight.shape[1:])
        x = x.astype(jnp.result_type(x, self.weight))
        y = self._compute("linear", x, self.weight, self.bias, key)
        return y[0] if self.out_features == "scalar" else y


class _Norm(Coded):
    kind = ""

    def __call__(self, x: jax.Array, *args: Any, key: Any = None, **kwargs: Any) -> Any:
        """As in Equinox, which computes norms over several axes, and with a state."""
        layer: Any = self
        if len(layer.shape) != 1 or x.shape != layer.shape or args or kwargs:
            of_equinox: Any = super()
            return of_equinox.__call__(x, *args, key=key, **kwargs)
        weight = jnp.ones(layer.shape) if layer.weight is None else layer.weight
        return self._compute(self.kind, x, weight, layer.bias, key, layer.eps).astype(x.dtype)


class LayerNorm(_Norm, eqx.nn.LayerNorm):
    """`equinox.nn.LayerNorm` that stores its input, or a code of it, and nothing else."""

    kind = "layer"


class RMSNorm(_Norm, eqx.nn.RMSNorm):
    """`equinox.nn.RMSNorm` that stores its input, or a code of it, and nothing else."""

    kind = "rms"
