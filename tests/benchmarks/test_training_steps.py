"""Steps compute the same numbers, and their compiled memory is as small as documented."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import tiny

from benchmarks import finetune, finetune_memory
from benchmarks.training_steps import (
    PLAIN_JAX,
    STEPS,
    TrainingStep,
    compiled_memory,
    method_step,
    random_batch,
    training_step,
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
REMATERIALIZED = [*(name for name in PLAIN_JAX if name.startswith("jax.checkpoint")), "remat"]
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def test_unknown_steps_are_refused():
    with pytest.raises(ValueError, match=r"unknown \['exakt'\]. There are: plain, .*exact"):
        check_names(("exakt", "exact"), STEPS)


def test_a_variant_takes_its_rank_from_the_width():
    assert VARIANTS["subspace d/4"].configure(PretrainConfig()).options.rank == 32
    assert VARIANTS["low_rank 32"].configure(PretrainConfig(model="llama_1b")).options.rank == 32


def test_the_settings_of_every_variant_fit():
    for variant in VARIANTS.values():
        resolve(variant.configure(PretrainConfig()), preset("llama_9m"))
    for row in (*finetune.ROWS.values(), *finetune_memory.ROWS.values()):
        resolve(row.configure(FinetuneConfig(checkpoint="none")), preset("llama_9m"))


def test_baselines_of_fine_tuning_take_a_step():
    config = finetune_memory.Config(seq_len=16)
    step, batch = finetune_memory.training_step("qlora, autodiff", config, tiny.CONFIG)
    state = jax.eval_shape(step.init)
    after, _ = jax.eval_shape(step.step, state, batch)
    assert jax.tree.leaves(after) == jax.tree.leaves(state)


@functools.cache
def small(name: str) -> TrainingStep:
    """A step of a model that is smaller than any preset."""
    if name not in VARIANTS:
        return training_step(name, SMALL, tiny.CONFIG)
    variant = VARIANTS[name]
    if variant.width_over_rank:
        options = dataclasses.replace(variant.options, rank=6)
        variant = dataclasses.replace(variant, width_over_rank=0, options=options)
    return method_step(variant, SMALL, tiny.CONFIG)


@functools.cache
def small_batch():
    return jax.jit(lambda: random_batch(SMALL, tiny.CONFIG.vocab_size))()


@functools.cache
def losses(name: str) -> list[float]:
    """Losses of two steps on one batch, and that of the first weights."""

    @jax.jit
    def run(batch):
        state, step = small(name).init(), small(name).step
        first = state.model.loss(batch["inputs"], batch["targets"], compute_dtype="float32")
        steps = jax.lax.scan(lambda state, _: step(state, batch), state, length=2)[1]
        return [first, *steps["loss"]]

    return [float(x) for x in run(small_batch())]


# Both baselines and one method: `tests/train/run/test_step.py` tests the others.
@pytest.mark.parametrize(
    "name", ["plain", "optax.contrib.galore d/4", "exact, 8-bit states, in backward"]
)
def test_steps_compute_the_loss_of_the_model(name):
    first, loss, second = losses(name)
    # The same loss with sums in another order: a few units in the last place of float32.
    np.testing.assert_allclose(loss, first, rtol=1e-5)
    if name.startswith("exact"):
        np.testing.assert_allclose([loss, second], losses("plain")[1:], rtol=1e-5)


@functools.cache
def gradient_of(name: str):
    @jax.jit
    def gradient(model, batch):
        state = dataclasses.replace(small("plain").init(), model=model)
        return small(name).gradient(state, batch)[1]

    # Initial norms are all one, where a missing scale would not show.
    return gradient(tiny.decoder(), small_batch())


@pytest.mark.parametrize(
    "name", ["plain, naive loss and attention", "exact", *map(slow, REMATERIALIZED)]
)
def test_exact_steps_have_the_same_gradient(name):
    pairs = (jax.tree.leaves(gradient_of(n)) for n in (name, "plain"))
    for a, b in zip(*pairs, strict=True):
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
def middle(name: str) -> TrainingStep:
    if name in METHODS:
        return method_step(METHODS[name], TRAIN, MODEL)
    return training_step(name, TRAIN, MODEL)


def gradient_temporaries(name: str) -> int:
    return _memory(middle(name).gradient, name)["temporaries"]


@functools.cache
def step_peak(name: str) -> int:
    return _memory(middle(name).step, name, donate_argnums=0)["peak"]


def _memory(function, name, **options) -> dict[str, int]:
    arguments = jax.eval_shape(middle(name).init), batch_shapes(TRAIN)
    return compiled_memory(jax.jit(function, **options).lower(*arguments).compile())


def test_activation_memory_falls_as_documented():
    exact, plain = gradient_temporaries("exact"), gradient_temporaries("plain")
    assert exact <= 0.45 * plain
    # Its factors take the place of the output of attention; other inputs of linear operators are
    # rebuilt by `exact`.
    assert gradient_temporaries("low_rank") <= 0.40 * plain


@pytest.mark.slow
def test_activation_memory_of_pamm_and_remat():
    # As little as `exact`, which rebuilds the input that `pamm` stores a few tokens of.
    assert gradient_temporaries("pamm") <= 0.45 * gradient_temporaries("plain")
    assert gradient_temporaries("remat") <= gradient_temporaries("jax.checkpoint, full")


@pytest.mark.slow
def test_the_peak_of_a_whole_step_falls():
    plain, full_remat = step_peak("plain"), step_peak("jax.checkpoint, full")
    assert step_peak("subspace d/16") <= 0.40 * plain
    assert step_peak("subspace d/4") <= 0.46 * plain
    assert step_peak("subspace d/16") < step_peak("subspace d/4") < step_peak("low_rank")
    assert step_peak("low_rank") < step_peak("exact") < plain
    assert step_peak("subspace d/16") < full_remat < step_peak("exact")
    assert step_peak("remat, in backward") < full_remat


@pytest.mark.slow
@pytest.mark.parametrize("name", ["subspace d/16", "subspace d/4", "low_rank"])
def test_the_peak_is_the_sum_of_the_table_and_little_more(name):
    # A fifth for the backward pass of one of twelve layers, and the chunk of logits.
    assert step_peak(name) <= 1.2 * middle(name).memory().total


def test_gradients_and_states_of_compressed_weights_are_a_seventh():
    # Without embedding and output, which are not compressed: a gradient and two moments in float32.
    others = 3 * 4 * 2 * MODEL.vocab_size * MODEL.hidden_size
    compressed, plain = (
        memory.gradients + memory.optimizer - others
        for memory in (middle(name).memory() for name in ("subspace d/16", "plain"))
    )
    assert compressed <= plain / 7


@functools.cache
def flops_at_1b(name: str) -> int:
    """Operations of the products of a whole step of 8 x 1024 tokens, from its trace."""
    config = PretrainConfig(model="llama_1b", batch_size=8, seq_len=1024, weight_dtype="bfloat16")
    built, length = training_step(name, config), causal_loop_length(config.seq_len)
    state = jax.eval_shape(built.init)
    return matmul_flops(built.step, state, batch_shapes(config), loop_length=length)


def test_compression_costs_fewer_operations_and_rematerialization_more():
    plain, full_remat = flops_at_1b("plain"), flops_at_1b("jax.checkpoint, full")
    assert flops_at_1b("exact") == plain
    assert flops_at_1b("pamm") < plain
    assert flops_at_1b("remat") > 1.2 * plain
    assert flops_at_1b("low_rank 32") <= 0.80 * plain
    assert flops_at_1b("low_rank 32") <= 0.62 * full_remat
    assert flops_at_1b("subspace d/16") < 0.62 * full_remat
