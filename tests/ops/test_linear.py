"""Tests of actjax/ops/linear.py: exact but for `dw`, and `dw` no worse than the codec."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.test_util import check_grads

from actjax import (
    Exact,
    PointApproximation,
    PrincipalPlusRandom,
    RandomizedSVD,
    RandomProjection,
    linear,
    qkv_projection,
)

LOSSY = (RandomProjection(3), RandomizedSVD(3), PrincipalPlusRandom(2, 1), PointApproximation(0.5))
CODECS = (Exact(), *LOSSY)
KEY = jax.random.key(7)


def normal(seed: int, *shape: int, dtype=None) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def held(fun, *args) -> list[jax.Array]:
    """Returns the arrays that the backward pass of `fun` holds, but for its arguments."""
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(jax.vjp(fun, *args)[1])}
    return [leaf for leaf in leaves.values() if not any(leaf is arg for arg in args)]


def nbytes(arrays: list[jax.Array]) -> int:
    return sum(array.nbytes for array in arrays)


# Values.


@pytest.mark.parametrize(
    ("codec", "dtype"), [(Exact(), "bfloat16"), *((codec, "float32") for codec in CODECS)], ids=str
)
def test_value_is_the_product_bit_for_bit(codec, dtype):
    x, w = normal(0, 2, 6, 8, dtype=dtype), normal(1, 8, 5, dtype=dtype)
    run = lambda x: linear(x, w, codec=codec, key=KEY)  # noqa: E731
    y = jax.jit(lambda x: jax.vjp(run, x)[0])(x)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, jax.jit(jnp.matmul)(x, w))


@pytest.mark.parametrize("lead", [(), (4,), (2, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("codec", [Exact(), RandomProjection(1)], ids=str)
def test_any_number_of_leading_axes(codec, lead, x64):
    x, w, dz = normal(0, *lead, 6), normal(1, 6, 5), normal(2, *lead, 5)

    @jax.jit
    def run(x, w, dz):
        y, pullback = jax.vjp(lambda x, w: linear(x, w, codec=codec, key=KEY), x, w)
        return y, *pullback(dz), codec.decode(codec.encode(x, KEY))

    y, dx, dw, x_hat = map(np.asarray, run(x, w, dz))
    x, w, dz = map(np.asarray, (x, w, dz))
    for got, want in (
        (y, x @ w),
        (dx, dz @ w.T),
        (dw, x_hat.reshape(-1, 6).T @ dz.reshape(-1, 5)),
    ):
        # Sums of up to 24 terms of size 1 and more, in another order: some 1e-16 each.
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("container", [tuple, list])
def test_several_weights_give_a_tuple_of_products(container):
    x, ws = normal(0, 6, 8), [normal(i, 8, n) for i, n in enumerate((5, 1, 3))]
    ys = linear(x, container(ws))
    assert isinstance(ys, tuple)
    for y, w in zip(ys, ws, strict=True):
        np.testing.assert_array_equal(y, x @ w)


def test_a_tuple_of_one_gives_a_tuple_of_one():
    x, w = normal(0, 6, 8), normal(1, 8, 5)
    (y,) = linear(x, (w,), bias=(None,))
    np.testing.assert_array_equal(y, linear(x, w))


def test_bias_is_added_to_the_product():
    x, w, b = normal(0, 6, 8), normal(1, 8, 5), normal(2, 5)
    np.testing.assert_array_equal(linear(x, w, bias=b), x @ w + b)


def test_some_weights_may_have_no_bias():
    x, w, b = normal(0, 6, 8), normal(1, 8, 5), normal(2, 5)
    plain, shifted, unbiased = linear(x, (w, w, w), bias=[None, b, None])
    np.testing.assert_array_equal(plain, x @ w)
    np.testing.assert_array_equal(shifted, x @ w + b)
    np.testing.assert_array_equal(unbiased, x @ w)


def test_qkv_projection_is_linear_with_three_weights():
    x, ws = normal(0, 6, 8), tuple(normal(i, 8, n) for i, n in enumerate((8, 4, 4), 1))
    bias = (normal(4, 8), None, normal(5, 4))
    options = {"bias": bias, "codec": RandomProjection(3), "key": KEY}

    def run(fun):
        y, pullback = jax.vjp(fun, x, ws)
        return y, pullback(y)

    got = run(lambda x, ws: qkv_projection(x, *ws, **options))
    jax.tree.map(np.testing.assert_array_equal, got, run(lambda x, ws: linear(x, ws, **options)))


# Gradients.


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_gradients_are_those_at_the_decoded_input(codec, x64):
    x, bias = normal(0, 2, 5, 6), (normal(1, 4), None, normal(2, 3))
    ws, dzs = (
        tuple(normal(i, *lead, n) for i, n in enumerate((4, 2, 3))) for lead in ((6,), (2, 5))
    )

    @jax.jit
    def run(x, ws, bias):
        fun = lambda *args: linear(*args[:2], bias=args[2], codec=codec, key=KEY)  # noqa: E731
        return *jax.vjp(fun, x, ws, bias)[1](dzs), codec.decode(codec.encode(x, KEY))

    # The key's numbers are drawn again in the backward pass, in the same dtype: equal ones.
    dx, dws, dbs, x_hat = run(x, ws, bias)
    want_dx = sum(np.asarray(dz) @ np.asarray(w).T for w, dz in zip(ws, dzs, strict=True))
    np.testing.assert_allclose(dx, want_dx, rtol=1e-12, atol=1e-13)
    for dw, dz in zip(dws, dzs, strict=True):
        want = np.einsum("bsd,bsn->dn", x_hat, dz)
        # Sums of ten terms of size 1 and more, in another order: some 1e-16 each.
        np.testing.assert_allclose(dw, want, rtol=1e-11, atol=1e-12)
    assert dbs[1] is None
    for db, dz in ((dbs[0], dzs[0]), (dbs[2], dzs[2])):
        np.testing.assert_allclose(db, np.asarray(dz).sum((0, 1)), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("argument", [0, 1, 2])
def test_exact_codec_passes_finite_differences(argument, x64):
    arguments = [normal(0, 2, 3, 5), normal(1, 5, 4), normal(2, 4)]

    def fun(one):
        x, w, b = (one if i == argument else a for i, a in enumerate(arguments))
        # Sines, so that the cotangent is not constant. A step of 1e-5 then errs by about 1e-10,
        # from the third derivative and from cancellation alike.
        return jnp.sin(linear(x, w, bias=b))

    # The defaults of check_grads would let an error of 0.1% pass.
    check_grads(jax.jit(fun), [arguments[argument]], 1, ["rev"], 1e-8, 1e-8, 1e-5)


def test_weight_gradient_is_unbiased_if_the_codec_is(x64):
    x, w, dz = normal(0, 7, 6), normal(1, 6, 3), normal(2, 7, 3)

    @jax.jit
    @jax.vmap
    def sample(key):
        run = lambda w: linear(x, w, codec=RandomProjection(3), key=key)  # noqa: E731
        return jax.vjp(run, w)[1](dz)[0]

    samples = np.asarray(sample(jax.random.split(KEY, 2000)))
    standard_error = samples.std(0) / np.sqrt(2000)
    assert standard_error.min() > 0  # Each key draws other numbers.
    error = np.abs(samples.mean(0) - np.asarray(x).T @ np.asarray(dz))
    assert np.all(error <= 5 * standard_error)


# Precision.


def test_sums_are_taken_in_float32():
    # 4096 ones: a bfloat16 sum stops at 256, where adding one rounds back.
    ones = lambda *shape: jnp.ones(shape, jnp.bfloat16)  # noqa: E731
    wide = jax.vjp(lambda x: linear(x, ones(4096, 2)), ones(3, 4096))[0]
    dx = jax.vjp(lambda x: linear(x, ones(2, 4096)), ones(3, 2))[1](ones(3, 4096))[0]
    run = lambda w, b: linear(ones(4096, 2), w, bias=b)  # noqa: E731
    dw, db = jax.vjp(run, ones(2, 3), ones(3))[1](ones(4096, 3))
    for array in (wide, dx, dw, db):
        assert array.dtype == jnp.bfloat16
        np.testing.assert_array_equal(array.astype(jnp.float32), 4096)


def test_dx_of_several_weights_is_rounded_once():
    # 256 + 0.5 + 0.5: rounded to bfloat16 after each term, where the step is 2, it would stay 256.
    ws = tuple(jnp.full((1, 1), value, jnp.bfloat16) for value in (256, 1, 1))
    one = jnp.ones((1, 1), jnp.bfloat16)
    (dx,) = jax.vjp(lambda x: linear(x, ws), one)[1]((one, one, one))
    assert dx == 258


def test_bias_is_added_before_rounding():
    # 256 + 1 + 1 in float32 is 258; rounded after the product, 256 + 1 would be 256 again.
    x, w = jnp.ones((1, 2), jnp.bfloat16), jnp.asarray([[256], [1]], jnp.bfloat16)
    assert linear(x, w, bias=jnp.ones(1, jnp.bfloat16))[0, 0] == 258


@pytest.mark.parametrize("codec", [Exact(), RandomProjection(3), RandomizedSVD(3)], ids=repr)
def test_a_wider_weight_is_cast_on_the_fly(codec):
    x, w, b = normal(0, 16, 8, dtype=jnp.bfloat16), normal(1, 8, 5), normal(2, 5)
    run = lambda x, w, b: linear(x, w, bias=b, codec=codec, key=KEY)  # noqa: E731
    y, pullback = jax.vjp(run, x, w, b)
    dx, dw, db = pullback(y)
    assert (y.dtype, dx.dtype, dw.dtype, db.dtype) == ("bfloat16", "bfloat16", "float32", "float32")
    stored = 0 if codec == Exact() else codec.stored_bytes(x.shape, x.dtype)
    assert nbytes(held(run, x, w, b)) == stored  # Neither w nor b in bfloat16.
    # The gradients of a float32 weight keep their float32 sums.
    decoded = np.asarray(codec.decode(codec.encode(x, KEY)), np.float64)
    wide = np.asarray(y, np.float64)
    np.testing.assert_allclose(db, wide.sum(0), rtol=1e-6, atol=1e-6)
    if codec == Exact():
        np.testing.assert_allclose(dw, decoded.T @ wide, rtol=1e-5, atol=1e-5)


# What is held.


@pytest.mark.parametrize("codec", LOSSY, ids=repr)
def test_backward_holds_the_code_and_no_input(codec):
    x, w = normal(0, 2, 16, 8), normal(1, 8, 5)
    run = lambda x, w: linear(jnp.negative(x), w, codec=codec, key=KEY)  # noqa: E731
    assert nbytes(held(run, x, w)) == codec.stored_bytes(x.shape, x.dtype)


@pytest.mark.parametrize("codec", [Exact(), RandomProjection(3)], ids=repr)
def test_several_weights_share_one_stored_copy(codec):
    x, ws = normal(0, 2, 16, 8), [normal(i, 8, 5) for i in range(3)]
    run = lambda x, *ws: linear(jnp.negative(x), ws, codec=codec, key=KEY)  # noqa: E731
    assert nbytes(held(run, x, *ws)) == codec.stored_bytes(x.shape, x.dtype)


@pytest.mark.parametrize(
    "codec",
    [Exact(), RandomProjection(4), RandomizedSVD(4), PointApproximation(points=4)],
    ids=repr,
)
def test_the_compiled_program_keeps_codes_across_a_scan(codec):
    x, tokens, features = jax.ShapeDtypeStruct((1024, 32), jnp.float32), 1024, 32

    def temporary(layers: int) -> int:
        def loss(ws, x, keys):
            body = lambda x, layer: (linear(x, layer[0], codec=codec, key=layer[1]), None)  # noqa: E731
            return jnp.sum(jax.lax.scan(body, x, (ws, keys))[0] ** 2)

        ws = jax.ShapeDtypeStruct((layers, features, features), jnp.float32)
        keys = jax.eval_shape(lambda: jax.random.split(KEY, layers))
        compiled = jax.jit(jax.grad(loss)).lower(ws, x, keys).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    per_layer = (temporary(16) - temporary(8)) / 8
    stored = codec.stored_bytes((tokens, features), jnp.float32)
    # A layer more costs its code, and buffers are padded to 64 bytes; the input itself, 128 KiB, is
    # dead. Nothing may be saved either: then the code would not be what backward reads.
    assert stored <= per_layer < stored + 1024


# Under transformations of JAX.


@pytest.fixture
def problem():
    return normal(0, 12, 8), normal(1, 8, 8)


def loss(x, w, key):
    return jnp.sum(jnp.sin(linear(x, w, codec=RandomProjection(3), key=key)))


GRADIENT = jax.jit(jax.grad(loss, argnums=(0, 1)))


def assert_close(got, want):
    # Float32 sums of up to 12 terms of size 1 to 10, compiled in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


def test_jit_gives_the_same_gradients(problem):
    assert_close(jax.grad(loss, argnums=(0, 1))(*problem, KEY), GRADIENT(*problem, KEY))


def test_vmap_over_the_input(problem):
    x, w = problem
    xs = jnp.stack([x, 2 * x, x[::-1]])
    got = jax.vmap(GRADIENT, in_axes=(0, None, None))(xs, w, KEY)
    assert_close(got, jax.tree.map(lambda *g: jnp.stack(g), *(GRADIENT(x, w, KEY) for x in xs)))


def test_vmap_over_the_key(problem):
    keys = jax.random.split(KEY, 3)
    got = jax.vmap(GRADIENT, in_axes=(None, None, 0))(*problem, keys)
    want = [GRADIENT(*problem, key) for key in keys]
    assert_close(got, jax.tree.map(lambda *g: jnp.stack(g), *want))
    assert not np.allclose(want[0][1], want[1][1])


def test_old_style_keys_draw_the_same_numbers(problem):
    old = jax.random.key_data(KEY)
    jax.tree.map(np.testing.assert_array_equal, GRADIENT(*problem, old), GRADIENT(*problem, KEY))


def test_scan_over_stacked_weights(problem):
    x, w = problem
    ws, keys = jnp.stack([w, -w, w.T]), jax.random.split(KEY, 3)
    layer = lambda x, w, key: jnp.tanh(linear(x, w, codec=RandomizedSVD(3), key=key))  # noqa: E731

    def scanned(x, ws):
        return jnp.sum(jax.lax.scan(lambda x, s: (layer(x, *s), None), x, (ws, keys))[0])

    def unrolled(x, ws):
        for i in range(3):
            x = layer(x, ws[i], keys[i])
        return jnp.sum(x)

    got, want = (jax.jit(jax.grad(f, argnums=(0, 1)))(x, ws) for f in (scanned, unrolled))
    assert_close(got, want)


def test_checkpoint_draws_the_same_numbers_again(problem):
    got = jax.jit(jax.grad(jax.checkpoint(loss), argnums=(0, 1)))(*problem, KEY)
    assert_close(got, GRADIENT(*problem, KEY))
    again = jax.checkpoint(lambda x, w: loss(x, w, KEY))
    # What is held is the key alone: the encoding runs again.
    assert [leaf.shape for leaf in held(again, *problem)] == [()]


def test_inside_an_nnx_module(problem):
    x, w = problem

    class Layer(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(w)

        def __call__(self, x):
            return linear(x, self.w[...], codec=RandomProjection(3), key=KEY)

    grads = nnx.jit(nnx.grad(lambda layer: jnp.sum(jnp.sin(layer(x)))))(Layer())
    assert_close(grads.w[...], GRADIENT(x, w, KEY)[1])


def test_inside_a_linen_module(problem):
    x, w = problem

    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x):
            w = self.param("w", linen.initializers.lecun_normal(), (8, 8))
            return linear(x, w, codec=RandomProjection(3), key=self.make_rng("codec"))

    def module_loss(variables, rngs):
        return jnp.sum(jnp.sin(Layer().apply(variables, x, rngs=rngs)))

    rngs = {"codec": KEY}
    grads = jax.jit(jax.grad(module_loss))({"params": {"w": w}}, rngs)
    # Linen folds the module's path into the key: the same key is found by asking for it.
    key = linen.Module.apply(_Key(), {}, rngs=rngs)
    assert_close(grads["params"]["w"], GRADIENT(x, w, key)[1])


class _Key(linen.Module):
    @linen.compact
    def __call__(self):
        return self.make_rng("codec")


# Errors.

ERRORS = {
    "transposed weight": (
        lambda x, w: linear(x, w.T),
        ValueError,
        "`w` must be [d, n] with d = (8,) features of `x`: got x(6, 8) @ w(5, 8)."
        " Did you pass it transposed?",
    ),
    "weight of other features": (
        lambda x, w: linear(x, (w, w[:7])),
        ValueError,
        "`w[1]` must be [d, n] with d = (8,) features of `x`: got x(6, 8) @ w[1](7, 5).",
    ),
    "weight of three axes": (lambda x, w: linear(x, w[None]), ValueError, "`w` must be [d, n]"),
    "scalar input": (lambda x, w: linear(x[0, 0], w), ValueError, "got x() @ w(8, 5)"),
    "wrong bias": (
        lambda x, w: linear(x, w, bias=jnp.ones(8)),
        ValueError,
        "the bias of `w`(8, 5) must be (5,), got (8,).",
    ),
    "no weight": (lambda x, w: linear(x, ()), ValueError, "`w` is an empty tuple"),
    "bias count": (
        lambda x, w: linear(x, (w, w), bias=(None,)),
        ValueError,
        "`bias` has 1 entries for 2 weights",
    ),
    "no key": (
        lambda x, w: linear(x, w, codec=RandomProjection(3)),
        ValueError,
        "`codec` RandomProjection(rank=3) draws random numbers, but got key=None: pass `key`",
    ),
    "codec class": (
        lambda x, w: linear(x, w, codec=Exact),
        TypeError,
        "`codec` must be an actjax.Codec (an instance, not the class)",
    ),
    "codec name": (lambda x, w: linear(x, w, codec="exact"), TypeError, "got 'exact'"),
    "integer input": (
        lambda x, w: linear(x.astype(int), w),
        TypeError,
        "`x` must be a floating point array, got int32: cast it",
    ),
    "input no array": (lambda x, w: linear([1.0], w), TypeError, "got list"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_argument_and_what_came(case):
    call, kind, message = ERRORS[case]
    with pytest.raises(kind, match=re.escape(message)):
        call(jnp.ones((6, 8)), jnp.ones((8, 5)))


@pytest.mark.parametrize("codec", [RandomProjection(7), RandomizedSVD(7)], ids=repr)
def test_a_rank_above_the_dimensions_is_an_error_of_the_backward_pass_alone(codec):
    x, w = jnp.ones((6, 8)), jnp.ones((8, 5))
    message = re.escape(f"`rank` 7 of {codec} is above min(T, d) = 6")
    with pytest.raises(ValueError, match=message):
        jax.grad(lambda x: linear(x, w, codec=codec, key=KEY).sum())(x)


def test_no_hint_of_a_transposed_weight_where_it_would_not_fit():
    with pytest.raises(ValueError) as error:
        linear(jnp.ones((6, 8)), jnp.ones((7, 5)))
    assert "transposed" not in str(error.value)


@pytest.mark.parametrize("w", [3.0, jnp.ones((8, 4), int), jnp.ones((8, 4), "float8_e4m3fn")])
def test_weights_that_are_no_floating_point_arrays_are_refused(w):
    with pytest.raises(TypeError, match="`w` must be a floating point array"):
        linear(jnp.ones((2, 8)), w)


def test_a_bias_that_is_no_array_is_refused():
    with pytest.raises(TypeError, match="`bias` must be a floating point array, got int"):
        linear(jnp.ones((2, 8)), jnp.ones((8, 4)), bias=3)
    with pytest.raises(TypeError, match=r"`bias\[1\]` must be a floating point array, got int32"):
        linear(jnp.ones((2, 8)), (jnp.ones((8, 4)),) * 2, bias=(None, jnp.ones(4, int)))
