"""Pretrains a Llama on text: `python -m train.pretrain --model llama_9m --steps 300`."""

import functools
import pathlib
from typing import Any

import jax
import tyro
from rich.console import Console

from models import preset
from train.checkpoint import identity_of
from train.config import PretrainConfig
from train.corpus import open_corpus
from train.data import train_batches, validation_batches
from train.loop import Run, begin, check_sizes, make_console, prepare_and_train, run_program
from train.sharding import make_mesh
from train.step import init_state, make_recipe
from train.tokenizer import Tokenizer, default_tokenizer, load_tokenizer


def main() -> None:
    """Reads the command line and trains. Exits with 2 if it cannot begin, with 1 on a NaN."""
    config = tyro.cli(
        PretrainConfig, prog="python -m train.pretrain", config=(tyro.conf.OmitArgPrefixes,)
    )
    run_program(lambda: run(config, make_console()))


def run(config: PretrainConfig, console: Console) -> int:
    """Trains as `config` says: the whole program behind the command line.

    Returns:
      The step it came to: less than `config.steps` if a signal stopped it.

    Raises:
      BadRunError: something is wrong with the settings, the text or the checkpoint.
      NonFiniteError: the loss or gradient of a step is not finite.
    """
    return prepare_and_train(lambda: prepare(config, console), console)


def prepare(config: PretrainConfig, console: Console) -> Run:
    """Returns a run ready to go: everything that can be wrong is found here, before the first step.

    Raises:
      ValueError: settings that do not fit one another, the text or the checkpoint.
      OSError: a file that cannot be read.
    """
    model_config = preset(config.model)
    mesh = make_mesh(config.mesh)
    check_sizes(config, model_config, mesh)
    recipe = make_recipe(config, model_config)
    corpus = open_corpus(config.data.data, _data_dir(config), text_field=config.data.text_field)
    tokenizer = _tokenizer(config, corpus)
    if tokenizer.vocab_size > model_config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but {config.model} has"
            f" {model_config.vocab_size}: lower `--vocab-size`, or pick another model."
        )
    sizes = {"batch_size": config.batch_size, "seq_len": config.seq_len}
    identity = identity_of(
        model=model_config,
        data=corpus.fingerprint,
        tokenizer=tokenizer.fingerprint,
        weight_dtype=recipe.config.weight_dtype,
        seed=config.seed,
        optimizer=recipe.optimizer_form,
        **sizes,
    )
    return begin(
        config,
        recipe,
        mesh,
        train_batches(corpus, tokenizer, seed=config.seed, **sizes),
        validation_batches(corpus, tokenizer, max_batches=config.eval_batches, **sizes),
        identity,
        first_state=lambda shardings: jax.jit(
            functools.partial(init_state, recipe), out_shardings=shardings
        )(),
        frozen=lambda _: None,
        console=console,
        text=(
            f"text: {corpus.name}, {len(corpus.train):,} documents and"
            f" {len(corpus.validation):,} held out; tokenizer of {tokenizer.vocab_size:,}"
        ),
    )


def _data_dir(config: PretrainConfig) -> pathlib.Path:
    return config.data.data_dir.expanduser()


def _tokenizer(config: PretrainConfig, corpus: Any) -> Tokenizer:
    if config.data.tokenizer is not None:
        return load_tokenizer(config.data.tokenizer)
    return default_tokenizer(corpus, config.data.vocab_size, _data_dir(config))


if __name__ == "__main__":
    main()
