"""Settings out of range, and settings that exclude each other."""

import pathlib

import pytest

from train.settings.config import DataConfig, OptimizerConfig, PretrainConfig
from train.settings.options import flag_name


def test_counts_below_one_are_refused():
    for name in ("steps", "batch_size", "seq_len", "save_every", "keep"):
        with pytest.raises(ValueError, match=f"`{flag_name(name)}` must be at least 1, got 0"):
            PretrainConfig(**{name: 0})


def test_batches_that_micro_batches_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="`--batch-size` 8 must be a multiple of `--accumulate` 3"):
        PretrainConfig(accumulate=3)


def test_optimizers_that_do_not_exist_or_do_not_fit_are_refused():
    for settings, message in (
        ({"optimizer": "adamv"}, "unknown `--optimizer` 'adamv'. Did you mean adamw"),
        (
            {"optimizer": "lion", "moment_dtype": "8bit-factored"},
            "`--moment-dtype 8bit-factored` is for .* moments of Adam, got `--optimizer lion`: pass"
            " `--moment-dtype 8bit`",
        ),
        (
            {"optimizer": "adafactor", "moment_dtype": "4bit"},
            "`--moment-dtype 4bit` has no effect with `--optimizer adafactor`",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            OptimizerConfig(**settings)


def test_optimizer_settings_out_of_range_are_refused():
    for name, value in (
        ("learning_rate", -1e-3),
        ("learning_rate", float("nan")),
        ("warmup_steps", -1),
        ("weight_decay", float("inf")),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("clip", 0.0),
        ("clip", float("nan")),
    ):
        with pytest.raises(ValueError, match=f"`{flag_name(name)}` must be .*, got {value}"):
            OptimizerConfig(**{name: value})


def test_run_settings_out_of_range_are_refused():
    for name, value in (("seed", -1), ("z_loss", -1.0)):
        with pytest.raises(ValueError, match=f"`{flag_name(name)}` must be in"):
            PretrainConfig(**{name: value})


def test_a_model_with_fewer_tokens_than_its_tokenizer_is_refused():
    with pytest.raises(ValueError, match=r"`--model-vocab-size` must be in \[0, inf\), got -1"):
        PretrainConfig(model_vocab_size=-1)
    with pytest.raises(ValueError, match="`--model-vocab-size 8191` is below the 8192 tokens"):
        PretrainConfig(model_vocab_size=8191)


def test_the_vocabulary_of_a_given_tokenizer_cannot_be_set():
    with pytest.raises(ValueError, match="`--vocab-size 300` has no effect with `--tokenizer`"):
        DataConfig(tokenizer=pathlib.Path("tokenizer.json"), vocab_size=300)
