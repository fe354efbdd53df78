"""Hugging Face folders of a run: the model or the adapter that it trained.

A run ends with `model` (or `adapter`) in its folder. `--export` writes one anywhere, of the last
checkpoint of a run too, whose arrays are read without those of the optimizer.
"""

import dataclasses
import functools
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rich.console import Console

from models import (
    Decoder,
    LinearRopeScaling,
    ModelConfig,
    RopeScaling,
    digests,
    huggingface,
)
from models.folders import check_free
from models.json_files import read_object
from models.lora import LoRAConfig, merge, padded_adapters
from models.padding import pad
from models.peft import save_adapters
from train.run import hosts
from train.run.checkpoint import Checkpoints
from train.run.progress import saying
from train.settings.config import FinetuneConfig, PretrainConfig, run_folder
from train.settings.messages import naming_flag
from train.settings.methods import METHODS
from train.text.tokenizer import Tokenizer
from train.text.tokenizer_files import load_tokenizer

MODEL, ADAPTER, TOKENIZER = "model", "adapter", "tokenizer"
"""Folders of a run."""
_MODEL_LEAVES = "model."
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclasses.dataclass(frozen=True)
class Target:
    """Where and how a run is exported.

    Attributes:
      folder: folder of the run; None to write to `export` alone.
      export: a further folder, or None.
      like: checkpoint that the run began with, whose files are copied; None without one.
      base: its name for PEFT.
      tokenizer: tokenizer to write; None for that of `like`.
      merge: whether adapters are also merged into a model.
    """

    folder: pathlib.Path | None
    export: pathlib.Path | None
    like: pathlib.Path | None = None
    base: str = ""
    tokenizer: Tokenizer | None = None
    merge: bool = False


@dataclasses.dataclass(frozen=True)
class Trained:
    """The trained arrays of a run.

    Attributes:
      arrays: a `Decoder`, or adapters as `models.lora.init_adapters` returns them.
      lora: settings of the adapters; None for a decoder.
      frozen: returns the decoder that adapters belong to.
      identity: identity of the run.
    """

    arrays: Any
    lora: LoRAConfig | None = None
    frozen: Callable[[], Decoder] | None = None
    identity: dict[str, Any] = dataclasses.field(default_factory=dict)

    def write(self, target: Target, console: Console) -> None:
        """Writes folders that `transformers` and `peft` read: a model, or an adapter.

        With `Target.merge` both; then `Target.export` is the merged model. All processes call it
        together; the first one writes.
        """
        write = functools.partial(write_model, like=target.like, tokenizer=target.tokenizer)
        writers: dict[str, Callable[[pathlib.Path], None]] = {}
        lora = self.lora
        if lora is None:
            writers[MODEL] = functools.partial(write, self.arrays)
        else:
            writers[ADAPTER] = functools.partial(self._write_adapters, lora, base=target.base)
            if target.merge:
                assert self.frozen is not None
                merged = merge(self.frozen(), self.arrays, lora)
                writers[MODEL] = functools.partial(write, merged)
        with saying(console, "writing what was trained", first=False):
            if target.folder is not None:
                for name, into in writers.items():
                    replace_folder(target.folder / name, into, console)
            if target.export is not None:
                *_, into = writers.values()
                into(target.export.expanduser())
                console.print(f"written: {target.export}")

    def _write_adapters(self, lora: LoRAConfig, folder: pathlib.Path, *, base: str) -> None:
        """Writes adapters in the dimensions of the decoder that they belong to."""
        if "model" in self.identity:
            config = _dimensions(self.identity["model"])
        else:
            assert self.frozen is not None
            config = self.frozen().config
        hashed = self.identity.get("base")
        save_adapters(self.arrays, lora, folder, config, base=base, base_digests=hashed)
        if hosts.is_main():
            _write_digests(folder)


def exports_only(config: PretrainConfig | FinetuneConfig) -> bool:
    """Returns whether `--export` is for a run that is there and is not to go on.

    Raises:
      ValueError: the folder to write exists and is not empty.
    """
    if config.export is None:
        return False
    with naming_flag("--export"):
        check_free(config.export.expanduser())
    return not config.resume and has_checkpoint(run_folder(config))


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
    if not hosts.is_main():
        return
    if tokenizer is not None:
        tokenizer.save(folder)
        ids = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_id)
        values = dict(zip(_IDS, ids, strict=True))
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        _write_json(folder / "config.json", {**config, **values})
        _write_json(folder / "generation_config.json", {"do_sample": False, **values})
    _write_digests(folder)


