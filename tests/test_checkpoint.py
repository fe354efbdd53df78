"""Tests of `actjax.checkpoint`: `jax.checkpoint`, but from codes of its arguments.

`tests/residuals/test_residuals_exact.py` and `test_residuals_functions.py` wrap all functions.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from cheap_codecs import Coarse, CoarseRandom, Spanned
from jaxprs import nbytes
from messages import assert_messages
from ops.helpers import assert_gradients_are_differences
from residuals.residual_helpers import assert_close, normal, total

import actjax
from actjax import (
    Calibrated,
    Exact,
    LoRA,
    NF4Weight,
    Quantized,
    RandomizedSVD,
    checkpoint,
    explain,
    linear,
)

KEY = jax.random.key(3)
NEAREST, DRAWN = Coarse(), CoarseRandom()
CODECS = Exact(), NEAREST, DRAWN, Spanned(3)


def layer(x, w):
    """Two products, whose residuals are stored or recomputed."""
    return x + jnp.tanh(jnp.sin(x @ w) @ w.T)


def hat(codec, x, number: int = 0):
    """Returns what the backward pass must read for the encoded array of this number."""
    return codec.decode(codec.encode(x, jax.random.fold_in(KEY, number)))


def gradient_at(fun, args, dy):
    return jax.vjp(fun, *args)[1](dy)


def held(fun, *args) -> int:
    """Returns the bytes that the backward pass holds, arguments included."""
    return nbytes(jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *args))


def test_value_is_exact_and_the_gradient_is_taken_at_the_decoded_input(x64):
    x, w, dy = normal(0, 6, 8), normal(1, 8, 5), normal(2, 6, 8)

    @jax.jit
    def run(x, w):
        cases = []
        for codec in CODECS:
            coded = checkpoint(layer, codec, key=KEY)
            y, pullback = jax.vjp(coded, x, w)
            cases.append(
                ((y, coded(x, w)), pullback(dy), gradient_at(layer, (hat(codec, x), w), dy))
            )
        nothing = checkpoint(layer, NEAREST, activations=())
        return layer(x, w), cases, gradient_at(nothing, (x, w), dy)

    value, cases, nothing_coded = run(x, w)
    for values, got, want in cases:
        for y in values:
            np.testing.assert_array_equal(y, value)
        assert_close(got, want)
    exact = cases[0][1]
    assert_close(nothing_coded, exact)


def test_gradients_agree_with_a_numpy_oracle(x64):
    gate, up, dy = normal(0, 6, 8), normal(1, 6, 8), normal(2, 6, 8)

    @jax.jit
    def run(gate, up):
        fun = lambda gate, up: gate * jax.nn.sigmoid(gate) * up  # noqa: E731
        coded = checkpoint(fun, DRAWN, activations=(0, 1), key=KEY)
        y, pullback = jax.vjp(coded, gate, up)
        return y, pullback(dy), [hat(DRAWN, x, i) for i, x in enumerate((gate, up))]

    y, got, hats = run(gate, up)
    np.testing.assert_allclose(y, oracles.swiglu(gate, up), rtol=1e-12, atol=1e-13)
    assert_close(got, oracles.swiglu_vjp(*hats, dy))


def test_finite_differences(x64):
    x, w = normal(0, 3, 4), normal(1, 4, 2)
    assert_gradients_are_differences(checkpoint(layer, Exact()), x, w / 2)


def test_bfloat16_stays_bfloat16():
    x, w = normal(0, 6, 8, dtype="bfloat16"), normal(1, 8, 5, dtype="bfloat16")

    @jax.jit
    def run(x, w):
        y, pullback = jax.vjp(checkpoint(layer, NEAREST), x, w)
        return y, layer(x, w), pullback(y), gradient_at(layer, (hat(NEAREST, x), w), y)

    y, want_y, got, want = run(x, w)
    np.testing.assert_array_equal(y, want_y)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == jnp.bfloat16
        # Two compilations of the same function may round some intermediate values differently.
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2**-5, atol=2**-5)


def test_the_default_codec_has_four_bits_and_the_function_keeps_its_name():
    assert inspect.signature(checkpoint).parameters["codec"].default == Quantized(4)
    assert (checkpoint(layer).__name__, checkpoint(layer).__doc__) == ("layer", layer.__doc__)


# Encoded arguments.


def of_trees(tree, scale, extra):
    """A function of pytrees that contain more than floats."""
    noise = jax.random.normal(tree["key"], tree["x"].shape, tree["x"].dtype)
    picked = tree["x"][tree["rows"]] * jnp.where(tree["mask"], 2.0, 1.0)[:, None]
    return {"y": jnp.sin(picked) * scale, "z": (noise * tree["x"], tree["h"].sum() * extra**2)}


OTHERS = {"key": jax.random.key(1), "mask": np.array([True, False]), "rows": np.array([4, 1])}


@pytest.mark.parametrize("activations", [[2, 0], 1], ids=str)
def test_only_floating_point_arrays_at_the_positions_are_encoded(activations, x64):
    floats = normal(0, 2, 3, 4), normal(1, 6, 8), normal(2, 8), normal(3, 5, 4)
    owners = 0, 0, 1, 2
    coded = [i for i, owner in enumerate(owners) if owner in np.atleast_1d(activations)]
    compressed = checkpoint(of_trees, DRAWN, activations=activations, key=KEY)

    def call(fun):
        return lambda h, x, scale, extra: fun({"h": h, "x": x} | OTHERS, scale, extra)

    @jax.jit
    def run(*floats):
        hats = list(floats)
        for number, i in enumerate(coded):
            hats[i] = hat(DRAWN, floats[i], number)
        y, pullback = jax.vjp(call(compressed), *floats)
        want = call(of_trees)(*floats)
        return (y, pullback(y)), (want, gradient_at(call(of_trees), hats, want))

    assert_close(*run(*floats))
    # The pullback holds codes, and all other leaves unchanged.
    stored = sum(DRAWN.stored_bytes(floats[i].shape, floats[i].dtype) for i in coded)
    unchanged = [x for i, x in enumerate(floats) if i not in coded], OTHERS
    assert held(lambda *args: call(compressed)(*args), *floats) == stored + nbytes(unchanged)


def test_scalars_and_empty_arrays_are_not_encoded():
    # A scalar has no tokens and no features.
    fun = lambda tree: jnp.sin(tree["x"]) * tree["scale"]  # noqa: E731
    coded = checkpoint(fun, NEAREST)
    x, dy = normal(0, 6, 8), normal(1, 6, 8)

    @jax.jit
    def run(x, scale):
        trees = [{"x": x, "scale": s} for s in (scale, 2.0)]
        decoded = [tree | {"x": hat(NEAREST, x)} for tree in trees]
        return [gradient_at(coded, [tree], dy) for tree in trees], [
            gradient_at(fun, [tree], dy) for tree in decoded
        ]

    assert_close(*run(x, np.float32(2)), 1e-5)  # Float32.
    for shape in ((0, 8), (3, 0)):
        gradient = jax.grad(lambda x: total(checkpoint(jnp.sin, NEAREST)(x)))
        assert jax.eval_shape(gradient, np.zeros(shape, np.float32)).shape == shape
    # Weak types stay weak: a bfloat16 array times a number is a bfloat16 array.
    coded = checkpoint(lambda x, shift, none: x * 2 + shift)
    assert jax.eval_shape(coded, x.astype("bfloat16"), 0.5, None).dtype == jnp.bfloat16


def test_the_random_numbers_depend_on_the_key_only():
    x, w = normal(0, 6, 8), normal(1, 8, 5)

    @jax.jit
    def gradients(keys):
        def gradient(key):
            return jax.grad(lambda x: total(checkpoint(layer, DRAWN, key=key)(x, w)))(x)

        raw = gradient(jax.random.key_data(keys[0]))
        return [gradient(key) for key in keys], raw, jax.vmap(gradient)(keys)

    (first, again, other), raw, mapped = gradients(jax.vmap(jax.random.key)(np.array([1, 1, 2])))
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, raw)
    assert not np.allclose(first, other)
    # Under vmap each example has its own key. Float32 sums of 8 terms of size 1 to 10.
    np.testing.assert_allclose(mapped, [first, again, other], rtol=1e-5, atol=1e-5)


def test_codecs_may_hold_arrays_and_weights_may_be_of_four_bits(x64):
    x, dy, w = normal(0, 6, 8), normal(1, 6, 5), normal(4, 8, 5)
    fun = lambda x, weight, *ab: jnp.tanh(linear(x, LoRA(weight, *ab, None, 1.0, 0.0)))  # noqa: E731

    @jax.jit
    def run(x, w, *ab):
        codec = Calibrated.fit(Quantized(4, scaling="channel"), 2 * x)
        weight = NF4Weight.quantize(w)
        of_weight = lambda f: lambda x, *ab: f(x, weight, *ab)  # noqa: E731
        coded = of_weight(checkpoint(fun, codec))
        decoded = codec.decode(codec.encode(x))
        return gradient_at(coded, (x, *ab), dy), gradient_at(of_weight(fun), (decoded, *ab), dy)

    assert_close(*run(x, w, normal(2, 8, 2), normal(3, 2, 5)))


# Stored bytes.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_backward_holds_the_code_and_the_weights(codec, dtype):
    x, w = normal(0, 6, 8, dtype=dtype), normal(1, 8, 5, dtype=dtype)
    coded = checkpoint(layer, codec, key=KEY)
    closed_over = lambda x, w: checkpoint(lambda x: layer(x, w), codec, key=KEY)(x)  # noqa: E731
    want = codec.stored_bytes(x.shape, dtype) + w.nbytes
    assert [held(f, x, w) for f in (coded, closed_over)] == [want, want]


@pytest.mark.parametrize("codec", [Exact(), NEAREST], ids=str)
def test_under_scan_a_layer_takes_the_bytes_of_its_code_only(codec):
    def temporaries(layers):
        def loss(x, ws):
            run = checkpoint(layer, codec, key=KEY)
            return jnp.sum(jax.lax.scan(lambda x, w: (run(x, w), None), x, ws)[0] ** 2)

        x = jax.ShapeDtypeStruct((512, 64), "float32")
        ws = jax.ShapeDtypeStruct((layers, 64, 96), "float32")
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, ws).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    grown = temporaries(12) - temporaries(4)
    # Apart from the alignment of buffers nothing else depends on the number of layers. One stored
    # float array in one of the eight additional layers would take 128 KiB.
    assert abs(grown - 8 * codec.stored_bytes((512, 64), "float32")) < 4096


def test_a_barrier_separates_the_two_passes():
    # Without a barrier XLA could merge both passes where the code is the input itself, and store
    # what should be recomputed.
    x, w = normal(0, 6, 8), normal(1, 8, 5)
    fun = lambda x: total(checkpoint(layer, Exact())(x, w))  # noqa: E731
    assert "optimization_barrier" in str(jax.make_jaxpr(jax.grad(fun))(x))


def test_explain_shows_the_codes_by_name():
    def fun(x, h, w):
        run = checkpoint(lambda x, h, w: layer(x, w) + h, NEAREST, activations=(0, 1), name="mine")
        return run(-x, -h, w), checkpoint(layer)(-x, w)

    table = explain(fun, normal(0, 6, 8), normal(1, 6, 8), normal(2, 8, 5))
    entries = {e.name: e.stored_bytes for e in table.residuals if e.operator == "checkpoint"}
    size, default = (c.stored_bytes((6, 8), "float32") for c in (NEAREST, Quantized(4)))
    assert entries == {"mine 0": size, "mine 1": size, "checkpoint": default}
    assert table.stored_bytes == sum(entries.values())


# Transformations of JAX, and nested checkpoints.


TRANSFORMS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x, w: jax.lax.scan(lambda _, x: (None, f(x, w)), None, x)[1],
    "vmap": lambda f: jax.vmap(f, in_axes=(0, None)),
}


def test_gradients_are_the_same_under_transformations(x64):
    x, w, dy = normal(0, 2, 3, 8), normal(1, 8, 5), normal(2, 2, 3, 8)

    @jax.jit
    def run(x, w):
        coded = checkpoint(layer, NEAREST)
        got = {name: gradient_at(make(coded), (x, w), dy) for name, make in TRANSFORMS.items()}
        # Levels do not depend on the batch.
        return got, gradient_at(layer, (hat(NEAREST, x), w), dy)

    got, want = run(x, w)
    assert_close(got, dict.fromkeys(got, want))


def test_nested_checkpoints_decode_their_own_codes(x64):
    x, w, dy, coarse = normal(0, 6, 8), normal(1, 8, 5), normal(2, 6, 8), Coarse(0.5)
    inner = checkpoint(layer, coarse)
    nested = checkpoint(lambda x, w: inner(jnp.cos(inner(x, w)), w), NEAREST)

    @jax.jit
    def run(x, w):
        # The outer function runs again from its code; the inner ones encode what they then get.
        first = hat(NEAREST, x)
        middle = layer(first, w)
        dmiddle, dw = gradient_at(layer, (hat(coarse, jnp.cos(middle)), w), dy)
        dx, dw_before = gradient_at(layer, (hat(coarse, first), w), -jnp.sin(middle) * dmiddle)
        return gradient_at(nested, (x, w), dy), (dx, dw + dw_before)

    assert_close(*run(x, w))
    assert held(nested, x, w) == w.nbytes + NEAREST.stored_bytes(x.shape, x.dtype)


def test_weights_inside_have_factored_gradients(x64):
    x, w, basis = normal(0, 6, 8), normal(1, 8, 5), normal(2, 8, 3)
    # At full rank the factors multiply to the exact gradient.
    codec = RandomizedSVD(6)

    def as_argument(params, codec):
        run = checkpoint(lambda x, w: jnp.sin(linear(x, w, codec=codec, key=KEY)), NEAREST)
        return total(run(x, params["w"]))

    def closed_over(params, codec):
        fun = lambda x: jnp.sin(linear(x, params["w"], codec=codec, key=KEY))  # noqa: E731
        return total(checkpoint(fun, NEAREST)(x))

    for fun in (as_argument, closed_over):
        groups = actjax.input_groups(functools.partial(fun, codec=Exact()), {"w": w})
        assert groups == {"w": "w"}

    @jax.jit
    def run(params, basis):
        factored = actjax.value_and_grad(functools.partial(as_argument, codec=codec))(params)[1][
            "w"
        ]
        exact = functools.partial(closed_over, codec=Exact())
        in_basis = actjax.value_and_grad(exact, bases={"w": basis})(params)[1]["w"]
        want = jax.grad(exact)(params)["w"]
        return factored.dense(), want, in_basis.left, in_basis.right, basis.T @ want

    got, want, left, right, want_right = run({"w": w}, basis)
    # Rank 6 of 6 tokens, in float64.
    assert_close(got, want)
    np.testing.assert_array_equal(left, basis)
    assert_close(right, want_right)


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
        (lambda: checkpoint(layer, chunk=2.5), "`chunk` of checkpoint must be an integer, got 2.5"),
    ])  # fmt: skip
    of_position = "`activations` of checkpoint has position {}, but the function was called with 2"
    assert_messages(ValueError, [
        (lambda: checkpoint(layer, activations=2)(x, w), of_position.format(2)),
        (lambda: checkpoint(layer, activations=(0, 5))(x, w), of_position.format(5)),
        *((lambda key=key: checkpoint(layer, DRAWN, key=key)(x, w), f"got key={key}: pass `key`")
          for key in (None, 0)),
        (lambda: jax.grad(lambda x: total(checkpoint(layer, DRAWN)(x, w)))(x),
         f"`codec` {DRAWN} draws random numbers"),
        (lambda: checkpoint(layer, chunk=0), "`chunk` of checkpoint must be at least 1, got 0"),
        (lambda: checkpoint(layer, chunk=2, axis=-1),
         "`axis` of checkpoint must be at least 0, got -1"),
        (lambda: checkpoint(layer, chunk=4, axis=3)(x, w),
         "along `axis` 3, so they must have this axis, of one length: got shapes (6, 8)"),
        (lambda: checkpoint(lambda x, y: x, activations=(0, 1), chunk=4)(x, x[:4]),
         "got shapes (6, 8), (4, 8)"),
        (lambda: checkpoint(lambda x: x.sum(1), chunk=4, axis=1)(x),
         "got chunks of 4 along `axis` 1, so its outputs must have this axis: got one of shape"),
    ])  # fmt: skip
