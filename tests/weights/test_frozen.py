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
from ops.operator_cases import BATCH, LENGTH, NEAREST, REBUILT, WIDTH, decoded

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

quantize = jax.jit(NF4Weight.quantize)


# Values and gradients.


def test_value_and_dx_are_those_of_the_plain_weight(x64):
    x, bias = normal(0, 2, 5, 6), (normal(1, 4), None, normal(2, 3))
    ws = [normal(i, 6, n) for i, n in enumerate((4, 2, 3))]
    dzs = tuple(normal(i, 2, 5, n) for i, n in enumerate((4, 2, 3), 9))

    @jax.jit
    def run(x, ws, bias):
        found = []
        for codec in (Exact(), RandomProjection(3)):

            def fun(x, bias, codec=codec):
                return linear(x, tuple(map(FrozenWeight, ws)), bias=bias, codec=codec, key=KEY)

            zs, pull = jax.vjp(fun, x, bias)
            found.append((zs, *pull(dzs)))
        q, k, v = qkv_projection(x, FrozenWeight(ws[0]), ws[1], FrozenWeight(ws[2]))
        return found, (q, k, v)

    found, qkv = run(x, ws, bias)
    x, ws, dzs = jax.tree.map(np.asarray, (x, ws, dzs))
    # Sums of six terms, and of nine in `dx`, of size 1: some 1e-16 each.
    same = functools.partial(assert_close, rtol=1e-12, atol=1e-13)
    same(qkv, tuple(x @ w for w in ws))
    for zs, dx, dbs in found:
        for z, w, b in zip(zs, ws, bias, strict=True):
            same(z, x @ w + (0 if b is None else np.asarray(b)))
        same(dx, sum(dz @ w.T for w, dz in zip(ws, dzs, strict=True)))
        # Biases are trained.
        assert dbs[1] is None
        for db, dz in ((dbs[0], dzs[0]), (dbs[2], dzs[2])):
            same(db, dz.sum((0, 1)))


def test_value_and_dx_are_those_of_the_plain_weight_to_the_bit():
    @jax.jit
    def run(problems):
        found = []
        for x, w, dz in problems:
            for weight in (FrozenWeight(w), w):
                z, pull = jax.vjp(lambda x, weight=weight: linear(x, weight), x)
                found.append((z, *pull(dz)))
        return found

    shapes = (6, 8), (8, 5), (6, 5)
    dtypes = "float32", "bfloat16"
    problems = [[normal(i, *s, dtype=d) for i, s in enumerate(shapes)] for d in dtypes]
    found = run(problems)
    assert_equal(found[0::2], found[1::2])


def test_the_gradient_of_a_frozen_weight_is_zero():
    x, w = normal(0, 6, 8), normal(1, 8, 5)
    grads = jax.jit(jax.grad(lambda f: jnp.sum(linear(x, f) ** 2)))(FrozenWeight(w))
    assert isinstance(grads, FrozenWeight)
    np.testing.assert_array_equal(grads.weight, np.zeros((8, 5)))


def test_other_weights_of_the_operator_have_their_gradients(x64):
    x, ws, dz = normal(0, 6, 8), [normal(i, 8, 5) for i in (1, 2, 3)], normal(4, 6, 5)

    @jax.jit
    def run(x, ws):
        found = []
        for codec in (Exact(), RandomProjection(3)):

            def fun(w, codec=codec):
                weights = FrozenWeight(ws[0]), w, FrozenWeight(ws[2])
                return linear(x, weights, codec=codec, key=KEY)

            pull = jax.vjp(fun, ws[1])[1]
            found.append((*pull((dz, 2 * dz, dz)), codec.decode(codec.encode(x, KEY))))
        return found

    for dw, x_hat in run(x, ws):
        assert_close(dw, 2 * np.asarray(x_hat).T @ np.asarray(dz), 1e-12, 1e-13)


