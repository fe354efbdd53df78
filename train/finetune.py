"""Fine-tunes a checkpoint: `python -m train.finetune --checkpoint DIR --data FILE`."""

import contextlib
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from models import digests, huggingface
from models.checkpoints import find_checkpoint, load_checkpoint, read_dimensions
from models.hub import is_remote
from models.lora import quantize
from train.planning.budget import settled
from train.run import hosts
from train.run.begin import begin, in_epochs
from train.run.calibration import calibrate
from train.run.export import Target, Trained, exports_only, method_of_run, read_trained
from train.run.loop import Run, moved, prepare_and_train, put_rows
from train.run.pretrained import fingerprint, read_model
from train.run.program import make_console, reporting_errors, run_program
from train.run.progress import saying
from train.run.recipe import Recipe, build_recipe
from train.run.references import with_references
from train.run.sharding import check_sizes, make_mesh, rows_of_process
from train.run.state import first_state
from train.run.step import TrainState, model_of
from train.settings import cli
from train.settings.config import FinetuneConfig
from train.settings.messages import naming_flag
from train.settings.resolve import ResolvedConfig, resolve
from train.text.data import ValidationSet
from train.text.examples import open_examples, parts_of
from train.text.packing import count_rows, pack_pairs, packed_batches, pair_batches, validation_set
from train.text.pairs import PairValidation
from train.text.tokenizer import Tokenizer
from train.text.tokenizer_files import fit_vocabulary, tokenizer_of


def main() -> None:
    """Reads the command line and trains. Exits with 2 if it cannot begin, with 1 on a NaN."""
    config = cli.parse(FinetuneConfig, "python -m train.finetune")
    run_program(lambda: run(config, make_console()))


def run(config: FinetuneConfig, console: Console) -> int:
    """Trains with the given settings: the program behind the command line.

    After the last step, the folder of the run holds a checkpoint that other tools read: `model`,
    or `adapter`, and with `--merge` both. `--export` of a run that is there writes its last
    checkpoint and trains nothing.

    Returns:
      The last step done: less than `config.steps` if a signal stopped the run.

    Raises:
      BadRunError: something is wrong with the settings, the examples or a checkpoint.
      NonFiniteError: the loss or gradient of a step is not finite.
    """
    if reporting_errors(functools.partial(exports_only, config)):
        return reporting_errors(functools.partial(export_last, config, console))
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
            huggingface.check(checkpoint)
        user_config = settled(user_config, model_config.vocab_size, console)
        config = resolve(user_config, model_config, dtype)
        mesh = make_mesh(config.mesh)
        check_sizes(config, mesh)
        tokenizer = tokenizer_of(checkpoint, user_config.tokenizer)
        flag = "--checkpoint" if user_config.tokenizer is None else "--tokenizer"
        size = config.model_config.vocab_size
        remark = fit_vocabulary(tokenizer, flag, config.title, size)
        folder = user_config.tokenizer or checkpoint
        with saying(console, "reading the examples"):
            examples = open_examples(
                user_config.data,
                tokenizer,
                config.seq_len,
                folder,
                preferences=config.preference is not None,
            )
        packing = {"seq_len": config.seq_len, "seed": config.seed, "shares": examples.shares}
        count = functools.partial(count_rows, examples.train, **packing)
        user_config = in_epochs(user_config, config, count)
        config = dataclasses.replace(config, steps=user_config.steps)
        recipe = build_recipe(config)
        reading = saying(console, "reading the checkpoint", first=False)
        with naming_flag("--checkpoint"), reading:
            hashed = fingerprint(checkpoint)
            base = digests.of_tensors(huggingface.weight_files(checkpoint))
        rows = {"batch_size": config.batch_size, "seq_len": config.seq_len}
        rows["pad_id"] = tokenizer.eos_id
        part = rows_of_process(mesh, config.batch_size)
        train, held_out = examples.train, examples.validation
        if config.preference is not None and config.lora is None:
            refer = functools.partial(
                with_references,
                recipe=recipe,
                mesh=mesh,
                checkpoint=checkpoint,
                pad_id=tokenizer.eos_id,
                console=console,
            )
            train, held_out = refer(train), refer(held_out)
        open_batches = functools.partial(
            packed_batches,
            train,
            seed=config.seed,
            part=part,
            shares=examples.shares,
            **rows,
        )
        batches = open_batches()
        validation = _validation(config, held_out, tokenizer, rows)
    lost = f"; {examples.cut:,} cut, {examples.dropped:,} dropped"
    parts = [part for item in examples.train for part in parts_of(item)]
    kind = "examples" if config.preference is None else "pairs"
    preference = {} if config.preference is None else {"preference": config.preference}
    return begin(
        user_config,
        recipe,
        mesh,
        console,
        batches=batches,
        validation=validation,
        summary=f"{kind}: {examples.name}, {len(examples.train):,} with"
        f" {sum(len(part.tokens) for part in parts):,} tokens, of which"
        f" {sum(int(part.counted.sum()) for part in parts):,} count in the loss, and"
        f" {len(examples.validation):,} held out"
        f"{lost if examples.cut or examples.dropped else ''}",
        remarks=[tokenizer.describe(), *filter(None, [remark]), *examples.remarks],
        first_state=functools.partial(_first_state, recipe, checkpoint, open_batches),
        frozen=lambda places: None if places is None else read_model(checkpoint, recipe, places),
        tokenizer=tokenizer,
        fingerprint=examples.fingerprint,
        checkpoint=hashed,
        base=base,
        **preference,
    )


