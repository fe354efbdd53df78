"""Pretrains a Llama on text: `python -m train.pretrain --model llama_9m --steps 300`."""

import dataclasses
import functools
import pathlib
from typing import Any

from rich.console import Console

from models import huggingface
from models.checkpoints import find_checkpoint, read_dimensions
from train.planning.budget import settled
from train.run import hosts
from train.run.begin import begin, in_epochs
from train.run.export import Target, Trained, exports_only, read_trained, tokenizer_of_run
from train.run.loop import Run, prepare_and_train
from train.run.pretrained import fingerprint, read_model
from train.run.program import make_console, reporting_errors, run_program
from train.run.progress import saying
from train.run.recipe import Recipe, build_recipe
from train.run.sharding import check_sizes, make_mesh, rows_of_process
from train.run.state import first_state
from train.run.step import TrainState
from train.run.verify import verify
from train.settings import cli
from train.settings.config import DataConfig, PretrainConfig, run_folder
from train.settings.messages import naming_flag
from train.settings.resolve import dimensions, resolve
from train.text.corpus import Corpus, open_corpus
from train.text.data import count_rows, row_order, train_batches, validation_batches
from train.text.special_tokens import Marker
from train.text.tokenizer import Tokenizer
from train.text.tokenizer_files import fit_vocabulary, load_tokenizer, tokenizer_of
from train.text.trained_tokenizer import default_tokenizer

_SEARCHED = 1000
"""Held-out documents that are searched for names of special tokens."""


def main() -> None:
    """Reads the command line and trains. Exits with 2 if it cannot begin, with 1 on a NaN."""
    config = cli.parse(PretrainConfig, "python -m train.pretrain")
    run_program(lambda: run(config, make_console()))


def run(config: PretrainConfig, console: Console) -> int:
    """Trains with the given settings: the program behind the command line.

    After the last step, the folder of the run holds a `model` that other tools read. With
    `--export` a run that is there is written and not trained, unless `--resume` is given too.

    With `--check` nothing is trained either: see `train.run.verify`.

    Returns:
      The last step done: less than `config.steps` if a signal stopped the run.

    Raises:
      BadRunError: something is wrong with the settings, the text or the checkpoint.
      NonFiniteError: the loss or gradient of a step is not finite.
    """
    if config.check is not None:
        folder = config.check.expanduser()
        return reporting_errors(lambda: verify(folder, console))
    if reporting_errors(functools.partial(exports_only, config)):
        return reporting_errors(functools.partial(export_last, config, console))
    prepared = functools.partial(prepare, config)
    return prepare_and_train(prepared, config, console, functools.partial(export, config))


