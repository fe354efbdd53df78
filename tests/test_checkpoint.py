"""Tests of `actjax.checkpoint`: `jax.checkpoint`, but from codes of its arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from checkpoint_helpers import (
    DRAWN,
    KEY,
    NEAREST,
    assert_close,
    hat,
    layer,
    nbytes,
    normal,
    total,
)
from messages import assert_messages
from ops.helpers import assert_gradients_are_differences

from actjax import (
    Calibrated,
    Exact,
    LoRA,
    NF4Weight,
    Quantized,
    RandomizedSVD,
    checkpoint,
    linear,
)

CODECS = Exact(), NEAREST, DRAWN, RandomizedSVD(3)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_value_is_exact_and_the_gradient_is_taken_at_the_decoded_input(codec, x64):
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


def test_with_an_exact_codec_it_equals_jax_checkpoint():
    x, w = normal(0, 6, 8), normal(1, 8, 5)
    run = jax.jit(lambda x, w: [
        jax.value_and_grad(lambda *args: total(f(layer)(*args)), (0, 1))(x, w)
        for f in (functools.partial(checkpoint, codec=Exact()), jax.checkpoint)
    ])  # fmt: skip
    # Float32 sums of at most 8 terms of size 1 to 10, perhaps in another order.
    same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(same, *run(x, w))


def test_the_default_codec_has_four_bits(x64):
    x, w, dy = normal(0, 6, 8), normal(1, 8, 5), normal(2, 6, 8)
    fun = lambda x: layer(x, w)  # noqa: E731
    run = lambda x: [  # noqa: E731
        jax.vjp(f, x)[1](dy) for f in (checkpoint(fun), checkpoint(fun, Quantized(4)))
    ]
    assert_close(*jax.jit(run)(x))


def test_gradients_agree_with_a_numpy_oracle(x64):
    gate, up, dy = normal(0, 6, 8), normal(1, 6, 8), normal(2, 6, 8)

    @jax.jit
    def run(gate, up):
        fun = lambda gate, up: gate * jax.nn.sigmoid(gate) * up  # noqa: E731
        compressed = checkpoint(fun, DRAWN, activations=(0, 1), key=KEY)
        y, pullback = jax.vjp(compressed, gate, up)
        return y, pullback(dy), [hat(DRAWN, x, i) for i, x in enumerate((gate, up))]

    y, got, hats = run(gate, up)
    np.testing.assert_allclose(y, oracles.swiglu(gate, up), rtol=1e-12, atol=1e-13)
    assert_close(got, oracles.swiglu_vjp(*hats, dy))


def test_finite_differences(x64):
    x, w = normal(0, 3, 4), normal(1, 4, 2)
    assert_gradients_are_differences(checkpoint(layer, Exact()), x, w / 2)


def test_bfloat16_stays_bfloat16():
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
        # Two compilations of the same function may round some intermediate values differently.
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2**-5, atol=2**-5)


# Arguments.


def of_trees(tree, scale, more):
    """A function of pytrees that contain more than floats."""
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
def test_only_floating_point_arrays_at_the_positions_are_encoded(activations, x64):
    args = trees()
    positions = {activations} if isinstance(activations, int) else set(activations)
    compressed = checkpoint(of_trees, DRAWN, activations=activations, key=KEY)

    def split(args):
        """Returns the differentiable leaves, and a function that puts them back."""
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
            hats[i] = hat(DRAWN, floats[i], number)
        y, pullback = jax.vjp(lambda floats: compressed(*join(floats)), floats)
        want_y = of_trees(*join(floats))
        _, at_decoded = jax.vjp(lambda floats: of_trees(*join(floats)), hats)
        return (y, pullback(y)), (want_y, at_decoded(y))

    assert_close(*run(floats))
    # The pullback holds codes, and all other leaves unchanged.
    pullback = jax.eval_shape(lambda f: jax.vjp(lambda f: compressed(*join(f)), f)[1], floats)
    stored = sum(DRAWN.stored_bytes(floats[i].shape, floats[i].dtype) for i in coded)
    plain = [x for i, x in enumerate(floats) if i not in coded]
    assert nbytes(pullback) == stored + nbytes(
        (plain, [args[0][n] for n in ("key", "mask", "rows")])
    )


def test_python_scalars_may_be_arguments(x64):
    x = normal(0, 6, 8)

    def fun(x, shift, factor, none):
        assert none is None
        return jnp.sin(x * factor) + shift

    def gradient(f):
        return jax.jit(jax.grad(lambda x, b: total(f(x, 2, b, None)), (0, 1)))(x, 3.0)

    assert_close(gradient(checkpoint(fun, Exact())), gradient(fun))
    # Weak types stay weak: a bfloat16 array times a number is a bfloat16 array.
    out = jax.eval_shape(checkpoint(fun), x.astype(jnp.bfloat16), 2, 0.5, None)
    assert out.dtype == jnp.bfloat16


def test_outputs_may_be_trees_with_integers(x64):
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
def test_randomness_is_replayed(old, x64):
    x, key = normal(0, 6, 8), jax.random.PRNGKey(5) if old else jax.random.key(5)

    def dropout(x, key):
        return x * jax.random.bernoulli(key, 0.5, x.shape)

    run = jax.jit(lambda f, key: jax.vjp(f, x, key)[1](x)[0], static_argnums=0)
    got = run(checkpoint(dropout), key)
    assert_close(got, run(dropout, key))
    assert 0 < np.count_nonzero(got) < got.size


def test_the_random_numbers_depend_on_the_key_only():
    x, w = normal(0, 6, 8), normal(1, 8, 5)

    @jax.jit
    def gradient(key):
        return jax.grad(lambda x: total(checkpoint(layer, DRAWN, key=key)(x, w)))(x)

    first, again, other = (gradient(jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, gradient(jax.random.PRNGKey(1)))
    assert not np.allclose(first, other)


def test_a_codec_may_hold_arrays(x64):
    x, w, dy = normal(0, 6, 8), normal(1, 8, 5), normal(2, 6, 8)

    @jax.jit
    def run(x):
        codec = Calibrated.fit(Quantized(4, scaling="channel"), 2 * x)
        x_hat = codec.decode(codec.encode(x))
        fun = lambda x: layer(x, w)  # noqa: E731
        return jax.vjp(checkpoint(fun, codec), x)[1](dy), jax.vjp(fun, x_hat)[1](dy)

    assert_close(*run(x))


def test_the_function_may_use_four_bit_weights_with_an_adapter(x64):
    x, dy, a, b = normal(0, 6, 8), normal(1, 6, 5), normal(2, 8, 2), normal(3, 2, 5)
    weight = jax.jit(NF4Weight.quantize)(normal(4, 8, 5))

    def fun(x, a, b, weight):
        return jnp.tanh(linear(x, LoRA(weight, a, b, None, 1.0, 0.0)))

    @jax.jit
    def gradients(x, a, b, weight):
        x_hat = hat(NEAREST, x)
        got = jax.vjp(lambda *args: checkpoint(fun, NEAREST)(*args, weight), x, a, b)[1](dy)
        return got, jax.vjp(lambda *args: fun(*args, weight), x_hat, a, b)[1](dy)

    assert_close(*gradients(x, a, b, weight))


def test_keyword_arguments_may_be_static_and_have_gradients(x64):
    def fun(x, *, w, train):
        return jnp.sum(jnp.sin(x @ w) if train else x)

    x, w = np.ones((3, 4)), np.eye(4)
    functions = checkpoint(fun, Exact()), fun
    got, want = jax.jit(
        lambda w: [jax.grad(lambda w, f=f: f(x, w=w, train=True))(w) for f in functions]
    )(w)
    np.testing.assert_allclose(got, want, rtol=1e-12)


# Arrays that are not encoded.


def test_an_argument_without_floating_point_arrays_is_not_encoded():
    tokens, w = jnp.array([3, 1, 3]), normal(0, 5, 4)
    embed = lambda tokens, w: jnp.sin(w[tokens])  # noqa: E731
    got, want = (jax.jit(jax.grad(lambda w, f=f: total(f(tokens, w))))(w)
                 for f in (checkpoint(embed), embed))  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_without_positions_it_equals_jax_checkpoint():
    x, w = normal(0, 6, 8), normal(1, 8, 5)
    got, want = (jax.jit(jax.grad(lambda w, f=f: total(f(x, w))))(w)
                 for f in (checkpoint(layer, activations=()), layer))  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("codec", [Exact(), NEAREST], ids=str)
@pytest.mark.parametrize("make", [float, jnp.float32], ids=["python", "array"])
def test_scalars_among_the_activations(make, codec):
    # A scalar has no tokens and no features, so it is not encoded.
    x, dy = normal(0, 6, 8), normal(1, 6, 8)
    fun = lambda tree: jnp.sin(tree["x"]) * tree["scale"]  # noqa: E731

    def gradient(f, x):
        # The scale is not an argument of the program: a Python number stays a Python number.
        return jax.jit(lambda x: jax.vjp(f, {"x": x, "scale": make(2)})[1](dy)[0])(x)

    decoded = jax.jit(lambda x: hat(codec, x))(x)
    got, want = gradient(checkpoint(fun, codec), x), gradient(fun, decoded)
    for name, exact in want.items():
        # A float32 sum of 48 terms of size 1.
        np.testing.assert_allclose(got[name], exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("codec", [Exact(), NEAREST], ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0)], ids=str)
def test_empty_activations(codec, shape):
    gradient = jax.grad(lambda x: total(checkpoint(jnp.sin, codec)(x)))
    assert jax.eval_shape(gradient, np.zeros(shape, np.float32)).shape == shape


# Errors.


def test_messages():
    x, w = np.ones((6, 8), np.float32), np.ones((8, 5), np.float32)
    positions = "`activations` of checkpoint must be positions of arguments, 0 or above: "
    codecs = (Quantized, "<class"), ("exact", "'exact'"), (None, "None"), ((Exact(),), "(Exact")
    assert_messages(TypeError, [
        (lambda: checkpoint(3), "`fun` of checkpoint must be a function, got 3"),
        *((lambda it=it: checkpoint(layer, it),
           f"`codec` of checkpoint must be an actjax.Codec, got {shown}") for it, shown in codecs),
        *((lambda it=it: checkpoint(layer, activations=it), positions + repr(it))
          for it in (-1, True, [0, -1], "0", (0, "x"), [0, False], (0.0,))),
        *((lambda it=it: checkpoint(layer, activations=it), "`activations` of checkpoint")
          for it in (1.5, None)),
    ])  # fmt: skip
    of_position = "`activations` of checkpoint has position {}, but the function was called with 2"
    assert_messages(ValueError, [
        (lambda: checkpoint(layer, activations=2)(x, w), of_position.format(2)),
        (lambda: checkpoint(layer, activations=(0, 5))(x, w), of_position.format(5)),
        *((lambda key=key: checkpoint(layer, DRAWN, key=key)(x, w), f"got key={key}: pass `key`")
          for key in (None, 0)),
        (lambda: jax.grad(lambda x: total(checkpoint(layer, DRAWN)(x, w)))(x),
         f"`codec` {DRAWN} draws random numbers"),
    ])  # fmt: skip


def test_the_wrapper_has_the_name_and_docstring_of_the_function():
    assert checkpoint(layer).__name__ == "layer"
    assert checkpoint(layer).__doc__ == layer.__doc__
