"""Pretrains a Llama on text: `python -m train.pretrain --model llama_9m --steps 300`."""

import dataclasses
import functools
from typing import Any

from rich.console import Console

from train.run import hosts
from train.run.begin import begin
from train.run.loop import Run, make_console, prepare_and_train, run_program
from train.run.recipe import build_recipe
from train.run.sharding import check_sizes, make_mesh, rows_of_process
from train.run.state import first_state
from train.settings import cli
from train.settings.config import DataConfig, PretrainConfig
from train.settings.resolve import dimensions, resolve
from train.text.corpus import Corpus, open_corpus
from train.text.data import row_order, train_batches, validation_batches
from train.text.tokenizer import Tokenizer
from train.text.tokenizer_files import load_tokenizer
from train.text.trained_tokenizer import default_tokenizer


def main() -> None:
    """Reads the command line and trains. Exits with 2 if it cannot begin, with 1 on a NaN."""
    config = cli.parse(PretrainConfig, "python -m train.pretrain")
    run_program(lambda: run(config, make_console()))


def run(config: PretrainConfig, console: Console) -> int:
    """Trains with the given settings: the program behind the command line.

    Returns:
      The last step done: less than `config.steps` if a signal stopped the run.

    Raises:
      BadRunError: something is wrong with the settings, the text or the checkpoint.
      NonFiniteError: the loss or gradient of a step is not finite.
    """
    return prepare_and_train(functools.partial(prepare, config), config, console)


def prepare(user_config: PretrainConfig, console: Console) -> Run:
    """Returns a run that is ready for its first step. Everything that can be wrong is found here.

    Raises:
      ValueError: settings that do not fit each other, the text or the checkpoint.
      OSError: a file that cannot be read.
    """
    with hosts.failing_together():
        config = resolve(user_config, dimensions(user_config))
        mesh = make_mesh(config.mesh)
        check_sizes(config, mesh)
    corpus, tokenizer = hosts.main_first(functools.partial(_open_text, user_config.data))
    with hosts.failing_together():
        model_config = dimensions(user_config, tokenizer.vocab_size)
        recipe = build_recipe(dataclasses.replace(config, model_config=model_config))
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
        remarks=[tokenizer.describe()],
        first_state=functools.partial(first_state, recipe),
        tokenizer=tokenizer,
        fingerprint=corpus.fingerprint,
        row_order=row_order(tokenizer),
    )


def _open_text(user_config: DataConfig) -> tuple[Corpus, Tokenizer]:
    data_dir = user_config.data_dir.expanduser()
    corpus = open_corpus(user_config.data, data_dir, text_field=user_config.text_field)
    if user_config.tokenizer is not None:
        return corpus, load_tokenizer(user_config.tokenizer)
    return corpus, default_tokenizer(corpus, user_config.vocab_size, data_dir)


if __name__ == "__main__":
    main()