@pytest.mark.parametrize("name", REBUILT)
def test_operators_with_a_rebuilt_input_accept_frozen_weights(name, x64):
    operator = REBUILT[name]
    xs, scale = operator.activations(), operator.scale()
    shapes = (WIDTH, 3), (WIDTH, 4), (BATCH, LENGTH, 3), (BATCH, LENGTH, 4)
    w, other, dz, dother = (normal(20 + i, *s) for i, s in enumerate(shapes))

    @jax.jit
    def run(xs, w, other):
        def fun(xs, other):
            return operator.call(xs, scale, (FrozenWeight(w), other), codec=NEAREST)

        zs, pull = jax.vjp(fun, xs, other)
        return zs, pull((dz, dother)), decoded(name, xs, NEAREST)

    zs, (dxs, dother_w), hats = run(xs, w, other)
    xs, hats, w, other, dz, dother = jax.tree.map(np.asarray, (xs, hats, w, other, dz, dother))
    y, y_hat = operator.oracle(xs, scale), operator.oracle(hats, scale)
    assert_close(zs, (y @ w, y @ other), 1e-11, 1e-12)
    assert_close(dxs, operator.vjp(hats, scale, dz @ w.T + dother @ other.T)[0], 1e-11, 1e-12)
    assert_close(dother_w, np.einsum("bsd,bsn->dn", y_hat, dother), 1e-11, 1e-12)


# Weights of 4 bits.


def test_a_4_bit_weight_acts_as_its_decoded_array(x64):
    x, w, dz = normal(0, 6, 70), normal(1, 70, 5), normal(2, 6, 5)

    @jax.jit
    def run(x, w):
        q = NF4Weight.quantize(w)
        found = []
        for weight in (q, FrozenWeight(q)):
            z, pull = jax.vjp(lambda x, weight=weight: linear(x, weight), x)
            found.append((z, *pull(dz)))
        return found, q.astype(jnp.float64)

    found, w = run(x, w)
    w = np.asarray(w)
    for got in found:
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


def temporaries(layers: int, wrap) -> int:
    """Returns the bytes of temporaries of a scan over layers and its gradients but of weights."""

    def loss(x, biases, weights):
        def body(x, layer):
            weight, bias = layer
            return linear(x, wrap(weight), bias=bias), None

        return jnp.sum(jax.lax.scan(body, x, (weights, biases))[0] ** 2)

    weights = shaped(layers, 64, 64)
    if wrap is not FrozenWeight:
        weights = jax.eval_shape(jax.vmap(NF4Weight.quantize), weights)
    biases = shaped(layers, 64) if wrap is FrozenWeight else None
    return compiled_temporaries(jax.grad(loss, argnums=(0, 1)), shaped(1024, 64), biases, weights)


@pytest.mark.parametrize("kind", ["frozen, with a trained bias", "4 bits"])
def test_under_scan_a_layer_more_keeps_nothing(kind):
    wrap = FrozenWeight if "bias" in kind else lambda w: w
    few, many = (temporaries(layers, wrap) for layers in (4, 12))
    # Its input would be 256 KiB, and a decoded weight of 4 bits 16 KiB.
    assert abs(many - few) < 1024


def test_with_a_trained_weight_a_layer_more_keeps_its_input():
    # Shows that the test above can fail.
    def loss(ws, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (linear(x, w), None), x, ws)[0] ** 2)

    few, many = (
        compiled_temporaries(jax.grad(loss), shaped(layers, 64, 64), shaped(1024, 64))
        for layers in (4, 12)
    )
    assert many - few >= 8 * 1024 * 64 * 4


def test_backward_holds_nothing_but_the_weight():
    x, w = normal(0, 16, 8), normal(1, 8, 5)
    for codec in (Exact(), Quantized(4, group=4), RandomProjection(3)):

        def fun(x, w, codec=codec):
            return linear(-x, FrozenWeight(w), codec=codec, key=KEY)

        only_dx = jax.eval_shape(lambda x, w, fun=fun: jax.vjp(lambda x: fun(x, w), x)[1], x, w)
        assert nbytes(only_dx) == w.nbytes
        # The weight has no gradient even where one is asked for.
        assert nbytes(pullback(fun, x, w)) == w.nbytes


def test_beside_a_plain_weight_one_code_is_held():
    x, w, other = normal(0, 16, 8), normal(1, 8, 5), normal(2, 8, 3)
    codec = RandomProjection(3)

    def held(x, w, other):
        fun = lambda x, other: linear(-x, (FrozenWeight(w), other), codec=codec, key=KEY)  # noqa: E731
        return jax.vjp(fun, x, other)[1]

    size = nbytes(jax.eval_shape(held, x, w, other))
    assert size == w.nbytes + other.nbytes + codec.stored_bytes(x.shape, x.dtype)


