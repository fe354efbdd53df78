"""Replaces layers of an existing model by layers that store codes."""

from typing import Any

from flax import linen, nnx

from actjax._rules import Rules, check_rules, codec_of
from actjax.flax import nnx as own_nnx


def replace(model: Any, rules: Rules, *, rngs: nnx.Rngs | None = None) -> Any:
    """Returns a model of Flax nnx whose layers store codes of their inputs.

        model = actjax.flax.replace(model, actjax.Quantized(4))
        model = actjax.flax.replace(model, {"(query|key|value)$": actjax.PointApproximation(64)},
                                    rngs=nnx.Rngs(codes=0))

    `nnx.Linear`, `LinearGeneral` (also within `MultiHeadAttention`), `Einsum`, `Conv`,
    `LayerNorm` and `RMSNorm` become their twins of `actjax.flax.nnx`, with the same parameters.
    Subclasses of them that a library defines are left alone, and so are layers with a product of
    the user (`dot_general=...`), and everything else.

    Args:
      model: an nnx module. It is not changed: parameters are shared with the result.
      rules: one codec for the inputs of linear layers, whose norms then keep their exact input and
        nothing else; or a mapping from regular expressions to codecs; or a function of the path of
        a layer and the layer.
      rngs: has a stream `codes`, for codecs that draw random numbers.

    Raises:
      TypeError: `model` is not an nnx module, or `rules` has another type.
      ValueError: the rules fit no layer, or a missing stream.
    """
    check_rules(rules, "replace")
    if isinstance(model, linen.Module):
        raise TypeError(
            "`model` of replace is a module of linen, which has no layers until it is called: use"
            " linen.intercept_methods(actjax.flax.linen.interceptor(rules))."
        )
    if not isinstance(model, nnx.Module):
        raise TypeError(f"`model` of replace must be a flax.nnx.Module, got {model!r}.")
    graph, state = nnx.split(model)
    model = nnx.merge(graph, state)
    changed = 0
    for path, layer in list(nnx.iter_modules(model)):
        if not own_nnx.has_twin(layer):
            continue
        name = "/".join(map(str, path))
        codec = codec_of(rules, name, layer, isinstance(layer, own_nnx.LINEAR))
        if codec is not None:
            own_nnx.twin(layer, codec, name, rngs)
            changed += 1
    if not changed:
        raise ValueError(
            "`rules` of replace fit no layer of the model that is nnx.Linear, LinearGeneral,"
            " Einsum, Conv, LayerNorm or RMSNorm itself."
        )
    return model
