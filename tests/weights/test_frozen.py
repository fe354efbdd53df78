"""Tests of actjax/weights.py: of a weight without gradient nothing is kept, and nothing made."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from flax import nnx
from jaxprs import nbytes, products

from actjax import (
    Exact,
    FrozenWeight,
    NF4Weight,
    Quantized,
    RandomProjection,
    attention_linear,
    cross_entropy,
    explain,
    linear,
    norm_linear,
    qkv_projection,
    swiglu_linear,
)

BF16 = 2.0**-8
"""Unit roundoff of bfloat16: the relative error of one rounding."""
KEY = jax.random.key(7)


def normal(seed: int, *shape: int, dtype=None) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


quantize = jax.jit(NF4Weight.quantize)  # Step by step most of the time would be compilation.


def assert_close(got, want, rtol=1e-12, atol=1e-13):
    same = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(same, got, want)


# Values and gradients.


@pytest.mark.parametrize("codec", [Exact(), RandomProjection(3)], ids=str)
def test_value_and_dx_are_those_of_the_plain_weight(codec, x64, quick_compile):
    x, bias = normal(0, 2, 5, 6), (normal(1, 4), None, normal(2, 3))
    ws = [normal(i, 6, n) for i, n in enumerate((4, 2, 3))]
    dzs = tuple(normal(i, 2, 5, n) for i, n in enumerate((4, 2, 3), 9))

    @jax.jit
    def run(x, ws, bias):
        def fun(x, bias):
            return linear(x, tuple(map(FrozenWeight, ws)), bias=bias, codec=codec, key=KEY)

        zs, pullback = jax.vjp(fun, x, bias)
        return zs, *pullback(dzs)

    zs, dx, dbs = run(x, ws, bias)
    x, ws, dzs = jax.tree.map(np.asarray, (x, ws, dzs))
    for z, w, b in zip(zs, ws, bias, strict=True):
        # Sums of six terms, and of nine in `dx`, of size 1: some 1e-16 each.
        assert_close(z, x @ w + (0 if b is None else np.asarray(b)))
    assert_close(dx, sum(dz @ w.T for w, dz in zip(ws, dzs, strict=True)))
    # Biases are no part of it.
    assert dbs[1] is None
    for db, dz in ((dbs[0], dzs[0]), (dbs[2], dzs[2])):
        assert_close(db, dz.sum((0, 1)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_value_and_dx_are_those_of_the_plain_weight_to_the_bit(dtype):
    x, w, dz = (normal(i, *s, dtype=dtype) for i, s in enumerate(((6, 8), (8, 5), (6, 5))))

    @jax.jit
    def run(x, w):
        found = [jax.vjp(lambda x, w=w: linear(x, w), x) for w in (FrozenWeight(w), w)]
        return [(z, *pullback(dz)) for z, pullback in found]

    jax.tree.map(np.testing.assert_array_equal, *run(x, w))


def test_its_gradient_is_zero_where_one_is_asked_for(quick_compile):
    x, w = normal(0, 6, 8), normal(1, 8, 5)
    grads = jax.jit(jax.grad(lambda f: jnp.sum(linear(x, f) ** 2)))(FrozenWeight(w))
    assert isinstance(grads, FrozenWeight)
    np.testing.assert_array_equal(grads.weight, np.zeros((8, 5)))


@pytest.mark.parametrize("codec", [Exact(), RandomProjection(3)], ids=str)
def test_beside_it_others_have_their_gradients(codec, x64, quick_compile):
    x, ws, dz = normal(0, 6, 8), [normal(i, 8, 5) for i in (1, 2, 3)], normal(4, 6, 5)

    @jax.jit
    def run(x, ws):
        def fun(w):
            return linear(x, (FrozenWeight(ws[0]), w, FrozenWeight(ws[2])), codec=codec, key=KEY)

        pullback = jax.vjp(fun, ws[1])[1]
        return *pullback((dz, 2 * dz, dz)), codec.decode(codec.encode(x, KEY))

    dw, x_hat = run(x, ws)
    assert_close(dw, 2 * np.asarray(x_hat).T @ np.asarray(dz))


# Each operator that ends in a linear one, what it is before that, and its vjp.
SCALE = 1 + normal(9, 8) / 4


def attended(q, k, v):
    return oracles.attention(q, k, v, True).reshape(2, 5, 8)


def attended_vjp(q, k, v, dy):
    return oracles.attention_vjp(q, k, v, dy.reshape(2, 5, 4, 2), True)


OPERATORS = {
    "norm": (
        lambda x, w, **given: norm_linear(x, SCALE, w, eps=1e-6, **given),
        lambda x: oracles.rms_norm(x, SCALE, 1e-6),
        lambda x, dy: (oracles.rms_norm_vjp(x, SCALE, 1e-6, dy)[0],),
        ((2, 5, 8),),
    ),
    "swiglu": (swiglu_linear, oracles.swiglu, oracles.swiglu_vjp, ((2, 5, 8),) * 2),
    "attention": (
        attention_linear, attended, attended_vjp, ((2, 5, 4, 2), (2, 5, 2, 2), (2, 5, 2, 2)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "codec"),
    [("swiglu", Exact()), *((name, Quantized(4, group=2)) for name in ("norm", "attention"))],
    ids=str,
)
def test_operators_that_end_in_a_linear_one_take_it(name, codec, x64, quick_compile):
    operator, first, vjp, shapes = OPERATORS[name]
    xs = tuple(normal(i, *shape) for i, shape in enumerate(shapes))
    w, other, dz, dother = (
        normal(i, *s) for i, s in enumerate(((8, 3), (8, 4), (2, 5, 3), (2, 5, 4)), 20)
    )

    @jax.jit
    def run(xs, w, other):
        def fun(xs, other):
            return operator(*xs, (FrozenWeight(w), other), codec=codec)

        zs, pullback = jax.vjp(fun, xs, other)
        hats = tuple(
            codec.decode(codec.encode(x.reshape(2, 5, -1))).reshape(x.shape)
            for x in xs
        )  # fmt: skip
        return zs, pullback((dz, dother)), hats

    zs, (dxs, dother_w), hats = run(xs, w, other)
    xs, hats, w, other, dz, dother = jax.tree.map(np.asarray, (xs, hats, w, other, dz, dother))
    y, y_hat = first(*xs), first(*hats)
    assert_close(zs, (y @ w, y @ other), 1e-11, 1e-12)
    assert_close(dxs, vjp(*hats, dz @ w.T + dother @ other.T), 1e-11, 1e-12)
    assert_close(dother_w, np.einsum("bsd,bsn->dn", y_hat, dother), 1e-11, 1e-12)


def test_a_projection_of_three_takes_it(x64):
    x, ws = normal(0, 6, 8), [normal(i, 8, 4) for i in range(3)]
    got = qkv_projection(x, FrozenWeight(ws[0]), ws[1], FrozenWeight(ws[2]))
    assert_close(got, tuple(np.asarray(x) @ np.asarray(w) for w in ws))


# Weights of 4 bits.


@pytest.mark.parametrize("frozen", [False, True])
def test_a_weight_of_4_bits_is_what_it_is_decoded_to(frozen, x64, quick_compile):
    x, q, dz = normal(0, 6, 70), quantize(normal(1, 70, 5)), normal(2, 6, 5)

    @jax.jit
    def run(x, q):
        z, pullback = jax.vjp(lambda x: linear(x, FrozenWeight(q) if frozen else q), x)
        return z, *pullback(dz), q.astype(jnp.float64)

    z, dx, w = run(x, q)
    w = np.asarray(w)
    # Sums of 70 terms of size 1.
    assert_close(z, np.asarray(x) @ w, 1e-11, 1e-12)
    assert_close(dx, np.asarray(dz) @ w.T, 1e-11, 1e-12)


def test_a_weight_of_4_bits_is_decoded_in_the_dtype_of_the_input(quick_compile):
    q = quantize(normal(1, 70, 5))
    x, dz = normal(0, 6, 70, dtype="bfloat16"), normal(2, 6, 5, dtype="bfloat16")

    @jax.jit
    def run(x, q):
        z, pullback = jax.vjp(lambda x: linear(x, q), x)
        return z, *pullback(dz), q.astype("float32")

    z, dx, w = run(x, q)
    assert z.dtype == dx.dtype == jnp.bfloat16
    x, dz, w = (np.float64(a) for a in (x, dz, w))
    # The weight and the result are rounded; if its level and scale are too, twice more.
    for got, want, terms in (
        (z, x @ w, np.abs(x) @ np.abs(w)),
        (dx, dz @ w.T, np.abs(dz) @ np.abs(w).T),
    ):
        assert np.all(np.abs(np.float64(got) - want) <= 3 * BF16 * terms + BF16 * np.abs(want))


# What is held.


def temporaries(layers, features, tokens, stack, *more) -> int:
    """Returns the bytes of temporaries of the gradient of a scan over layers."""

    def loss(x, more, stacked):
        def body(x, layer):
            weight, *rest = layer
            return linear(x, stack(weight), bias=rest[0] if rest else None), None

        return jnp.sum(jax.lax.scan(body, x, (stacked, *more))[0] ** 2)

    w = jax.ShapeDtypeStruct((layers, features, features), jnp.float32)
    if stack is not None and more and more[0] == "4 bits":
        w, more = jax.eval_shape(jax.vmap(NF4Weight.quantize), w), more[1:]
    x = jax.ShapeDtypeStruct((tokens, features), jnp.float32)
    more = tuple(jax.ShapeDtypeStruct((layers, *shape), jnp.float32) for shape in more)
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, more, w).compile()
    return compiled.memory_analysis().temp_size_in_bytes


KINDS = {
    "frozen, with a trained bias": (FrozenWeight, ((64,),)),
    "4 bits": (lambda w: w, ("4 bits",)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_under_scan_a_layer_more_keeps_nothing(kind):
    stack, more = KINDS[kind]
    few, many = (temporaries(layers, 64, 1024, stack, *more) for layers in (4, 12))
    # Its input would be 256 KiB, and a weight of 4 bits decoded 16 KiB.
    assert abs(many - few) < 1024


def test_with_a_plain_weight_that_is_trained_a_layer_more_keeps_its_input():
    # That the test above can fail.
    def loss(ws, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (linear(x, w), None), x, ws)[0] ** 2)

    def bytes_of(layers):
        ws = jax.ShapeDtypeStruct((layers, 64, 64), jnp.float32)
        x = jax.ShapeDtypeStruct((1024, 64), jnp.float32)
        compiled = jax.jit(jax.grad(loss)).lower(ws, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert bytes_of(12) - bytes_of(4) >= 8 * 1024 * 64 * 4


@pytest.mark.parametrize("codec", [Exact(), Quantized(4, group=4), RandomProjection(3)], ids=repr)
def test_backward_holds_nothing_but_the_weight(codec):
    x, w = normal(0, 16, 8), normal(1, 8, 5)

    def pullback(x):
        return jax.vjp(lambda x: linear(-x, FrozenWeight(w), codec=codec, key=KEY), x)[1]

    # With respect to the weight too: no gradient of it is to come.
    def of_both(x, w):
        return jax.vjp(lambda x, w: linear(-x, FrozenWeight(w), codec=codec, key=KEY), x, w)[1]

    assert nbytes(jax.eval_shape(pullback, x)) == w.nbytes
    assert nbytes(jax.eval_shape(of_both, x, w)) == w.nbytes


def test_beside_a_plain_weight_one_code_is_held():
    x, w, other = normal(0, 16, 8), normal(1, 8, 5), normal(2, 8, 3)
    codec = RandomProjection(3)

    def pullback(x, w, other):
        fun = lambda x, other: linear(-x, (FrozenWeight(w), other), codec=codec, key=KEY)  # noqa: E731
        return jax.vjp(fun, x, other)[1]

    size = nbytes(jax.eval_shape(pullback, x, w, other))
    assert size == w.nbytes + other.nbytes + codec.stored_bytes(x.shape, x.dtype)


def test_a_barrier_keeps_the_decoded_weight_of_the_two_passes_apart():
    # XLA could merge them, and keep what is to be decoded again. (On CPUs it does so even then.)
    q = jax.eval_shape(NF4Weight.quantize, normal(1, 8, 5))
    fun = lambda x, q: jnp.sum(linear(x, q))  # noqa: E731
    assert "optimization_barrier" in str(jax.make_jaxpr(jax.grad(fun))(normal(0, 6, 8), q))


def test_explain_names_nothing_of_its_input():
    w = normal(1, 8, 5)
    found = explain(lambda x: jnp.sum(linear(-x, FrozenWeight(w))), normal(0, 16, 8))
    assert not any(entry.operator == "linear" for entry in found.residuals)


# What is computed.


@pytest.mark.parametrize("codec", [Exact(), RandomProjection(3)], ids=repr)
@pytest.mark.parametrize("argnums", [0, (0, 1)], ids=["dx", "dx and what would be dw"])
def test_no_product_is_made_for_its_gradient(argnums, codec):
    x, w = normal(0, 16, 8), normal(1, 8, 5)

    def shapes(wrap):
        def fun(x, w):
            return jnp.sum(linear(x, wrap(w), codec=codec, key=KEY) ** 2)

        return products(jax.grad(fun, argnums), x, w)

    assert sorted(shapes(FrozenWeight)) == [(16, 5), (16, 8)]
    # That this can fail.
    assert (8, 5) in shapes(lambda w: w)


@pytest.mark.parametrize("name", OPERATORS)
def test_of_other_operators_no_product_is_made_for_its_gradient_either(name):
    operator, _, _, shapes = OPERATORS[name]
    xs = tuple(normal(i, *shape) for i, shape in enumerate(shapes))

    def made(wrap):
        fun = lambda xs, w: jnp.sum(operator(*xs, wrap(w)) ** 2)  # noqa: E731
        return products(jax.grad(fun, (0, 1)), xs, normal(9, 8, 3))

    assert len(made(FrozenWeight)) == len(made(lambda w: w)) - 1
    assert not {(8, 3), (3, 8)} & set(made(FrozenWeight))
    assert {(8, 3), (3, 8)} & set(made(lambda w: w))


# The output projection.


def head_problem(dtype=None):
    labels = jnp.asarray(np.random.default_rng(3).integers(0, 11, (2, 6)))
    mask = jnp.asarray(np.random.default_rng(4).integers(0, 2, (2, 6)))
    return normal(0, 2, 6, 8, dtype=dtype), normal(1, 8, 11, dtype=dtype), labels, mask


@pytest.mark.parametrize(
    ("masked", "options", "chunk"),
    [(False, {}, None), (True, {"z_loss": 0.1}, None), (True, {}, 5), (False, {"z_loss": 0.1}, 5)],
    ids=str,
)
def test_a_frozen_head_gives_the_loss_and_dhidden(masked, options, chunk, x64, quick_compile):
    hidden, head, labels, mask = head_problem()
    mask = mask if masked else None

    @jax.jit
    def run(hidden, head):
        def fun(hidden):
            given = {"mask": mask, "chunk": chunk, **options}
            return 3 * cross_entropy(hidden, FrozenWeight(head), labels, **given)

        return fun(hidden), *jax.value_and_grad(fun)(hidden)

    flat = [None if x is None else np.asarray(x).reshape(12, *x.shape[2:])
            for x in (hidden, labels, mask)]  # fmt: skip
    arguments = flat[0], head, flat[1], flat[2], options.get("z_loss", 0.0)
    alone, loss, dhidden = run(hidden, head)
    # Sums of 12 tokens, with exponentials: some 1e-16 each.
    assert_close((alone, loss), (3 * oracles.cross_entropy(*arguments),) * 2)
    want = 3 * oracles.cross_entropy_vjp(*arguments)[0]
    assert_close(dhidden, want.reshape(hidden.shape))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_frozen_head_gives_the_very_bits_of_a_plain_one(dtype):
    hidden, head, labels, mask = head_problem(dtype)

    def run(head):
        fun = lambda hidden: cross_entropy(hidden, head, labels, mask=mask, z_loss=1e-2)  # noqa: E731
        return jax.jit(jax.value_and_grad(fun))(hidden)

    jax.tree.map(np.testing.assert_array_equal, run(FrozenWeight(head)), run(head))


def test_a_frozen_head_of_another_kind(x64, quick_compile):
    hidden, _, labels, _ = head_problem()
    table = normal(5, 11, 8)
    q = quantize(table.T)

    @jax.jit
    def run(hidden, table, q):
        heads = {
            "of the embedding": FrozenWeight(table).T,
            "4 bits": FrozenWeight(q),
        }
        found = {
            name: jax.value_and_grad(lambda h, w=w: cross_entropy(h, w, labels))(hidden)
            for name, w in heads.items()
        }
        return found, q.astype("float64")

    found, decoded = run(hidden, table, q)
    hidden, labels = np.reshape(hidden, (12, 8)), np.reshape(labels, 12)
    for name, head in (("of the embedding", table.T), ("4 bits", decoded)):
        loss, dhidden = found[name]
        assert_close(loss, oracles.cross_entropy(hidden, head, labels))
        want = oracles.cross_entropy_vjp(hidden, head, labels)[0]
        assert_close(dhidden, want.reshape(2, 6, 8))


@pytest.mark.parametrize("chunk", [12, 5])
def test_of_a_frozen_head_no_product_is_made_for_its_gradient(chunk):
    hidden, head, labels, _ = head_problem()

    def made(wrap):
        def fun(hidden, head):
            return cross_entropy(hidden, wrap(head), labels, chunk=chunk)

        return products(jax.grad(fun, (0, 1)), hidden, head)

    # In a loop over whole chunks, and in a shorter last one.
    count = 1 if chunk == 12 else 2
    assert len(made(FrozenWeight)) == 2 * count
    assert len(made(lambda w: w)) == 3 * count
    assert (8, 11) not in made(FrozenWeight)


def test_of_a_frozen_head_no_gradient_is_held():
    # 4 MiB, of which a plain head has the gradient, and its sum so far.
    hidden, labels = jax.ShapeDtypeStruct((256, 128), "float32"), jnp.zeros(256, int)
    head = jax.ShapeDtypeStruct((128, 8192), "float32")

    def size(wrap):
        fun = lambda h, w: cross_entropy(h, wrap(w), labels, chunk=16)  # noqa: E731
        compiled = jax.jit(jax.grad(fun, (0, 1))).lower(hidden, head).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # Where both gradients are asked for, the frozen one's zeros are no temporary.
    assert size(lambda w: w) - size(FrozenWeight) > 2**22 - 1024  # Buffers are aligned.


# As a value.


def test_it_has_the_shape_of_its_weight():
    w = normal(0, 8, 5, dtype=jnp.bfloat16)
    for frozen in (FrozenWeight(w), FrozenWeight(quantize(w))):
        assert (frozen.shape, frozen.ndim, frozen.dtype) == ((8, 5), 2, jnp.bfloat16)
    assert FrozenWeight(w).T.shape == (5, 8)
    assert "FrozenWeight" in repr(FrozenWeight(w))


def test_it_stands_for_the_value_of_a_variable():
    x, w = normal(0, 6, 8), normal(1, 8, 5)
    np.testing.assert_array_equal(linear(x, FrozenWeight(nnx.Param(w))), linear(x, w))


@pytest.mark.parametrize("kind", ["checkpoint", "vmap", "vmap of weights", "scan"])
def test_gradients_are_the_same_under(kind, x64, quick_compile):
    x, ws = normal(0, 3, 6, 8), normal(1, 3, 8, 8)

    def one(x, frozen):
        return jnp.tanh(linear(x, frozen))

    def transformed(x, ws, wrap):
        if kind == "checkpoint":
            return jax.checkpoint(one)(x, wrap(ws[0]))
        if kind == "vmap":
            return jax.vmap(one, in_axes=(0, None))(x, wrap(ws[0]))
        if kind == "vmap of weights":
            return jax.vmap(one)(x, wrap(ws))
        return jax.lax.scan(lambda x, w: (one(x, w), None), x[0], wrap(ws))[0]

    def gradient(wrap):
        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(transformed(x, ws, wrap)))))(x)

    assert_close(gradient(FrozenWeight), gradient(lambda w: w))


# Errors.

X, W = jnp.ones((6, 8)), jnp.ones((8, 5))
LABELS = jnp.zeros(6, int)

ERRORS = {
    "transposed": (
        lambda: linear(X, FrozenWeight(W.T)), ValueError, "got x(6, 8) @ w(5, 8). Did you pass it",
    ),
    "4 bits of other features": (
        lambda: linear(X, quantize(W[:7])), ValueError, "got x(6, 8) @ w(7, 5)",
    ),
    "integers": (
        lambda: linear(X, FrozenWeight(W.astype(int))),
        TypeError,
        "`w` must be a floating point array, got int32",
    ),
    "no array": (lambda: linear(X, FrozenWeight(3.0)), TypeError, "`w` must be a floating point"),
    "bias": (
        lambda: linear(X, FrozenWeight(W), bias=jnp.ones(4)), ValueError, "must be (5,), got (4,)",
    ),
    "head": (
        lambda: cross_entropy(X, FrozenWeight(W.T), LABELS),
        ValueError,
        "got hidden(6, 8) @ head(5, 8)",
    ),
    "head of integers": (
        lambda: cross_entropy(X, FrozenWeight(W.astype(int)), LABELS), TypeError, "`head` must be",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_argument_and_what_came(case):
    call, kind, message = ERRORS[case]
    with pytest.raises(kind, match=re.escape(message)):
        call()