def prepare(user_config: PretrainConfig, console: Console) -> Run:
    """Returns a run that is ready for its first step. Everything that can be wrong is found here.

    Raises:
      ValueError: settings that do not fit each other, the text or the checkpoint.
      OSError: a file that cannot be read.
    """
    checkpoint, dtype, parts = None, "float32", dict[str, Any]()
    with hosts.failing_together():
        if user_config.checkpoint:
            with naming_flag("--checkpoint"):
                checkpoint = find_checkpoint(user_config.checkpoint, user_config.download)
                _, dtype = read_dimensions(checkpoint)
                huggingface.check(checkpoint)
        config = resolve(user_config, dimensions(user_config), dtype)
        mesh = make_mesh(config.mesh)
        check_sizes(config, mesh)
    with saying(console, "reading the text and its tokenizer"):
        opened = hosts.main_first(functools.partial(_open_text, user_config.data, checkpoint))
    corpus, tokenizer = opened
    with hosts.failing_together():
        model_config, remark = dimensions(user_config, tokenizer.vocab_size), ""
        user_config = settled(user_config, model_config.vocab_size, console)
        config = resolve(user_config, model_config, dtype)
        if checkpoint is not None:
            flag = "--checkpoint" if user_config.data.tokenizer is None else "--tokenizer"
            remark = fit_vocabulary(tokenizer, flag, config.title, model_config.vocab_size)
            parts["checkpoint"] = fingerprint(checkpoint)
        if user_config.epochs is not None:
            special = user_config.data.special_tokens
            rows = count_rows(corpus, tokenizer, config.seq_len, special)
            user_config = in_epochs(user_config, config, lambda epochs: epochs * rows)
        config = dataclasses.replace(config, steps=user_config.steps)
        recipe = build_recipe(config)
        how: dict[str, Any] = {"batch_size": config.batch_size, "seq_len": config.seq_len}
        how["special_tokens"] = user_config.data.special_tokens
        part = rows_of_process(mesh, config.batch_size)
        batches = train_batches(corpus, tokenizer, seed=config.seed, part=part, **how)
        validation = validation_batches(corpus, tokenizer, eval_batches=config.eval_batches, **how)
    return begin(
        user_config,
        recipe,
        mesh,
        console,
        batches=batches,
        validation=validation,
        summary=f"text: {corpus.name}, {len(corpus.train):,} documents and"
        f" {len(corpus.validation):,} held out",
        remarks=[tokenizer.describe(), *filter(None, [remark, _names(user_config.data, opened)])],
        first_state=functools.partial(_first_state, recipe, checkpoint),
        tokenizer=tokenizer,
        fingerprint=corpus.fingerprint,
        row_order=row_order(tokenizer),
        **parts,
    )


def _names(user_config: DataConfig, opened: tuple[Corpus, Tokenizer]) -> str:
    """Returns a line about names of special tokens in some documents; "" without any."""
    corpus, tokenizer = opened
    if user_config.special_tokens == "parse":
        return ""
    marker, documents = Marker(tokenizer.special.values()), min(_SEARCHED, len(corpus.validation))
    naming = sum(marker.count(corpus.validation[i]) > 0 for i in range(documents))
    return marker.describe(f"{naming:,} of {documents:,} held-out documents")


def _first_state(
    recipe: Recipe, checkpoint: pathlib.Path | None, shardings: TrainState
) -> TrainState:
    """Returns the state before the first step, with the weights of a checkpoint if there is one."""
    if checkpoint is None:
        return first_state(recipe, shardings)
    return first_state(recipe, shardings, read_model(checkpoint, recipe, shardings.model))


def export(user_config: PretrainConfig, run: Run, console: Console) -> None:
    """Writes the model of a run into its folder, as `transformers` reads it.

    All processes call it together; the first one writes.
    """
    trained = Trained(run.state.model)
    trained.write(_target(user_config, run.config.folder, run.config.folder), console)


def export_last(user_config: PretrainConfig, console: Console) -> int:
    """Writes the last checkpoint of a run to `--export`, without training. Returns its step."""
    folder = run_folder(user_config)
    step, trained = read_trained(folder)
    trained.write(_target(user_config, folder, None), console)
    console.print(f"this is step {step} of the run in {folder}")
    return step


def _target(user_config: PretrainConfig, run: pathlib.Path, folder: pathlib.Path | None) -> Target:
    """Returns where and how a run is exported."""
    like = find_checkpoint(user_config.checkpoint) if user_config.checkpoint else None
    # The files of a checkpoint have more, such as a chat template.
    copied = like is not None and user_config.data.tokenizer is None
    tokenizer = None if copied else tokenizer_of_run(run)
    return Target(folder, user_config.export, like=like, tokenizer=tokenizer)


def _open_text(
    user_config: DataConfig, checkpoint: pathlib.Path | None
) -> tuple[Corpus, Tokenizer]:
    data_dir = user_config.data_dir.expanduser()
    corpus = open_corpus(user_config.data, data_dir, text_field=user_config.text_field)
    if user_config.tokenizer is not None:
        return corpus, load_tokenizer(user_config.tokenizer)
    if checkpoint is not None:
        return corpus, tokenizer_of(checkpoint, None)
    return corpus, default_tokenizer(corpus, user_config.vocab_size, data_dir)


if __name__ == "__main__":
    main()
