"""Adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

Adapters must be of linear weights of the layers, whose base weights are unchanged: LoRA (with ranks
and factors by module), rank-stabilized LoRA, or DoRA. Other settings are refused by their names.
"""

import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import safetensors

from models import digests, huggingface
from models.config import ModelConfig
from models.folders import atomic_folder
from models.json_files import check_fields, read_object
from models.lora import TARGETS, Adapters, LoRAConfig, padded_adapters, weight_shape
from models.padding import without_padding
from models.parameters import fetch

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")
_READ = {
    "alpha_pattern", "exclude_modules", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "lora_alpha", "lora_dropout", "r", "rank_pattern", "target_modules",
    "use_dora", "use_rslora",
}  # fmt: skip
_HARMLESS = {
    "_name_or_path", "auto_mapping", "base_model_name_or_path", "corda_config",
    "ensure_weight_tying", "eva_config", "inference_mode", "loftq_config", "lora_ga_config",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config",
}  # fmt: skip
"""Fields that change nothing once adapters exist, or only together with a field that is refused."""
_FIXED = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}
_INITS = ("gaussian", "eva", "orthogonal", "mica")
"""Initial values of the factors that leave the base weights as they are, besides true and false."""
_CONVERTED = ("pissa", "olora", "corda", "lora_ga")
"""Beginnings of initial values that subtract the adapter from the base weights. PEFT converts such
adapters."""


def _module(target: str, layer: int) -> str:
    """Returns the name of a linear module in `transformers`."""
    owner = "self_attn" if target in "qkvo" else "mlp"
    return f"model.layers.{layer}.{owner}.{target}_proj"


def _tensor_name(module: str, factor: str) -> str:
    names = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
    return f"base_model.model.{module}.{names[factor]}"


