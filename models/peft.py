"""Adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from models.config import ModelConfig
from models.folders import atomic_folder
from models.json_files import read_object
from models.lora import TARGETS, Adapters, LoRAConfig, weight_shape
from models.parameters import fetch

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

    If several processes share the arrays, all of them call this function together, and the first
    process writes.

    Args:
      adapters: as `models.lora.init_adapters` returns them.
      lora: their settings.
      folder: the folder to create. It appears once everything in it is written.
      base: name or path of the model that the adapters belong to.

    Raises:
      FileExistsError: the folder exists and is not empty.
    """
    folder = pathlib.Path(folder)
    tensors: dict[str, np.ndarray] = {}
    for target, factors in adapters["layers"].items():
        for letter, stacked in factors.items():
            for layer, factor in enumerate(fetch(stacked)):
                tensors[_tensor_name(target, layer, letter)] = np.ascontiguousarray(factor.T)
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
    if jax.process_index():
        return
    with atomic_folder(folder) as scratch:
        (scratch / _CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        safetensors.numpy.save_file(tensors, scratch / _WEIGHTS, metadata={"format": "pt"})
        (scratch / _WEIGHTS).chmod(0o644)


def load_adapters(folder: pathlib.Path | str, config: ModelConfig) -> tuple[Adapters, LoRAConfig]:
    """Reads adapters from a folder that PEFT wrote, and their settings.

    Args:
      folder: with `adapter_config.json` and `adapter_model.safetensors`.
      config: dimensions of the decoder that the adapters are for.

    Raises:
      FileNotFoundError: a missing file.
      ValueError: an unsupported kind of adapter, adapters for another model, or a damaged file.
    """
    folder = pathlib.Path(folder)
    for name in (_CONFIG, _WEIGHTS):
        if not (folder / name).exists():
            raise FileNotFoundError(f"the adapter '{folder}' cannot be read: no {name} in it.")
    lora = _read_settings(folder / _CONFIG)
    try:
        tensors: Mapping[str, np.ndarray] = safetensors.numpy.load_file(folder / _WEIGHTS)
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{folder / _WEIGHTS} cannot be read ({error}): it is truncated or damaged."
        ) from error
    remaining = dict(tensors)
    factors: dict[str, dict[str, jax.Array]] = {}
    for target in lora.targets:
        d, n = weight_shape(config, target)
        shapes = {"a": (lora.rank, d), "b": (n, lora.rank)}
        factors[target] = {
            letter: _pop_layers(
                remaining,
                [_tensor_name(target, layer, letter) for layer in range(config.num_layers)],
                shape,
                folder / _WEIGHTS,
            )
            for letter, shape in shapes.items()
        }
    if remaining:
        raise ValueError(f"{folder / _WEIGHTS}: no adapter for the tensor {min(remaining)!r}.")
    return {"layers": factors}, lora


def _pop_layers(
    tensors: dict[str, np.ndarray], names: list[str], shape: tuple[int, int], path: pathlib.Path
) -> jax.Array:
    """Removes the tensors of all layers of a factor, and returns them transposed and stacked."""
    layers = []
    for name in names:
        if name not in tensors:
            raise ValueError(f"{path}: {name!r} is missing.")
        array = tensors.pop(name)
        if array.shape != shape:
            raise ValueError(
                f"{path}: {name!r} has the shape {list(array.shape)}, but the model and the rank"
                f" require {list(shape)}."
            )
        if not (
            jnp.issubdtype(array.dtype, jnp.floating)
            and np.isfinite(array.astype(np.float32)).all()
        ):
            raise ValueError(
                f"{path}: {name!r} must hold finite floating point numbers: its training diverged,"
                f" or the file is damaged ({array.dtype})."
            )
        layers.append(array.T)
    return jax.device_put(np.stack(layers).astype(np.float32))


def _read_settings(path: pathlib.Path) -> LoRAConfig:
    fields = read_object(path)
    fixed = {
        "peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False,
        "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
        "layers_to_transform": None, "fan_in_fan_out": False,
    }  # fmt: skip
    for name, value in fixed.items():
        if fields.get(name, value) not in (value, None):
            raise ValueError(f"{path}: `{name}` is {fields[name]!r}: only {value!r} is supported.")
    targets = fields.get("target_modules")
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        raise ValueError(f"{path}: `target_modules` must be a list of names, got {targets!r}.")
    names = [name.removesuffix("_proj") for name in targets]
    rank = _number(path, fields, "r")
    if rank != int(rank):
        raise ValueError(f"{path}: `r` must be an integer, got {rank!r}.")
    try:
        return LoRAConfig(
            rank=int(rank),
            alpha=_number(path, fields, "lora_alpha"),
            dropout=_number(path, {"lora_dropout": 0.0} | fields, "lora_dropout"),
            targets=tuple(name for name in TARGETS if name in names)
            + tuple(name for name in names if name not in TARGETS),
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _number(path: pathlib.Path, fields: Mapping[str, Any], name: str) -> float:
    """Returns a number of the settings."""
    if name not in fields:
        raise ValueError(f"{path}: `{name}` is missing.")
    value = fields[name]
    # Python's integers are of any size, and its JSON has infinities and NaN.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 2**31:
        raise ValueError(f"{path}: `{name}` must be a number, got {value!r}.")
    return value
