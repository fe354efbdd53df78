"""Tests of actjax/ops/linear.py beyond `test_contract.py`: bits, bias, precision and keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from cheap_codecs import Coarse, CoarseRandom
from jaxprs import nbytes
from ops.helpers import KEY, assert_close, assert_equal, normal, ones, pullback

from actjax import Exact, RandomizedSVD, RandomProjection, linear, norm_linear, qkv_projection


def test_value_is_the_product_bit_for_bit():
    dtypes = "float32", "bfloat16"

    @jax.jit
    def run(arrays):
        results = []
        for x, w in arrays:
            for codec in (Exact(), Coarse()):
                fun = lambda x, w=w, codec=codec: linear(x, w, codec=codec, key=KEY)  # noqa: E731
                results.append((jax.vjp(fun, x)[0], x @ w))
        return results

    arrays = [(normal(0, 2, 6, 8, dtype=d), normal(1, 8, 5, dtype=d)) for d in dtypes]
    for i, (y, want) in enumerate(run(arrays)):
        assert y.dtype == dtypes[i // 2]
        np.testing.assert_array_equal(y, want)


def test_qkv_projection_is_linear_with_three_weights():
    x, ws = normal(0, 6, 8), tuple(normal(i, 8, n) for i, n in enumerate((8, 4, 4), 1))
    options = {"bias": (normal(4, 8), None, normal(5, 4)), "codec": CoarseRandom(), "key": KEY}

    @jax.jit
    def run(x, ws):
        results = []
        for fun in (lambda x, ws: qkv_projection(x, *ws, **options),
                    lambda x, ws: linear(x, ws, **options)):  # fmt: skip
            y, pull = jax.vjp(fun, x, ws)
            results.append((y, pull(y)))
        return results

    assert_equal(*run(x, ws))


def test_weight_gradient_is_unbiased_if_the_codec_is(x64):
    x, w, dz = normal(0, 7, 6), normal(1, 6, 3), normal(2, 7, 3)

    def sample(key):
        run = lambda w: linear(x, w, codec=RandomProjection(3), key=key)  # noqa: E731
        return jax.vjp(run, w)[1](dz)[0]

    samples = np.asarray(jax.jit(lambda: jax.vmap(sample)(jax.random.split(KEY, 2000)))())
    standard_error = samples.std(0) / np.sqrt(2000)
    assert standard_error.min() > 0  # Each key draws other numbers.
    error = np.abs(samples.mean(0) - np.asarray(x).T @ np.asarray(dz))
    assert np.all(error <= 5 * standard_error)


def test_sums_are_taken_in_float32():
    # 4096 ones: a bfloat16 sum stops at 256, where adding one rounds back.
    bf16 = lambda *shape: ones(*shape, dtype=jnp.bfloat16)  # noqa: E731

    @jax.jit
    def run(tall, wide, flat, dz):
        value = linear(wide, tall)
        dx = jax.vjp(lambda x: linear(x, tall.T), flat)[1](wide)[0]
        fun = lambda w, b: linear(tall, w, bias=b)  # noqa: E731
        return value, dx, *jax.vjp(fun, flat.T, wide[:, 0])[1](dz)

    for array in run(bf16(4096, 2), bf16(3, 4096), bf16(3, 2), bf16(4096, 3)):
        assert array.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.float32(array), 4096)


def test_dx_of_several_weights_is_rounded_once():
    # 256 + 1 + 1 is 258; rounded to bfloat16 after each term, where numbers are 2 apart, it is 256.
    ws = tuple(np.full((1, 1), value, jnp.bfloat16) for value in (256, 1, 1))
    dz = ones(1, 1, dtype=jnp.bfloat16)
    run = jax.jit(lambda x, ws, dzs: jax.vjp(lambda x: linear(x, ws), x)[1](dzs))
    (dx,) = run(dz, ws, (dz,) * 3)
    assert dx == 258


def test_bias_is_added_before_rounding():
    # 256 + 1 + 1 in float32 is 258; rounded after the product, 256 + 1 would be 256 again.
    x, w = ones(1, 2, dtype=jnp.bfloat16), np.asarray([[256], [1]], jnp.bfloat16)
    y = jax.jit(lambda x, w, b: linear(x, w, bias=b))(x, w, ones(1, dtype=jnp.bfloat16))
    assert y[0, 0] == 258


def test_a_wider_weight_is_cast_on_the_fly():
    x, w, b = normal(0, 16, 8, dtype=jnp.bfloat16), normal(1, 8, 5), normal(2, 5)
    codecs = Exact(), RandomProjection(3), RandomizedSVD(3)

    def call(codec):
        return lambda x, w, b: linear(x, w, bias=b, codec=codec, key=KEY)

    @jax.jit
    def run(x, w, b):
        results = []
        for codec in codecs:
            y, pull = jax.vjp(call(codec), x, w, b)
            results.append((y, *pull(y)))
        return results

    for codec, (y, dx, dw, db) in zip(codecs, run(x, w, b), strict=True):
        dtypes = y.dtype, dx.dtype, dw.dtype, db.dtype
        assert dtypes == ("bfloat16", "bfloat16", "float32", "float32")
        # No copy of w or b in bfloat16.
        held = nbytes(pullback(call(codec), x, w, b))
        assert held == codec.stored_bytes(x.shape, x.dtype) + w.nbytes + b.nbytes
        # The gradients of a float32 weight keep their float32 sums.
        wide = np.asarray(y, np.float64)
        np.testing.assert_allclose(db, wide.sum(0), rtol=1e-6, atol=1e-6)
        if codec == Exact():
            np.testing.assert_allclose(dw, np.float64(x).T @ wide, rtol=1e-5, atol=1e-5)


def test_each_key_draws_its_numbers_under_vmap_map_and_checkpoint():
    x, w, codec = normal(0, 12, 8), normal(1, 8, 8), CoarseRandom()
    operators = {
        "linear": lambda w, key: linear(x, w, codec=codec, key=key),
        "norm_linear": lambda w, key: norm_linear(x, jnp.ones(8), w, codec=codec, key=key),
    }

    @jax.jit
    def run(w, keys):
        results = {}
        for name, operator in operators.items():
            loss = lambda w, key, operator=operator: jnp.sum(jnp.sin(operator(w, key)))  # noqa: E731
            gradient = jax.grad(loss)
            over_keys = functools.partial(jax.vmap, in_axes=(None, 0))
            results[name] = (
                jax.lax.map(functools.partial(gradient, w), keys),
                over_keys(jax.grad(jax.checkpoint(loss)))(w, keys),
                over_keys(gradient)(w, jax.random.key_data(keys)),  # Keys of the old style.
            )
        return results

    for each, *others in run(w, jax.random.split(KEY, 3)).values():
        assert not np.allclose(each[0], each[1])
        for got in others:
            # Float32 sums of up to 12 terms of size 1 to 10, compiled in another order.
            assert_close(got, each, 1e-5, 1e-5)


def test_a_checkpoint_holds_no_code_but_arguments_and_key():
    def loss(x, w, key):
        return jnp.sum(linear(x, w, codec=CoarseRandom(), key=key))

    held = pullback(jax.checkpoint(loss), ones(12, 8), ones(8, 5), KEY)
    assert {leaf.shape for leaf in jax.tree.leaves(held)} <= {(12, 8), (8, 5), ()}
