"""Tests of actjax/ops/rebuilt_input.py: exact values, and gradients at the decoded activations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from flax import nnx
from ops.helpers import (
    BF16,
    KEY,
    assert_close,
    assert_equal,
    normal,
    ones,
)
from ops.operator_cases import (
    BATCH,
    LENGTH,
    MIXED,
    NEAREST,
    REBUILT,
    WIDTH,
    attention_case,
    decoded,
)

from actjax import (
    Exact,
    Quantized,
    linear,
    norm_linear,
    swiglu_linear,
)

OUTPUTS = (3, 1, 4)


def weights(dtype=None) -> tuple[jax.Array, ...]:
    return tuple(normal(20 + n, WIDTH, n, dtype=dtype) for n in OUTPUTS)


def biases(dtype=None) -> tuple[jax.Array | None, ...]:
    return normal(30, 3, dtype=dtype), None, normal(31, 4, dtype=dtype)


def cotangents(dtype=None) -> tuple[jax.Array, ...]:
    return tuple(normal(40 + n, BATCH, LENGTH, n, dtype=dtype) for n in OUTPUTS)


def run_each(operator, codecs, arguments, dzs):
    """Returns for each codec outputs and cotangents; and outputs without a backward pass to come.

    And those of the two operators that make up the one. All in one program.
    """

    def call(codec, activations, scale, ws, bs):
        return operator.call(activations, scale, ws, bias=bs, codec=codec, key=KEY)

    @jax.jit
    def run(*arguments):
        found = []
        for codec in codecs:
            zs, pullback = jax.vjp(functools.partial(call, codec), *arguments)
            found.append((zs, pullback(dzs)))
        activations, scale, ws, bs = arguments
        apart = linear(operator.first(activations, scale), ws, bias=bs)
        return found, call(codecs[-1], *arguments), apart

    return run(*arguments)


def run_oracle(operator, exact, hats, scale, ws, bs, dzs):
    """Returns outputs at the exact inputs, cotangents at the decoded ones, in NumPy float64."""
    wide = functools.partial(jax.tree.map, lambda x: np.asarray(x, np.float64))
    exact, hats, scale, ws, bs, dzs = map(wide, (exact, hats, scale, ws, bs, dzs))
    y, y_hat = operator.oracle(exact, scale), operator.oracle(hats, scale)
    zs = tuple(y @ w + (0 if b is None else b) for w, b in zip(ws, bs, strict=True))
    dy = sum(dz @ w.T for w, dz in zip(ws, dzs, strict=True))
    dws = tuple(np.einsum("bsd,bsn->dn", y_hat, dz) for dz in dzs)
    dbs = tuple(None if b is None else dz.sum((0, 1)) for b, dz in zip(bs, dzs, strict=True))
    return zs, (*operator.vjp(hats, scale, dy), dws, dbs)


# Values and gradients.


def test_full_attention_without_rotation_and_one_kv_head(x64):
    operator = attention_case(causal=False, rotates=False, kv_heads=1)
    activations, w, dz = operator.activations(), weights()[0], cotangents()[0]

    @jax.jit
    def run(xs, w):
        z, pullback = jax.vjp(lambda *args: operator.call(args[0], None, args[1]), xs, w)
        return z, *pullback(dz)

    z, dxs, dw = run(activations, w)
    (want,), (want_dxs, _, (want_dw,), _) = run_oracle(
        operator, activations, activations, None, (w,), (None,), (dz,)
    )
    assert_close((z, dxs, dw), (want, want_dxs, want_dw), 1e-11, 1e-12)


def test_a_single_weight_gives_a_single_output_and_a_tuple_a_tuple():
    w = weights()[0]
    for operator in REBUILT.values():
        given = operator.activations(), operator.scale()
        for ws, count in ((w, None), (nnx.Param(w), None), ((w,), 1), ([w, w], 2)):
            zs = jax.eval_shape(lambda ws: operator.call(*given, ws), ws)
            assert (len(zs) if isinstance(zs, tuple) else None) == count
            assert {z.shape for z in jax.tree.leaves(zs)} == {(BATCH, LENGTH, 3)}


def test_eps_is_that_of_the_norm():
    x, scale, w, dz = normal(0, 4, 8), ones(8), normal(1, 8, 3), normal(2, 4, 3)

    @jax.jit
    def run(x, w):
        z, pullback = jax.vjp(lambda x, w: norm_linear(x, scale, w, eps=0.5), x, w)
        given = ({}, {"eps": 1e-6}, {"eps": 1e-5})
        small = [norm_linear(1e-3 * x, scale, w, **options) for options in given]
        return (z, *pullback(dz)), small

    got, (default, same, other) = run(x, w)
    normed = oracles.rms_norm(x, scale, 0.5)
    want_dx = oracles.rms_norm_vjp(x, scale, 0.5, np.asarray(dz) @ np.asarray(w).T)[0]
    want = normed @ np.asarray(w), want_dx, normed.T @ np.asarray(dz)
    assert_close(got, want, 1e-5, 1e-5)  # Float32.
    np.testing.assert_array_equal(default, same)
    assert not np.allclose(default, other)


def test_any_number_of_leading_axes(x64):
    w, leads = normal(1, 8, 3), ((), (2, 3, 4))
    inputs = [(normal(0, *lead, 8), normal(2, *lead, 3)) for lead in leads]

    @jax.jit
    def run(inputs, w):
        found = []
        for x, dz in inputs:
            z, pullback = jax.vjp(lambda x, w: swiglu_linear(x, x, w), x, w)
            found.append((z, *pullback(dz)))
        return found

    found, w = run(inputs, w), np.asarray(w)
    for got, (x, dz) in zip(found, jax.tree.map(np.asarray, inputs), strict=True):
        y = oracles.swiglu(x, x)
        want = (
            y @ w,
            sum(oracles.swiglu_vjp(x, x, dz @ w.T)),
            y.reshape(-1, 8).T @ dz.reshape(-1, 3),
        )
        assert_close(got, want, 1e-12, 1e-13)


# The error of a code.


def test_the_error_of_dither_is_proportional_to_the_distance_of_its_levels():
    # With b bits the distance is 1 / (2^b - 1) of the range. To first order the error follows it.
    x, w, dz = normal(0, 32, 16), normal(1, 16, 4), normal(2, 32, 4)

    def gradient(codec, key=None):
        fun = lambda w: jnp.sum(dz * norm_linear(x, jnp.ones(16), w, codec=codec, key=key))  # noqa: E731
        return jax.grad(fun)(w)

    @jax.jit
    def errors():
        keys = jax.random.split(KEY, 16)
        sizes = []
        for bits in (3, 8):
            codec = Quantized(bits, group=16, rounding="dither", scale_dtype="float32")
            error = jax.lax.map(functools.partial(gradient, codec), keys) - gradient(Exact())
            sizes.append(jnp.sqrt(jnp.mean(error**2)))
        return sizes

    coarse, fine = map(float, errors())
    # The second order is a share of the distance, with 3 bits a seventh of the range: with its
    # sign, a fifth.
    assert coarse / fine == pytest.approx((2**8 - 1) / (2**3 - 1), rel=0.2)


# Precision.


@pytest.mark.parametrize("name", ["norm", "attention"])
def test_bfloat16_is_rounded_where_the_two_operators_round(name):
    operator, bf16 = REBUILT[name], jnp.bfloat16
    activations, scale = operator.activations(bf16), operator.scale()
    # Weights are wider, as master weights are; the operator rounds them.
    ws, bs, dzs = weights(), biases(), cotangents(bf16)
    arguments = activations, scale, ws, bs
    [(zs, grads)], _, apart = run_each(operator, (NEAREST,), arguments, dzs)
    hats = jax.jit(lambda xs: decoded(name, xs, NEAREST))(activations)
    assert_equal(zs, apart)
    assert {x.dtype for x in (*zs, *grads[0], *hats)} == {jnp.dtype(bf16)}
    assert {x.dtype for x in jax.tree.leaves(grads[1:])} == {jnp.dtype("float32")}
    cast = tuple(np.asarray(w).astype(bf16) for w in ws)
    want_zs, want = run_oracle(operator, activations, hats, scale, cast, bs, dzs)
    sizes = [np.linalg.norm(x) for x in (*want[0], *want[2])]
    y_hat = operator.oracle(*jax.tree.map(lambda x: np.asarray(x, np.float64), (hats, scale)))
    terms = [np.abs(y_hat).reshape(-1, WIDTH).T @ np.abs(dz).reshape(-1, dz.shape[-1])
             for dz in (np.asarray(dz, np.float64) for dz in dzs)]  # fmt: skip
    for z, exact in zip(zs, want_zs, strict=True):
        # The linear input and the output are rounded, and in attention the weights of values.
        assert np.linalg.norm(np.float64(z) - exact) <= 3 * BF16 * np.linalg.norm(exact)
    for dw, exact, term in zip(grads[2], want[2], terms, strict=True):
        # In `dw` only the rebuilt input is rounded, in attention the weights of values besides.
        roundings = 2 if name == "attention" else 1
        assert np.all(np.abs(dw - exact) <= roundings * BF16 * term + 1e-5)
    for dx, exact, size in zip(grads[0], want[0], sizes, strict=False):
        # Its cotangent, terms that are subtracted from one another, and the result.
        assert np.linalg.norm(np.float64(dx) - exact) <= 4 * BF16 * size
    for db, exact in zip(grads[3], want[3], strict=True):
        assert (db is None) == (exact is None)
        if db is not None:
            np.testing.assert_allclose(db, exact, rtol=1e-6, atol=1e-5)  # Float32 sums.


def test_the_value_of_swiglu_in_bfloat16_is_that_of_the_two_operators_to_the_bit():
    operator, bf16 = REBUILT["swiglu"], "bfloat16"
    (w, *_), (b, *_) = weights(bf16), biases(bf16)

    @jax.jit
    def values(xs, w, b):
        call = functools.partial(operator.call, bias=b, codec=MIXED["swiglu"], key=KEY)
        apart = linear(operator.first(xs, None), w, bias=b)
        return call(xs, None, w), jax.vjp(lambda w: call(xs, None, w), w)[0], apart

    *found, apart = values(operator.activations(bf16), w, b)
    assert apart.dtype == jnp.bfloat16
    for z in found:
        np.testing.assert_array_equal(z, apart)


def test_sums_are_taken_in_float32():
    # 4096 ones: a bfloat16 sum stops at 256, where adding one rounds back.
    bf16 = functools.partial(ones, dtype=jnp.bfloat16)

    def fun(x, scale, w, b):
        return norm_linear(x, scale, w, eps=0.0, bias=b)

    arguments = bf16(4096, 2), bf16(2), bf16(2, 1), bf16(1)
    run = jax.jit(lambda dz, *args: jax.vjp(fun, *args)[1](dz))
    for grad in run(bf16(4096, 1), *arguments)[1:]:
        assert grad.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.float32(grad), 4096)
