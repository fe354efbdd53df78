"""Low-rank adapters of a decoder: drawing, attaching and merging them, and frozen NF4 weights.

Adapters are a tree apart from the decoder, which does not change. Only this tree is differentiated,
trained and saved. `attach` combines it with the decoder for a forward pass.
"""

import dataclasses
import difflib
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

import actjax
from actjax._core.paths import map_named
from models.config import ModelConfig
from models.decoder import Decoder
from models.padding import pad
from models.parameters import parameter_of

TARGETS = {
    "q": "attention.q",
    "k": "attention.k",
    "v": "attention.v",
    "o": "attention.o",
    "gate": "mlp.gate",
    "up": "mlp.up",
    "down": "mlp.down",
}
"""Weights that can have an adapter: by name, their paths in a `Block`."""

Adapters = dict[str, dict[str, dict[str, jax.Array]]]
"""Under "layers", by target, `a` [L, d, r] and `b` [L, r, n], with the padding of the weight.

Adapters of DoRA (Liu et al., 2024) also have `magnitude` [L, n], the norms of the columns of the
merged weight. They are read, attached and merged, not drawn."""


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters (Hu et al., 2022).

    Raises:
      ValueError: an unknown target, or a number out of range.
    """

    rank: int = 16
    """Rank r of the adapters."""
    alpha: float = 16.0
    """The output of an adapter is multiplied by alpha / rank, or as `rslora` says."""
    dropout: float = 0.0
    """Share of the inputs of an adapter that training sets to zero."""
    targets: tuple[str, ...] = tuple(TARGETS)
    """Weights that have an adapter: any of q, k, v, o, gate, up and down."""
    rslora: bool = False
    """Whether the factor is alpha / sqrt(rank) instead (rank-stabilized LoRA; Kalajdzievski, 2023,
    arXiv 2312.03732): the size of an update then does not shrink with the rank."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"`rank` of the adapters must be at least 1, got {self.rank}.")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"`alpha` of the adapters must be in (0, inf), got {self.alpha}.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"`dropout` of the adapters must be in [0, 1), got {self.dropout}.")
        if not self.targets:
            raise ValueError("`targets` of the adapters is empty: name at least one weight.")
        for name in self.targets:
            if name not in TARGETS:
                short = name.removesuffix("_proj")
                near = difflib.get_close_matches(short, TARGETS, n=1, cutoff=0.3)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ValueError(
                    f"unknown adapter target {name!r} in `targets`.{hint} Targets are:"
                    f" {', '.join(TARGETS)}."
                )
        if len(set(self.targets)) != len(self.targets):
            raise ValueError(f"`targets` of the adapters has duplicates: {self.targets}.")

    @property
    def scale(self) -> float:
        """Factor of the output of an adapter."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def weight_shape(config: ModelConfig, target: str) -> tuple[int, int]:
    """Returns the shape [d, n] of a target in one layer, without padding."""
    d, f, size = config.hidden_size, config.ffn_size, config.head_size
    queries, keys = config.num_heads * size, config.num_kv_heads * size
    shapes = {"q": (d, queries), "k": (d, keys), "v": (d, keys), "o": (queries, d)}
    return {**shapes, "gate": (d, f), "up": (d, f), "down": (f, d)}[target]


def init_adapters(config: ModelConfig, lora: LoRAConfig, key: jax.Array) -> Adapters:
    """Returns initial adapters in float32: `a` is uniform as in PEFT, and `b` is zero.

    Args:
      config: dimensions of the decoder.
      lora: settings.
      key: randomness; consumed.
    """
    factors = {}
    for i, target in enumerate(lora.targets):
        d, n = weight_shape(config, target)
        bound, layers = d**-0.5, config.num_layers
        target_key = jax.random.fold_in(key, i)
        drawn = jax.random.uniform(target_key, (layers, d, lora.rank), minval=-bound, maxval=bound)
        factors[target] = {"a": drawn, "b": jnp.zeros((layers, lora.rank, n))}
    return padded_adapters({"layers": factors}, config)


def padded_adapters(adapters: Any, config: ModelConfig) -> Adapters:
    """Returns adapters of the published widths with the padding of the weights that they adapt."""
    return map_named(lambda path, factor: pad(path, factor, config), adapters)


def attach(
    model: Decoder, adapters: Adapters, lora: LoRAConfig, key: jax.Array | None = None
) -> Decoder:
    """Returns the decoder with its adapters. Its other weights are frozen.

    Args:
      model: of plain arrays, or with `actjax.NF4Weight`s in its layers. It is not changed.
      adapters: as `init_adapters` returns them.
      lora: their settings.
      key: randomness of the dropout; None turns dropout off.

    A weight with a `magnitude` is merged (as `merge` does), because its adapter scales the whole
    column: it takes the memory of a plain array even if the model is quantized.

    Raises:
      ValueError: dropout of an adapter with a `magnitude`, which a merged weight cannot apply.
    """
    attached, factors = _copy(model), adapters["layers"]
    for i, (target, path) in enumerate(TARGETS.items()):
        weight = _parameter(attached, path)
        if target not in factors:
            weight.set_value(actjax.FrozenWeight(weight.get_value()))
            continue
        keys = None
        if key is not None and lora.dropout > 0:
            keys = jax.random.split(jax.random.fold_in(key, i), model.config.num_layers)
        if "magnitude" in factors[target]:
            if keys is not None:
                raise ValueError(
                    f"`dropout` is {lora.dropout}, but the adapter of {target!r} has a magnitude"
                    " (DoRA): pass key=None."
                )
            weight.set_value(_merge_layers(weight.get_value(), factors[target], lora.scale, None))
            continue
        a, b = factors[target]["a"], factors[target]["b"]
        weight.set_value(actjax.LoRA(weight.get_value(), a, b, keys, lora.scale, lora.dropout))
    for parameter in (attached.embedding, attached.output):
        if parameter is not None:
            parameter.set_value(actjax.FrozenWeight(parameter.get_value()))
    return attached


def merge(model: Decoder, adapters: Adapters, lora: LoRAConfig, dtype: Any = None) -> Decoder:
    """Returns the decoder with `V = W + scale A B` in place of each adapted weight.

    With a `magnitude` m, column j of V is multiplied by `m_j / |V_j|` (Liu et al., 2024, equation
    5). The gradient takes the norms as constants (Section 4.3).

    Args:
      model: as for `attach`. All quantized weights are decoded.
      adapters: as for `attach`.
      lora: as for `attach`.
      dtype: dtype of the merged and decoded weights; the dtype of the original weights if None.
    """
    merged, factors = _copy(model), adapters["layers"]
    for target, path in TARGETS.items():
        weight = _parameter(merged, path)
        value = weight.get_value()
        if target in factors:
            weight.set_value(_merge_layers(value, factors[target], lora.scale, dtype))
        elif isinstance(value, actjax.NF4Weight):
            weight.set_value(jax.lax.map(lambda w: w.astype(dtype or w.dtype), value))
    return merged


@functools.partial(jax.jit, static_argnames=("scale", "dtype"))
def _merge_layers(
    weight: Any, factors: dict[str, jax.Array], scale: float, dtype: Any
) -> jax.Array:
    def merged(layer: tuple[Any, dict[str, jax.Array]]) -> jax.Array:
        weight, factors = layer
        adapted = actjax.LoRA(weight, factors["a"], factors["b"], scale=scale)
        if "magnitude" not in factors:
            return adapted.merged(dtype)
        value = adapted.merged(jnp.promote_types(weight.dtype, jnp.float32))
        norms = jax.lax.stop_gradient(jnp.linalg.norm(value, axis=0))
        norms = jnp.where(norms > 0, norms, 1)  # Columns of padding are zero.
        return (value * (factors["magnitude"] / norms)).astype(dtype or weight.dtype)

    return jax.lax.map(merged, (weight, factors))


def quantize(path: str, array: Any) -> Any:
    """Returns a linear weight of a layer in NF4, and any other parameter unchanged.

    With `models.huggingface.load(convert=quantize)` a decoder is quantized while it is read, and
    never exists at full size.

    Args:
      path: path of the parameter in the decoder.
      array: the parameter of one layer.
    """
    if path.removeprefix("layers.") not in TARGETS.values():
        return array
    return jax.device_get(_quantize(array))


def quantize_layers(model: Decoder) -> Decoder:
    """Returns the decoder with the linear weights of its layers in NF4."""
    quantized = _copy(model)
    for path in TARGETS.values():
        weight = _parameter(quantized, path)
        weight.set_value(jax.lax.map(actjax.NF4Weight.quantize, weight.get_value()))
    return quantized


@jax.jit
def _quantize(array: jax.Array) -> actjax.NF4Weight:
    return actjax.NF4Weight.quantize(array)


def _parameter(model: Decoder, path: str) -> Any:
    return parameter_of(model, f"layers.{path}")


def _copy(model: Decoder) -> Decoder:
    """Returns another decoder of the same arrays, so that parameters can be set."""
    return jax.tree.map(lambda x: x, model)