def _validation(
    config: ResolvedConfig, examples: Sequence[Any], tokenizer: Tokenizer, rows: dict[str, int]
) -> ValidationSet | PairValidation:
    """Returns the first batches of the held-out examples or pairs."""
    if config.preference is None:
        return validation_set(examples, tokenizer, eval_batches=config.eval_batches, **rows)
    most = config.eval_batches * config.batch_size // 2
    packed = pack_pairs(examples, config.seq_len)[:most]
    return PairValidation(pair_batches(packed, **rows), sum(map(len, packed)))


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


def export(user_config: FinetuneConfig, run: Run, console: Console) -> None:
    """Writes what was trained into the folder of a run, in the format of other tools.

    All processes call it together; the first one writes.
    """
    recipe, state = run.recipe, run.state
    if recipe.method.four_bit:
        console.print(
            "the adapter was trained with 4-bit weights and fits them best: train.evaluate holds"
            " the weights of a run so by itself, and a merged model contains the 4-bit weights"
        )
    trained = Trained(state.model, recipe.config.lora, lambda: state.frozen, run.identity)
    trained.write(_target(user_config, run.config.folder), console)


def export_last(user_config: FinetuneConfig, console: Console) -> int:
    """Writes the last checkpoint of a run to `--export`, without training. Returns its step."""
    with naming_flag("--checkpoint"):
        checkpoint = find_checkpoint(user_config.checkpoint)
        config = resolve(user_config, *read_dimensions(checkpoint))
        huggingface.check(checkpoint)
    if (method := method_of_run(config.folder)) not in (None, config.method):
        raise ValueError(
            f"the run in `--out` {config.folder} has `--method {method}`: pass the settings of the"
            " run to export it."
        )
    convert = quantize if config.info.four_bit else None
    options = {"dtype": config.weight_dtype, "convert": convert}
    frozen = functools.partial(load_checkpoint, checkpoint, **options)
    step, trained = read_trained(config.folder, frozen)
    base = digests.of_tensors(huggingface.weight_files(checkpoint))
    # Earlier versions kept no digests of the tensors.
    wrong = digests.changed(trained.identity.get("base", base), base)
    if wrong or trained.identity.get("checkpoint") != fingerprint(checkpoint):
        raise ValueError(
            f"the run in `--out` {config.folder} began with other weights than those of"
            f" `--checkpoint` {checkpoint}{f' ({wrong})' if wrong else ''}: pass the checkpoint of"
            " the run."
        )
    trained.write(_target(user_config, None), console)
    console.print(f"this is step {step} of the run in {config.folder}")
    return step


def _target(user_config: FinetuneConfig, folder: pathlib.Path | None) -> Target:
    """Returns where and how a run is exported."""
    checkpoint = find_checkpoint(user_config.checkpoint)
    path = user_config.tokenizer
    return Target(
        folder=folder,
        export=user_config.export,
        like=checkpoint,
        # PEFT knows the names of the Hub, and may read the adapter in another folder.
        base=name if is_remote(name := user_config.checkpoint) else str(checkpoint.resolve()),
        tokenizer=None if path is None else tokenizer_of(checkpoint, path),
        merge=user_config.adapter.merge,
    )


if __name__ == "__main__":
    main()
