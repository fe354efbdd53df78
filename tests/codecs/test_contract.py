"""The battery: every codec of `cases.CODECS` keeps what the contract and its docstring promise."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CODECS, DTYPES, SHAPES
from hypothesis import given, settings
from hypothesis import strategies as st

import actjax

every = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
drawing = pytest.mark.parametrize("name", [n for n, c in CODECS.items() if c.needs_key])
KEY = jax.random.key(0)


def activation(shape, dtype="float32", seed=1):
    """Tokens with two directions that all share, as activations have: codecs differ on them."""
    tokens, features = int(np.prod(shape[:-1])), shape[-1]
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=(tokens, 2)) @ rng.normal(size=(2, features))
    return jnp.asarray((shared + 0.3 * rng.normal(size=(tokens, features))).reshape(shape), dtype)


@functools.partial(jax.jit, static_argnums=0)
def encode(codec, x, key=KEY):
    return codec.encode(x, key)


@functools.partial(jax.jit, static_argnums=0)
def encode_and_decode(codec, x):
    code = codec.encode(x, KEY)
    return code, codec.decode(code)


@functools.partial(jax.jit, static_argnums=0)
def round_trip(codec, x, key=KEY):
    return codec.decode(codec.encode(x, key))


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_every_codec_of_the_package_has_a_row():
    public = {
        v for v in vars(actjax).values() if isinstance(v, type) and issubclass(v, actjax.Codec)
    }
    # One with arrays of its own is no static value.
    others = {actjax.Codec, actjax.Calibrated}
    assert public - others == {type(codec) for codec in CODECS.values()}


@every
def test_the_docstring_states_storage_error_bias_and_source(codec):
    text = type(codec).__doc__
    assert all(f"{part}: " in text for part in ("Storage", "Error", "Source"))
    assert ("Biased: " if codec.biased else "Unbiased") in text


@every
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_bytes_are_known_before_anything_is_computed(codec, shape, dtype):
    code = jax.eval_shape(codec.encode, jax.ShapeDtypeStruct(shape, dtype), KEY)
    decoded = jax.eval_shape(codec.decode, code)
    assert (decoded.shape, decoded.dtype) == (shape, dtype)
    leaves = jax.tree.leaves(code)
    assert sum(a.size * a.dtype.itemsize for a in leaves) == codec.stored_bytes(shape, dtype)


@every
@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_gives_the_shape_and_dtype_back_and_bytes_are_as_said(codec, dtype):
    shape = SHAPES[-1]
    x = activation(shape, dtype)
    code, decoded = encode_and_decode(codec, x)
    assert (decoded.shape, decoded.dtype) == (x.shape, x.dtype)
    assert nbytes(code) == codec.stored_bytes(shape, dtype)


@every
def test_leading_dimensions_are_tokens(codec, x64):
    flat = activation(SHAPES[0], "float64")
    want = round_trip(codec, flat)
    for shape in SHAPES[1:]:
        got = round_trip(codec, flat.reshape(shape)).reshape(flat.shape)
        # The same sums in another order: rounding of 24 terms, far from one.
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12)


@every
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_weight_gradient_is_the_product_with_what_is_decoded(codec, shape, x64):
    code, decoded = encode_and_decode(codec, activation(shape, "float64"))
    dz = activation((*shape[:-1], 5), "float64", seed=2)
    decoded = np.asarray(decoded).reshape(-1, shape[-1])
    want = decoded.T @ np.asarray(dz).reshape(-1, 5)
    # Two orders of the same sums of 24 terms.
    scale = np.linalg.norm(decoded) * np.linalg.norm(dz)
    np.testing.assert_allclose(codec.weight_grad(code, dz), want, rtol=0, atol=1e-14 * scale)


@every
def test_the_weight_gradient_of_bfloat16_is_summed_in_float32(codec):
    code = encode(codec, activation((24, 8), "bfloat16"))
    dz = activation((24, 5), "bfloat16", seed=2)
    got = codec.weight_grad(code, dz)
    assert got.dtype == jnp.float32
    decoded = np.asarray(codec.decode(code), np.float64)
    scale = np.linalg.norm(decoded) * np.linalg.norm(np.asarray(dz, np.float64))
    # decode rounds x_hat to bfloat16, half an ulp of 2^-8; the factored product does not.
    np.testing.assert_allclose(
        got, decoded.T @ np.asarray(dz, np.float64), rtol=0, atol=2**-8 * scale
    )


@every
def test_gradients_are_the_exact_vjp_at_the_decoded_input(codec, x64):
    x, w = activation((24, 8), "float64"), activation((8, 5), "float64", seed=2)
    dy = activation((24, 5), "float64", seed=3)

    @functools.partial(jax.jit, static_argnums=0)
    def run(linear, x, w, dy):
        y, pullback = jax.vjp(linear, x, w)
        return y, *pullback(dy)

    y, dx, dw = run(functools.partial(actjax.linear, codec=codec, key=KEY), x, w, dy)
    want_y, want_dx, _ = run(jnp.matmul, x, w, dy)
    np.testing.assert_array_equal(y, want_y)
    np.testing.assert_array_equal(dx, want_dx)
    decoded = round_trip(codec, x)
    np.testing.assert_allclose(dw, decoded.T @ dy, rtol=1e-11, atol=1e-12)


@every
def test_the_forward_pass_is_exact_to_the_bit(codec):
    x, w = activation((24, 8)), activation((8, 5), seed=2)
    y, _ = jax.vjp(lambda w: actjax.linear(x, w, codec=codec, key=KEY), w)
    np.testing.assert_array_equal(y, x @ w)


@every
@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_holds_the_bytes_that_the_docstring_promises(codec, dtype):
    x, w = activation((24, 8), dtype), activation((8, 5), dtype)
    _, pullback = jax.vjp(lambda x, w: actjax.linear(x, w, codec=codec, key=KEY), x, w)
    assert nbytes(pullback) - w.nbytes == codec.stored_bytes(x.shape, dtype)


@every
def test_under_scan_a_layer_takes_the_bytes_of_its_code_and_no_more(codec):
    shape, features = (512, 64), 64

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
    # Buffers are aligned; besides them nothing depends on the number of layers. One float kept
    # in a single one of the eight more layers would be 128 KiB.
    assert abs(grown - 8 * codec.stored_bytes(shape, "float32")) < 4096


@every
def test_bias_is_as_declared(codec, x64):
    x, w = activation((12, 8), "float64"), activation((8, 3), "float64", seed=2)
    dy = activation((12, 3), "float64", seed=3)

    def gradient(key):
        return jax.grad(lambda w: jnp.sum(dy * actjax.linear(x, w, codec=codec, key=key)))(w)

    count = 2000
    samples = np.asarray(jax.jit(jax.vmap(gradient))(jax.random.split(KEY, count)))
    deviation = np.abs(samples.mean(0) - x.T @ dy)
    standard_error = samples.std(0) / np.sqrt(count)
    if codec.biased:
        assert np.any(deviation > 20 * standard_error + 1e-9)
    else:
        assert np.all(deviation <= 5 * standard_error + 1e-12)


@every
def test_a_codec_is_a_static_value(codec):
    again = dataclasses.replace(codec)
    assert again == codec
    assert hash(again) == hash(codec)
    assert eval(repr(codec), vars(actjax)) == codec
    assert len({*CODECS.values()}) == len(CODECS)


@drawing
def test_a_key_gives_the_same_code_again_and_another_key_another(name):
    codec, x = CODECS[name], activation((24, 8))
    first, again, other = (encode(codec, x, jax.random.key(seed)) for seed in (3, 3, 4))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(codec.decode(first), codec.decode(other))


@drawing
def test_old_style_keys_draw_the_same(name):
    codec, x = CODECS[name], activation((24, 8))
    new, old = (encode(codec, x, make(5)) for make in (jax.random.key, jax.random.PRNGKey))
    np.testing.assert_array_equal(codec.decode(new), codec.decode(old))
    assert nbytes(new) == nbytes(old)


@drawing
@pytest.mark.parametrize("key", [None, 0])
def test_what_is_no_key_is_named(name, key):
    with pytest.raises(ValueError, match=f"got key={key}: pass `key`"):
        CODECS[name].encode(activation((24, 8)), key)


@every
def test_transformations_of_jax_change_nothing(codec, x64):
    xs = jnp.stack([activation((24, 8), "float64", seed) for seed in range(3)])
    keys = jax.random.split(KEY, 3)

    def plain(x, key):
        return codec.decode(codec.encode(x, key))

    eager = plain(xs[0], keys[0])
    mapped = jax.jit(jax.vmap(plain))(xs, keys)
    _, scanned = jax.lax.scan(lambda _, xk: (None, plain(*xk)), None, (xs, keys))
    jitted = jnp.stack([round_trip(codec, x, key) for x, key in zip(xs, keys, strict=True)])
    np.testing.assert_allclose(jitted[0], eager, rtol=1e-11, atol=1e-12)
    for got in (mapped, scanned):
        np.testing.assert_allclose(got, jitted, rtol=1e-11, atol=1e-12)


FILLS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "zeros": lambda rng, shape: np.zeros(shape),
    "constant": lambda rng, shape: np.full(shape, -2.5),
    "huge": lambda rng, shape: 1e30 * rng.normal(size=shape),
    # A projection to rank 1 lengthens 7 features up to 40-fold (chi-squared, one in a million), and
    # its gradient sums 7 tokens: ten bits below the largest number leave room for both.
    "near the largest": lambda rng, shape: 2.0**118 * rng.uniform(-1, 1, shape),
    "tiny": lambda rng, shape: 1e-30 * rng.normal(size=shape),
    "subnormal": lambda rng, shape: 1e-40 * rng.normal(size=shape),
    "one token": lambda rng, shape: np.eye(shape[0], shape[1], dtype=float) * 3,
    "mixed scales": lambda rng, shape: 10.0 ** rng.integers(-20, 20, shape),
}


def fitted(codec, tokens, features):
    """The codec, its ranks lowered to what the shape allows."""
    limit = {"rank": min(tokens, features), "tail": 1, "points": tokens}
    given = {field.name: getattr(codec, field.name) for field in dataclasses.fields(codec)}
    if "tail" in given:
        if limit["rank"] < 2:
            return actjax.RandomProjection(1)
        limit["rank"] -= 1
    lower = {name: min(given[name], limit[name]) for name in limit if given.get(name)}
    return dataclasses.replace(codec, **lower)


@functools.partial(jax.jit, static_argnums=0)
def round_trip_and_gradient(codec, x, key):
    code = codec.encode(x, key)
    return codec.decode(code), codec.weight_grad(code, jnp.ones((x.shape[0], 2), x.dtype))


# A few shapes and many fills, since each new shape is compiled.
@every
@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from([(1, 1), (1, 7), (7, 1), (5, 3)]),
    fill=st.sampled_from(sorted(FILLS)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 5),
)
def test_any_activation_survives(codec, shape, fill, dtype, seed):
    x = jnp.asarray(FILLS[fill](np.random.default_rng(seed), shape), dtype)
    codec = fitted(codec, *shape)
    decoded, dw = round_trip_and_gradient(codec, x, jax.random.key(seed))
    assert decoded.dtype == x.dtype
    assert np.isfinite(np.asarray(decoded, np.float32)).all()
    assert np.isfinite(dw).all()
    if fill == "zeros":
        assert not np.any(decoded)
