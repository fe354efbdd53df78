"""The rivals compute the same thing, and the memory that the project promises really falls."""

import functools

import jax
import numpy as np
import pytest
import tiny

from benchmarks.flops import matmul_flops
from benchmarks.rivals import rivals
from models import Decoder, ModelConfig
from train.methods import MethodOptions

# llama_130m at a third of its width: heads of 64, ffn 2.67 d, and as many layers, so that what is
# kept outweighs the workspace of one layer.
CONFIG = ModelConfig(
    vocab_size=512, hidden_size=256, ffn_size=680, num_layers=12, num_heads=4, num_kv_heads=4
)
OPTIONS = MethodOptions(rank=8, ratio=1 / 64)


@pytest.mark.parametrize("name", list(rivals(OPTIONS, "float32")))
def test_every_rival_computes_the_same_loss(name):
    loss = jax.jit(rivals(OPTIONS, "float32")[name])(
        tiny.decoder(), *tiny.batch(), jax.random.key(0)
    )
    # One loss in one order of sums or another: a few units in the last place of float32.
    expected = tiny.decoder().loss(*tiny.batch(), compute_dtype="float32")
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "name", ["plain, naive loss and attention", "jax.checkpoint, dots", "exact", "remat"]
)
def test_exact_rivals_have_the_same_gradient(name):
    losses = rivals(OPTIONS, "float32")
    arguments = (tiny.decoder(), *tiny.batch(), jax.random.key(0))
    got, want = (jax.jit(jax.grad(losses[n]))(*arguments) for n in (name, "plain"))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


@pytest.fixture(scope="module")
def measured():
    """Temporaries of forward + backward, in bytes, and operations of its products."""
    model = jax.eval_shape(functools.partial(Decoder, CONFIG, dtype="float32"), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((4, 256), "int32")
    key = jax.eval_shape(lambda: jax.random.key(0))
    losses = rivals(OPTIONS, "float32")
    figures = {}
    for name in ("plain", "jax.checkpoint, full", "exact", "remat", "low_rank", "pamm"):
        gradient = jax.value_and_grad(losses[name])
        arguments = (model, tokens, tokens, key)
        stats = jax.jit(gradient).lower(*arguments).compile().memory_analysis()
        figures[name] = stats.temp_size_in_bytes, matmul_flops(gradient, *arguments)
    return figures


def test_memory_falls_as_promised(measured):
    size = {name: figure[0] for name, figure in measured.items()}
    assert size["exact"] <= 0.62 * size["plain"]
    assert size["low_rank"] <= 0.72 * size["exact"]
    assert size["pamm"] < size["exact"]
    assert size["remat"] <= size["jax.checkpoint, full"]


def test_compression_costs_fewer_operations_and_rematerialisation_more(measured):
    flops = {name: figure[1] for name, figure in measured.items()}
    assert flops["exact"] == flops["plain"]
    assert flops["low_rank"] < flops["exact"]
    assert flops["pamm"] < flops["exact"]
    assert flops["remat"] > 1.2 * flops["exact"]
