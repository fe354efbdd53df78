"""Tests of actjax/ops/rope.py: a rotation whose gradient is the opposite rotation."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.helpers import BF16, THETA, assert_gradients_are_differences, normal, tables

from actjax import rope


@jax.jit
def run(x, cos, sin, dy):
    y, pullback = jax.vjp(lambda x: rope(x, cos, sin), x)
    return y, *pullback(dy)


def oracle(x, dy):
    positions = np.arange(x.shape[1])
    return oracles.rope(x, positions, THETA), oracles.rope(dy, -positions, THETA)


def test_value_and_gradient_agree_with_the_oracle(x64):
    shapes = (1, 1, 1, 2), (2, 5, 3, 6), (1, 9, 2, 16)
    inputs = [(normal(0, *s), *tables(s[1], s[3]), normal(1, *s)) for s in shapes]
    found = jax.jit(lambda inputs: [run(*one) for one in inputs])(inputs)
    for got, (x, _, _, dy) in zip(found, inputs, strict=True):
        for y, want in zip(got, oracle(x, dy), strict=True):
            assert y.dtype == jnp.float64
            np.testing.assert_allclose(y, want, rtol=1e-12, atol=1e-14)


def test_finite_differences(x64):
    cos, sin = tables(5, 6)
    assert_gradients_are_differences(lambda x: rope(x, cos, sin), normal(0, 2, 5, 2, 6))


@pytest.mark.parametrize("table_dtype", ["float32", "float64"])
def test_bfloat16_is_rotated_wider_and_rounded_once(table_dtype, x64):
    x, dy = (normal(i, 2, 9, 3, 16, dtype=jnp.bfloat16) for i in range(2))
    got = run(x, *(np.asarray(t).astype(table_dtype) for t in tables(9, 16)), dy)
    for y, want in zip(got, oracle(x, dy), strict=True):
        assert y.dtype == jnp.bfloat16
        # One rounding to bfloat16; float32 inside errs by a few 6e-8 of terms of size 1.
        np.testing.assert_allclose(np.float64(y), want, rtol=1.01 * BF16, atol=1e-6)


def test_backward_holds_only_the_tables():
    x, (cos, sin) = normal(0, 2, 5, 3, 6), tables(5, 6)
    leaves = jax.tree.leaves(jax.vjp(rope, x, cos, sin)[1])
    assert {id(leaf) for leaf in leaves} == {id(cos), id(sin)}


def test_no_gradient_reaches_the_tables():
    x, (cos, sin) = normal(0, 2, 5, 3, 6), tables(5, 6)
    grads = jax.jit(jax.grad(lambda *args: jnp.sum(rope(*args)), argnums=(1, 2)))(x, cos, sin)
    np.testing.assert_array_equal(grads, 0)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=12, max_size=12))
def test_rotation_keeps_the_length_of_each_pair(numbers):
    x = np.reshape(np.float32(numbers), (1, 3, 1, 4))
    y, dx = run(x, *tables(3, 4), x)
    before, after, back = (np.hypot(*np.split(np.float64(a), 2, axis=-1)) for a in (x, y, dx))
    # A few roundings of 6e-8; numbers below the smallest normal one may be flushed to zero.
    np.testing.assert_allclose(after, before, rtol=5e-7, atol=1e-37)
    np.testing.assert_allclose(back, before, rtol=5e-7, atol=1e-37)


def test_scores_depend_only_on_the_distance(x64):
    same = [np.broadcast_to(normal(i, 1, 1, 1, 8), (1, 6, 1, 8)) for i in range(2)]
    q, k = map(np.asarray, jax.jit(lambda same: [rope(x, *tables(6, 8)) for x in same])(same))
    scores = np.einsum("bshd,bthd->st", q, k)
    for i in range(5):
        np.testing.assert_allclose(scores[i + 1, 1:], scores[i, :-1], rtol=1e-12, atol=1e-13)


TRANSFORMS = {
    "checkpoint": lambda f: jax.vmap(jax.checkpoint(f), in_axes=(0, None, None)),
    "scan": lambda f: lambda x, *t: jax.lax.scan(lambda _, y: (None, f(y, *t)), None, x)[1],
    "vmap": lambda f: jax.vmap(f, in_axes=(0, None, None)),
}


def test_gradient_is_the_same_under_transformations():
    x = normal(0, 3, 2, 5, 2, 6)

    @jax.jit
    def run(x):
        losses = [
            lambda x, f=transform(rope): jnp.sum(jnp.sin(f(x, *tables(5, 6))))
            for transform in TRANSFORMS.values()
        ]
        return [jax.grad(loss)(x) for loss in losses]

    want = np.stack([oracle(one, np.cos(oracle(one, one)[0]))[1] for one in np.asarray(x)])
    for got in run(x):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
