"""The battery: every codec of `cases.CODECS` keeps the contract and what its docstring promises.

A codec compiles one program for all checks in float64 and one for those in other dtypes:
compilation takes most of the time here.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CODECS, DTYPES, SHAPES
from jax.test_util import check_grads

import actjax

every = pytest.mark.parametrize("name", CODECS)
drawing = pytest.mark.parametrize("name", [n for n, c in CODECS.items() if c.needs_key])
KEY = jax.random.key(3)
OUTPUTS = 5


def activation(shape, dtype="float32", seed=1):
    """Returns tokens that share two directions, as activations do: codecs differ on them."""
    tokens, features = int(np.prod(shape[:-1])), shape[-1]
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=(tokens, 2)) @ rng.normal(size=(2, features))
    noisy = shared + 0.3 * rng.normal(size=(tokens, features))
    return noisy.reshape(shape).astype(jnp.dtype(dtype))


def leading(codec):
    """Returns a shape with one leading dimension and one with three, for the same tokens.

    Balanced channels have statistics of each sequence, so these are all of one sequence.
    """
    balanced = getattr(codec, "balance", False)
    return SHAPES[0], (1, 1, *SHAPES[0]) if balanced else SHAPES[-1]


def round_trip(codec, x, key):
    return codec.decode(codec.encode(x, key))


def linear_vjp(codec, x, w, dy):
    """Returns the output of a linear operator and the gradients of `x` and `w`."""
    y, pullback = jax.vjp(lambda x, w: actjax.linear(x, w, codec=codec, key=KEY), x, w)
    return y, *pullback(dy)


def nbytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


X, W, DY = activation(SHAPES[0]), activation((8, OUTPUTS), seed=2), activation((24, 5), seed=3)


@functools.cache
def in_float64(name):
    """Returns the results of one program in float64, by name, as NumPy arrays."""
    codec = CODECS[name]

    @jax.jit
    def run(xs, w, dy, other_key):
        x, keys = xs[0], jnp.stack([KEY, other_key])
        shapes = {}
        for shape in leading(codec):
            code = codec.encode(x.reshape(shape), KEY)
            dz = dy.reshape(*shape[:-1], OUTPUTS)
            shapes[shape] = codec.decode(code), codec.weight_grad(code, dz)
        _, scanned = jax.lax.scan(lambda _, xk: (None, round_trip(codec, *xk)), None, (xs, keys))
        return {
            "shapes": shapes,
            "linear": linear_vjp(codec, x, w, dy),
            "exact": (x @ w, dy @ w.T),
            "vmap": jax.vmap(functools.partial(round_trip, codec))(xs, keys),
            "scan": scanned,
        }

    with jax.enable_x64(True):
        xs = np.stack([X, activation(SHAPES[0], seed=4)]).astype("float64")
        results = run(xs, W.astype("float64"), DY.astype("float64"), jax.random.key(4))
        return jax.tree.map(np.asarray, results)


@functools.cache
def in_narrow_dtypes(name):
    """Returns the results of one program in bfloat16, and of keys in float32, by name."""
    codec = CODECS[name]

    @jax.jit
    def run(x, half, half_dz, key, old_key, other_key):
        # Encoded twice in one trace, so that a draw at trace time would show.
        keys = {"first": key, "again": key, "other": other_key, "old key": old_key}
        codes = {label: codec.encode(x, k) for label, k in keys.items() if codec.needs_key}
        half_code = codec.encode(half, key)
        return {
            "codes": codes,
            "decoded": {label: codec.decode(code) for label, code in codes.items()},
            "half": (codec.decode(half_code), codec.weight_grad(half_code, half_dz)),
        }

    half, half_dz = X.astype(jnp.bfloat16), DY.astype(jnp.bfloat16)
    return run(X, half, half_dz, KEY, jax.random.PRNGKey(3), jax.random.key(4))


def test_every_codec_of_the_package_has_a_row():
    public = {
        v for v in vars(actjax).values() if isinstance(v, type) and issubclass(v, actjax.Codec)
    }
    # `Calibrated` holds arrays, so it is not a static value.
    others = {actjax.Codec, actjax.Calibrated}
    assert public - others == {type(codec) for codec in CODECS.values()}


@every
def test_the_docstring_states_storage_error_bias_and_source(name):
    codec = CODECS[name]
    text = type(codec).__doc__
    assert all(f"{part}: " in text for part in ("Storage", "Error", "Source"))
    assert ("Biased: " if codec.biased else "Unbiased") in text


@every
def test_shapes_and_bytes_are_known_before_anything_is_computed(name):
    codec = CODECS[name]
    for shape, dtype in zip(SHAPES, (*DTYPES, *DTYPES), strict=False):
        code = jax.eval_shape(codec.encode, jax.ShapeDtypeStruct(shape, dtype), KEY)
        decoded = jax.eval_shape(codec.decode, code)
        assert (decoded.shape, decoded.dtype) == (shape, dtype)
        assert nbytes(code) == codec.stored_bytes(shape, dtype)


@every
def test_leading_dimensions_are_tokens(name):
    decoded = {shape: both[0] for shape, both in in_float64(name)["shapes"].items()}
    for shape, got in decoded.items():
        assert got.shape == shape
        # The same sums in another order: rounding of 24 terms of size about one.
        got = got.reshape(X.shape)
        np.testing.assert_allclose(got, decoded[SHAPES[0]], rtol=1e-11, atol=1e-12)


@every
def test_the_weight_gradient_is_the_product_with_the_decoded_input(name):
    for decoded, gradient in in_float64(name)["shapes"].values():
        decoded = decoded.reshape(X.shape)
        # Two orders of the same sums of 24 terms.
        atol = 1e-14 * np.linalg.norm(decoded) * np.linalg.norm(DY)
        want = decoded.T @ DY.astype("float64")
        np.testing.assert_allclose(gradient, want, rtol=0, atol=atol)


@every
def test_the_weight_gradient_of_bfloat16_is_summed_in_float32(name):
    decoded, gradient = in_narrow_dtypes(name)["half"]
    assert gradient.dtype == jnp.float32
    decoded, dz = np.asarray(decoded, np.float64), DY.astype(jnp.bfloat16).astype(np.float64)
    # decode rounds x_hat to bfloat16, half an ulp of 2^-8; the factored product does not.
    atol = 2**-8 * np.linalg.norm(decoded) * np.linalg.norm(dz)
    np.testing.assert_allclose(gradient, decoded.T @ dz, rtol=0, atol=atol)


@every
def test_the_value_is_exact_and_gradients_are_the_exact_vjp_at_the_decoded_input(name):
    results = in_float64(name)
    y, dx, dw = results["linear"]
    want_y, want_dx = results["exact"]
    np.testing.assert_array_equal(y, want_y)
    np.testing.assert_array_equal(dx, want_dx)
    decoded = results["shapes"][SHAPES[0]][0]
    np.testing.assert_allclose(dw, decoded.T @ DY.astype("float64"), rtol=1e-11, atol=1e-12)


@every
def test_the_backward_pass_holds_the_documented_bytes(name):
    codec = CODECS[name]
    for dtype in DTYPES:
        shapes = jax.ShapeDtypeStruct((24, 8), dtype), jax.ShapeDtypeStruct((8, OUTPUTS), dtype)
        pullback = jax.eval_shape(
            lambda x, w: jax.vjp(lambda x, w: actjax.linear(x, w, codec=codec, key=KEY), x, w)[1],
            *shapes,
        )
        assert nbytes(pullback) - nbytes(shapes[1]) == codec.stored_bytes((24, 8), dtype)


# A codec of each kind; the others store the same arrays. The second part runs in CI.
SCANNED = ("randomized SVD", "four bits, ragged groups", "two bits by channel, an outlier")


@pytest.mark.parametrize(
    "name", [n if n in SCANNED else pytest.param(n, marks=pytest.mark.slow) for n in CODECS]
)
def test_under_scan_a_layer_takes_the_bytes_of_its_code_and_no_more(name):
    codec, shape, features = CODECS[name], (512, 64), 64

    def temporaries(layers):
        def loss(x, ws):
            def body(x, w):
                return x + actjax.linear(x, w, codec=codec, key=KEY), None

            return jnp.sum(jax.lax.scan(body, x, ws)[0] ** 2)

        x = jax.ShapeDtypeStruct(shape, "float32")
        ws = jax.ShapeDtypeStruct((layers, features, features), "float32")
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, ws).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    grown = temporaries(12) - temporaries(4)
    # Buffers are aligned; apart from that, nothing else depends on the number of layers. One
    # float32 activation kept in a single one of the eight more layers would be 128 KiB.
    assert abs(grown - 8 * codec.stored_bytes(shape, "float32")) < 4096


@every
def test_bias_is_as_declared(name, x64):
    codec, count = CODECS[name], 2000
    shapes = ((12, 8), (8, 3), (12, 3))
    x, w, dy = (
        jnp.asarray(activation(shape, "float64", seed)) for seed, shape in enumerate(shapes, 1)
    )

    def gradient(key):
        return jax.grad(lambda w: jnp.sum(dy * actjax.linear(x, w, codec=codec, key=key)))(w)

    samples = np.asarray(jax.jit(jax.vmap(gradient))(jax.random.split(KEY, count)))
    deviation = np.abs(samples.mean(0) - np.asarray(x).T @ np.asarray(dy))
    standard_error = samples.std(0) / np.sqrt(count)
    if codec.biased:
        assert np.any(deviation > 20 * standard_error + 1e-9)
    else:
        assert np.all(deviation <= 5 * standard_error + 1e-12)


def test_a_codec_is_a_static_value():
    for codec in CODECS.values():
        again = dataclasses.replace(codec)
        assert again == codec
        assert hash(again) == hash(codec)
        assert eval(repr(codec), vars(actjax)) == codec
    assert len({*CODECS.values()}) == len(CODECS)


@drawing
def test_a_key_gives_the_same_code_again_and_another_key_another_code(name):
    results = in_narrow_dtypes(name)
    codes, decoded = results["codes"], results["decoded"]
    jax.tree.map(np.testing.assert_array_equal, codes["again"], codes["first"])
    assert not np.array_equal(decoded["other"], decoded["first"])
    # Old-style keys draw the same numbers. Fused in another way, sums of 24 terms round apart.
    atol = 24 * 2**-23 * np.abs(X).max()
    np.testing.assert_allclose(decoded["old key"], decoded["first"], rtol=0, atol=atol)
    assert nbytes(codes["old key"]) == nbytes(codes["first"])


@every
def test_vmap_and_scan_change_nothing(name):
    results = in_float64(name)
    alone = results["shapes"][SHAPES[0]][0]
    np.testing.assert_allclose(results["vmap"][0], alone, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(results["scan"], results["vmap"], rtol=1e-11, atol=1e-12)


# Eager execution compiles each operation by itself, so one codec is enough for the default run.
@pytest.mark.parametrize(
    "name",
    [n if n == "random projection" else pytest.param(n, marks=pytest.mark.slow) for n in CODECS],
)
def test_without_jit_the_result_is_the_same(name, x64):
    got = round_trip(CODECS[name], jnp.asarray(X, "float64"), KEY)
    want = in_float64(name)["shapes"][SHAPES[0]][0]
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12)


def test_gradients_of_the_exact_codec_agree_with_finite_differences(x64):
    # Quadratic in its arguments, so central differences are exact up to rounding.
    fun = jax.jit(lambda x, w, bias: actjax.linear(x, w, bias=bias))
    args = (activation(shape, "float64") for shape in ((3, 4, 5), (5, 2), (2,)))
    # With its defaults, `check_grads` passes an error of a tenth of a percent.
    check_grads(fun, tuple(args), order=1, modes=["rev"], rtol=1e-8, atol=1e-8)
