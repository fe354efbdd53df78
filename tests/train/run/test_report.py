"""The opening of a run: stored arrays, and memory by category."""

import dataclasses
import functools
import io

import jax
import pytest
from rich.console import Console
from tiny import CONFIG as MODEL

from actjax import RandomizedSVD
from models import ModelConfig, Storage
from train.run.recipe import Recipe, make_recipe
from train.run.report import (
    StepMemory,
    exact_memory,
    explain_step,
    gradient_bytes,
    print_model,
    print_tables,
    step_memory,
)
from train.run.step import init_state
from train.settings.config import OptimizerConfig, PretrainConfig
from train.settings.options import MethodOptions, used_options

CONFIG = PretrainConfig(method="exact", batch_size=4, seq_len=16, compute_dtype="float32")
RANK = MethodOptions(rank=4)
LAYERS, TOKENS = MODEL.num_layers, 4 * 16
BFLOAT16 = {"weight_dtype": "bfloat16"}


@functools.cache
def recipe(**changes) -> Recipe:
    return make_recipe(dataclasses.replace(CONFIG, **changes), MODEL)


def shapes(one: Recipe):
    return jax.eval_shape(lambda: init_state(one))


@functools.cache
def _explained(**changes):
    one = recipe(**changes)
    return explain_step(one, shapes(one))


def explained(weight_rounding: str = "", **changes):
    """Returns what a step stores, which the rounding of the weights does not change."""
    return _explained(**changes)


def stored(**changes) -> dict:
    """Returns the stored arrays by name."""
    return {residual.name: residual for residual in explained(**changes).residuals}


def memory(**changes) -> StepMemory:
    one = recipe(**changes)
    return step_memory(one, shapes(one), explained(**changes))


@functools.cache
def gradients(**changes) -> dict[str, int]:
    return gradient_bytes(recipe(**changes), shapes(recipe(**changes)))


def test_the_explanation_has_each_site_and_its_storage():
    one = dataclasses.replace(recipe(), storage=Storage(mlp_out=RandomizedSVD(4)))
    by_name = {residual.name: residual for residual in explain_step(one, shapes(one)).residuals}
    assert by_name["mlp_out"].codec == "RandomizedSVD(rank=4)"
    assert by_name["mlp_out"].stored_bytes == LAYERS * 4 * 4 * (TOKENS + 48)
    assert by_name["mlp_in"].codec == "Exact()"


def test_between_refreshes_inputs_are_stored_in_the_bases():
    options = MethodOptions(rank=4, codec=("Quantized(8)",))
    mlp_out = stored(method="subspace", options=options)["mlp_out"]
    assert mlp_out.codec == "Basis(rank=4, bits=8)"
    # A byte per coordinate and a scale per token.
    assert mlp_out.stored_bytes == LAYERS * TOKENS * (4 + 4)


def test_with_accumulation_one_micro_batch_is_stored():
    half, full = (stored(accumulate=n)["mlp gate"].stored_bytes for n in (2, 1))
    assert 2 * half == full


def test_memory_by_category():
    one = memory()
    parameters = sum(x.size for x in jax.tree.leaves(shapes(recipe()).model))
    assert one.weights == one.gradients == 4 * parameters
    # Two moments per weight, and up to three counters per layer and for the other weights.
    assert 0 <= one.optimizer - 8 * parameters < 200
    # Inputs of linear operators are rebuilt: from those of two norms, from gate and up. Attention
    # stores that of the output projection, which it needs too.
    assert one.linear_residuals == 0
    assert one.other_residuals > (24 + 24 + 48 + 48) * TOKENS * LAYERS * 4
    assert one.workspace is None
    whole = one.with_workspace(one.gradients + one.other_residuals + 1000)
    assert whole.workspace == 1000
    assert whole.total == one.total + 1000
    # Other methods are compared with it.
    assert exact_memory(recipe(method="lean", **BFLOAT16)) == one


def test_shared_factors_count_once_and_bases_do_not_count():
    low_rank = gradients(method="low_rank", options=RANK)
    # k is the first of q, k and v, so the shared factor counts for it.
    assert low_rank["layers.attention.k"] == LAYERS * 4 * (24 + 8) * 4
    assert low_rank["layers.attention.q"] == LAYERS * 4 * 24 * 4
    subspace = gradients(method="subspace", options=RANK)
    assert subspace["layers.attention.k"] == LAYERS * 4 * 8 * 4
    assert subspace["embedding"] == gradients()["embedding"]


def test_with_in_backward_updates_one_layer_has_a_gradient():
    every = gradients()
    for name, size in gradients(in_backward=True).items():
        assert size * (LAYERS if name.startswith("layers.") else 1) == every[name]


def test_8_bit_states_take_a_quarter():
    # Wide enough for all matrices to have 4,096 entries; smaller ones are not compressed.
    wide = ModelConfig(
        vocab_size=64, hidden_size=96, ffn_size=128, num_layers=2, num_heads=4, num_kv_heads=4
    )

    def optimizer_bytes(dtype: str) -> int:
        config = dataclasses.replace(CONFIG, optimizer=OptimizerConfig(moment_dtype=dtype))
        one = make_recipe(config, wide)
        return step_memory(one, shapes(one), explained()).optimizer

    # One byte instead of four, a scale per row of at least 64, and norms in float32.
    share = optimizer_bytes("8bit") / optimizer_bytes("float32")
    assert 0.25 < share < 0.25 * (1 + 4 / 64) + 0.01


def opening(**changes) -> str:
    console, one = Console(file=io.StringIO(), width=140), recipe(**changes)
    state, total = shapes(one), memory(**changes).with_workspace(10**9)
    print_model(console, one, state)
    print_tables(console, one, explained(**changes), total)
    return console.file.getvalue()


@pytest.mark.parametrize("method", ["exact", "subspace", "lean"])
def test_the_opening_shows_the_memory_by_category(method):
    text = opening(method=method, options=used_options(method, RANK))
    for word in ("parameters", "weights", "gradients", "optimizer", "linear residuals", "total",
                 "other residuals", "workspace", "mlp"):  # fmt: skip
        assert word in text
    assert ("exact, float32" in text) == (method != "exact")


def test_a_rank_that_is_too_large_is_found_before_the_first_step():
    one = dataclasses.replace(recipe(), storage=Storage(mlp_in=RandomizedSVD(25)))
    with pytest.raises(ValueError, match=r"`rank` 25 .* is above min\(T, d\) = 24"):
        explain_step(one, shapes(one))


def test_bfloat16_weights_are_rounded_as_the_opening_says():
    """Stochastic rounding takes a step and a key for each layer and for the other weights."""
    nearest = BFLOAT16 | {"weight_rounding": "nearest"}
    assert "weights: bfloat16, rounded stochastically" in opening(**BFLOAT16)
    assert "weights: bfloat16, rounded to nearest" in opening(**nearest)
    assert memory(**BFLOAT16).optimizer == memory(**nearest).optimizer + (LAYERS + 1) * 12