def save_adapters(
    adapters: Adapters,
    lora: LoRAConfig,
    folder: pathlib.Path | str,
    config: ModelConfig | None = None,
    *,
    base: str = "",
    base_digests: Mapping[str, str] | None = None,
) -> None:
    """Writes adapters as a folder that PEFT reads.

    If several processes share the arrays, all of them call this function together, and the first
    process writes.

    Args:
      adapters: as `models.lora.init_adapters` returns them.
      lora: their settings.
      folder: the folder to create. It appears once everything in it is written.
      config: dimensions of the decoder that the adapters are for; None if its weights have no
        padding (`ModelConfig.stored_ffn_size`).
      base: name or path of the model that the adapters belong to.
      base_digests: digests of its tensors, as `models.digests.of_tensors` returns them. With them
        `load_adapters` finds another model.

    Raises:
      FileExistsError: the folder exists and is not empty.
      ValueError: a number in the padding of a factor is not zero.
    """
    folder = pathlib.Path(folder)
    tensors: dict[str, np.ndarray] = {}
    for target, factors in adapters["layers"].items():
        for factor, stacked in factors.items():
            whole = fetch(stacked)
            if config is not None:
                whole = without_padding(f"layers.{target}.{factor}", whole, config)
            for layer, array in enumerate(whole):
                name = _tensor_name(_module(target, layer), factor)
                tensors[name] = np.ascontiguousarray(array.T)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": [f"{name}_proj" for name in lora.targets],
        "use_rslora": lora.rslora,
        "use_dora": any("magnitude" in factors for factors in adapters["layers"].values()),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    if jax.process_index():
        return
    with atomic_folder(folder) as scratch:
        (scratch / _CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        known = {digests.BASE: json.dumps(dict(base_digests))} if base_digests else {}
        digests.save_tensors(tensors, scratch / _WEIGHTS, **known)


def load_adapters(
    folder: pathlib.Path | str, config: ModelConfig, base: pathlib.Path | None = None
) -> tuple[Adapters, LoRAConfig]:
    """Reads adapters from a folder that PEFT wrote, and their settings.

    A module without an adapter has a zero adapter if other layers have one there. Adapters of
    unequal ranks are padded with zeros to the largest, and the settings hold this rank; factors
    alpha / rank that differ from theirs are multiplied into `b`.

    Args:
      folder: with `adapter_config.json` and `adapter_model.safetensors`.
      config: dimensions of the decoder that the adapters are for.
      base: folder of its checkpoint, whose tensors must be those that the adapters were trained
        with; None not to compare them. Only adapters that `save_adapters` wrote know them.

    Raises:
      FileNotFoundError: a missing file.
      ValueError: an unsupported setting, adapters for another model, or a damaged file.
    """
    folder = pathlib.Path(folder)
    for name in (_CONFIG, _WEIGHTS):
        if not (folder / name).is_file():
            advice = ""
            if name == _WEIGHTS and (folder / "adapter_model.bin").exists():
                advice = (
                    " adapter_model.bin is a pickle, and reading a pickle can run any program: if"
                    " you trust it, convert it with `save_pretrained` of PEFT."
                )
            raise FileNotFoundError(
                f"the adapter '{folder}' cannot be read: no {name} in it.{advice}"
            )
    path = folder / _CONFIG
    fields = read_object(path)
    try:
        settings = _Settings.of(fields, config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    tensors = _read_tensors(folder / _WEIGHTS)
    wanted = _wanted(settings, config)
    try:
        _check_tensors(tensors, wanted)
    except ValueError as error:
        raise ValueError(f"{folder / _WEIGHTS}: {error}") from error
    if base is not None:
        digests.check_base(folder / _WEIGHTS, huggingface.weight_files(base))
    factors = {name: _stack(settings, name, config, tensors) for name in settings.lora.targets}
    return jax.device_put(padded_adapters({"layers": factors}, config)), settings.lora


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Settings of an adapter.

    Attributes:
      lora: settings of all adapters, with the largest rank.
      modules: rank and factor of each adapter, by target and layer.
      dora: whether adapters have magnitudes.
    """

    lora: LoRAConfig
    modules: dict[str, dict[int, tuple[int, float]]]
    dora: bool

    @classmethod
    def of(cls, fields: Mapping[str, Any], config: ModelConfig) -> "_Settings":
        _check_init(fields.get("init_lora_weights"))
        check_fields(fields, _READ | _HARMLESS, _FIXED)
        rslora, dora = _flag(fields, "use_rslora"), _flag(fields, "use_dora")
        rank = _integer("r", _field(fields, "r"))
        alpha = _number("lora_alpha", _field(fields, "lora_alpha"))
        modules: dict[str, dict[int, tuple[int, float]]] = {}
        for target in TARGETS:
            for layer in range(config.num_layers):
                module = _module(target, layer)
                if not _has_adapter(fields, module, layer):
                    continue
                own_rank, own_alpha = rank, alpha
                if (value := _own(fields, "rank_pattern", module)) is not None:
                    own_rank = _integer("rank_pattern", value)
                if (value := _own(fields, "alpha_pattern", module)) is not None:
                    own_alpha = _number("alpha_pattern", value)
                scale = own_alpha / (math.sqrt(own_rank) if rslora else own_rank)
                modules.setdefault(target, {})[layer] = own_rank, scale
        if not modules:
            raise ValueError(
                f"`target_modules` {fields.get('target_modules')!r} names no linear weight of the"
                " model."
            )
        partial = [name for name in modules if len(modules[name]) < config.num_layers]
        if dora and partial:
            raise ValueError(
                f"`use_dora` is True, but only some layers have an adapter of {partial[0]!r}: merge"
                " it in PEFT, with `merge_and_unload`."
            )
        lora = LoRAConfig(
            rank=max(own_rank for layers in modules.values() for own_rank, _ in layers.values()),
            alpha=alpha,
            dropout=_number("lora_dropout", fields.get("lora_dropout", 0.0)),
            targets=tuple(modules),
            rslora=rslora,
        )
        return cls(lora, modules, dora)


def _check_init(value: Any) -> None:
    """Raises unless `init_lora_weights` leaves the base weights as they are."""
    name = str(value).lower()
    if isinstance(value, bool) or value is None or name in _INITS:
        return
    merge = (
        "merge it in PEFT, with `merge_and_unload`, and pass the merged model as the checkpoint."
    )
    changed = "which changes the base weights, so the adapter does not fit the checkpoint:"
    if name.startswith(_CONVERTED):
        advice = (
            f"{changed} convert it to plain LoRA in PEFT, with `save_pretrained(OUT,"
            f" path_initial_model_for_weight_conversion=UNTRAINED_ADAPTER)`, or {merge}"
        )
    elif name == "loftq":
        advice = f"{changed} {merge}"
    else:
        advice = f"but supported are true, false, {', '.join(_INITS)}."
    raise ValueError(f"`init_lora_weights` is {value!r}, {advice}")


def _has_adapter(fields: Mapping[str, Any], module: str, layer: int) -> bool:
    """Returns whether PEFT gives a module an adapter."""
    if _matches(fields, "exclude_modules", module):
        return False
    layers, pattern = fields.get("layers_to_transform"), fields.get("layers_pattern")
    if pattern not in (None, [], "", "layers", ["layers"]):
        raise ValueError(f"`layers_pattern` is {pattern!r}: only 'layers' is supported.")
    if isinstance(layers, int) and not isinstance(layers, bool):
        layers = [layers]
    if layers and not (isinstance(layers, list) and all(isinstance(x, int) for x in layers)):
        raise ValueError(f"`layers_to_transform` must be a list of layers, got {layers!r}.")
    if layers and layer not in layers:
        return False
    if fields.get("target_modules") == "all-linear":
        return True
    return _matches(fields, "target_modules", module)


def _matches(fields: Mapping[str, Any], name: str, module: str) -> bool:
    """Returns whether a regular expression, or a name or end of a name in a list, matches."""
    names = fields.get(name)
    if isinstance(names, str):
        return _compiled(name, names).fullmatch(module) is not None
    if not isinstance(names, list | None) or not all(isinstance(x, str) for x in names or []):
        raise ValueError(
            f"`{name}` must be a list of names or a regular expression, got {names!r}."
        )
    return any(f".{module}".endswith(f".{end}") for end in names or [])


def _own(fields: Mapping[str, Any], name: str, module: str) -> Any:
    """Returns the value that the first matching pattern gives a module, or None."""
    patterns = fields.get(name) or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"`{name}` must be an object of numbers by module, got {patterns!r}.")
    for pattern, value in patterns.items():
        if _compiled(name, rf"(.*\.)?({pattern})$").match(module):
            return value
    return None


def _compiled(name: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"`{name}`: {pattern!r} is no regular expression ({error}).") from error


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if not isinstance(value, bool | None):
        raise ValueError(f"`{name}` must be true or false, got {value!r}.")
    return bool(value)


def _field(fields: Mapping[str, Any], name: str) -> Any:
    if name not in fields:
        raise ValueError(f"`{name}` is missing.")
    return fields[name]


def _integer(name: str, value: Any) -> int:
    if _number(name, value) != int(value) or value < 1:
        raise ValueError(f"`{name}` must be an integer of at least 1, got {value!r}.")
    return int(value)


def _number(name: str, value: Any) -> float:
    # Python's integers are of any size, and its JSON has infinities and NaN.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**31:
        raise ValueError(f"`{name}` must be a number, got {value!r}.")
    return value


def _read_tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a file in float32."""
    tensors = {}
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 (it is no mapping)
                dtype = file.get_slice(name).get_dtype()
                if dtype not in _FLOATS:
                    raise ValueError(
                        f"{path}: {name!r} is {dtype}, but adapters must be one of"
                        f" {', '.join(_FLOATS)}: save it in float32 with PEFT."
                    )
                tensors[name] = file.get_tensor(name).astype(np.float32)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error}): it is truncated or damaged.") from error
    digests.check_tensors(path)
    return tensors


