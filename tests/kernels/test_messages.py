"""Error messages of the kernels: wrong arguments, and arguments that a program does not take."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.kernel_cases import random_code
from messages import assert_messages

import actjax
from actjax import Quantized
from actjax.formats.blockwise import blockwise_zeros
from actjax.formats.code import QuantizeInputs
from actjax.formats.four_bit import rank_one_zeros, signed_zeros
from actjax.kernels import dispatch
from actjax.kernels.adam_4bit.api import KERNEL, adam_4bit
from actjax.kernels.adam_8bit.api import adam_8bit
from actjax.kernels.dequantize.api import dequantize
from actjax.kernels.quantize.api import quantize
from actjax.kernels.rms_norm_backward.api import rms_norm_backward
from actjax.kernels.swiglu_backward.api import swiglu_backward
from actjax.optim import scale_by_adam_8bit

ERRORS = (ValueError, TypeError)
X = np.ones((4, 256), np.float32)
CODE, NARROW = (random_code(Quantized(4), "float32", (4, d)) for d in (256, 128))
ADAM = {"b1": 0.9, "b2": 0.999, "eps": 1e-8}


def ones(*shape, dtype="float32"):
    return np.ones(shape, dtype)


def quantized(*arrays, format=Quantized(4).format, implementation=None, **others):
    inputs = QuantizeInputs(*arrays, **others)
    return quantize(inputs, format=format, implementation=implementation)


def test_wrong_arguments_are_named():
    dither, seed = Quantized(4, rounding="dither").format, np.zeros(2, np.uint32)
    scales = ones(256, dtype="uint16")
    # Shapes alone: the checks need no values.
    mu, nu = (
        jax.eval_shape(lambda unsigned=u: blockwise_zeros((4, 256), "float32", unsigned=unsigned))
        for u in (False, True)
    )
    mu_4bit, nu_4bit = signed_zeros((5, 70), "float32", 32), rank_one_zeros((5, 70), "float32", 32)
    tx = scale_by_adam_8bit()
    state = jax.eval_shape(tx.init, {"w": ones(64, 256)})
    rows = [
        (lambda: quantized(ones(4, 8, dtype="int32")), "`x` of quantize"),
        (lambda: quantized(np.float32(1)), "[..., d], got shape ()"),
        (lambda: quantized(X, format=dither), "`seed` of quantize must be given"),
        (lambda: quantized(X, seed), "`seed` of quantize must not be given"),
        (lambda: quantized(X, seed[:1], format=dither), "(2,), got (1,)"),
        (lambda: quantized(X, mean=scales), "`mean` and `spread` of quantize must be given"),
        (lambda: quantized(X, mean=scales[:8], spread=scales), "(256,), got (8,)"),
        (lambda: quantized(X, mean=scales, spread=X[0]), "uint16, as stored, got float32"),
        (lambda: swiglu_backward(CODE, NARROW, X), "`up` of swiglu_backward"),
        (lambda: swiglu_backward(CODE, CODE, X[:1]), "code of (1, 256), got one of (4, 256)"),
        (lambda: swiglu_backward(X, X, X), "must be a QuantizedCode, got"),
        (lambda: rms_norm_backward(CODE, X[0, :128], X), "`scale` of rms_norm_backward"),
        (lambda: rms_norm_backward(CODE, X[0, :1], X), "(256,), got (1,)"),
        (lambda: rms_norm_backward(X, X[0], X[:1]), "`x` of rms_norm_backward"),
        (lambda: adam_8bit(X[:, :128], mu, nu, ones(2), **ADAM), "`grad` of adam_8bit"),
        (lambda: adam_8bit(X, mu, nu, ones(1), **ADAM), "`corrections` of adam_8bit"),
        (
            lambda: jax.eval_shape(tx.update, {"w": ones(1, 256)}, state),
            "`grad` of adam_8bit",
        ),
        (lambda: adam_4bit(ones(4, 70), mu_4bit, nu_4bit, ones(2), **ADAM), "`grad` of adam_4bit"),
        (
            lambda: adam_4bit(
                ones(5, 70), signed_zeros((5, 90), "float32", 32), nu_4bit, ones(2), **ADAM
            ),
            "`mu` of adam_4bit",
        ),
        (
            lambda: adam_4bit(ones(5, 70), mu_4bit, nu_4bit, ones(1), **ADAM),
            "`corrections` of adam_4bit",
        ),
    ]
    assert_messages(ERRORS, rows)


def test_settings_of_adam_are_named_with_their_value():
    nan, name = float("nan"), "of scale_by_adam_8bit must be"
    rows = [
        ({"b1": 1.0}, f"`b1` {name} in [0, 1), got 1.0"),
        ({"b1": -0.1}, f"`b1` {name} in [0, 1), got -0.1"),
        ({"b2": nan}, f"`b2` {name} in [0, 1), got nan"),
        ({"eps": -1e-8}, f"`eps` {name} >= 0, got -1e-08"),
        ({"eps_root": nan}, f"`eps_root` {name} >= 0, got nan"),
        ({"block": 0}, "`block` of "),
        ({"min_size": 0}, "`min_size` of "),
    ]
    assert_messages(
        ERRORS,
        [(lambda settings=s: scale_by_adam_8bit(**settings), message) for s, message in rows],
    )


def test_an_unknown_implementation_is_named():
    known = "('reference', 'mosaic', 'triton')"
    rows = []
    for unknown in ("cuda", "", "Reference", 1, True):
        message = f"`implementation` must be None or one of {known}, got {unknown!r}."
        rows.append((functools.partial(dequantize, CODE, implementation=unknown), message))
        rows.append((lambda name=unknown: actjax.kernels.use(name).__enter__(), message))
    assert_messages(ERRORS, rows)


@pytest.mark.skipif(dispatch._missing("triton") is not None, reason="needs jax-triton")
def test_arguments_that_a_program_refuses_are_named(x64):
    def refused(kernel, name, reason, *args, **options):
        call = functools.partial(kernel, *args, implementation="triton", **options)
        return call, f"'triton' of {name} takes {reason}"

    def moments(group=32, dtype="float32", width=64):
        shape = (2, width)
        return signed_zeros(shape, dtype, group), rank_one_zeros(shape, dtype, group)

    def adam_4(reason, mu, nu, grad=None):
        grad = ones(2, mu.width) if grad is None else grad
        scales = ones(2, 1), ones(1, 64), ones(2, 1), ones(1, 64)
        return refused(KERNEL, "adam_4bit", reason, grad, mu, nu, scales, ones(2), **ADAM)

    def adam_8(reason, mu, nu):
        grad = ones(*mu.codes.shape)
        return refused(adam_8bit, "adam_8bit", reason, grad, mu, nu, ones(2), **ADAM)

    def swiglu(reason, dtype="float32", group=64, rounding="nearest", rotate=True):
        settings = {"rotate": rotate, "balance": True, "rounding": rounding}
        gate = random_code(Quantized(4, group=64, **settings), dtype, (2, 128))
        up = random_code(Quantized(4, group=group, **settings), dtype, (2, 128))
        arguments = gate, up, ones(2, 128, dtype=dtype)
        return refused(swiglu_backward, "swiglu_backward", reason, *arguments)

    mu, nu = moments()
    first, second = (blockwise_zeros((2, 8), "float32", unsigned=u) for u in (False, True))
    halved = dataclasses.replace(second, dtype=jnp.dtype("bfloat16"))
    long = [blockwise_zeros((1, 5000), "float32", unsigned=u, block=5000) for u in (False, True)]
    sizes = "blocks of one size up to 4096, got"
    floats = "floating point numbers of 16 or 32 bits, got float64"
    exact = ones(2, 40, dtype="float64")
    rows = [
        adam_4("groups of 32, 64, ... 256 values, got 16", *moments(16)),
        adam_4("groups of 32, 64, ... 256 values, got 512", *moments(512, width=512)),
        adam_4("groups of one size, got 32 and 64", mu, moments(64)[1]),
        adam_4("moments of float32, got bfloat16", *moments(dtype="bfloat16")),
        adam_4("gradients of 16 or 32 bits, got int8", mu, nu, ones(2, 64, dtype="int8")),
        adam_8("`mu` in int8 and `nu` in uint8, got uint8 and int8", second, first),
        adam_8("moments of float32, got float32 and bfloat16", first, halved),
        adam_8(f"{sizes} 5000, 5000", *long),
        adam_8(f"{sizes} 8, 4", first, dataclasses.replace(second, block=4)),
        refused(rms_norm_backward, "rms_norm_backward", floats, exact, exact[0], exact),
        swiglu(floats, "float64"),
        swiglu("groups of one size for `gate` and `up`, got 64 and 32", group=32),
        swiglu("rotated groups, rounded to the nearest level", rounding="dither"),
        swiglu("rotated groups, rounded to the nearest level", rotate=False),
    ]
    assert_messages(ERRORS, rows)


def test_codes_that_a_tpu_does_not_take_are_named():
    as_lean = Quantized(4, levels="normal", rotate=True, group=128, balance=True)
    rows = [
        (dataclasses.replace(as_lean, bits=2, balance=False), (1, 2, 8), "takes bits 4 on TPUs"),
        (Quantized(4), (1, 2, 8), "takes levels 'normal' on TPUs, got 'uniform'"),
        (as_lean, (4, 8), "takes arrays [B, S, d] with d up to 16384 on TPUs, got (4, 8)"),
        (as_lean, (1, 1, 16_385), "got (1, 1, 16385)"),
    ]
    assert_messages(
        ERRORS,
        [
            (
                functools.partial(
                    quantized, ones(*shape), format=codec.format, implementation="mosaic"
                ),
                message,
            )
            for codec, shape, message in rows
        ],
    )
