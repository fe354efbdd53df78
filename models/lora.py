"""Adapters of a decoder: made, attached, merged, and written as PEFT does.

Adapters are a tree of their own, beside a decoder that stays as it is: what is trained, saved and
differentiated is the tree. `attach` puts both together for a forward pass.
"""

import dataclasses
import difflib
import functools
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

import actjax
from models.config import ModelConfig
from models.decoder import Decoder
from models.folders import written_whole
from models.huggingface import parameter_of

TARGETS = {
    "q": "attention.q",
    "k": "attention.k",
    "v": "attention.v",
    "o": "attention.o",
    "gate": "mlp.gate",
    "up": "mlp.up",
    "down": "mlp.down",
}
"""Where adapters can be, by name, and where that is in a `Block`."""

Adapters = dict[str, dict[str, dict[str, jax.Array]]]
"""Under "layers", by target, `a` [L, d, r] and `b` [L, r, n]."""


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters (Hu et al., 2022).

    Raises:
      ValueError: an unknown target, or a number out of range.
    """

    rank: int = 16
    """Rank r of the adapters."""
    alpha: float = 16.0
    """What adapters give is multiplied by alpha / rank."""
    dropout: float = 0.0
    """Share of an adapter's inputs that are set to zero in training."""
    targets: tuple[str, ...] = tuple(TARGETS)
    """Weights that have an adapter: of q, k, v, o, gate, up and down."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"`rank` of the adapters must be at least 1, got {self.rank}.")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"`alpha` of the adapters must be in (0, inf), got {self.alpha}.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"`dropout` of the adapters must be in [0, 1), got {self.dropout}.")
        if not self.targets:
            raise ValueError("`targets` of the adapters are none: name at least one weight.")
        for name in self.targets:
            if name not in TARGETS:
                short = name.removesuffix("_proj")
                near = difflib.get_close_matches(short, TARGETS, n=1, cutoff=0.3)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise ValueError(
                    f"`targets` of the adapters has {name!r}, which is no weight of a layer.{hint}"
                    f" There are: {', '.join(TARGETS)}."
                )
        if len(set(self.targets)) != len(self.targets):
            raise ValueError(f"`targets` of the adapters has one twice: {self.targets}.")

    @property
    def scale(self) -> float:
        """What adapters give is multiplied by this."""
        return self.alpha / self.rank


def weight_shape(config: ModelConfig, target: str) -> tuple[int, int]:
    """Returns [d, n] of the weight of a layer."""
    d, f, size = config.hidden_size, config.ffn_size, config.head_size
    queries, keys = config.num_heads * size, config.num_kv_heads * size
    shapes = {"q": (d, queries), "k": (d, keys), "v": (d, keys), "o": (queries, d)}
    return {**shapes, "gate": (d, f), "up": (d, f), "down": (f, d)}[target]


def init_adapters(config: ModelConfig, lora: LoRAConfig, key: jax.Array) -> Adapters:
    """Returns adapters that change nothing yet: `b` is zero, `a` uniform as in PEFT; float32.

    Args:
      config: dimensions of the decoder.
      lora: settings.
      key: randomness; consumed.
    """
    factors = {}
    for i, target in enumerate(lora.targets):
        d, n = weight_shape(config, target)
        bound, layers = d**-0.5, config.num_layers
        own = jax.random.fold_in(key, i)
        factors[target] = {
            "a": jax.random.uniform(own, (layers, d, lora.rank), minval=-bound, maxval=bound),
            "b": jnp.zeros((layers, lora.rank, n)),
        }
    return {"layers": factors}


def attach(
    model: Decoder, adapters: Adapters, lora: LoRAConfig, key: jax.Array | None = None
) -> Decoder:
    """Returns the decoder with its adapters, whose own weights have no gradient.

    Args:
      model: of plain arrays, or with `actjax.NF4Weight`s in its layers. Stays as it is.
      adapters: as `init_adapters` makes them.
      lora: the settings that they were made with.
      key: randomness of the dropout; None for none.
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
        a, b = factors[target]["a"], factors[target]["b"]
        weight.set_value(actjax.LoRA(weight.get_value(), a, b, keys, lora.scale, lora.dropout))
    for whole in (attached.embedding, attached.output):
        if whole is not None:
            whole.set_value(actjax.FrozenWeight(whole.get_value()))
    return attached


def merge(model: Decoder, adapters: Adapters, lora: LoRAConfig, dtype: Any = None) -> Decoder:
    """Returns the decoder with `W + scale A B` in place of each adapted weight.

    Args:
      model: as for `attach`. Quantized weights are decoded, in any case.
      adapters: likewise.
      lora: likewise.
      dtype: of the merged weights; their own if None.
    """
    merged, factors = _copy(model), adapters["layers"]
    for target, path in TARGETS.items():
        weight = _parameter(merged, path)
        value = weight.get_value()
        if target in factors:
            ab = factors[target]
            weight.set_value(_merge_layers(value, ab["a"], ab["b"], lora.scale, dtype))
        elif isinstance(value, actjax.NF4Weight):
            weight.set_value(jax.lax.map(lambda w: w.astype(dtype or w.dtype), value))
    return merged


