"""Tests of actjax/checkpointing.py: `jax.checkpoint`, from a code of what it was given."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax.test_util import check_grads

import actjax
from actjax import Calibrated, Exact, Quantized, RandomizedSVD, checkpoint, explain, linear

KEY = jax.random.key(3)
NEAREST = Quantized(4, group=3)
DITHER = Quantized(2, group=4, rounding="dither")
CODECS = Exact(), NEAREST, DITHER, RandomizedSVD(3)


def normal(seed: int, *shape: int, dtype=None) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def layer(x, w):
    """Two products, so that there is something to keep and to recompute."""
    return x + jnp.tanh(jnp.sin(x @ w) @ w.T)


def total(*ys: jax.Array) -> jax.Array:
    """A scalar whose cotangents are not constant."""
    return sum((jnp.sum(jnp.sin(y)) for y in ys), jnp.zeros(()))


def hat(codec, x: jax.Array, number: int = 0, key=KEY) -> jax.Array:
    """Returns what the backward pass is to see of the coded array of this number."""
    return codec.decode(codec.encode(x, jax.random.fold_in(key, number)))


def nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def assert_close(got: Any, want: Any) -> None:
    # Float64: sums of at most 60 terms of size 1 to 10, perhaps in another order.
    same = functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-12)
    jax.tree.map(same, got, want)


# Values and gradients.


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_value_is_exact_to_the_bit_and_the_gradient_that_at_the_decoded_input(
    codec, x64, quick_compile
):
    x, w, dy = normal(0, 6, 8), normal(1, 8, 5), normal(2, 6, 8)

    @jax.jit
    def run(x, w):
        compressed = checkpoint(layer, codec, key=KEY)
        y, pullback = jax.vjp(compressed, x, w)
        _, at_decoded = jax.vjp(layer, hat(codec, x), w)
        return (y, compressed(x, w)), layer(x, w), pullback(dy), at_decoded(dy)

    values, want_value, got, want = run(x, w)
    for value in values:
        np.testing.assert_array_equal(value, want_value)
    assert_close(got, want)


def test_an_exact_codec_is_what_jax_does(quick_compile):
    x, w = normal(0, 6, 8), normal(1, 8, 5)
    run = jax.jit(lambda x, w: [
        jax.value_and_grad(lambda *args: total(f(layer)(*args)), (0, 1))(x, w)
        for f in (functools.partial(checkpoint, codec=Exact()), jax.checkpoint)
    ])  # fmt: skip
    # Float32: sums of at most 8 terms of size 1 to 10, perhaps in another order.
    same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(same, *run(x, w))


def test_four_bits_if_nothing_is_said(x64, quick_compile):
    x, w, dy = normal(0, 6, 8), normal(1, 8, 5), normal(2, 6, 8)
    fun = lambda x: layer(x, w)  # noqa: E731
    run = lambda x: [  # noqa: E731
        jax.vjp(f, x)[1](dy) for f in (checkpoint(fun), checkpoint(fun, Quantized(4)))
    ]
    assert_close(*jax.jit(run)(x))


def test_gradients_agree_with_an_oracle_that_jax_has_no_part_in(x64, quick_compile):
    gate, up, dy = normal(0, 6, 8), normal(1, 6, 8), normal(2, 6, 8)

    @jax.jit
    def run(gate, up):
        fun = lambda gate, up: gate * jax.nn.sigmoid(gate) * up  # noqa: E731
        compressed = checkpoint(fun, DITHER, activations=(0, 1), key=KEY)
        y, pullback = jax.vjp(compressed, gate, up)
        return y, pullback(dy), [hat(DITHER, x, i) for i, x in enumerate((gate, up))]

    y, got, hats = run(gate, up)
    np.testing.assert_allclose(y, oracles.swiglu(gate, up), rtol=1e-12, atol=1e-13)
    assert_close(got, oracles.swiglu_vjp(*hats, dy))


def test_finite_differences(x64, quick_compile):
    x, w = normal(0, 3, 4), normal(1, 4, 2)
    # The defaults of check_grads would let an error of 0.1% pass. With steps of 1e-5 truncation and
    # cancellation err by about 1e-10 each.
    fun = jax.jit(checkpoint(layer, Exact()))
    check_grads(fun, (x, w / 2), 1, ["rev"], 1e-8, 1e-8, 1e-5)


def test_bfloat16_comes_out_as_it_does_without(quick_compile):
    x, w = normal(0, 6, 8, dtype=jnp.bfloat16), normal(1, 8, 5)

    @jax.jit
    def run(x, w):
        y, pullback = jax.vjp(checkpoint(layer, NEAREST), x, w.astype(x.dtype))
        _, at_decoded = jax.vjp(layer, hat(NEAREST, x), w.astype(x.dtype))
        return y, layer(x, w.astype(x.dtype)), pullback(y), at_decoded(y)

    y, want_y, got, want = run(x, w)
    np.testing.assert_array_equal(y, want_y)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == jnp.bfloat16
        # Two compilations of the same may round otherwise here and there.
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2**-5, atol=2**-5)


# Arguments.


def of_trees(tree, scale, more):
    """A function of pytrees that hold more than floats."""
    noise = jax.random.normal(tree["key"], tree["x"].shape, tree["x"].dtype)
    picked = tree["x"][tree["rows"]] * jnp.where(tree["mask"], 2.0, 1.0)[:, None]
    return {"y": jnp.sin(picked) * scale, "z": (noise * tree["x"], tree["h"].sum() * more[0] ** 2)}


def trees():
    tree = {
        "h": normal(0, 2, 3, 4),
        "key": jax.random.key(1),
        "mask": jnp.array([True, False]),
        "rows": jnp.array([4, 1]),
        "x": normal(1, 6, 8),
    }
    return tree, normal(2, 8), (normal(3, 5, 4),)


FLOATS = {0: 2, 1: 1, 2: 1}
"""Floating point arrays in each argument of `of_trees`."""


@pytest.mark.parametrize("activations", [[2, 0], 1], ids=str)
def test_floating_point_arrays_at_the_positions_are_coded_and_nothing_else(
    activations, x64, quick_compile
):
    args = trees()
    positions = {activations} if isinstance(activations, int) else set(activations)
    compressed = checkpoint(of_trees, DITHER, activations=activations, key=KEY)

    def split(args):
        """Returns the leaves that are differentiated, and how to put them in again."""
        leaves, treedef = jax.tree.flatten(args)
        at = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

        def join(floats):
            merged = list(leaves)
            for i, x in zip(at, floats, strict=True):
                merged[i] = x
            return jax.tree.unflatten(treedef, merged)

        return [leaves[i] for i in at], join

    floats, join = split(args)
    owners = [owner for owner, count in FLOATS.items() for _ in range(count)]
    coded = [i for i, owner in enumerate(owners) if owner in positions]

    @jax.jit
    def run(floats):
        hats = list(floats)
        for number, i in enumerate(coded):
            hats[i] = hat(DITHER, floats[i], number)
        y, pullback = jax.vjp(lambda floats: compressed(*join(floats)), floats)
        want_y = of_trees(*join(floats))
        _, at_decoded = jax.vjp(lambda floats: of_trees(*join(floats)), hats)
        return (y, pullback(y)), (want_y, at_decoded(y))

    assert_close(*run(floats))
    # What is held: all that is not coded, as it is.
    pullback = jax.eval_shape(lambda f: jax.vjp(lambda f: compressed(*join(f)), f)[1], floats)
    stored = sum(DITHER.stored_bytes(floats[i].shape, floats[i].dtype) for i in coded)
    plain = [x for i, x in enumerate(floats) if i not in coded]
    assert nbytes(pullback) == stored + nbytes(
        (plain, [args[0][n] for n in ("key", "mask", "rows")])
    )


def test_python_scalars_are_arguments(x64, quick_compile):
    x = normal(0, 6, 8)

    def fun(x, shift, factor, none):
        assert none is None
        return jnp.sin(x * factor) + shift

    def gradient(f):
        return jax.jit(jax.grad(lambda x, b: total(f(x, 2, b, None)), (0, 1)))(x, 3.0)

    assert_close(gradient(checkpoint(fun, Exact())), gradient(fun))
    # Weak types stay weak: a bfloat16 times a number is a bfloat16.
    out = jax.eval_shape(checkpoint(fun), x.astype(jnp.bfloat16), 2, 0.5, None)
    assert out.dtype == jnp.bfloat16


def test_outputs_may_be_trees_with_integers_among_them(x64, quick_compile):
    x, w = normal(0, 6, 8), normal(1, 8, 5)

    def fun(x, w):
        y = x @ w
        return {"loss": total(y), "aux": (jnp.argmax(y), [y > 0, None]), "y": y}

    @jax.jit
    def run(x, w):
        compressed = checkpoint(fun, Exact())
        loss = lambda f: lambda *args: (f(*args)["loss"], f(*args))  # noqa: E731
        return [jax.grad(loss(f), (0, 1), has_aux=True)(x, w) for f in (compressed, fun)]

    assert_close(*run(x, w))


@pytest.mark.parametrize("old", [False, True])
def test_randomness_is_replayed(old, x64, quick_compile):
    x, key = normal(0, 6, 8), jax.random.PRNGKey(5) if old else jax.random.key(5)

    def dropout(x, key):
        return x * jax.random.bernoulli(key, 0.5, x.shape)

    run = jax.jit(lambda f, key: jax.vjp(f, x, key)[1](x)[0], static_argnums=0)
    got = run(checkpoint(dropout), key)
    assert_close(got, run(dropout, key))
    assert 0 < np.count_nonzero(got) < got.size


def test_another_key_draws_other_numbers_and_the_same_key_the_same(quick_compile):
    x, w = normal(0, 6, 8), normal(1, 8, 5)

    @jax.jit
    def gradient(key):
        return jax.grad(lambda x: total(checkpoint(layer, DITHER, key=key)(x, w)))(x)

    first, again, other = (gradient(jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, gradient(jax.random.PRNGKey(1)))
    assert not np.allclose(first, other)


def test_a_codec_may_hold_arrays(x64, quick_compile):
    x, w, dy = normal(0, 6, 8), normal(1, 8, 5), normal(2, 6, 8)

    @jax.jit
    def run(x):
        codec = Calibrated.fit(Quantized(4, scaling="channel"), 2 * x)
        x_hat = codec.decode(codec.encode(x))
        fun = lambda x: layer(x, w)  # noqa: E731
        return jax.vjp(checkpoint(fun, codec), x)[1](dy), jax.vjp(fun, x_hat)[1](dy)

    assert_close(*run(x))


# What is closed over.


def test_gradients_reach_what_the_function_closes_over(x64, quick_compile):
    x, w, dy, fixed = normal(0, 6, 8), normal(1, 8, 5), normal(2, 6, 8), normal(3, 6, 8)

    @jax.jit
    def run(x, w):
        hats = hat(NEAREST, x)

        def with_weights(x, w, of):
            return jax.vjp(lambda x, w: of(lambda x: layer(x, w) * fixed)(x), x, w)[1](dy)

        compressed = functools.partial(checkpoint, codec=NEAREST)
        return with_weights(x, w, compressed), with_weights(hats, w, lambda f: f)

    assert_close(*run(x, w))


def test_what_is_closed_over_is_kept_as_it_is():
    x, w = normal(0, 6, 8), normal(1, 8, 5)
    fun = lambda x, w: checkpoint(lambda x: layer(x, w), NEAREST)(x)  # noqa: E731
    pullback = jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], x, w)
    assert nbytes(pullback) == w.nbytes + NEAREST.stored_bytes(x.shape, x.dtype)


def test_closing_over_what_a_loop_or_a_map_runs_over(x64, quick_compile):
    x, ws = normal(0, 6, 8), normal(1, 3, 8, 5)

    def scanned(of):
        def body(x, w):
            return of(lambda x: layer(x, w) * ws.sum() / 9)(x), None

        return lambda x, ws: jax.lax.scan(body, x, ws)[0]

    def mapped(of):
        return jax.vmap(lambda x, w: of(lambda x: layer(x, w) * ws.sum())(x), in_axes=(None, 0))

    @jax.jit
    def run(x, ws):
        gradients = [
            jax.grad(lambda *args, f=f: total(f(*args)), (0, 1))(x, ws)
            for make in (scanned, mapped)
            for f in (make(functools.partial(checkpoint, codec=Exact())), make(lambda f: f))
        ]
        return gradients[0::2], gradients[1::2]

    assert_close(*run(x, ws))


# What is held.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_backward_holds_the_code_and_the_weights(codec, dtype):
    x, w = normal(0, 6, 8, dtype=dtype), normal(1, 8, 5, dtype=dtype)
    compressed = checkpoint(layer, codec, key=KEY)
    pullback = jax.eval_shape(lambda *args: jax.vjp(compressed, *args)[1], x, w)
    assert nbytes(pullback) == codec.stored_bytes(x.shape, dtype) + w.nbytes


@pytest.mark.parametrize("codec", [Exact(), Quantized(2, group=32, rounding="dither")], ids=str)
def test_under_scan_a_layer_takes_the_bytes_of_its_code_and_no_more(codec):
    def temporaries(layers):
        def loss(x, ws):
            run = checkpoint(layer, codec, key=KEY)
            return jnp.sum(jax.lax.scan(lambda x, w: (run(x, w), None), x, ws)[0] ** 2)

        x = jax.ShapeDtypeStruct((512, 64), "float32")
        ws = jax.ShapeDtypeStruct((layers, 64, 96), "float32")
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, ws).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    grown = temporaries(12) - temporaries(4)
    # Buffers are aligned; besides them nothing depends on the number of layers. One float kept
    # in a single one of the eight more layers would be 128 KiB.
    assert abs(grown - 8 * codec.stored_bytes((512, 64), "float32")) < 4096


def test_a_barrier_keeps_the_two_passes_apart():
    # Where the code is the input itself, XLA could else merge them, and keep what is recomputed.
    x, w = normal(0, 6, 8), normal(1, 8, 5)
    fun = lambda x: total(checkpoint(layer, Exact())(x, w))  # noqa: E731
    assert "optimization_barrier" in str(jax.make_jaxpr(jax.grad(fun))(x))


def test_explain_shows_the_codes_by_name():
    def fun(x, h, w):
        run = checkpoint(lambda x, h, w: layer(x, w) + h, NEAREST, activations=(0, 1), name="mine")
        return jnp.sum(run(-x, -h, w))

    found = explain(fun, normal(0, 6, 8), normal(1, 6, 8), normal(2, 8, 5))
    entries = {e.name: e for e in found.residuals if e.operator == "checkpoint"}
    assert sorted(entries) == ["mine 0", "mine 1"]
    size = NEAREST.stored_bytes((6, 8), "float32")
    assert all(e.stored_bytes == size for e in entries.values())
    assert found.stored_bytes == 2 * size
    alone = explain(
        lambda x, w: jnp.sum(checkpoint(layer)(-x, w)), normal(0, 6, 8), normal(2, 8, 5)
    )
    assert [e.name for e in alone.residuals if e.operator == "checkpoint"] == ["checkpoint"]


# Under transformations of JAX, and in one another.

TRANSFORMS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x, w: jax.lax.scan(lambda _, x: (None, f(x, w)), None, x)[1],
    "vmap": lambda f: jax.vmap(f, in_axes=(0, None)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_gradients_are_the_same_under(name, x64, quick_compile):
    x, w, dy = normal(0, 2, 3, 8), normal(1, 8, 5), normal(2, 2, 3, 8)

    def run(x, w):
        fun = TRANSFORMS[name](checkpoint(layer, NEAREST))
        # Groups lie within tokens: examples are coded alike, by themselves or in a batch.
        return jax.vjp(fun, x, w)[1](dy), jax.vjp(layer, hat(NEAREST, x), w)[1](dy)

    assert_close(*jax.jit(run)(x, w))


def test_under_vmap_each_example_may_have_its_own_key(quick_compile):
    x, w, keys = normal(0, 6, 8), normal(1, 8, 5), jax.random.split(KEY, 2)

    @jax.jit
    def gradient(key):
        return jax.grad(lambda x: total(checkpoint(layer, DITHER, key=key)(x, w)))(x)

    mapped = jax.jit(jax.vmap(gradient))(keys)
    # Float32: sums of 8 terms of size 1 to 10.
    np.testing.assert_allclose(mapped, [gradient(key) for key in keys], rtol=1e-5, atol=1e-5)
    assert not np.allclose(*mapped)


def test_in_one_another_each_decodes_its_own(x64, quick_compile):
    x, w, dy, coarse = normal(0, 6, 8), normal(1, 8, 5), normal(2, 6, 8), Quantized(2, group=8)

    def twice(inner):
        return lambda x, w: inner(jnp.cos(inner(x, w)), w)

    @jax.jit
    def run(x, w):
        nested = checkpoint(twice(checkpoint(layer, coarse)), NEAREST)
        got = jax.vjp(nested, x, w)[1](dy)
        # The outer one runs on from its own code; the inner ones code what they are then given.
        first = hat(NEAREST, x)
        middle = layer(first, w)
        _, last = jax.vjp(layer, hat(coarse, jnp.cos(middle)), w)
        dmiddle, dw = last(dy)
        _, before = jax.vjp(layer, hat(coarse, first), w)
        dx, dw_before = before(-jnp.sin(middle) * dmiddle)
        return got, (dx, dw + dw_before)

    assert_close(*run(x, w))
    held = jax.eval_shape(
        lambda *a: jax.vjp(checkpoint(twice(checkpoint(layer, coarse)), NEAREST), *a)[1], x, w
    )
    assert nbytes(held) == w.nbytes + NEAREST.stored_bytes(x.shape, x.dtype)


def test_control_flow_is_run_again_with_its_branches(x64, quick_compile):
    x, w = normal(0, 6, 8), normal(1, 8, 8)

    def fun(x, w, steps):
        x = jax.lax.cond(steps > 2, lambda: jnp.sin(x @ w), lambda: jnp.cos(x @ w))
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, 2)[0]

    @jax.jit
    def run(x, w, steps):
        fs = checkpoint(fun, Exact()), fun
        return [jax.grad(lambda *a, f=f: total(f(*a, steps)), (0, 1))(x, w) for f in fs]

    for steps in (1, 5):
        assert_close(*run(x, w, steps))


# Factored gradients.


def test_weights_within_have_factored_gradients(x64, quick_compile):
    x, w, b = normal(0, 6, 8), {"w": normal(1, 8, 5)}, {"w": normal(2, 8, 3)}
    # Of full rank: factors of the gradient without a codec.
    codec = RandomizedSVD(6)

    def given(params, codec):
        run = checkpoint(lambda x, w: jnp.sin(linear(x, w, codec=codec, key=KEY)), NEAREST)
        return total(run(x, params["w"]))

    def closed_over(params, codec):
        fun = lambda x: jnp.sin(linear(x, params["w"], codec=codec, key=KEY))  # noqa: E731
        return total(checkpoint(fun, NEAREST)(x))

    for fun in (given, closed_over):
        assert actjax.input_groups(functools.partial(fun, codec=Exact()), w) == {"w": "w"}

    @jax.jit
    def run(w):
        factored = actjax.value_and_grad(functools.partial(given, codec=codec))(w)[1]["w"]
        exact = functools.partial(closed_over, codec=Exact())
        in_basis = actjax.value_and_grad(exact, bases=b)(w)[1]["w"]
        return factored, in_basis, jax.grad(exact)(w)["w"]

    factored, in_basis, want = run(w)
    # Rank 6 of 6 tokens, in float64.
    assert_close(factored.dense(), want)
    np.testing.assert_array_equal(in_basis.left, b["w"])
    assert_close(in_basis.right, b["w"].T @ want)


# Arrays that no codec fits.


def test_an_argument_without_floating_point_arrays_has_nothing_to_code(quick_compile):
    tokens, w = jnp.array([3, 1, 3]), normal(0, 5, 4)
    embed = lambda tokens, w: jnp.sin(w[tokens])  # noqa: E731
    got, want = (jax.jit(jax.grad(lambda w, f=f: total(f(tokens, w))))(w)
                 for f in (checkpoint(embed), embed))  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_no_positions_are_as_good_as_jax_checkpoint(quick_compile):
    x, w = normal(0, 6, 8), normal(1, 8, 5)
    got, want = (jax.jit(jax.grad(lambda w, f=f: total(f(x, w))))(w)
                 for f in (checkpoint(layer, activations=()), layer))  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("codec", [Exact(), NEAREST], ids=str)
@pytest.mark.parametrize("make", [float, jnp.float32], ids=["python", "array"])
def test_scalars_among_the_activations(make, codec, quick_compile):
    # A scalar has no tokens and no features: there is nothing to gain, and so nothing to lose.
    x, dy = normal(0, 6, 8), normal(1, 6, 8)
    fun = lambda tree: jnp.sin(tree["x"]) * tree["scale"]  # noqa: E731
    at = {"x": x, "scale": make(2)}
    decoded = {"x": jax.jit(lambda x: hat(codec, x))(x), "scale": make(2)}
    got = jax.vjp(checkpoint(fun, codec), at)[1](dy)[0]
    want = jax.vjp(fun, decoded)[1](dy)[0]
    for name, exact in want.items():
        # Float32: a sum of 48 terms of size 1.
        np.testing.assert_allclose(got[name], exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("codec", [Exact(), NEAREST], ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0)], ids=str)
def test_empty_activations(codec, shape, quick_compile):
    x = jnp.zeros(shape)
    got = jax.grad(lambda x: total(checkpoint(jnp.sin, codec)(x)))(x)
    assert got.shape == shape


@pytest.mark.parametrize("closed_over", [False, True])
def test_gradients_of_complex_weights_are_not_lost(closed_over, quick_compile):
    x, c = normal(0, 6, 8), normal(1, 6, 8) + 1j * normal(2, 6, 8)

    def gradient(of):
        def loss(c):
            if closed_over:
                return jnp.sum(of(lambda x: jnp.abs(x * c) ** 2)(x))
            return jnp.sum(of(lambda x, c: jnp.abs(x * c) ** 2)(x, c))

        return jax.jit(jax.grad(loss))(c)

    want = gradient(jax.checkpoint)
    got = gradient(functools.partial(checkpoint, codec=Exact()))
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_what_is_passed_by_name_may_be_static_and_has_gradients(x64, quick_compile):
    def fun(x, *, w, train):
        return jnp.sum(jnp.sin(x @ w) if train else x)

    x, w = jnp.ones((3, 4)), jnp.eye(4)
    got = jax.grad(lambda w: checkpoint(fun, Exact())(x, w=w, train=True))(w)
    np.testing.assert_allclose(got, jax.grad(lambda w: fun(x, w=w, train=True))(w), rtol=1e-12)


# Errors.


def test_what_is_no_function_is_refused_at_once():
    with pytest.raises(TypeError, match="`fun` of checkpoint must be a function, got 3"):
        checkpoint(3)


def test_what_is_no_array_is_refused():
    with pytest.raises(
        TypeError, match="an argument is 'a', which is no array: pass what is static"
    ):
        checkpoint(lambda x, mode: x)(jnp.ones(3), "a")


@pytest.mark.parametrize(
    ("codec", "shown"),
    [(Quantized, "<class 'actjax."), ("exact", "'exact'"), (None, "None"), ((Exact(),), "(Exact")],
)
def test_what_is_no_codec_is_refused_at_once(codec, shown):
    message = f"`codec` of checkpoint must be an actjax.Codec, got {shown}"
    with pytest.raises(TypeError, match=re.escape(message)):
        checkpoint(layer, codec)


@pytest.mark.parametrize("activations", [-1, True, [0, -1], "0", (0, "x"), [0, False], (0.0,)])
def test_what_are_no_positions_is_refused_at_once(activations):
    message = "`activations` of checkpoint must be positions of arguments, 0 or above: "
    with pytest.raises(TypeError, match=re.escape(message + repr(activations))):
        checkpoint(layer, activations=activations)


@pytest.mark.parametrize("activations", [1.5, None])
def test_what_is_no_number_is_refused_by_name(activations):
    with pytest.raises(TypeError, match="`activations` of checkpoint"):
        checkpoint(layer, activations=activations)


@pytest.mark.parametrize("activations", [2, (0, 5)])
def test_a_position_that_is_not_there_is_refused_in_the_call(activations):
    x, w = normal(0, 6, 8), normal(1, 8, 5)
    position = np.max(activations)
    message = (
        f"`activations` of checkpoint has position {position}, but the function was called with 2"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        checkpoint(layer, activations=activations)(x, w)


@pytest.mark.parametrize("key", [None, 0])
def test_a_missing_key_is_refused_in_the_call(key):
    x, w = normal(0, 6, 8), normal(1, 8, 5)
    run = checkpoint(layer, DITHER, key=key)
    with pytest.raises(ValueError, match=re.escape(f"got key={key}: pass `key`")):
        run(x, w)
    with pytest.raises(ValueError, match=re.escape(f"`codec` {DITHER} draws random numbers")):
        jax.grad(lambda x: total(run(x, w)))(x)


def test_name_and_docstring_are_those_of_the_function():
    assert checkpoint(layer).__name__ == "layer"
    assert checkpoint(layer).__doc__ == layer.__doc__
