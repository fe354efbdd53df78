"""Fine-tunes a checkpoint: `python -m train.finetune --checkpoint DIR --data FILE`."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
from rich.console import Console

from models import Decoder, huggingface
from models.checkpoints import find_checkpoint, load_checkpoint, read_dimensions
from models.lora import merge, quantize
from models.peft import save_adapters
from train.run import hosts
from train.run.begin import begin
from train.run.calibration import calibrate
from train.run.loop import Run, make_console, moved, prepare_and_train, put_rows, run_program
from train.run.recipe import Recipe, build_recipe
from train.run.sharding import check_sizes, make_mesh, rows_of_process
from train.run.state import first_state
from train.run.step import TrainState, model_of
from train.settings import cli
from train.settings.config import FinetuneConfig
from train.settings.messages import naming_flag
from train.settings.resolve import resolve
from train.text.examples import open_examples
from train.text.packing import packed_batches, validation_set
from train.text.tokenizer import check_vocabulary, tokenizer_of


def main() -> None:
    """Reads the command line and trains. Exits with 2 if it cannot begin, with 1 on a NaN."""
    config = cli.parse(FinetuneConfig, "python -m train.finetune")
    run_program(lambda: run(config, make_console()))


def run(config: FinetuneConfig, console: Console) -> int:
    """Trains with the given settings: the program behind the command line.

    After the last step, the folder of the run holds a checkpoint that other tools read: `model`,
    or `adapter`, and with `--merge` both.

    Returns:
      The last step done: less than `config.steps` if a signal stopped the run.

    Raises:
      BadRunError: something is wrong with the settings, the examples or a checkpoint.
      NonFiniteError: the loss or gradient of a step is not finite.
    """
    prepared = functools.partial(prepare, config)
    return prepare_and_train(prepared, config, console, functools.partial(export, config))


def prepare(user_config: FinetuneConfig, console: Console) -> Run:
    """Returns a run that is ready for its first step. Everything that can be wrong is found here.

    Raises:
      ValueError: settings that do not fit each other, the examples or a checkpoint.
      OSError: a file that cannot be read.
    """
    with hosts.failing_together():
        with naming_flag("--checkpoint"):
            checkpoint = find_checkpoint(user_config.checkpoint, user_config.download)
            model_config, dtype = read_dimensions(checkpoint)
        config = resolve(user_config, model_config, dtype)
        mesh = make_mesh(config.mesh)
        check_sizes(config, mesh)
        recipe = build_recipe(config)
        tokenizer = tokenizer_of(checkpoint, user_config.tokenizer)
        check_vocabulary(tokenizer, config.title, config.model_config.vocab_size)
        folder = user_config.tokenizer or checkpoint
        examples = open_examples(user_config.data, tokenizer, config.seq_len, folder)
        with naming_flag("--checkpoint"):
            hashed = fingerprint(checkpoint)
        rows = {"batch_size": config.batch_size, "seq_len": config.seq_len}
        rows["pad_id"] = tokenizer.eos_id
        part = rows_of_process(mesh, config.batch_size)
        open_batches = functools.partial(
            packed_batches, examples.train, seed=config.seed, part=part, **rows
        )
        batches = open_batches()
        validation = validation_set(
            examples.validation, tokenizer, eval_batches=config.eval_batches, **rows
        )
    lost = f"; {examples.cut:,} cut, {examples.dropped:,} dropped"
    return begin(
        user_config,
        recipe,
        mesh,
        console,
        batches=batches,
        validation=validation,
        summary=f"examples: {examples.name}, {len(examples.train):,} with"
        f" {sum(len(example.tokens) for example in examples.train):,} tokens, of which"
        f" {sum(int(example.counted.sum()) for example in examples.train):,} count in the loss, and"
        f" {len(examples.validation):,} held out"
        f"{lost if examples.cut or examples.dropped else ''}; tokenizer of"
        f" {tokenizer.vocab_size:,}",
        first_state=functools.partial(_first_state, recipe, checkpoint, open_batches),
        frozen=lambda places: None if places is None else read_model(checkpoint, recipe, places),
        tokenizer=tokenizer,
        fingerprint=examples.fingerprint,
        checkpoint=hashed,
    )


def _first_state(
    recipe: Recipe, checkpoint: pathlib.Path, open_batches: Callable[[], Any], shardings: TrainState
) -> TrainState:
    """Returns the state before the first step: pretrained weights, and calibrated channels."""
    places = shardings.model if recipe.config.lora is None else shardings.frozen
    base = read_model(checkpoint, recipe, places)
    state = first_state(recipe, shardings, base)
    config, mesh = recipe.config, shardings.step.mesh
    if config.adapter is None or not recipe.method.calibrates:
        return state
    with contextlib.closing(open_batches()) as fresh:
        first = itertools.islice(fresh, config.adapter.calibration_batches)
        put = functools.partial(put_rows, mesh=mesh, batch_size=config.batch_size)
        model = model_of(recipe, state)
        measured = calibrate(recipe.storage, model, map(put, first), config.compute_dtype)
    return dataclasses.replace(state, calibration=moved(measured, shardings.calibration))


def read_model(checkpoint: pathlib.Path, recipe: Recipe, places: Any) -> Decoder:
    """Returns the decoder of a checkpoint, in 4 bits if the method holds it so.

    Args:
      checkpoint: folder or file.
      recipe: the run.
      places: the decoder with a sharding in place of each array.
    """

    def put(path: str, value: Any) -> Any:
        shardings = huggingface.parameter_of(places, path).get_value()
        return jax.tree.map(hosts.place, value, shardings)

    with naming_flag("--checkpoint"):
        return load_checkpoint(
            checkpoint,
            dtype=recipe.config.weight_dtype,
            convert=quantize if recipe.method.four_bit else None,
            put=put,
        )


def fingerprint(checkpoint: pathlib.Path) -> str:
    """Returns a hexadecimal hash that tells checkpoints apart. Reads a part of each file."""
    digest = hashlib.sha256()
    for file in sorted([*checkpoint.glob("*.safetensors"), checkpoint / "config.json"]):
        with file.open("rb") as opened:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            # Headers, and numbers of the first and last tensors.
            digest.update(opened.read(2**20))
            opened.seek(max(0, size - 2**20))
            digest.update(opened.read())
    return digest.hexdigest()


def export(user_config: FinetuneConfig, run: Run, console: Console) -> None:
    """Writes what was trained into the folder of a run, in the format of other tools.

    All processes call it together; the first one writes.
    """
    recipe, state, folder = run.recipe, run.state, run.config.folder
    checkpoint = find_checkpoint(user_config.checkpoint)
    given = pathlib.Path(user_config.checkpoint).expanduser()  # PEFT knows the names of the Hub.

    def write_model(model: Decoder, path: pathlib.Path) -> None:
        huggingface.save(model, path, like=checkpoint)
        if hosts.is_main() and user_config.tokenizer is not None:
            tokenizer_of(checkpoint, user_config.tokenizer).save(path)

    if recipe.config.lora is None:
        _replace(folder / "model", functools.partial(write_model, state.model), console)
        return
    write = functools.partial(save_adapters, state.model, recipe.config.lora, base=str(given))
    _replace(folder / "adapter", write, console)
    if recipe.method.four_bit:
        console.print(
            "the adapter was trained with 4-bit weights and fits them best: evaluate it with"
            " train.evaluate --four-bit (a merged model contains the 4-bit weights)"
        )
    if user_config.adapter.merge:
        merged = merge(state.frozen, state.model, recipe.config.lora)
        _replace(folder / "model", functools.partial(write_model, merged), console)


def _replace(path: pathlib.Path, write: Callable[[pathlib.Path], None], console: Console) -> None:
    """Writes a folder. A folder of an earlier export stays until the new one is complete."""
    scratch = path.with_name(f".{path.name}-new")
    if hosts.is_main():
        shutil.rmtree(scratch, ignore_errors=True)
    write(scratch)
    if hosts.is_main():
        shutil.rmtree(path, ignore_errors=True)
        scratch.rename(path)
        console.print(f"written: {path}")


if __name__ == "__main__":
    main()
