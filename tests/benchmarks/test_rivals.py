"""Rivals compute the same numbers, and their compiled memory is as small as documented."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny

from benchmarks import finetune
from benchmarks.rivals import (
    PLAIN,
    RIVALS,
    Rival,
    compiled_memory,
    method_rival,
    random_batch,
    rival,
)
from benchmarks.variants import EIGHT_BIT, VARIANTS, Variant, check_names, codec
from models import ModelConfig, preset
from train.planning.flops import causal_loop_length, matmul_flops
from train.run.loss import batch_shapes
from train.settings.config import FinetuneConfig, PretrainConfig
from train.settings.options import MethodOptions
from train.settings.resolve import resolve

TRAIN = PretrainConfig(batch_size=4, seq_len=256, compute_dtype="float32")
# llama_130m at a third of its width, with heads of 64, ffn 2.67 d, and its twelve layers, so that
# residuals outweigh the workspace of one layer.
MODEL = ModelConfig(
    vocab_size=512, hidden_size=256, ffn_size=680, num_layers=12, num_heads=4, num_kv_heads=4
)
SMALL = dataclasses.replace(TRAIN, seq_len=16)
EXACT = ("plain, naive loss and attention", "exact")
REMATERIALIZED = [*(name for name in PLAIN if name.startswith("jax.checkpoint")), "remat"]


def test_unknown_rivals_are_refused():
    check_names(("plain", "exact"), RIVALS)
    with pytest.raises(ValueError, match=r"unknown \['exakt'\]. There are: plain, .*exact"):
        check_names(("exakt",), RIVALS)


def test_a_variant_takes_its_rank_from_the_width():
    assert VARIANTS["subspace d/4"].configure(PretrainConfig()).options.rank == 32
    assert VARIANTS["low_rank 32"].configure(PretrainConfig(model="llama_1b")).options.rank == 32


def test_the_settings_of_every_variant_fit():
    for variant in VARIANTS.values():
        resolve(variant.configure(PretrainConfig()), preset("llama_9m"))
    for row in finetune.ROWS.values():
        resolve(row.configure(FinetuneConfig(checkpoint="none")), preset("llama_9m"))


@functools.cache
def small(name: str) -> Rival:
    """A rival of a model that is smaller than any preset."""
    if name not in VARIANTS:
        return rival(name, SMALL, tiny.CONFIG)
    variant = VARIANTS[name]
    if variant.width_over_rank:
        options = dataclasses.replace(variant.options, rank=6)
        variant = dataclasses.replace(variant, width_over_rank=0, options=options)
    return method_rival(variant, SMALL, tiny.CONFIG)


def started(name: str):
    """The first state of a rival, and a batch."""
    batch = jax.jit(lambda: random_batch(SMALL, tiny.CONFIG.vocab_size))()
    return jax.jit(small(name).init)(), batch


@functools.cache
def gradient_of(name: str):
    return jax.jit(small(name).gradient)


# One of each kind of program: `tests/train/run/test_step.py` tests the methods.
@pytest.mark.parametrize(
    "name", ["optax.contrib.galore d/4", "subspace d/4, 8-bit states and inputs", "lean"]
)
def test_rivals_compute_the_same_loss(name):
    state, batch = started(name)
    loss = jax.jit(small(name).step)(state, batch)[1]["loss"]
    # The same loss with sums in another order: a few units in the last place of float32.
    expected = jax.jit(
        lambda model: model.loss(batch["inputs"], batch["targets"], compute_dtype="float32")
    )(state.model)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def losses(name: str) -> list[float]:
    """Losses of two steps on one batch."""
    state, batch = started(name)
    step, found = jax.jit(small(name).step), []
    for _ in range(2):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    return found


@functools.cache
def losses_of_plain() -> list[float]:
    return losses("plain")


@pytest.mark.parametrize("name", ["exact", "exact, 8-bit states, in backward"])
def test_exact_rivals_have_the_same_losses_after_a_step_too(name):
    np.testing.assert_allclose(losses(name), losses_of_plain(), rtol=1e-5)


@pytest.mark.parametrize(
    "name", [*EXACT, *(pytest.param(name, marks=pytest.mark.slow) for name in REMATERIALIZED)]
)
def test_exact_rivals_have_the_same_gradient(name):
    state, batch = started("plain")
    # Initial norms are all one, where a missing scale would not show.
    state = dataclasses.replace(state, model=tiny.decoder())
    got, want = (gradient_of(n)(state, batch)[1] for n in (name, "plain"))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


# Ranks in the proportions that 128 and 512 have to a width of 2,048.
METHODS = {
    "exact": Variant("exact"),
    "remat": Variant("remat"),
    "pamm": Variant("pamm", options=codec("PointApproximation(0.015625)")),
    "low_rank": Variant("low_rank", options=MethodOptions(rank=8)),
    "subspace d/16": Variant("subspace", options=MethodOptions(rank=16)),
    "subspace d/4": Variant("subspace", options=MethodOptions(rank=64)),
    "remat, in backward": Variant("remat", optimizer=EIGHT_BIT, in_backward=True),
}


@functools.cache
def middle(name: str) -> Rival:
    return (
        method_rival(METHODS[name], TRAIN, MODEL) if name in METHODS else rival(name, TRAIN, MODEL)
    )


@functools.cache
def arguments(name: str) -> tuple:
    return jax.eval_shape(middle(name).init), batch_shapes(TRAIN)


def gradient_temporaries(name: str) -> int:
    return _memory(middle(name).gradient, name)["temporaries"]


def step_peak(name: str) -> int:
    return _memory(middle(name).step, name, donate_argnums=0)["peak"]


def _memory(function, name, **options) -> dict[str, int]:
    return compiled_memory(jax.jit(function, **options).lower(*arguments(name)).compile())


def test_activation_memory_falls_as_documented():
    exact = gradient_temporaries("exact")
    assert exact <= 0.62 * gradient_temporaries("plain")
    assert gradient_temporaries("low_rank") <= 0.72 * exact


@pytest.mark.slow
def test_activation_memory_of_pamm_and_remat():
    assert gradient_temporaries("pamm") < gradient_temporaries("exact")
    assert gradient_temporaries("remat") <= gradient_temporaries("jax.checkpoint, full")


@pytest.mark.slow
def test_the_peak_of_a_whole_step_falls():
    plain, full_remat = step_peak("plain"), step_peak("jax.checkpoint, full")
    assert step_peak("subspace d/16") <= 0.40 * plain
    assert step_peak("subspace d/4") <= 0.46 * plain
    assert step_peak("subspace d/16") < step_peak("subspace d/4") < step_peak("low_rank")
    assert step_peak("low_rank") < step_peak("exact") < step_peak("plain")
    assert step_peak("subspace d/16") < full_remat < step_peak("exact")
    assert step_peak("remat, in backward") < full_remat


@pytest.mark.slow
@pytest.mark.parametrize("name", ["subspace d/16", "subspace d/4", "low_rank"])
def test_the_peak_is_what_the_table_counts_and_little_more(name):
    # A fifth for the backward pass of one of twelve layers, and the chunk of logits.
    assert step_peak(name) <= 1.2 * middle(name).memory().total


def test_gradients_and_states_of_compressed_weights_are_a_seventh():
    assert sum(middle("subspace d/16").of_layers()) <= sum(middle("plain").of_layers()) / 7


@functools.cache
def flops_at_1b(name: str) -> int:
    """Operations of the products of a whole step of 8 x 1024 tokens, from its trace."""
    config = PretrainConfig(model="llama_1b", batch_size=8, seq_len=1024, weight_dtype="bfloat16")
    one, length = rival(name, config), causal_loop_length(config.seq_len)
    state = jax.eval_shape(one.init)
    return matmul_flops(one.step, state, batch_shapes(config), loop_length=length)


def test_compression_costs_fewer_operations_and_rematerialization_more():
    plain, full_remat = flops_at_1b("plain"), flops_at_1b("jax.checkpoint, full")
    assert flops_at_1b("exact") == plain
    assert flops_at_1b("pamm") < plain
    assert flops_at_1b("remat") > 1.2 * plain
    assert flops_at_1b("low_rank 32") <= 0.80 * plain
    assert flops_at_1b("low_rank 32") <= 0.62 * full_remat
    assert flops_at_1b("subspace d/16") < 0.62 * full_remat
