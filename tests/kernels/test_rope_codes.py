"""Tests of `rope_encode` and `rope_decode`: rotated numbers beside codes, and from codes."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from kernels.kernel_cases import TINY, f64, normal

import actjax
from actjax import Quantized
from actjax.codecs.quantized import QuantizeInputs
from actjax.kernels.dequantize.api import dequantize
from actjax.kernels.quantize.api import quantize
from actjax.kernels.rope_decode.api import rope_decode
from actjax.kernels.rope_encode.api import rope_encode

FORMAT = Quantized(4, group=16, scale_dtype="float32").format
X = normal(2, 6, 64)
ANGLES = 10 * normal(6, 4, seed=1)
TABLES = np.cos(ANGLES), np.sin(ANGLES)


def encoded(x, *tables, format=FORMAT, **options):
    return rope_encode(QuantizeInputs(x), *tables, format=format, **options)


@functools.partial(jax.jit, static_argnames="format")
def both(x, *tables, format=FORMAT):
    """Returns the value and the code, and the value at the decoded numbers."""
    value, code = encoded(x, *tables, format=format)
    return value, code, rope_decode(code, *tables), dequantize(code)


def rotated(x, cos, sin):
    """Returns pairs (i, i + D/2) of heads of D numbers as complex numbers, turned."""
    x = f64(x).reshape(*x.shape[:2], -1, 2, cos.shape[-1])
    turned = (x[..., 0, :] + 1j * x[..., 1, :]) * (f64(cos) + 1j * f64(sin))[:, None]
    return np.stack([turned.real, turned.imag], -2).reshape(*x.shape[:2], -1)


def assert_equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_values_and_codes():
    value, code, again, decoded = both(X, *TABLES)
    # Two products and a sum, of numbers up to the length of a pair.
    np.testing.assert_allclose(value, rotated(X, *TABLES), atol=4 * TINY * 2 * abs(X).max())
    assert_equal(code, jax.jit(functools.partial(quantize, format=FORMAT))(QuantizeInputs(X)))
    want = rotated(np.asarray(decoded), *TABLES)
    np.testing.assert_allclose(again, want, atol=4 * TINY * 2 * abs(X).max())
    assert abs(want - f64(value)).max() > 0.01


def test_where_no_program_does_all_of_it_its_parts_have_theirs():
    as_on_tpus = Quantized(4, group=128, levels="normal", rotate=True).format
    traced = both.trace(normal(2, 6, 128), *TABLES, format=as_on_tpus)
    for platform, count in {"cpu": 0, "tpu": 3}.items():
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count("tpu_custom_call") == count, platform


@pytest.mark.parametrize(("half", "columns"), [(4, 16), (16, 32)], ids=["whole heads", "too wide"])
def test_each_device_has_whole_heads(half, columns):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    placed = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data", None, "tensor")))
    tables = [np.tile(x, half // 4) for x in TABLES]
    with jax.set_mesh(mesh):
        got = jax.jit(lambda *args: both(*args))(placed, *tables)
    # Bytes of four bits; groups of 16 have no whole head of 32.
    assert got[1].planes[0].sharding.shard_shape(got[1].planes[0].shape)[-1] == columns
    want = both(X, *tables)
    assert_equal(got[1], want[1])
    for i in (0, 2):
        np.testing.assert_allclose(got[i], want[i], atol=8 * TINY * abs(X).max())


def test_wrong_arguments_are_named():
    cos, sin = TABLES
    code = jax.eval_shape(both, X, cos, sin)[1]
    rows = [
        (lambda: encoded(X, cos, sin[:2]), ValueError, "`sin` of rope_encode"),
        (lambda: encoded(X, cos[:2], sin[:2]), ValueError, r"`x` of rope_encode must be \[B, S,"),
        (lambda: encoded(X[0], cos, sin), ValueError, "`x` of rope_encode"),
        (lambda: encoded(X.astype("int32"), cos, sin), TypeError, "`x` of rope_encode"),
        (lambda: rope_decode(X, cos, sin), TypeError, "`code` of rope_decode"),
        (lambda: rope_decode(code, cos[:, :3], sin[:, :3]), ValueError, "`x` of rope_decode"),
    ]
    for call, error, message in rows:
        with pytest.raises(error, match=message):
            call()


def test_gradients_are_those_of_the_definition():
    @jax.jit
    def gradients():
        loss = lambda x: jnp.sum(jnp.sin(encoded(x, *TABLES)[0]))  # noqa: E731
        return jax.grad(loss)(X), jnp.cos(encoded(X, *TABLES)[0])

    dx, cotangent = gradients()
    want = rotated(np.asarray(cotangent), TABLES[0], -TABLES[1])
    np.testing.assert_allclose(dx, want, atol=4 * TINY * 2)


@pytest.mark.parametrize("settings", [{"balance": True}, {"rounding": "dither"}], ids=str)
def test_attention_has_the_gradient_at_the_decoded_heads(settings):
    codec, key = Quantized(4, 16, **settings), jax.random.key(3)
    key = key if codec.needs_key else None
    heads = [normal(2, 6, n, 8, seed=n) for n in (8, 4, 2)]
    heads[2] = heads[2].repeat(2, axis=2)
    segments = np.repeat([[0, 1]], 3, axis=1).repeat(2, axis=0)

    @jax.jit
    def gradients():
        def value(*qkv, **options):
            return actjax.attention(*qkv, rope=TABLES, segments=segments, **options)

        got = jax.vjp(functools.partial(value, codec=codec, key=key), *heads)
        merged = [x.reshape(2, 6, -1) for x in heads]
        keys = [key if key is None else jax.random.fold_in(key, i) for i in range(3)]
        decoded = [codec.decode(codec.encode(*both)) for both in zip(merged, keys, strict=True)]
        decoded = [x.reshape(y.shape) for x, y in zip(decoded, heads, strict=True)]
        dy = jnp.sin(got[0])
        return got[0], value(*heads), got[1](dy), jax.vjp(value, *decoded)[1](dy)

    result, exact, got, want = gradients()
    np.testing.assert_array_equal(result, exact)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=256 * TINY, atol=256 * TINY * abs(b).max())


class Tables(NamedTuple):
    """Tables of a user."""

    cos: Any
    sin: Any


def test_tables_are_taken_from_any_container_and_must_fit_the_heads():
    q = normal(2, 6, 2, 8)

    def value(tables):
        return lambda q: actjax.attention(q, q, q, rope=tables, codec=Quantized(4, 16))

    containers = [TABLES, list(TABLES), Tables(*TABLES), np.stack(TABLES)]
    shapes = [jax.eval_shape(jax.grad(lambda q: jnp.sum(value(x)(q))), q) for x in containers]
    assert {x.shape for x in shapes} == {q.shape}
    for wrong in ([x[:, :2] for x in TABLES], [np.tile(x, 2) for x in TABLES]):
        # Also where no gradient is computed in the end.
        with pytest.raises(ValueError, match=r"`x` must be \[B, S, H, D\] .* got x\(2, 6, 2, 8\)"):
            jax.eval_shape(lambda q: jax.vjp(value(wrong), q)[0], q)