def _write_digests(folder: pathlib.Path) -> None:
    digests.write(folder, (file for file in folder.rglob("*") if file.is_file()))


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


def remove_exports(folder: pathlib.Path, console: Console) -> None:
    """Removes what an earlier end of a run exported, before the run goes on to other weights."""
    for path in (folder / MODEL, folder / ADAPTER):
        if hosts.is_main() and path.is_dir():
            shutil.rmtree(path)
            console.print(f"removed: {path}, which is of an earlier step")


def save_tokenizer(tokenizer: Tokenizer, folder: pathlib.Path, *, is_new: bool) -> None:
    """Keeps the tokenizer of a run in its folder. A new run replaces that of one before it."""
    path = folder / TOKENIZER
    if hosts.is_main() and (is_new or not path.exists()):
        shutil.rmtree(path, ignore_errors=True)
        tokenizer.save(path)
        _write_digests(path)


def tokenizer_of_run(folder: pathlib.Path) -> Tokenizer:
    """Returns the tokenizer that a run has kept.

    Raises:
      ValueError: there is none, or it is damaged.
    """
    digests.check(folder / TOKENIZER)
    try:
        return load_tokenizer(folder / TOKENIZER, "--out")
    except FileNotFoundError as error:
        raise ValueError(
            f"`--out` {folder} has no tokenizer: an earlier version wrote the run. Continue it with"
            " `--resume` for a step, which writes one."
        ) from error


def adapter_of_run(folder: pathlib.Path) -> tuple[str, pathlib.Path, bool] | None:
    """Returns the adapter of a run that trained one and no merged model; None for other folders.

    Returns:
      The checkpoint that the adapter belongs to, its folder, and whether the weights of the
      checkpoint were in 4 bits.
    """
    adapter = folder / ADAPTER
    if not (adapter / "adapter_config.json").is_file() or (folder / MODEL).is_dir():
        return None
    base = str(read_object(adapter / "adapter_config.json").get("base_model_name_or_path") or "")
    method = method_of_run(folder)
    return base, adapter, method is not None and METHODS[method].four_bit


def method_of_run(folder: pathlib.Path) -> str | None:
    """Returns the method of a run; None if its settings do not tell it."""
    settings = folder / "settings.json"
    method = read_object(settings).get("method") if settings.is_file() else None
    return method if method in METHODS else None


def has_checkpoint(folder: pathlib.Path) -> bool:
    """Returns whether a folder holds a run that can be exported."""
    steps = folder / "checkpoints"
    return steps.is_dir() and any(path.name.isdecimal() for path in steps.iterdir())


def read_trained(
    folder: pathlib.Path, frozen: Callable[[], Decoder] | None = None
) -> tuple[int, Trained]:
    """Reads the last checkpoint of a run without its optimizer.

    Args:
      folder: folder of the run.
      frozen: returns the decoder that adapters belong to.

    Returns:
      The step, and what was trained.

    Raises:
      ValueError: the checkpoint is damaged.
    """
    with naming_flag("--out"):
        checkpoints = Checkpoints(folder / "checkpoints", keep=1, read_only=True)
        step, identity, arrays = checkpoints.read_latest(_MODEL_LEAVES)
        checkpoints.close()
    config, adapters = _dimensions(identity["model"]), identity["optimizer"].get("adapters")
    if adapters is not None:
        lora = LoRAConfig(**{**adapters, "targets": tuple(adapters["targets"])})
        return step, Trained(padded_adapters(_nested(arrays), config), lora, frozen, identity)
    model = jax.eval_shape(functools.partial(Decoder, config), jax.random.key(0))
    for name, array in arrays.items():
        path = name.removesuffix(".value")
        # Checkpoints of earlier versions have no padding.
        huggingface.parameter_of(model, path).set_value(pad(path, array, config))
    return step, Trained(model, identity=identity)


def _nested(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *parents, leaf = name.split(".")
        node = functools.reduce(lambda node, parent: node.setdefault(parent, {}), parents, tree)
        node[leaf] = array
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
