"""Tests of `actjax.Controller`: GACT's Algorithm 1 for each array of a model."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import assert_messages
from residuals.residual_helpers import normal, relative_error

import actjax
from actjax import Quantized

WEIGHTS = normal(1, 3, 32, 32) / 5
X = normal(0, 64, 32)
KEY = jax.random.key(3)


def layer(x, w):
    return jnp.tanh(jnp.sin(3 * x) @ w)


def unrolled(weights, x):
    for i, w in enumerate(weights):
        with jax.named_scope(f"h/{i}"):
            x = layer(x, w)
    return jnp.mean(x * jnp.cos(X))


def scanned(weights, x):
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)
    return jnp.mean(x * jnp.cos(X))


CODEC = Quantized(4, group=32, rounding="stochastic")


@functools.partial(jax.jit, static_argnums=0)
def gradient(fun, key=None):
    fun = fun if key is None else functools.partial(fun, code_key=key)
    return jax.grad(fun)(WEIGHTS, X)


@pytest.fixture(scope="module", params=[unrolled, scanned], ids=lambda f: f.__name__)
def controller(request):
    made = actjax.Controller(request.param, 4.0, codec=CODEC)
    assert made.step(WEIGHTS, X, key=KEY)
    return made


def test_each_array_has_its_own_bits_within_the_budget(controller):
    sizes = dict.fromkeys(controller.bits, X.size)
    if controller.stored.fun is scanned:
        sizes = {label: n * len(WEIGHTS) for label, n in sizes.items()}
    else:
        assert {label.split("/")[1] for label in controller.bits} == {"0", "1", "2"}
    spent = sum(n * controller.bits[label] for label, n in sizes.items()) / sum(sizes.values())
    assert 4.0 * 0.98 <= spent <= 4.0
    assert set(controller.sensitivity) == set(controller.bits)
    # A gradient for each array and one more, a hundred times: less than 1% of the steps' time.
    assert controller.every == 100 * (len(controller.bits) + 1)


def test_the_gradient_is_unbiased_to_first_order(controller):
    @jax.jit
    def mean_gradient(keys):
        grads = jax.lax.map(lambda key: gradient(controller.stored, key), keys)
        return grads.mean(0), grads.std(0)

    mean, deviation = mean_gradient(jax.random.split(KEY, 400))
    exact = gradient(controller.stored.fun)
    noise = np.linalg.norm(deviation) / np.linalg.norm(exact) / 400**0.5
    # Four deviations of the mean, and the second order of an error of `20 noise`.
    assert relative_error(mean, exact) < 4 * noise + (20 * noise) ** 2


def test_steps_measure_when_due_and_states_come_back(controller):
    other = actjax.Controller(controller.stored.fun, 4.0, codec=CODEC, every=2)
    other.restore(json.loads(json.dumps(controller.state())))
    assert other.stored == controller.stored
    assert hash(other.stored) == hash(controller.stored)
    assert other.steps == 1
    before = dict(other.sensitivity)
    other.step(WEIGHTS, X, key=KEY)
    assert other.sensitivity == before
    other.step(WEIGHTS, 2 * X, key=KEY)
    assert other.sensitivity != before


def test_a_batch_that_is_not_finite_changes_nothing(controller):
    before = controller.state()
    with pytest.warns(UserWarning, match=r"gradient of this batch is not finite"):
        assert not controller.measure(WEIGHTS, np.where(X[0, 0] == X, np.nan, X), key=KEY)
    assert controller.state() == before


def test_a_state_of_other_code_is_refused(controller):
    other = actjax.Controller(lambda w, x: jnp.mean(jnp.sin(3 * x @ w[0]) ** 2), codec=CODEC)
    other.restore(controller.state())
    with pytest.raises(ValueError, match=r"Controller: .* arrays that bits were chosen for"):
        jax.eval_shape(jax.grad(functools.partial(other.stored, code_key=KEY)), WEIGHTS, X)


def test_a_controller_of_segments_that_are_computed_again():
    made = actjax.Controller(scanned, 4.0, codec=CODEC, level="CB1")
    made.step(WEIGHTS, X, key=KEY)
    # The second forward pass starts from a code, and its arrays are stored as codes.
    assert 0 < relative_error(gradient(made.stored, KEY), gradient(scanned)) < 0.5


def test_keyword_arguments_are_measured_anew():
    made = actjax.Controller(lambda w, *, x: jnp.mean(layer(x, w) ** 2), 4.0, codec=CODEC)
    made.measure(WEIGHTS[0], x=X, key=KEY)
    before = made.sensitivity
    made.measure(WEIGHTS[0], x=2 * X, key=KEY)
    assert made.sensitivity.keys() == before.keys()
    assert made.sensitivity != before


def test_wrong_arguments_are_refused():
    nothing_stored = actjax.Controller(lambda w: jnp.sum(w * 2))
    assert_messages(ValueError, [
        (lambda: actjax.Controller(scanned, level="CB2"), "'CB2'. For CB2 use"),
        (lambda: actjax.Controller(scanned, codec=Quantized(4)),
         "with rounding='stochastic', got Quantized"),
        (lambda: actjax.Controller(scanned, 1.0), "`average_bits` must be between 2 and 8"),
        (lambda: actjax.Controller(scanned, every=0), "`every` must be a number of steps"),
        (lambda: nothing_stored.step(X, key=KEY), "stores no array"),
        (lambda: actjax.Controller(scanned).restore({}),
         "must have 'steps', 'bits' and 'sensitivity'"),
    ])  # fmt: skip


def test_bytes_of_a_level_l2_are_on_the_host(controller):
    l2 = actjax.Controller(controller.stored.fun, 4.0, codec=CODEC, level="L2")
    l2.restore(controller.state())
    np.testing.assert_array_equal(*(gradient(c.stored, KEY) for c in (l2, controller)))
    table = actjax.explain(functools.partial(l2.stored, code_key=KEY), WEIGHTS, X)
    assert "Offloaded" in str(table)