def test_a_barrier_keeps_the_decoded_weight_of_the_two_passes_apart():
    # XLA could merge the two and keep the decoded weight. (On CPUs it does so in spite of this.)
    q = jax.eval_shape(NF4Weight.quantize, normal(1, 8, 5))
    fun = lambda x, q: jnp.sum(linear(x, q))  # noqa: E731
    assert "optimization_barrier" in str(jax.make_jaxpr(jax.grad(fun))(normal(0, 6, 8), q))


def test_explain_does_not_list_the_input():
    w = normal(1, 8, 5)
    found = explain(lambda x: jnp.sum(linear(-x, FrozenWeight(w))), normal(0, 16, 8))
    assert not any(entry.operator == "linear" for entry in found.residuals)


# What is computed.


def test_no_product_is_computed_for_the_gradient():
    x, w = normal(0, 16, 8), normal(1, 8, 5)
    for codec in (Exact(), RandomProjection(3)):
        for argnums in (0, (0, 1)):

            def shapes(wrap, codec=codec, argnums=argnums):
                def fun(x, w):
                    return jnp.sum(linear(x, wrap(w), codec=codec, key=KEY) ** 2)

                return products(jax.grad(fun, argnums), x, w)

            assert sorted(shapes(FrozenWeight)) == [(16, 5), (16, 8)]
            # Shows that this can fail.
            assert (8, 5) in shapes(lambda w: w)


def test_operators_with_a_rebuilt_input_compute_no_product_for_the_gradient():
    for operator in REBUILT.values():
        xs, scale = operator.activations(), operator.scale()

        def made(wrap, operator=operator, xs=xs, scale=scale):
            fun = lambda xs, w: jnp.sum(operator.call(xs, scale, wrap(w)) ** 2)  # noqa: E731
            return products(jax.grad(fun, (0, 1)), xs, normal(9, WIDTH, 3))

        assert len(made(FrozenWeight)) == len(made(lambda w: w)) - 1
        assert not {(WIDTH, 3), (3, WIDTH)} & set(made(FrozenWeight))
        assert {(WIDTH, 3), (3, WIDTH)} & set(made(lambda w: w))


# As a value.


def test_a_frozen_weight_has_the_shape_of_its_array():
    w = normal(0, 8, 5, dtype=jnp.bfloat16)
    for frozen in (FrozenWeight(w), FrozenWeight(quantize(w))):
        assert (frozen.shape, frozen.ndim, frozen.dtype) == ((8, 5), 2, jnp.bfloat16)
    assert FrozenWeight(w).T.shape == (5, 8)
    assert "FrozenWeight" in repr(FrozenWeight(w))


def test_a_frozen_weight_may_wrap_a_flax_variable():
    x, w = normal(0, 6, 8), normal(1, 8, 5)
    run = jax.jit(lambda x, w: (linear(x, FrozenWeight(nnx.Param(w))), linear(x, w)))
    assert_equal(*run(x, w))


def test_gradients_are_the_same_under_transformations(x64):
    x, ws = normal(0, 3, 6, 8), normal(1, 3, 8, 8)

    def one(x, frozen):
        return jnp.tanh(linear(x, frozen))

    transformed = {
        "checkpoint": lambda x, ws, wrap: jax.checkpoint(one)(x, wrap(ws[0])),
        "vmap": lambda x, ws, wrap: jax.vmap(one, in_axes=(0, None))(x, wrap(ws[0])),
        "vmap of weights": lambda x, ws, wrap: jax.vmap(one)(x, wrap(ws)),
        "scan": lambda x, ws, wrap: jax.lax.scan(
            lambda x, w: (one(x, w), None), x[0], wrap(ws)
        )[0],
    }  # fmt: skip

    @jax.jit
    def run(x, ws):
        def gradients(wrap):
            return {
                kind: jax.grad(lambda x, fun=fun: jnp.sum(jnp.sin(fun(x, ws, wrap))))(x)
                for kind, fun in transformed.items()
            }

        return gradients(FrozenWeight), gradients(lambda w: w)

    assert_close(*run(x, ws), 1e-12, 1e-13)
