"""Layers of Equinox whose backward passes store codes of their inputs. Needs the package `equinox`.

Each is a subclass of a layer of Equinox, with the same parameters and one more argument, `codec`,
and is mapped over tokens in the same way: `jax.vmap(layer)(x)`. Mapping makes one call with all
tokens, so a weight has one gradient, and a codec sees all tokens. `replace(model, rules)` puts them
into an existing model.
"""

import dataclasses
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

from actjax._core.tokenwise import tokenwise
from actjax._rules import Rules, check_rules, codec_of
from actjax.codecs import Codec, Exact
from actjax.ops import layer_norm, linear, rms_norm
from actjax.weights.transposed import TransposedWeight

Model = TypeVar("Model")


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


class _Coded(eqx.Module):
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

    def _compute(
        self, kind: str, x: jax.Array, weight: jax.Array, bias: Any, key: Any, eps: float = 0.0
    ) -> jax.Array:
        key = (self.codes if key is None else key) if self.codec.needs_key else None
        key = self.codec.required_key(key) if self.codec.needs_key else None
        impl = None if key is None else str(jax.random.key_impl(key))
        words = None if key is None else jax.random.key_data(key)
        operator = _TokenFunction(kind, self.codec, self.code_name, bias is not None, impl, eps)
        return tokenwise(operator, x, weight, *(y for y in (bias, words) if y is not None))


class Linear(_Coded, eqx.nn.Linear):
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


class _Norm(_Coded):
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


_TWINS: dict[type, type[_Coded]] = {
    eqx.nn.Linear: Linear,
    eqx.nn.LayerNorm: LayerNorm,
    eqx.nn.RMSNorm: RMSNorm,
}


def replace(model: Model, rules: Rules, *, key: jax.Array | None = None) -> Model:
    """Returns a model of Equinox whose layers store codes of their inputs.

        model = actjax.equinox.replace(model, actjax.Quantized(4))
        model = actjax.equinox.replace(model, {"(query|key|value)_proj$": actjax.RandomizedSVD(64)},
                                       key=key)

    `equinox.nn.Linear` (also within `MLP` and `MultiheadAttention`), `LayerNorm` and `RMSNorm`
    become their twins, with the same parameters; twins get another codec. Other subclasses of them
    that a library defines are left alone, and so is everything else.

    Args:
      model: a pytree with layers of Equinox.
      rules: one codec for the inputs of linear layers, whose norms then keep their exact input and
        nothing else; or a mapping from regular expressions to codecs; or a function of the path of
        a layer, such as "mlp/layers/0", and the layer.
      key: for codecs that draw random numbers; see `with_keys`.

    Raises:
      TypeError: `rules` has another type.
      ValueError: the rules fit no layer, or a missing key.
    """
    check_rules(rules, "replace")
    changed = 0

    def is_layer(x: Any) -> bool:
        return type(x) in _TWINS or isinstance(x, _Coded)

    def twin(path: Any, layer: Any) -> Any:
        nonlocal changed
        if not is_layer(layer):
            return layer
        name = "/".join(
            str(getattr(p, "name", getattr(p, "idx", getattr(p, "key", p)))) for p in path
        )
        codec = codec_of(rules, name, layer, isinstance(layer, eqx.nn.Linear))
        if codec is None:
            return layer
        if codec.needs_key and key is None:
            raise ValueError(
                f"`key` of replace is None, and the codec {codec} of {name!r} needs one."
            )
        changed += 1
        # The constructor would draw parameters.
        made = object.__new__(_TWINS.get(type(layer), type(layer)))
        fields = {"codec": codec, "code_name": name, "codes": None}
        for field in dataclasses.fields(made):
            value = fields[field.name] if field.name in fields else getattr(layer, field.name)
            object.__setattr__(made, field.name, value)
        return made

    model = jax.tree_util.tree_map_with_path(twin, model, is_leaf=is_layer)
    if not changed:
        raise ValueError(
            "`rules` of replace fit no layer of the model that is equinox.nn.Linear, LayerNorm or"
            " RMSNorm itself."
        )
    return model if key is None else with_keys(model, key)


def with_keys(model: Model, key: jax.Array) -> Model:
    """Returns a model whose layers draw random numbers from a key; call it in each step.

    Args:
      model: a pytree with layers of this module.
      key: a key of `jax.random`; each layer whose codec draws random numbers gets another key, and
        a stack of layers one key for each layer. (Equinox writes `jax.random.PRNGKey`s into
        files, but no keys of `jax.random.key`.)

    Raises:
      TypeError: `key` is not a key.
    """
    if not hasattr(key, "dtype"):
        raise TypeError(f"`key` of with_keys must be a key of jax.random, got {key!r}.")
    number = 0

    def keyed(layer: Any) -> Any:
        nonlocal number
        if not isinstance(layer, _Coded) or not layer.codec.needs_key:
            return layer
        number += 1
        layer_key = jax.random.fold_in(key, number)
        weight: Any = getattr(layer, "weight")  # noqa: B009
        stacked = () if weight is None else weight.shape[: weight.ndim - layer.weight_axes]
        if stacked:
            layer_key = jax.random.split(layer_key, stacked)
        return eqx.tree_at(lambda coded: coded.codes, layer, layer_key, is_leaf=lambda x: x is None)

    return jax.tree.map(keyed, model, is_leaf=lambda x: isinstance(x, _Coded))
