"""Tests of actjax/weights/frozen.py: a frozen weight has no gradient, and its input is not kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxprs import nbytes, products
from ops.helpers import (
    BF16,
    KEY,
    assert_close,
    assert_equal,
    compiled_temporaries,
    normal,
    pullback,
    shaped,
)
from ops.operator_cases import DRAWN, OPERATORS, WIDTH

from actjax import (
    Exact,
    FrozenWeight,
    NF4Weight,
    Quantized,
    RandomProjection,
    explain,
    linear,
    qkv_projection,
)

# Values and gradients.


def test_value_and_gradients_are_those_of_plain_weights(x64):
    x, biases = normal(0, 2, 5, 6), (normal(1, 4), None, normal(2, 3))
    ws, dzs = (
        tuple(normal(i, *lead, n) for i, n in enumerate((4, 2, 3), first))
        for lead, first in (((6,), 3), ((2, 5), 9))
    )

    @jax.jit
    def run(x, ws, biases):
        results = []
        for codec in (Exact(), RandomProjection(3)):

            def fun(x, w, biases, codec=codec):
                weights = FrozenWeight(ws[0]), w, FrozenWeight(ws[2])
                return linear(x, weights, bias=biases, codec=codec, key=KEY)

            zs, pull = jax.vjp(fun, x, ws[1], biases)
            results.append((zs, *pull(dzs), codec.decode(codec.encode(x, KEY))))
        return results, qkv_projection(x, FrozenWeight(ws[0]), ws[1], FrozenWeight(ws[2]))

    results, qkv = run(x, ws, biases)
    x, ws, dzs, biases = jax.tree.map(np.asarray, (x, ws, dzs, biases))
    # Sums of ten terms, of size 1: some 1e-16 each.
    same = functools.partial(assert_close, rtol=1e-12, atol=1e-13)
    same(qkv, tuple(x @ w for w in ws))
    for zs, dx, dw, dbs, x_hat in results:
        same(zs, tuple(x @ w + (0 if b is None else b) for w, b in zip(ws, biases, strict=True)))
        same(dx, sum(dz @ w.T for w, dz in zip(ws, dzs, strict=True)))
        same(dw, np.einsum("bsd,bsn->dn", x_hat, dzs[1]))
        # Biases are trained.
        same(dbs, (dzs[0].sum((0, 1)), None, dzs[2].sum((0, 1))))


def test_value_and_dx_have_the_bits_of_the_plain_weight_and_its_gradient_is_zero():
    @jax.jit
    def run(problems):
        results = []
        for x, w, dz in problems:
            for wrap in (FrozenWeight, lambda w: FrozenWeight(nnx.Param(w)), lambda w: w):
                z, pull = jax.vjp(linear, x, wrap(w))
                results.append((z, *pull(dz)))
        return results

    shapes = (6, 8), (8, 5), (6, 5)
    dtypes = "float32", "bfloat16"
    results = run([[normal(i, *s, dtype=d) for i, s in enumerate(shapes)] for d in dtypes])
    for frozen, variable, plain in (results[:3], results[3:]):
        assert isinstance(frozen[2], FrozenWeight)
        assert_equal(frozen[:2], plain[:2])
        assert_equal(variable[:2], plain[:2])
        for (gradient,) in map(jax.tree.leaves, (frozen[2], variable[2])):
            np.testing.assert_array_equal(gradient, np.zeros((8, 5)))


# Weights of 4 bits.


def test_a_4_bit_weight_acts_as_its_decoded_array(x64):
    x, w, dz = normal(0, 6, 70), normal(1, 70, 5), normal(2, 6, 5)

    @jax.jit
    def run(x, w):
        q = NF4Weight.quantize(w)
        results = []
        for weight in (q, FrozenWeight(q)):
            z, pull = jax.vjp(lambda x, weight=weight: linear(x, weight), x)
            results.append((z, *pull(dz)))
        return results, q.astype(jnp.float64)

    results, w = run(x, w)
    w = np.asarray(w)
    for got in results:
        # Sums of 70 terms of size 1.
        assert_close(got, (np.asarray(x) @ w, np.asarray(dz) @ w.T), 1e-11, 1e-12)


def test_a_4_bit_weight_is_decoded_in_the_dtype_of_the_input():
    x, dz = normal(0, 6, 70, dtype="bfloat16"), normal(2, 6, 5, dtype="bfloat16")

    @jax.jit
    def run(x, w):
        q = NF4Weight.quantize(w)
        z, pull = jax.vjp(lambda x: linear(x, q), x)
        return z, *pull(dz), q.astype("float32")

    z, dx, w = run(x, normal(1, 70, 5))
    assert z.dtype == dx.dtype == jnp.bfloat16
    x, dz, w = (np.float64(a) for a in (x, dz, w))
    # The weight and the result are rounded; if its level and scale are too, twice more.
    for got, want, terms in (
        (z, x @ w, np.abs(x) @ np.abs(w)),
        (dx, dz @ w.T, np.abs(dz) @ np.abs(w).T),
    ):
        assert np.all(np.abs(np.float64(got) - want) <= 3 * BF16 * terms + BF16 * np.abs(want))


# What is held.


def loss(x, biases, weights, wrap):
    """Returns the loss of a scan over layers."""

    def body(x, layer):
        weight, bias = layer
        return linear(x, wrap(weight), bias=bias), None

    return jnp.sum(jax.lax.scan(body, x, (weights, biases))[0] ** 2)


@pytest.mark.parametrize("kind", ["frozen, with a trained bias", "4 bits", "plain"])
def test_under_scan_a_layer_more_keeps_nothing(kind):
    def temporaries(layers):
        weights, biases = shaped(layers, 64, 64), None
        wrap, argnums = (lambda w: w), (0, 1)
        if kind == "4 bits":
            weights = jax.eval_shape(jax.vmap(NF4Weight.quantize), weights)
        elif kind == "plain":
            argnums = 2
        else:
            wrap, biases = FrozenWeight, shaped(layers, 64)
        gradients = jax.grad(functools.partial(loss, wrap=wrap), argnums=argnums)
        return compiled_temporaries(gradients, shaped(1024, 64), biases, weights)

    few, many = map(temporaries, (4, 12))
    if kind == "plain":  # Shows that the test can fail.
        assert many - few >= 8 * 1024 * 64 * 4
    else:
        # Its input would be 256 KiB, and a decoded weight of 4 bits 16 KiB.
        assert abs(many - few) < 1024


def test_backward_holds_the_weight_and_beside_a_plain_weight_one_code():
    x, w, other = normal(0, 16, 8), normal(1, 8, 5), normal(2, 8, 3)
    for codec in (Exact(), Quantized(4, group=4), RandomProjection(3)):

        def fun(x, w, codec=codec):
            return linear(-x, FrozenWeight(w), codec=codec, key=KEY)

        def both(x, other, codec=codec):
            return linear(-x, (FrozenWeight(w), other), codec=codec, key=KEY)

        only_dx = jax.eval_shape(lambda x, w, fun=fun: jax.vjp(lambda x: fun(x, w), x)[1], x, w)
        assert nbytes(only_dx) == w.nbytes
        # The weight has no gradient even where one is asked for.
        assert nbytes(pullback(fun, x, w)) == w.nbytes
        code = codec.stored_bytes(x.shape, x.dtype)
        assert nbytes(pullback(both, x, other)) == w.nbytes + other.nbytes + code


def test_a_barrier_keeps_the_decoded_weight_of_the_two_passes_apart():
    # XLA could merge the two and keep the decoded weight. (On CPUs it does so in spite of this.)
    q = jax.eval_shape(NF4Weight.quantize, normal(1, 8, 5))
    fun = lambda x, q: jnp.sum(linear(x, q))  # noqa: E731
    assert "optimization_barrier" in str(jax.make_jaxpr(jax.grad(fun))(normal(0, 6, 8), q))


def test_explain_does_not_list_the_input():
    w = normal(1, 8, 5)
    results = explain(lambda x: jnp.sum(linear(-x, FrozenWeight(w))), normal(0, 16, 8))
    assert not any(entry.operator == "linear" for entry in results.residuals)


# What is computed.


@pytest.mark.parametrize("name", OPERATORS)
def test_no_product_is_computed_for_the_gradient(name):
    operator = OPERATORS[name]
    xs, scale = operator.activations(), operator.scale()
    for codec in (Exact(), DRAWN):

        def made(wrap, codec=codec):
            def fun(xs, w):
                return jnp.sum(operator.call(xs, scale, wrap(w), codec=codec, key=KEY) ** 2)

            return products(jax.grad(fun, (0, 1)), xs, normal(9, WIDTH, 3))

        frozen, plain = made(FrozenWeight), made(lambda w: w)
        assert len(frozen) == len(plain) - 1
        assert not {(WIDTH, 3), (3, WIDTH)} & set(frozen)
        assert {(WIDTH, 3), (3, WIDTH)} & set(plain)


# As a value.


def test_a_frozen_weight_has_the_shape_of_its_array():
    w = normal(0, 8, 5, dtype=jnp.bfloat16)
    for frozen in (
        FrozenWeight(w),
        jax.eval_shape(lambda w: FrozenWeight(NF4Weight.quantize(w)), w),
    ):
        assert (frozen.shape, frozen.ndim, frozen.dtype) == ((8, 5), 2, jnp.bfloat16)
    assert FrozenWeight(w).T.shape == (5, 8)
    assert "FrozenWeight" in repr(FrozenWeight(w))
