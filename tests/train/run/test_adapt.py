"""Bits chosen by the sensitivity of the gradient."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIG as MODEL
from tiny import batch as tokens_and_targets

from actjax import Quantized
from train.run.adapt import Choice, choose_bits, is_due, site_width
from train.run.recipe import make_recipe
from train.run.step import init_state, make_train_step
from train.settings.config import OptimizerConfig, PretrainConfig
from train.settings.methods import METHODS
from train.settings.options import MethodOptions

OPTIONS = MethodOptions(
    average_bits=3, adapt_every=5,
    codec=("Quantized(group=8, levels='uniform', rotate=False, balance=False)",),
)  # fmt: skip
CONFIG = PretrainConfig(
    method="lean",
    in_backward=False,
    options=OPTIONS,
    batch_size=4,
    seq_len=16,
    compute_dtype="float32",
    weight_dtype="float32",
    optimizer=OptimizerConfig(moment_dtype="float32"),
)


def batch(rows=4):
    tokens, targets = tokens_and_targets(rows=rows, length=16)
    return {"inputs": tokens, "targets": targets, "mask": jnp.ones(tokens.shape)}


@functools.cache
def first_state():
    return jax.jit(functools.partial(init_state, make_recipe(CONFIG, MODEL)))()


@pytest.fixture(scope="module")
def chosen():
    return choose_bits(make_recipe(CONFIG, MODEL), first_state().model, batch(), 0)


def test_bits_use_the_budget_and_do_not_exceed_it(chosen):
    assert set(chosen.bits) == set(METHODS["lean"].adaptive)
    widths = {site: site_width(MODEL, site) for site in chosen.bits}
    average = sum(widths[s] * n for s, n in chosen.bits.items()) / sum(widths.values())
    # The rest is too small for the next number of bits at any site.
    assert 3 - max(widths.values()) * 4 / sum(widths.values()) < average <= 3
    assert len(set(chosen.bits.values())) > 1
    # One bit with uniform levels is worse than storing nothing.
    assert min(chosen.bits.values()) >= 2


def test_a_choice_is_deterministic(chosen):
    recipe = make_recipe(CONFIG, MODEL)
    again = choose_bits(recipe, first_state().model, batch(), 0)
    assert again.bits == chosen.bits
    # Compiled separately, so roundings can differ.
    assert again.compression_variance == pytest.approx(chosen.compression_variance, rel=0.05)
    assert again.sampling_variance == pytest.approx(chosen.sampling_variance, rel=0.05)


def test_a_recipe_uses_the_chosen_bits(chosen):
    recipe = make_recipe(CONFIG, MODEL, chosen.bits)
    for site, bits in chosen.bits.items():
        assert getattr(recipe.storage, site) == Quantized(bits, group=8)
    step = jax.jit(make_train_step(recipe))
    _, metrics = step(first_state(), batch())
    assert np.isfinite(float(metrics["loss"]))


def test_widths_are_those_of_the_stored_arrays():
    want = {"q": 24, "k": 8, "v": 8, "gate": 44, "up": 44, "attention_norm": 24, "mlp_norm": 24}
    assert {site: site_width(MODEL, site) for site in want} == want


def test_when_bits_are_chosen():
    recipe = make_recipe(CONFIG, MODEL)
    assert [step for step in range(103) if is_due(recipe, step)] == [*range(0, 101, 5)]
    seldom = dataclasses.replace(OPTIONS, adapt_every=50)
    recipe = make_recipe(dataclasses.replace(CONFIG, options=seldom), MODEL)
    assert [step for step in range(103) if is_due(recipe, step)] == [0, 10, 50, 100]
    uniform = make_recipe(dataclasses.replace(CONFIG, options=MethodOptions()), MODEL)
    assert not is_due(uniform, 0)


def test_noise_above_that_of_sampling_gives_a_warning():
    assert "Compression adds more noise" in Choice({"q": 1}, 3.0, 1.0).describe()
    assert "Compression adds" not in Choice({"q": 4}, 0.5, 1.0).describe()
    assert "Compression adds" not in Choice({"q": 4}, 0.5, math.nan).describe()


def test_gact_chooses_bits_unless_they_are_given():
    model = MODEL
    assert METHODS["gact"].resolve(MethodOptions(), model).average_bits == 4
    given = MethodOptions(codec=("Quantized(2)",))
    assert METHODS["gact"].resolve(given, model).average_bits == 0
