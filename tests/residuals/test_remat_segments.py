"""Tests of segments that the backward pass computes again, exactly and with codes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from residuals.residual_helpers import normal, relative_error

import actjax
from actjax import Quantized
from actjax.residuals.candidates import Recompute, Settings
from actjax.residuals.function import compressed_function

LAYERS, WIDTH = 4, 32
WEIGHTS = {
    "up": normal(1, LAYERS, WIDTH, 8 * WIDTH) / WIDTH**0.5,
    "down": normal(2, LAYERS, 8 * WIDTH, WIDTH) / WIDTH,
}
X = normal(0, 512, WIDTH)


def layer(x, w):
    return x + jnp.tanh(x @ w["up"]) @ w["down"]


def unrolled(weights, x):
    for i in range(LAYERS):
        x = layer(x, jax.tree.map(lambda w, i=i: w[i], weights))
    return jnp.mean(jnp.sin(x))


def scanned(weights, x, run=layer):
    x, _ = jax.lax.scan(lambda x, w: (run(x, w), None), x, weights)
    return jnp.mean(jnp.sin(x))


def keep(_):
    """A rule that keeps everything."""


again = functools.partial(Settings, keep, remat=Recompute())


@pytest.fixture(scope="module", params=[unrolled, scanned], ids=lambda f: f.__name__)
def results(request):
    """Returns the function, value and gradient exact, computed again and with codes, and labels."""
    fun, labels = request.param, []

    def rule(what):
        labels.append(what.label)
        return Quantized(8, group=32)

    coded = compressed_function(fun, Settings(rule, remat=Recompute(codes=True)))
    fs = fun, compressed_function(fun, again()), coded
    run = jax.jit(lambda *args: [jax.value_and_grad(f)(*args) for f in fs])
    return fun, run(WEIGHTS, X), set(labels)


def test_the_gradient_is_exact_and_with_codes_each_array_of_each_segment_has_a_label(results):
    fun, ((value, exact), (again_value, again), (_, coded)), labels = results
    np.testing.assert_allclose(again_value, value, rtol=1e-6)
    # Another order of the same operations in float32.
    assert relative_error(again, exact) < 1e-5
    assert 1e-6 < relative_error(coded, exact) < 0.05
    if fun is unrolled:
        # Equal layers are on equal lines: segments tell them apart.
        assert sum("segment" in label for label in labels) >= LAYERS


def test_under_a_scan_memory_is_that_of_checkpoint_around_each_layer():
    def memory(fun):
        compiled = jax.jit(jax.grad(fun)).lower(WEIGHTS, X).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    stack = LAYERS * 512 * 8 * WIDTH * 4
    by_hand = memory(functools.partial(scanned, run=jax.checkpoint(layer)))
    again_bytes, codes = (
        memory(compressed_function(scanned, settings))
        for settings in (again(), Settings(Quantized(4), remat=Recompute(codes=True)))
    )
    assert memory(scanned) > stack
    assert again_bytes <= 1.05 * by_hand < stack
    assert codes <= again_bytes


def test_unrolled_layers_store_what_is_alive_between_them():
    small = compressed_function(unrolled, again())
    stored = actjax.explain(lambda w: small(w, X), WEIGHTS).stored_bytes
    # At most the input of each layer and of the last mean.
    assert stored <= (LAYERS + 1) * X.nbytes
    assert actjax.explain(lambda w: unrolled(w, X), WEIGHTS).stored_bytes > 8 * stored


def test_an_effect_happens_once():
    calls = []

    def fun(weights, x):
        x = layer(x, jax.tree.map(lambda w: w[0], weights))
        io_callback(lambda: calls.append(1), None)
        return jnp.mean(jnp.sin(layer(x, jax.tree.map(lambda w: w[1], weights))))

    for settings in (Settings(keep), again()):
        calls.clear()
        jax.block_until_ready(jax.jit(jax.grad(compressed_function(fun, settings)))(WEIGHTS, X))
        jax.effects_barrier()
        assert calls == [1], settings


def test_data_that_a_foreign_rule_refuses_to_differentiate_stays_data():
    # As `equinox.filter_custom_vjp` does with its other arguments.
    @jax.custom_jvp
    def data(x):
        return x

    @data.defjvp
    def refuse(*_):
        raise RuntimeError("Unexpected tangent")

    @jax.custom_vjp
    def scaled(x, by):
        return x * by

    scaled.defvjp(lambda x, by: (x * by, by), lambda by, dy: (dy * by, jnp.zeros_like(by)))
    times = jnp.linspace(0.5, 1.5, WIDTH)

    def fun(weights, x):
        for i in range(LAYERS):
            by = data(jnp.exp(times) / jnp.sum(times))
            x = scaled(layer(x, jax.tree.map(lambda w, i=i: w[i], weights)), by)
        return jnp.mean(jnp.sin(x))

    settings = Settings(Quantized(8, group=32), remat=Recompute(codes=True))
    fs = compressed_function(fun, settings), fun
    run = jax.jit(lambda *args: [jax.grad(f)(*args) for f in fs])
    assert 0 < relative_error(*run(WEIGHTS, X)) < 0.05


def biased_attention(ws, x):
    distance = jnp.arange(64)[:, None] - jnp.arange(64)
    bias = jnp.where(distance >= 0, -0.3 * distance, -1e9)
    for w in ws:
        x = x + jax.nn.softmax((x @ w) @ x.T / 4 + bias) @ x
    return jnp.mean(x**2)


def sorted_rows(ws, x):
    for w in ws:
        x = jnp.sort(jnp.tanh(x @ w), -1) * jnp.arange(32)
    return jnp.mean(x**2)


@pytest.mark.parametrize("loss", [biased_attention, sorted_rows])
def test_codes_of_segments_are_as_exact_as_without_recomputation(loss):
    ws, x = normal(1, 2, 32, 32) / 6, normal(0, 64, 32)
    ways = [None, Settings(Quantized(8)), Settings(Quantized(8), remat=Recompute(codes=True))]

    @jax.jit
    def run(ws):
        fun = lambda ws: loss(ws, x)  # noqa: E731
        return [jax.grad(fun if s is None else compressed_function(fun, s))(ws) for s in ways]

    exact, codes, again = run(ws)
    assert 0 < relative_error(again, exact) < 3 * relative_error(codes, exact) + 1e-3