def _wanted(settings: _Settings, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of the tensors of an adapter."""
    wanted: dict[str, tuple[int, ...]] = {}
    for target, layers in settings.modules.items():
        d, n = weight_shape(config, target)
        for layer, (rank, _) in layers.items():
            shapes: dict[str, tuple[int, ...]] = {"a": (rank, d), "b": (n, rank)}
            if settings.dora:
                shapes["magnitude"] = (n,)
            for factor, shape in shapes.items():
                wanted[_tensor_name(_module(target, layer), factor)] = shape
    return wanted


def _check_tensors(
    tensors: Mapping[str, np.ndarray], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises unless there are exactly the wanted tensors, of these shapes and finite."""
    for name, shape in wanted.items():
        if name not in tensors:
            raise ValueError(f"{name!r} is missing.")
        if tensors[name].shape != shape:
            raise ValueError(
                f"{name!r} has the shape {list(tensors[name].shape)}, but the model and the rank"
                f" require {list(shape)}."
            )
        if not np.isfinite(tensors[name]).all():
            raise ValueError(
                f"{name!r} must hold finite floating point numbers: its training diverged, or the"
                " file is damaged."
            )
    unknown = tensors.keys() - wanted.keys()
    if unknown:
        raise ValueError(
            f"no adapter for the tensor {min(unknown)!r}: adapters are of linear weights of layers"
            " that `target_modules` names."
        )


def _stack(
    settings: _Settings, target: str, config: ModelConfig, tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns the factors of a target, with a leading axis of layers and without padding."""
    (d, n), lora, layers = weight_shape(config, target), settings.lora, config.num_layers
    factors: dict[str, np.ndarray] = {
        "a": np.zeros((layers, d, lora.rank), np.float32),
        "b": np.zeros((layers, lora.rank, n), np.float32),
    }
    if settings.dora:
        factors["magnitude"] = np.zeros((layers, n), np.float32)
    for layer, (rank, scale) in settings.modules[target].items():
        parts = {name: tensors[_tensor_name(_module(target, layer), name)].T for name in factors}
        factors["a"][layer, :, :rank] = parts["a"]
        factors["b"][layer, :rank] = parts["b"] * np.float32(scale / lora.scale)
        if settings.dora:
            factors["magnitude"][layer] = parts["magnitude"]
    return factors
