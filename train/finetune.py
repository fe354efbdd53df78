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
import tyro
from rich.console import Console

from models import Decoder, huggingface
from models.checkpoints import load_checkpoint, read_dimensions
from models.lora import merge, quantize
from models.peft import save_adapters
from train.calibration import calibrate, calibrated_sites
from train.checkpoint import identity_of
from train.config import FinetuneConfig
from train.examples import Examples, open_examples
from train.loop import Run, begin, check_sizes, make_console, prepare_and_train, run_program
from train.packing import packed_batches, validation_set
from train.sharding import batch_sharding, make_mesh
from train.step import Recipe, TrainState, init_state, make_recipe, model_of
from train.tokenizer import Tokenizer, tokenizer_of


def main() -> None:
    """Reads the command line and trains. Exits with 2 if it cannot begin, with 1 on a NaN."""
    config = tyro.cli(
        FinetuneConfig, prog="python -m train.finetune", config=(tyro.conf.OmitArgPrefixes,)
    )
    run_program(lambda: run(config, make_console()))


def run(config: FinetuneConfig, console: Console) -> int:
    """Trains as `config` says: the whole program behind the command line.

    When its last step is done, the folder of the run holds a checkpoint that other tools read:
    `model`, or the `adapter`, and with `--merge` both.

    Returns:
      The step it came to: less than `config.steps` if a signal stopped it.

    Raises:
      BadRunError: something is wrong with the settings, the examples or a checkpoint.
      NonFiniteError: the loss or gradient of a step is not finite.
    """
    finish = functools.partial(export, console=console)
    return prepare_and_train(lambda: prepare(config, console), console, finish)


def prepare(config: FinetuneConfig, console: Console) -> Run:
    """Returns a run ready to go: everything that can be wrong is found here, before the first step.

    Raises:
      ValueError: settings that do not fit one another, the examples or a checkpoint.
      OSError: a file that cannot be read.
    """
    checkpoint = pathlib.Path(config.checkpoint).expanduser()
    model_config, dtype = read_dimensions(checkpoint)
    if config.weight_dtype == "auto":
        # Of 16 bits, training wants those with the range of float32.
        chosen: Any = "bfloat16" if dtype == "float16" else dtype
        config = dataclasses.replace(config, weight_dtype=chosen)
    mesh = make_mesh(config.mesh)
    check_sizes(config, model_config, mesh)
    recipe = make_recipe(config, model_config)
    tokenizer = tokenizer_of(checkpoint, config.tokenizer)
    if tokenizer.vocab_size > model_config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but {config.title} has"
            f" {model_config.vocab_size}: `--tokenizer` is that of another model."
        )
    folder = config.tokenizer or checkpoint
    examples = open_examples(config.data, tokenizer, config.seq_len, folder)
    sizes = {"batch_size": config.batch_size, "seq_len": config.seq_len}
    pad = tokenizer.eos_id
    packed = functools.partial(
        packed_batches, examples.train, **sizes, seed=config.seed, pad_id=pad
    )
    identity = identity_of(
        model=model_config,
        checkpoint=fingerprint(checkpoint),
        data=examples.fingerprint,
        tokenizer=tokenizer.fingerprint,
        weight_dtype=recipe.config.weight_dtype,
        seed=config.seed,
        optimizer=recipe.optimizer_form,
        **sizes,
    )

    def first_state(shardings: TrainState) -> TrainState:
        places = shardings.model if recipe.lora is None else shardings.frozen
        start = functools.partial(init_state, recipe)
        base = read_model(checkpoint, recipe, places)
        state = jax.jit(start, donate_argnums=0, out_shardings=shardings)(base)
        if not calibrated_sites(recipe.storage):
            return state
        with contextlib.closing(packed()) as fresh:
            first = itertools.islice(fresh, config.adapter.calibration_batches)
            put = functools.partial(jax.device_put, device=batch_sharding(mesh))
            found = calibrate(
                recipe.storage, model_of(recipe, state), map(put, first), config.compute_dtype
            )
        return dataclasses.replace(state, calibration=jax.device_put(found, shardings.calibration))

    return begin(
        config,
        recipe,
        mesh,
        packed(),
        validation_set(
            examples.validation, tokenizer, max_batches=config.eval_batches, **sizes, pad_id=pad
        ),
        identity,
        first_state=first_state,
        frozen=lambda places: None if places is None else read_model(checkpoint, recipe, places),
        console=console,
        text=_describe(examples, tokenizer),
    )


