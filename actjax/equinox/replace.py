"""Replaces layers of an existing model of Equinox by layers that store codes."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax

from actjax._rules import Rules, Seen, check_rules, codec_of
from actjax.equinox import attention, layers, traced
from actjax.equinox.layers import Coded

Model = TypeVar("Model")

_TWINS: dict[type, type[Coded]] = {
    eqx.nn.Linear: layers.Linear,
    eqx.nn.LayerNorm: layers.LayerNorm,
    eqx.nn.RMSNorm: layers.RMSNorm,
    eqx.nn.Conv: traced.Conv,
    eqx.nn.Conv1d: traced.Conv1d,
    eqx.nn.Conv2d: traced.Conv2d,
    eqx.nn.Conv3d: traced.Conv3d,
    eqx.nn.GroupNorm: traced.GroupNorm,
    eqx.nn.GRUCell: traced.GRUCell,
    eqx.nn.LSTMCell: traced.LSTMCell,
    eqx.nn.MultiheadAttention: attention.MultiheadAttention,
}
_LINEAR = (eqx.nn.Linear, eqx.nn.Conv, eqx.nn.GRUCell, eqx.nn.LSTMCell)
"""Layers whose inputs a single codec is for: linear ones, and cells of them."""


def replace(
    model: Model, rules: Rules, *, key: jax.Array | None = None, verbose: bool = True
) -> Model:
    """Returns a model of Equinox whose layers store codes of their inputs.

        model = actjax.equinox.replace(model, actjax.Quantized(4))
        model = actjax.equinox.replace(model, {"(query|key|value)_proj$": actjax.RandomizedSVD(64)},
                                       key=key)

    `equinox.nn.Linear` (also within `MLP` and `MultiheadAttention`), `Conv`, `Conv1d` to `Conv3d`,
    `GRUCell`, `LSTMCell`, `LayerNorm`, `RMSNorm`, `GroupNorm` and `MultiheadAttention` become their
    twins, with the same parameters; twins get another codec. Other subclasses of them that a
    library defines are left alone, and so is everything else.

    Args:
      model: a pytree with layers of Equinox.
      rules: one codec for the inputs of linear layers, convolutions and cells, where norms and
        attention then keep their exact input and nothing else; or a mapping from regular
        expressions to codecs; or a function of the path of a layer, such as "mlp/layers/0", and the
        layer.
      key: for codecs that draw random numbers; see `with_keys`.
      verbose: whether to print which layers with parameters are left alone.

    Raises:
      TypeError: `rules` has another type.
      ValueError: the rules fit no layer, or a missing key.
    """
    check_rules(rules, "replace")
    seen = Seen()

    def visit(path: tuple[Any, ...], value: Any) -> Any:
        is_other_module = lambda x: isinstance(x, eqx.Module) and x is not value  # noqa: E731
        if not isinstance(value, eqx.Module):
            return value
        if not (type(value) in _TWINS or isinstance(value, Coded)):
            leaves = jax.tree.leaves(value, is_leaf=is_other_module)
            if any(eqx.is_array(x) for x in leaves):
                seen.left(value, _name(path))
            return _mapped(visit, path, value, is_other_module)
        codec = codec_of(rules, _name(path), value, isinstance(value, _LINEAR))
        if codec is None:
            seen.left(value, _name(path))
            return _mapped(visit, path, value, is_other_module)
        if codec.needs_key and key is None:
            raise ValueError(
                f"`key` of replace is None, and the codec {codec} of {_name(path)!r} needs one."
            )
        seen.changed += 1
        # The constructor would draw parameters.
        made = object.__new__(_TWINS.get(type(value), type(value)))
        fields = {"codec": codec, "code_name": _name(path), "codes": None}
        for field in dataclasses.fields(made):
            if field.name not in fields:
                at = (*path, jax.tree_util.GetAttrKey(field.name))
                child = getattr(value, field.name)
                fields[field.name] = _mapped(visit, at, child, _is_module)
            object.__setattr__(made, field.name, fields[field.name])
        return made

    model = _mapped(visit, (), model, _is_module)
    seen.finish("equinox.nn." + ", ".join(x.__name__ for x in _TWINS), verbose)
    return model if key is None else with_keys(model, key)


def _mapped(
    visit: Callable[[tuple[Any, ...], Any], Any],
    path: tuple[Any, ...],
    value: Any,
    is_leaf: Callable[[Any], bool],
) -> Any:
    """Returns a pytree with its modules replaced by `visit`, which gets their paths."""
    return jax.tree_util.tree_map_with_path(
        lambda inner, x: visit((*path, *inner), x), value, is_leaf=is_leaf
    )


def _is_module(x: Any) -> bool:
    return isinstance(x, eqx.Module)


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(str(getattr(p, "name", getattr(p, "idx", getattr(p, "key", p)))) for p in path)


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
        if not isinstance(layer, Coded):
            return layer
        # Attention holds layers.
        is_inner = lambda x: isinstance(x, Coded) and x is not layer  # noqa: E731
        if not layer.codec.needs_key:
            return jax.tree.map(keyed, layer, is_leaf=is_inner)
        number += 1
        layer_key = jax.random.fold_in(key, number)
        if stacked := layer.stacked():
            layer_key = jax.random.split(layer_key, stacked)
        layer = jax.tree.map(keyed, layer, is_leaf=is_inner)
        return eqx.tree_at(lambda coded: coded.codes, layer, layer_key, is_leaf=lambda x: x is None)

    return jax.tree.map(keyed, model, is_leaf=lambda x: isinstance(x, Coded))
