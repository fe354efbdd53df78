"""Hugging Face folders of a run: the model or the adapter that it trained.

A run ends with `model` (or `adapter`) in its folder. `--export` writes one anywhere, of the last
checkpoint of a run too, whose arrays are read without those of the optimizer.
"""

import functools
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rich.console import Console

from models import Decoder, LinearRopeScaling, ModelConfig, RopeScaling, huggingface
from models.folders import check_free
from models.lora import Adapters, LoRAConfig
from models.peft import save_adapters
from train.run import hosts
from train.run.checkpoint import Checkpoints
from train.settings.messages import naming_flag
from train.text.tokenizer import Tokenizer
from train.text.tokenizer_files import load_tokenizer

MODEL, ADAPTER, TOKENIZER = "model", "adapter", "tokenizer"
"""Folders of a run."""
_MODEL_LEAVES = "model."
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_target(target: pathlib.Path | None) -> None:
    """Raises a `ValueError` unless `--export` can write there."""
    if target is not None:
        with naming_flag("--export"):
            check_free(target.expanduser())


def write_model(
    model: Decoder,
    folder: pathlib.Path,
    *,
    like: pathlib.Path | None = None,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Writes a model with its tokenizer, as `transformers` reads them.

    All processes call it together; the first one writes.

    Args:
      model: a decoder of plain arrays.
      folder: the folder to create.
      like: as for `models.huggingface.save`.
      tokenizer: tokenizer to write; None for that of `like`.
    """
    huggingface.save(model, folder, like=like)
    if not hosts.is_main() or tokenizer is None:
        return
    tokenizer.save(folder)
    ids = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_id)
    values = dict(zip(_IDS, ids, strict=True))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    _write_json(folder / "config.json", {**config, **values})
    _write_json(folder / "generation_config.json", {"do_sample": False, **values})


def replace_folder(
    path: pathlib.Path, write: Callable[[pathlib.Path], None], console: Console
) -> None:
    """Writes a folder. A folder of an earlier export stays until the new one is complete."""
    scratch = path.with_name(f".{path.name}-new")
    if hosts.is_main():
        shutil.rmtree(scratch, ignore_errors=True)
    write(scratch)
    if hosts.is_main():
        shutil.rmtree(path, ignore_errors=True)
        scratch.rename(path)
        console.print(f"written: {path}")


def save_tokenizer(tokenizer: Tokenizer, folder: pathlib.Path) -> None:
    """Keeps the tokenizer of a run in its folder."""
    if hosts.is_main() and not (folder / TOKENIZER).exists():
        tokenizer.save(folder / TOKENIZER)


def tokenizer_of_run(folder: pathlib.Path) -> Tokenizer:
    """Returns the tokenizer that a run has kept.

    Raises:
      ValueError: there is none.
    """
    try:
        return load_tokenizer(folder / TOKENIZER, "--out")
    except FileNotFoundError as error:
        raise ValueError(
            f"`--out` {folder} has no tokenizer: an earlier version wrote the run. Continue it with"
            " `--resume` for a step, which writes one."
        ) from error


def has_checkpoint(folder: pathlib.Path) -> bool:
    """Returns whether a folder holds a run that can be exported."""
    steps = folder / "checkpoints"
    return steps.is_dir() and any(path.name.isdecimal() for path in steps.iterdir())


def read_trained(folder: pathlib.Path) -> tuple[int, ModelConfig, Any, LoRAConfig | None]:
    """Reads the last checkpoint of a run without its optimizer.

    Args:
      folder: folder of the run.

    Returns:
      The step, the dimensions of the model, the trained arrays on the host (a `Decoder`, or
      adapters as `models.lora.init_adapters` returns them), and the settings of adapters.

    Raises:
      ValueError: there is no checkpoint, or it is damaged.
    """
    if not has_checkpoint(folder):
        raise ValueError(f"`--out` {folder} holds no checkpoint of a run: name the folder of one.")
    checkpoints = Checkpoints(folder / "checkpoints", keep=1, read_only=True)
    step, identity, arrays = checkpoints.read_latest(_MODEL_LEAVES)
    checkpoints.close()
    config = _dimensions(identity["model"])
    adapters = identity["optimizer"].get("adapters")
    if adapters is not None:
        adapters["targets"] = tuple(adapters["targets"])
        return step, config, {"layers": _nested(arrays)["layers"]}, LoRAConfig(**adapters)
    model = jax.eval_shape(functools.partial(Decoder, config), jax.random.key(0))
    for name, array in arrays.items():
        parameter = huggingface.parameter_of(model, name.removesuffix(".value"))
        parameter.set_value(array)
    return step, config, model, None


def export_adapters(
    adapters: Adapters, lora: LoRAConfig, folder: pathlib.Path, base: pathlib.Path
) -> None:
    """Writes adapters as PEFT reads them."""
    save_adapters(adapters, lora, folder, base=str(base))


def _nested(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *parents, leaf = name.split(".")
        functools.reduce(lambda node, parent: node.setdefault(parent, {}), parents, tree)[leaf] = array
    return tree


def _dimensions(fields: dict[str, Any]) -> ModelConfig:
    """Returns dimensions from their JSON in the identity of a run."""
    scaling = fields.get("rope_scaling")
    if scaling is not None:
        kind = RopeScaling if "low_freq_factor" in scaling else LinearRopeScaling
        fields = {**fields, "rope_scaling": kind(**scaling)}
    return ModelConfig(**fields)


def _write_json(path: pathlib.Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
