"""Programs for TPUs, interpreted: equal to the definitions up to float32 rounding."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from actjax import Quantized
from actjax.formats.balance import balance_of
from actjax.formats.blockwise import blockwise_zeros
from actjax.formats.code import QuantizeInputs
from actjax.formats.packing import unpack
from actjax.kernels.adam_8bit import rows
from actjax.kernels.adam_8bit.api import adam_8bit
from actjax.kernels.dequantize.api import dequantize
from actjax.kernels.lanes import tokens_of
from actjax.kernels.quantize.api import quantize
from actjax.kernels.rms_norm_backward.api import rms_norm_backward
from actjax.kernels.rms_norm_encode.api import rms_norm_encode
from actjax.kernels.swiglu_backward.api import swiglu_backward
from actjax.kernels.swiglu_encode.api import swiglu_encode
from train.planning.devices import TPUS, compile_for

CODEC = Quantized(4, levels="normal", rotate=True, group=128, balance=True)
"""As `lean` stores numbers."""


def activation(shape, dtype):
    """Channels of different sizes, and a token of zeros."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal(shape) * np.exp(draw.standard_normal(shape[-1]))
    x[0, 0] = 0
    return x.astype(jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=0)
def by_both(codec, x):
    """Returns codes by the program and by the definition, their unpacked integers, and numbers."""
    mean, spread = balance_of(x, "bfloat16") if codec.balance else (None, None)
    inputs = QuantizeInputs(x, mean=mean, spread=spread)
    codes = [quantize(inputs, format=codec.format, implementation=name) for name in BOTH]
    features = x.shape[-1] + -x.shape[-1] % 128
    integers = [unpack(c.planes, 4, features, 128).astype(jnp.int32) for c in codes]
    code = dataclasses.replace(codes[1], mean=mean, spread=spread)
    return codes, integers, [dequantize(code, implementation=name) for name in BOTH]


BOTH = ("mosaic", "reference")
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("shape", "dtype", "balance"),
    [
        ((1, 9, 341), "bfloat16", True),
        ((2, 8, 384), "float32", False),
        slow((2, 16, 128), "bfloat16", True),
        slow((1, 130, 85), "float32", True),
        slow((1, 3, 1), "float32", False),
        slow((1, 4, 200), "bfloat16", False),
    ],
)
def test_codes_and_numbers_are_those_of_the_definition(shape, dtype, balance):
    x = activation(shape, dtype)
    codec = CODEC if balance else Quantized(4, levels="normal", rotate=True, group=128)
    (got, want), integers, numbers = by_both(codec, x)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    # Sums in another order may move a scale to the next bfloat16, and a number to the next level.
    scales = [np.asarray(c.scale).view(jnp.bfloat16).astype("float32") for c in (got, want)]
    np.testing.assert_allclose(*scales, rtol=2**-7, atol=0)
    apart = np.abs(np.subtract(*map(np.asarray, integers)))
    assert apart.max() <= 1
    assert apart.mean() < 0.002
    # Sums of 128 products in float32, then one rounding.
    tolerance = 2**-7 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(
        *(np.asarray(n, "float32") for n in numbers),
        rtol=tolerance,
        atol=tolerance * float(abs(x).max()),
    )


@pytest.mark.parametrize(("dtype", "features"), [("bfloat16", 341), slow("float32", 384)])
def test_values_beside_codes_are_those_of_the_definition(dtype, features):
    x, y = activation((2, 9, features), dtype), activation((2, 9, features), dtype)[:, ::-1]

    @jax.jit
    def by_all(x, y, scale):
        inputs = [QuantizeInputs(v, mean=m, spread=s) for v, m, s in map(statistics, (x, y))]
        formats = CODEC.format, CODEC.format
        both = [
            (
                swiglu_encode(*inputs, formats=formats, features=features - 3, implementation=name),
                rms_norm_encode(inputs[0], scale, format=CODEC.format, implementation=name),
            )
            for name in BOTH
        ]
        # The program of `quantize` writes the same codes.
        alone = [quantize(v, format=CODEC.format, implementation="mosaic") for v in inputs]
        return both, alone

    def statistics(x):
        return x, *balance_of(x, "bfloat16")

    ((swiglu, norm), want), alone = by_all(x, y, activation((2, 9, features), "float32")[1, 1])
    jax.tree.map(np.testing.assert_array_equal, [*swiglu[1:], norm[1]], [*alone, alone[0]])
    # A dozen roundings in float32, then one.
    tolerance = 2**-7 if dtype == "bfloat16" else 1e-5
    for got, exact in zip((swiglu, norm), want, strict=True):
        got, exact = (np.asarray(v[0], "float32") for v in (got, exact))
        np.testing.assert_allclose(got, exact, rtol=tolerance, atol=tolerance)