def _describe(examples: Examples, tokenizer: Tokenizer) -> str:
    counted = sum(int(one.counted.sum()) for one in examples.train)
    tokens = sum(len(one.tokens) for one in examples.train)
    lost = f"; {examples.cut:,} were cut, {examples.dropped:,} dropped"
    return (
        f"examples: {examples.name}, {len(examples.train):,} of {tokens:,} tokens, {counted:,} of"
        f" which count, and {len(examples.validation):,} held out"
        f"{lost if examples.cut or examples.dropped else ''}; tokenizer of"
        f" {tokenizer.vocab_size:,}"
    )


def read_model(checkpoint: pathlib.Path, recipe: Recipe, places: Any) -> Decoder:
    """Returns the decoder of a checkpoint, in 4 bits if the method is to hold it so.

    Args:
      checkpoint: folder or file.
      recipe: the run.
      places: the decoder with a sharding in place of each array.
    """

    def put(path: str, value: Any) -> Any:
        return jax.device_put(value, huggingface.parameter_of(places, path).get_value())

    return load_checkpoint(
        checkpoint,
        dtype=recipe.config.weight_dtype,
        convert=quantize if recipe.method.four_bit else None,
        put=put,
    )


def fingerprint(checkpoint: pathlib.Path) -> str:
    """Returns what tells a checkpoint from another without reading it all, hexadecimal."""
    digest = hashlib.sha256()
    files = [checkpoint]
    if checkpoint.is_dir():
        files = sorted([*checkpoint.glob("*.safetensors"), checkpoint / "config.json"])
    for file in files:
        with file.open("rb") as opened:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            # Headers, and numbers of the first and last tensors.
            digest.update(opened.read(2**20))
            opened.seek(max(0, size - 2**20))
            digest.update(opened.read())
    return digest.hexdigest()


def export(run: Run, console: Console) -> None:
    """Writes what was trained into the folder of a run, in the format of other tools."""
    config, recipe, state = run.config, run.recipe, run.state
    assert isinstance(config, FinetuneConfig)
    checkpoint = pathlib.Path(config.checkpoint).expanduser()
    like = checkpoint if checkpoint.is_dir() else None

    def write_model(model: Decoder, path: pathlib.Path) -> None:
        huggingface.save(model, path, like=like)
        if like is None or config.tokenizer is not None:
            tokenizer_of(checkpoint, config.tokenizer).save(path)

    if recipe.lora is None:
        _replace(config.folder / "model", functools.partial(write_model, state.model), console)
        return
    write = functools.partial(save_adapters, state.model, recipe.lora, base=str(checkpoint))
    _replace(config.folder / "adapter", write, console)
    if recipe.method.four_bit:
        console.print(
            "the adapter was trained with the layers in 4 bits: in full they are another model"
            " (train.evaluate --four-bit; a merged model has them as they were trained with)"
        )
    if config.adapter.merge:
        merged = merge(state.frozen, state.model, recipe.lora)
        _replace(config.folder / "model", functools.partial(write_model, merged), console)


def _replace(path: pathlib.Path, write: Callable[[pathlib.Path], None], console: Console) -> None:
    """Writes a folder in place of one of an earlier export, which stays until it is done."""
    scratch = path.with_name(f".{path.name}-new")
    shutil.rmtree(scratch, ignore_errors=True)
    write(scratch)
    shutil.rmtree(path, ignore_errors=True)
    scratch.rename(path)
    console.print(f"written: {path}")


if __name__ == "__main__":
    main()
