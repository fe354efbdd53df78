"""The opening of a run: stored arrays, and memory by category."""

import dataclasses
import io

import jax
import pytest
from rich.console import Console
from tiny import CONFIG as MODEL

from actjax import RandomizedSVD
from models import ModelConfig, Storage
from train.run.recipe import make_recipe
from train.run.report import (
    StepMemory,
    exact_memory,
    explain_step,
    gradient_bytes,
    print_opening,
    step_memory,
)
from train.run.step import init_state
from train.settings.config import OptimizerConfig, PretrainConfig
from train.settings.options import MethodOptions, used_options

CONFIG = PretrainConfig(method="exact", batch_size=4, seq_len=16, compute_dtype="float32")
STORAGE = Storage(mlp_out=RandomizedSVD(4))


def recipe(storage: Storage = Storage(), **changes):
    made = make_recipe(dataclasses.replace(CONFIG, **changes), MODEL)
    return dataclasses.replace(made, storage=storage) if storage != Storage() else made


def shapes(one):
    return jax.eval_shape(lambda: init_state(one))


def explained(one):
    return explain_step(one, shapes(one))


def memory(one) -> StepMemory:
    return step_memory(one, shapes(one), explained(one))


def parameters() -> int:
    return sum(x.size for x in jax.tree.leaves(shapes(recipe()).model))


def test_the_explanation_has_each_site_and_its_storage():
    by_name = {residual.name: residual for residual in explained(recipe(STORAGE)).residuals}
    assert by_name["mlp_out"].codec == "RandomizedSVD(rank=4)"
    assert by_name["mlp_out"].stored_bytes == 3 * 4 * 4 * (4 * 16 + 44)
    assert by_name["mlp_in"].codec == "Exact()"


def test_between_refreshes_inputs_are_stored_in_the_bases():
    options = MethodOptions(rank=4, codec=("Quantized(8)",))
    found = explained(recipe(method="subspace", options=options)).residuals
    by_name = {residual.name: residual for residual in found}
    assert by_name["mlp_out"].codec == "Basis(rank=4, bits=8)"
    # A byte per coordinate and a scale per token.
    assert by_name["mlp_out"].stored_bytes == 3 * 4 * 16 * (4 + 4)


def test_with_accumulation_one_micro_batch_is_stored():
    row = {r.name: r.stored_bytes for r in explained(recipe(accumulate=2)).residuals}["mlp_out"]
    assert 2 * row == {r.name: r.stored_bytes for r in explained(recipe()).residuals}["mlp_out"]


def test_memory_by_category():
    one = memory(recipe())
    assert one.weights == one.gradients == 4 * parameters()
    # Two moments per weight, and up to three counters per layer and for the rest.
    assert 0 <= one.optimizer - 8 * parameters() < 200
    tokens = 4 * 16
    # Attention stores the input of the output projection, which it needs too.
    linear = (24 + 24 + 44) * tokens * MODEL.num_layers * 4
    assert one.linear_residuals == linear
    assert one.other_residuals > linear
    assert one.workspace is None
    whole = one.with_workspace(one.gradients + linear + one.other_residuals + 1000)
    assert whole.workspace == 1000
    assert whole.total == one.total + 1000


def test_shared_factors_count_once_and_bases_do_not_count():
    layers, rank = MODEL.num_layers, 4
    kept = gradient_bytes(recipe(), shapes(recipe()))
    low_rank = recipe(method="low_rank", options=MethodOptions(rank=rank))
    sizes = gradient_bytes(low_rank, shapes(low_rank))
    # k is the first of q, k and v, so the shared factor counts for it.
    assert sizes["layers.attention.k"] == layers * rank * (24 + 8) * 4
    assert sizes["layers.attention.q"] == layers * rank * 24 * 4
    subspace = recipe(method="subspace", options=MethodOptions(rank=rank))
    sizes = gradient_bytes(subspace, shapes(subspace))
    assert sizes["layers.attention.k"] == layers * rank * 8 * 4
    assert sizes["embedding"] == kept["embedding"]


def test_with_in_backward_updates_one_layer_has_a_gradient():
    inside = recipe(in_backward=True)
    sizes, whole = (
        gradient_bytes(inside, shapes(inside)),
        gradient_bytes(recipe(), shapes(recipe())),
    )
    for name, size in sizes.items():
        assert size * (MODEL.num_layers if name.startswith("layers.") else 1) == whole[name]


def test_8_bit_states_take_a_quarter():
    # Wide enough for all matrices to have 4,096 entries; smaller ones are not compressed.
    wide = ModelConfig(
        vocab_size=64, hidden_size=96, ffn_size=128, num_layers=2, num_heads=4, num_kv_heads=4
    )
    sizes = []
    for dtype in ("float32", "8bit"):
        config = dataclasses.replace(CONFIG, optimizer=OptimizerConfig(moment_dtype=dtype))
        one = make_recipe(config, wide)
        sizes.append(memory(one).optimizer)
    # One byte instead of four, a scale per row of at least 64, and norms in float32.
    assert 0.25 < sizes[1] / sizes[0] < 0.25 * (1 + 4 / 64) + 0.01


@pytest.mark.parametrize("method", ["exact", "subspace", "lean"])
def test_the_opening_shows_the_memory_by_category(method):
    console = Console(file=io.StringIO(), width=140)
    one = recipe(method=method, options=used_options(method, MethodOptions(rank=4)))
    print_opening(console, one, shapes(one), explained(one), memory(one).with_workspace(10**9))
    text = console.file.getvalue()
    for word in ("parameters", "weights", "gradients", "optimizer", "linear residuals", "total",
                 "other residuals", "workspace", "mlp"):  # fmt: skip
        assert word in text
    assert ("exact, float32" in text) == (method != "exact")


def test_exact_is_what_other_methods_are_compared_with():
    one = recipe()
    assert exact_memory(recipe(method="lean", weight_dtype="bfloat16")) == memory(one)


def test_a_rank_that_is_too_large_is_found_before_the_first_step():
    with pytest.raises(ValueError, match=r"`rank` 25 .* is above min\(T, d\) = 24"):
        explained(recipe(Storage(mlp_in=RandomizedSVD(25))))


@pytest.mark.parametrize(
    ("rounding", "words"),
    [
        ("auto", "weights: bfloat16, rounded stochastically"),
        ("nearest", "weights: bfloat16, rounded to nearest"),
    ],
)
def test_the_opening_says_how_bfloat16_weights_are_rounded(rounding, words):
    one = recipe(weight_dtype="bfloat16", weight_rounding=rounding)
    console = Console(file=io.StringIO(), width=140)
    print_opening(console, one, shapes(one), explained(one), memory(one))
    assert words in console.file.getvalue()


def test_stochastic_rounding_takes_a_step_and_a_key_for_each_layer_and_the_rest():
    nearest, stochastic = (
        memory(recipe(weight_dtype="bfloat16", weight_rounding=rounding)).optimizer
        for rounding in ("nearest", "stochastic")
    )
    assert stochastic == nearest + 4 * 12