def test_blocks_of_wide_rows_have_fewer_tokens():
    # That they fit is tested by `test_programs_compile_for_tpus`, which needs the extra tpu.
    for width, dtype, tokens in [
        (2048, "bfloat16", 128),
        (8192, "float32", 64),
        (9000, "float32", 32),
    ]:
        assert tokens_of(512, width, dtype, size=2**21) == tokens
        assert tokens * width * jnp.dtype(dtype).itemsize <= 2**21


def test_a_tpu_falls_back_to_the_definition(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    quantized = functools.partial(quantize, format=Quantized(3, group=8).format)

    @jax.jit
    def both(x):
        inputs = QuantizeInputs(x)
        return quantized(inputs), quantized(inputs, implementation="reference")

    jax.tree.map(np.testing.assert_array_equal, *both(activation((2, 4, 16), "float32")))


def test_backward_passes_decode_with_it():
    @jax.jit
    def both(x, dy):
        code, other = CODEC.encode(x), CODEC.encode(x + 1)
        return [
            (
                swiglu_backward(code, other, dy, with_value=True, implementation=name),
                rms_norm_backward(code, jnp.ones(250), dy, with_value=True, implementation=name),
            )
            for name in BOTH
        ]

    got, want = both(*(activation((2, 4, 250), "float32") for _ in range(2)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


def test_large_moments_are_updated_some_rows_at_a_time(monkeypatch):
    monkeypatch.setattr(rows, "_NUMBERS", 96)
    draw = np.random.default_rng(0).standard_normal
    numbers = [draw((24, 32)).astype("float32") for _ in range(3)]
    hyper = {"b1": 0.9, "b2": 0.999, "eps": 1e-8}

    def both(grad, first, second):
        zeros = (blockwise_zeros((24, 32), "float32", unsigned=u, block=16) for u in (False, True))
        mu, nu = (x.encode(y) for x, y in zip(zeros, (first, second**2), strict=True))
        args = grad, mu, nu, jnp.asarray([0.1, 0.001])
        results = [adam_8bit(*args, **hyper, implementation=name) for name in BOTH]
        return results, [[moment.decode() for moment in result[1:]] for result in results]

    (got, want), decoded = jax.jit(both)(*numbers)
    # XLA fuses both in another order: a last bit may differ, and then a code.
    np.testing.assert_allclose(got[0], want[0], rtol=2e-5, atol=1e-6)
    for a, b in zip(*decoded, strict=True):
        np.testing.assert_allclose(a, b, rtol=0.15, atol=1e-6)
    for a, b in zip(got[1:], want[1:], strict=True):
        assert a.codes.shape == b.codes.shape
        assert np.mean(np.asarray(a.codes) != np.asarray(b.codes)) < 0.01
    monkeypatch.setattr(rows, "_NUMBERS", 8)
    with pytest.raises(ValueError, match="takes large matrices on TPUs, got"):
        jax.eval_shape(lambda *numbers: both(*numbers), *numbers)


def programs(x, code):
    """Returns the results of all programs but the backward passes."""
    inputs = QuantizeInputs(x, mean=code.mean, spread=code.spread)
    formats, scale = (CODEC.format, CODEC.format), jnp.ones(x.shape[-1], x.dtype)
    return (
        quantize(inputs, format=CODEC.format),
        dequantize(code),
        rms_norm_encode(inputs, scale, format=CODEC.format),
        swiglu_encode(inputs, inputs, formats=formats),
    )


@pytest.mark.parametrize("features", [2048, slow(5461)])
def test_programs_lower_for_a_tpu_at_the_shapes_of_real_models(features, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    x = jax.ShapeDtypeStruct((8, 1024, features), "bfloat16")
    code = jax.eval_shape(CODEC.encode, x)

    text = jax.jit(programs).trace(x, code).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 4


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs the extra tpu")
@pytest.mark.parametrize(
    ("name", "width", "dtype"),
    [*((name, 5504, "bfloat16") for name in TPUS), ("v5e", 16384, "float32")],
)
def test_programs_compile_for_tpus(name, width, dtype):
    x = jax.ShapeDtypeStruct((2, 256, width), dtype)
    code = jax.eval_shape(CODEC.encode, x)
    with compile_for(TPUS[name]) as place:
        text = jax.jit(programs).lower(place(x), place(code)).compile().as_text()
    for kernel in ("quantize", "dequantize", "rms_norm_encode", "swiglu_encode"):
        assert f"actjax_{kernel}" in text
