"""Settings with every default filled in."""

import dataclasses
import json
import pathlib

import hub_cache
import pytest
from tiny import CONFIG as MODEL

from models import preset
from models.huggingface import fields_of
from train.run.recipe import build_recipe
from train.settings.config import AdapterConfig, FinetuneConfig, OptimizerConfig, PretrainConfig
from train.settings.methods import METHODS
from train.settings.options import MethodOptions
from train.settings.resolve import ResolvedConfig, dimensions, resolve

FINETUNE = FinetuneConfig(checkpoint="some/model", adapter=AdapterConfig(lora_rank=4))


def pretrain(**changes) -> ResolvedConfig:
    return resolve(PretrainConfig(**changes), MODEL)


def test_nothing_is_left_to_choose():
    for name, method in METHODS.items():
        given = FinetuneConfig(checkpoint="x", method=name)
        found = resolve(given, MODEL, "bfloat16")
        assert found.optimizer.moment_dtype == ("8bit" if method.lean else "float32")
        assert found.in_backward == method.lean
        assert found.options.rank > 0
        assert found.folder == pathlib.Path(f"runs/x-{name}")
        assert (found.lora is not None) == method.adapters
        assert found.pretrained


def test_given_settings_are_kept():
    found = pretrain(
        method="lean", optimizer=OptimizerConfig(moment_dtype="bfloat16"), steps=7,
        out=pathlib.Path("here"),
    )  # fmt: skip
    assert (found.optimizer.moment_dtype, found.steps) == ("bfloat16", 7)
    assert found.folder == pathlib.Path("here")
    assert (found.title, found.pretrained) == ("llama_9m", False)
    assert found.lora is None


@pytest.mark.parametrize(
    ("asked", "tokenizer_size", "want"),
    [(0, 8192, 8192), (0, 8193, 8320), (0, 1, 128), (9000, 8200, 9000), (0, None, 32_000),
     (9000, None, 9000)],
)  # fmt: skip
def test_the_vocabulary_of_a_model_is_that_of_its_tokenizer_unless_it_is_given(
    asked, tokenizer_size, want
):
    config = PretrainConfig(model="llama_60m", model_vocab_size=asked)
    found = dimensions(config, tokenizer_size)
    assert found == dataclasses.replace(preset("llama_60m"), vocab_size=want)


def test_dimensions_of_a_checkpoint_by_its_name_at_the_hub(tmp_path, monkeypatch):
    hub_cache.use(monkeypatch, tmp_path / "hub")
    (tmp_path / "config.json").write_text(json.dumps(fields_of(MODEL, "float32")))
    with pytest.raises(ValueError, match="`--model`: 'org/tiny' is no folder and is not in the H"):
        dimensions(PretrainConfig(model="org/tiny"))
    hub_cache.put(tmp_path / "hub", "org/tiny", tmp_path)  # Weights are not needed.
    assert dimensions(PretrainConfig(model="org/tiny")) == MODEL
    with pytest.raises(ValueError, match="`--download` has no effect with `--model llama_9m`"):
        dimensions(PretrainConfig(download=True))


@pytest.mark.parametrize(
    ("method", "given", "checkpoint", "want"),
    [
        ("lean", "auto", "float32", "bfloat16"),
        ("lean_subspace", "auto", "bfloat16", "bfloat16"),
        ("lean", "float32", "bfloat16", "float32"),
        ("exact", "auto", "float16", "float32"),
        ("lora", "auto", "bfloat16", "bfloat16"),
        ("qlora", "auto", "float16", "bfloat16"),
        ("lora", "auto", "float32", "float32"),
        ("exact", "bfloat16", "float32", "bfloat16"),
    ],
)
def test_the_dtype_of_weights_follows_from_the_method_unless_it_is_given(
    method, given, checkpoint, want
):
    config = FinetuneConfig(checkpoint="x", method=method, weight_dtype=given)
    assert resolve(config, MODEL, checkpoint).weight_dtype == want


@pytest.mark.parametrize(
    ("method", "dtype", "given", "want"),
    [
        ("exact", "bfloat16", "auto", "stochastic"),
        ("lean", "bfloat16", "stochastic", "stochastic"),
        ("lean", "bfloat16", "nearest", "nearest"),
        ("exact", "float32", "auto", "nearest"),
        ("exact", "auto", "nearest", "nearest"),
        ("lora", "bfloat16", "auto", "nearest"),
    ],
)
def test_trained_bfloat16_weights_are_rounded_stochastically_by_default(method, dtype, given, want):
    config = FinetuneConfig(
        checkpoint="x", method=method, weight_dtype=dtype, weight_rounding=given
    )
    assert resolve(config, MODEL, "bfloat16").weight_rounding == want


def test_bfloat16_weights_that_are_rounded_to_nearest_are_warned_about():
    (warning,) = pretrain(weight_dtype="bfloat16", weight_rounding="nearest").warnings
    assert "updates below 1/512 of a weight are lost" in warning
    assert "--weight-rounding stochastic" in warning
    assert "--weight-dtype float32" in warning
    frozen = dataclasses.replace(FINETUNE, weight_dtype="bfloat16")
    for quiet in (pretrain(), pretrain(weight_dtype="bfloat16"), resolve(frozen, MODEL)):
        assert quiet.warnings == []


def test_a_method_named_after_a_paper_has_its_defaults():
    model = dataclasses.replace(preset("llama_130m"), num_layers=1)
    for method, decay, rank in (("galore", 0.999, 256), ("lean_subspace", 0.95, 192)):
        found = resolve(PretrainConfig(model="llama_130m", method=method), model)
        assert (found.optimizer.betas[1], found.options.rank) == (decay, rank)
    given = PretrainConfig(method="galore", optimizer=OptimizerConfig(beta2=0.9))
    assert resolve(given, MODEL).optimizer.betas == (0.9, 0.9)
    for optimizer, rank, betas in (("fira", 6, (0.9, 0.95)), ("lion", 32, (0.9, 0.99))):
        found = pretrain(method="lean", optimizer=OptimizerConfig(optimizer=optimizer))
        assert (found.options.rank, found.optimizer.betas) == (rank, betas)
    scaled = MethodOptions(rank=4, gap=7, scale=0.5)
    assert pretrain(optimizer=OptimizerConfig(optimizer="fira"), options=scaled).options == scaled


def test_sequences_beyond_the_positions_of_a_model_are_allowed_with_a_warning():
    config = pretrain(seq_len=4096)
    (warning,) = config.warnings
    assert "`--seq-len` 4096 is above the 1024 positions of llama_9m" in warning
    assert build_recipe(config).config.model_config.max_seq_len == 4096
    given = dataclasses.replace(FINETUNE, seq_len=4096)
    assert "has never seen the others" in resolve(given, MODEL, "bfloat16").warnings[0]
    assert pretrain(seq_len=1024).warnings == []