@functools.partial(jax.jit, static_argnames=("scale", "dtype"))
def _merge_layers(weight: Any, a: jax.Array, b: jax.Array, scale: float, dtype: Any) -> jax.Array:
    def one(layer: tuple[Any, jax.Array, jax.Array]) -> jax.Array:
        return actjax.LoRA(*layer, scale=scale).merged(dtype)

    return jax.lax.map(one, (weight, a, b))


def quantize(path: str, array: Any) -> Any:
    """Returns a layer's weight in NF4, and any other parameter as it is.

    For `models.huggingface.load(convert=...)`: a decoder is quantized while it is read, so that it
    never exists in full.

    Args:
      path: of the parameter in the decoder.
      array: of one layer.
    """
    if path.removeprefix("layers.") not in TARGETS.values():
        return array
    return jax.device_get(_quantize(jnp.asarray(array)))


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
    """Returns another decoder of the same arrays, whose parameters can be set."""
    return jax.tree.map(lambda x: x, model)


# ----- PEFT's format

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model.model.layers"


def _tensor_name(target: str, layer: int, letter: str) -> str:
    owner = "self_attn" if target in "qkvo" else "mlp"
    return f"{_PREFIX}.{layer}.{owner}.{target}_proj.lora_{letter.upper()}.weight"


def save_adapters(
    adapters: Adapters,
    lora: LoRAConfig,
    folder: pathlib.Path | str,
    *,
    base: str = "",
) -> None:
    """Writes adapters as a folder that PEFT reads.

    Args:
      adapters: as `init_adapters` makes them.
      lora: the settings that they were made with.
      folder: to be made. It appears when all of it is written.
      base: name or path of the model that they belong to.

    Raises:
      FileExistsError: there is such a folder, and something in it.
    """
    folder = pathlib.Path(folder)
    tensors: dict[str, np.ndarray] = {}
    for target, factors in adapters["layers"].items():
        for letter, stacked in factors.items():
            for layer, one in enumerate(np.asarray(stacked)):
                tensors[_tensor_name(target, layer, letter)] = np.ascontiguousarray(one.T)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": [f"{name}_proj" for name in lora.targets],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    with written_whole(folder) as scratch:
        (scratch / _CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        safetensors.numpy.save_file(tensors, scratch / _WEIGHTS, metadata={"format": "pt"})
        (scratch / _WEIGHTS).chmod(0o644)


def load_adapters(folder: pathlib.Path | str, config: ModelConfig) -> tuple[Adapters, LoRAConfig]:
    """Returns adapters in PEFT's format, and their settings.

    Args:
      folder: with `adapter_config.json` and `adapter_model.safetensors`.
      config: dimensions of the decoder that they are for.

    Raises:
      FileNotFoundError: one of the files is not there.
      ValueError: adapters of another kind, or for another model, or a damaged file.
    """
    folder = pathlib.Path(folder)
    for name in (_CONFIG, _WEIGHTS):
        if not (folder / name).exists():
            raise FileNotFoundError(f"the adapter '{folder}' cannot be read: no {name} in it.")
    lora = _read_config(folder / _CONFIG)
    try:
        tensors: Mapping[str, np.ndarray] = safetensors.numpy.load_file(folder / _WEIGHTS)
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{folder / _WEIGHTS} cannot be read ({error}): it is cut off or damaged."
        ) from error
    remaining = dict(tensors)
    factors: dict[str, dict[str, jax.Array]] = {}
    for target in lora.targets:
        d, n = weight_shape(config, target)
        shapes = {"a": (lora.rank, d), "b": (n, lora.rank)}
        factors[target] = {}
        for letter, shape in shapes.items():
            layers = []
            for layer in range(config.num_layers):
                name = _tensor_name(target, layer, letter)
                if name not in remaining:
                    raise ValueError(f"{folder / _WEIGHTS}: {name!r} is not there.")
                array = remaining.pop(name)
                if array.shape != shape:
                    raise ValueError(
                        f"{folder / _WEIGHTS}: {name!r} is {list(array.shape)}, but the model and"
                        f" the rank make it {list(shape)}."
                    )
                layers.append(array.T)
            factors[target][letter] = jnp.asarray(np.stack(layers), jnp.float32)
    if remaining:
        raise ValueError(f"{folder / _WEIGHTS}: no adapter takes {min(remaining)!r}.")
    return {"layers": factors}, lora


def _read_config(path: pathlib.Path) -> LoRAConfig:
    fields = json.loads(path.read_text(encoding="utf-8"))
    fixed = {
        "peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False,
        "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
        "layers_to_transform": None, "fan_in_fan_out": False,
    }  # fmt: skip
    for name, value in fixed.items():
        if fields.get(name, value) not in (value, None):
            raise ValueError(f"{path}: `{name}` is {fields[name]!r}: only {value!r} is supported.")
    targets = fields.get("target_modules")
    if not isinstance(targets, list):
        raise ValueError(f"{path}: `target_modules` is {targets!r}: a list of names is needed.")
    names = [name.removesuffix("_proj") for name in targets]
    try:
        return LoRAConfig(
            rank=fields["r"],
            alpha=fields["lora_alpha"],
            dropout=fields.get("lora_dropout", 0.0),
            targets=tuple(name for name in TARGETS if name in names)
            + tuple(name for name in names if name not in TARGETS),
        )
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
