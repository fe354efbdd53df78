"""Bits chosen by the sensitivity of the gradient."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from tiny import CONFIG as MODEL
from tiny import batch as tokens_and_targets
from tiny import decoder

from actjax import Quantized
from actjax.choosing.measure import Sensitivity
from train.run import adapt
from train.run.adapt import SiteBits, SiteChooser, site_chooser, site_width
from train.run.recipe import make_recipe
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


def batch():
    tokens, targets = tokens_and_targets(rows=4, length=16)
    return {"inputs": tokens, "targets": targets, "mask": np.ones((4, 16), np.float32)}


@pytest.fixture(scope="module")
def chooser():
    return SiteChooser(make_recipe(CONFIG, MODEL))


@pytest.fixture(scope="module")
def chosen(chooser):
    return chooser.choose_and_compare(decoder(), batch(), 0)


def test_bits_use_the_budget_and_do_not_exceed_it(chosen):
    assert set(chosen.bits) == set(METHODS["lean"].adaptive)
    widths = {site: site_width(MODEL, site) for site in chosen.bits}
    average = sum(widths[s] * n for s, n in chosen.bits.items()) / sum(widths.values())
    # The rest is too small for the next number of bits at any site.
    assert 3 - max(widths.values()) * 4 / sum(widths.values()) < average <= 3
    assert len(set(chosen.bits.values())) > 1
    # One bit with uniform levels is worse than storing nothing.
    assert min(chosen.bits.values()) >= 2


def test_a_choice_is_deterministic(chooser, chosen):
    assert chooser.choose_and_compare(decoder(), batch(), 0) == chosen


def test_a_gradient_that_is_not_finite_leaves_the_bits(chooser, chosen):
    model = jax.tree.map(lambda x: np.full_like(x, np.nan), decoder())
    assert chooser.choose(model, batch(), 0) == chosen.bits


def test_sites_that_are_stored_exactly_get_no_bits(monkeypatch):
    measured = []

    def sensitivity(gradient, codecs):
        measured.append(codecs)
        return Sensitivity(gradient, codecs)

    monkeypatch.setattr(adapt, "Sensitivity", sensitivity)
    codec = ("Exact()", *(f"{site}={OPTIONS.codec[0]}" for site in ("gate", "up")))
    options = dataclasses.replace(OPTIONS, codec=codec)
    SiteChooser(make_recipe(dataclasses.replace(CONFIG, options=options), MODEL))
    assert [set(codecs) for codecs in measured] == [{"gate", "up"}]


def test_a_recipe_uses_the_chosen_bits(chosen):
    storage = make_recipe(CONFIG, MODEL, chosen.bits).storage
    for site, bits in chosen.bits.items():
        assert getattr(storage, site) == Quantized(bits, group=8)


def test_widths_are_those_of_the_stored_arrays():
    want = {"q": 24, "k": 8, "v": 8, "gate": 48, "up": 48, "attention_norm": 24, "mlp_norm": 24}
    assert {site: site_width(MODEL, site) for site in want} == want


def test_when_bits_are_chosen():
    seldom = dataclasses.replace(OPTIONS, adapt_every=50)
    due = SiteChooser(make_recipe(dataclasses.replace(CONFIG, options=seldom), MODEL)).is_due
    assert [step for step in range(103) if due(step)] == [0, 10, 50, 100]
    uniform = make_recipe(dataclasses.replace(CONFIG, options=MethodOptions()), MODEL)
    assert site_chooser(uniform) is None


def test_noise_above_that_of_sampling_gives_a_warning():
    assert "Compression adds more noise" in SiteBits({"q": 1}, 3.0, 1.0).describe()
    assert "Compression adds" not in SiteBits({"q": 4}, 0.5, 1.0).describe()
    assert "Compression adds" not in SiteBits({"q": 4}, 0.5, math.nan).describe()
