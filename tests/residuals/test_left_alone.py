"""Tests that `compress_residuals` leaves alone what a code would make wrong or nobody needs.

The functions store an activation that is coded, and something else that must not be.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from residuals.residual_helpers import CODE, asked, held_bytes, normal, relative_error

import actjax
from actjax import Quantized, compress_residuals
from actjax.residuals.graph.segments import cut, pieces

X, W = normal(0, 64, 64), normal(1, 64, 64) / 8


def seen_and_gradients(fun, *args):
    """Returns the primitives of the arrays that a rule decides on, and gradients: at 2 bits, exact.

    The function is differentiated with respect to its first argument.
    """
    seen = []

    def rule(what):
        seen.append(what.primitive)
        return Quantized(2, group=16)

    variants = compress_residuals(fun, rule), fun
    return seen, *jax.jit(lambda *args: [jax.grad(f)(*args) for f in variants])(*args)


def result_of_a_loop(w):
    scale = jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x * 2, jnp.ones((64, 64)))
    return jnp.sum((X @ w) * scale)


def test_results_of_while_loops_are_exact():
    seen, got, want = seen_and_gradients(result_of_a_loop, W)
    assert seen == []
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_factors_of_a_matrix_are_exact():
    def fun(w):
        gram = w.T @ w + 10 * jnp.eye(64)
        return jnp.sum(jnp.log(jnp.diag(jnp.linalg.cholesky(gram))))

    seen, got, want = seen_and_gradients(fun, W)
    assert "cholesky" not in seen
    assert relative_error(got, want) < 0.02


def test_only_what_the_wanted_gradient_needs_is_stored():
    def fun(w, x):
        return jnp.sum(jnp.sin(jnp.sin(x @ w[0]) @ w[1]))

    small = compress_residuals(fun, CODE, activations=1)
    code = CODE.stored_bytes(X.shape, X.dtype)
    # The last product and the one before it, and for the first weight also the data.
    last = held_bytes(lambda w: small([W, w], X), W)
    first = held_bytes(lambda w: small([w, W], X), W)
    assert last == 2 * code
    assert first == 3 * code


def test_a_frozen_weight_in_four_bits_may_be_an_argument():
    a, b = normal(2, 64, 4) / 8, normal(3, 4, 64) / 8

    def fun(adapter, weight):
        return jnp.mean(jnp.tanh(actjax.linear(X, actjax.LoRA(weight, *adapter))) ** 2)

    small = compress_residuals(fun, Quantized(8, group=64))

    @jax.jit
    def gradients(adapter, w):
        frozen = actjax.NF4Weight.quantize(w)
        return [jax.grad(f)(adapter, frozen) for f in (small, fun)]

    got, exact = gradients((a, b), W)
    assert relative_error(got, exact) < 0.02


def test_arrays_of_one_line_and_layers_of_loops_have_labels_of_their_own():
    def fun(w):
        x = X
        for _ in range(3):
            x = jnp.sin(x @ w)
        step = lambda x, w: (jnp.sin(x @ w), None)  # noqa: E731
        for layers in (2, 3):
            x, _ = jax.lax.scan(step, x, jnp.stack([w] * layers))
        return jnp.sum(x)

    candidates = {c.label: c for c in asked(fun, W)}
    layers = [c.layers for c in candidates.values() if c.primitive != "argument"]
    assert sorted(layers)[:3] == [1, 1, 1]
    assert {2, 3} <= set(layers)
    assert any("loop 1" in label for label in candidates)
    assert sum(label.endswith(("#1", "#2")) for label in candidates) >= 2


def test_segments_are_cut_where_little_is_alive():
    def fun(x):
        for _ in range(4):
            wide = jnp.concatenate([x, x, x, x], -1) @ jnp.ones((256, 1024))
            x = jnp.abs(wide) @ jnp.ones((1024, 64))
        return x

    closed = jax.make_jaxpr(fun)(X)
    dies = [False] * (len(closed.jaxpr.constvars) + 1)
    segments = cut(closed.jaxpr, 1, dies, lambda _: False)
    assert len(segments) == 4
    made = pieces(closed, segments, dies)
    # Each but the last hands over one narrow array.
    for body, _ in made[:-1]:
        assert [x.aval.shape for x in body.outvars if x.aval.size > 64 * 64] == []


def test_a_gradient_through_what_a_custom_rule_closes_over_is_refused():
    def fun(w):
        shifted = w * 2

        @jax.custom_vjp
        def product(x):
            return x @ shifted

        product.defvjp(lambda x: (product(x), None), lambda _, g: (g @ shifted.T,))
        return jnp.sum(product(X))

    with pytest.raises(ValueError, match="custom_vjp that closes over it"):
        jax.eval_shape(jax.grad(compress_residuals(fun, CODE)), W)
