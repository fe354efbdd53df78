"""Tests of `rms_norm_encode`: the value of a norm and the code of its input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from kernels.kernel_cases import TINY, f64, normal

import actjax
from actjax import Quantized
from actjax.codecs.quantized import QuantizeInputs
from actjax.kernels.quantize.api import quantize
from actjax.kernels.rms_norm_encode.api import rms_norm_encode

FORMAT = Quantized(4, group=16, scale_dtype="float32").format
X, SCALE, Y = normal(4, 32), normal(32, seed=1), normal(4, 32, seed=2)


def encoded(x, scale, **options):
    return rms_norm_encode(QuantizeInputs(x), scale, format=FORMAT, eps=1e-3, **options)


def assert_equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_value_and_code():
    value, code = jax.jit(encoded)(X, SCALE)
    x = f64(X)
    want = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-3) * f64(SCALE)
    # A sum of 32 squares, a root, and three operations.
    np.testing.assert_array_less(abs(value - want), (32 + 8) * TINY * abs(want) + 1e-30)
    assert_equal(code, jax.jit(functools.partial(quantize, format=FORMAT))(QuantizeInputs(X)))


def test_each_device_encodes_its_tokens():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    placed = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data", "tensor")))
    with jax.set_mesh(mesh):
        got = jax.jit(lambda *args: encoded(*args))(placed, SCALE)
    assert got[1].planes[0].sharding.shard_shape(got[1].planes[0].shape) == (2, 16)
    assert_equal(got, jax.jit(encoded)(X, SCALE))


@pytest.mark.parametrize("settings", [{"balance": True}, {"rounding": "dither"}], ids=str)
def test_an_operator_holds_the_code_that_its_codec_makes(settings):
    codec, key = Quantized(4, 16, **settings), jax.random.key(3)
    key = key if codec.needs_key else None

    @jax.jit
    def gradients():
        def loss(x, scale, codec, key):
            return jnp.sum(jnp.sin(actjax.rms_norm(x, scale, codec=codec, key=key)))

        got = jax.grad(loss, argnums=(0, 1))(X, SCALE, codec, key)
        # The cotangent is that of the exact value.
        cotangent = jnp.cos(actjax.rms_norm(X, SCALE))
        decoded = codec.decode(codec.encode(X, key if key is None else jax.random.fold_in(key, 0)))
        return got, jax.vjp(actjax.rms_norm, decoded, SCALE)[1](cotangent)

    got, want = gradients()
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=64 * TINY, atol=64 * TINY)


class Doubled(Quantized):
    """A codec of a user, which decodes in its own way."""

    def decode(self, code):
        return 2 * super().decode(code)


def test_a_subclass_decodes_in_its_own_way():
    @jax.jit
    def gradients():
        norm = functools.partial(actjax.rms_norm, scale=SCALE)
        own = jax.grad(lambda x: jnp.vdot(norm(x, codec=Doubled(4, 16)), Y))(X)
        decoded = Quantized(4, 16).decode(Quantized(4, 16).encode(X))
        return own, jax.vjp(norm, 2 * decoded)[1](Y)[0]

    got, want = gradients()
    np.testing.assert_allclose(got, want, rtol=64 * TINY, atol=64 * TINY)


def test_wrong_arguments_are_named():
    rows = [
        ((X, SCALE[:2]), ValueError, "`scale` of rms_norm_encode"),
        ((X.astype("int32"), SCALE), TypeError, "`x` of rms_norm_encode"),
    ]
    for args, error, message in rows:
        with pytest.raises(error, match=message):
            encoded(*args)
