"""Tests of actjax/ops/rope.py: a rotation whose gradient is the opposite rotation."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
from ops.helpers import BF16, THETA, composed, normal, of_all_sizes, tables

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
    results = jax.jit(lambda inputs: [run(*arrays) for arrays in inputs])(inputs)
    for got, (x, _, _, dy) in zip(results, inputs, strict=True):
        for y, want in zip(got, oracle(x, dy), strict=True):
            assert y.dtype == jnp.float64
            np.testing.assert_allclose(y, want, rtol=1e-12, atol=1e-14)


def test_bfloat16_is_rotated_wider_and_rounded_once(x64):
    x, dy = (normal(i, 2, 9, 3, 16, dtype=jnp.bfloat16) for i in range(2))
    both = [[np.asarray(t).astype(d) for t in tables(9, 16)] for d in ("float32", "float64")]
    for got in jax.jit(lambda x, dy: [run(x, *pair, dy) for pair in both])(x, dy):
        for y, want in zip(got, oracle(x, dy), strict=True):
            assert y.dtype == jnp.bfloat16
            # One rounding to bfloat16; float32 inside errs by a few 6e-8 of terms of size 1.
            np.testing.assert_allclose(np.float64(y), want, rtol=1.01 * BF16, atol=1e-6)


def test_backward_holds_only_the_tables():
    x, (cos, sin) = normal(0, 2, 5, 3, 6), tables(5, 6)
    program = jax.make_jaxpr(lambda *args: jax.vjp(rope, *args)[1])(x, cos, sin).jaxpr
    assert set(program.outvars) == set(program.invars[1:])


def test_no_gradient_reaches_the_tables():
    x, (cos, sin) = normal(0, 2, 5, 3, 6), tables(5, 6)
    grads = jax.jit(jax.grad(lambda *args: jnp.sum(rope(*args)), argnums=(1, 2)))(x, cos, sin)
    np.testing.assert_array_equal(grads, 0)


def test_rotation_keeps_the_length_of_each_pair():
    x = of_all_sizes(0, 100, 3, 1, 4, largest=100)
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


def test_gradient_is_the_same_under_scan_vmap_and_checkpoint():
    x = normal(0, 3, 2, 1, 5, 2, 6)
    fun = composed(lambda x: rope(x, *tables(5, 6)))
    got = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(fun(x)))))(x)
    rows = np.reshape(x, (6, 5, 2, 6))
    want = oracle(rows, np.cos(oracle(rows, rows)[0]))[1]
    np.testing.assert_allclose(np.reshape(got, rows.shape), want, rtol=1e-5, atol=1e-6)
