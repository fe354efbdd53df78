"""Replaces layers of an existing model by layers that store codes."""

from typing import Any

from flax import linen, nnx

from actjax._rules import Rules, Seen, check_rules, codec_of
from actjax.flax import nnx as own_nnx


def replace(model: Any, rules: Rules, *, rngs: nnx.Rngs | None = None, verbose: bool = True) -> Any:
    """Returns a model of Flax nnx whose layers store codes of their inputs.

        model = actjax.flax.replace(model, actjax.Quantized(4))
        model = actjax.flax.replace(model, {"(query|key|value)$": actjax.PointApproximation(64)},
                                    rngs=nnx.Rngs(codes=0))

    `nnx.Linear`, `LinearGeneral` (also within `MultiHeadAttention` and recurrent cells), `Einsum`,
    `Conv`, `LayerNorm`, `RMSNorm` and `GroupNorm` become their twins of `actjax.flax.nnx`, with the
    same parameters. The `attention_fn` of a `MultiHeadAttention` stores queries, keys and values,
    and the backward pass computes the weights again. Subclasses of layers that a library defines
    are left alone, and so are layers with a product of the user (`dot_general=...`), and everything
    else.

    Args:
      model: an nnx module. It is not changed: parameters are shared with the result.
      rules: one codec for the inputs of linear layers, where norms and attention then keep their
        exact input and nothing else; or a mapping from regular expressions to codecs; or a function
        of the path of a layer and the layer.
      rngs: has a stream `codes`, for codecs that draw random numbers.
      verbose: whether to print which layers with parameters are left alone.

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
    seen = Seen()
    for path, layer in list(nnx.iter_modules(model)):
        name, codec = "/".join(map(str, path)), None
        if own_nnx.has_twin(layer):
            codec = codec_of(rules, name, layer, isinstance(layer, own_nnx.LINEAR))
        if codec is not None:
            own_nnx.twin(layer, codec, name, rngs)
            seen.changed += 1
        elif any(isinstance(x, nnx.Param) for x in vars(layer).values()):
            seen.left(layer, name)
    kinds = "nnx.Linear, LinearGeneral, Einsum, Conv, LayerNorm, RMSNorm, GroupNorm"
    seen.finish(f"{kinds} or MultiHeadAttention", verbose)
    return model
