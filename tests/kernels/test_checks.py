"""Tests of actjax/kernels/checks.py: wrong arguments never reach a kernel."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.kernel_cases import random_code

import actjax
from actjax.formats.blockwise import blockwise_zeros
from actjax.formats.code import QuantizeInputs
from actjax.kernels.adam_8bit.api import adam_8bit
from actjax.kernels.point_assignment.api import point_assignment
from actjax.kernels.quantize.api import quantize
from actjax.kernels.rms_norm_backward.api import rms_norm_backward
from actjax.kernels.swiglu_backward.api import swiglu_backward

X = np.ones((4, 256), np.float32)
CODE, NARROW = (random_code(actjax.Quantized(4), "float32", (4, d)) for d in (256, 128))
# Shapes alone: the checks need no values.
MU, NU = (
    jax.eval_shape(lambda unsigned=u: blockwise_zeros((4, 256), jnp.float32, unsigned=unsigned))
    for u in (False, True)
)
ADAM = {"b1": 0.9, "b2": 0.999, "eps": 1e-8}
DITHER = actjax.Quantized(4, rounding="dither").format
SEED = np.zeros(2, jnp.uint32)
SCALES = np.ones(256, jnp.uint16)


def quantized(*arrays, format=actjax.Quantized(4).format, **others):
    return quantize(QuantizeInputs(*arrays, **others), format=format)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantized(np.ones((4, 8), jnp.int32)), "`x` of quantize"),
        (lambda: quantized(np.float32(1)), "[..., d], got shape ()"),
        (lambda: quantized(X, format=DITHER), "`seed` of quantize must be given"),
        (lambda: quantized(X, SEED), "`seed` of quantize must not be given"),
        (lambda: quantized(X, SEED[:1], format=DITHER), "(2,), got (1,)"),
        (lambda: quantized(X, mean=SCALES), "`mean` and `spread` of quantize must be given"),
        (lambda: quantized(X, mean=SCALES[:8], spread=SCALES), "(256,), got (8,)"),
        (lambda: quantized(X, mean=SCALES, spread=X[0]), "uint16, as stored, got float32"),
        (lambda: swiglu_backward(CODE, NARROW, X), "`up` of swiglu_backward"),
        (lambda: swiglu_backward(CODE, CODE, X[:1]), "code of (1, 256), got one of (4, 256)"),
        (lambda: swiglu_backward(X, X, X), "must be a QuantizedCode, got"),
        (lambda: rms_norm_backward(CODE, X[0, :128], X), "`scale` of rms_norm_backward"),
        (lambda: rms_norm_backward(CODE, X[0, :1], X), "(256,), got (1,)"),
        (lambda: rms_norm_backward(X, X[0], X[:1]), "`x` of rms_norm_backward"),
        (lambda: point_assignment(X, X[:2, :128]), "`points` of point_assignment"),
        (lambda: point_assignment(X, X[:0]), "at least one point"),
        (lambda: adam_8bit(X[:, :128], MU, NU, np.ones(2), **ADAM), "`grad` of adam_8bit"),
        (lambda: adam_8bit(X, MU, NU, np.ones(1), **ADAM), "`corrections` of adam_8bit"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        call()


def test_an_update_of_another_shape_than_its_parameter_is_refused():
    tx = actjax.optim.scale_by_adam_8bit()
    state = jax.eval_shape(tx.init, {"w": np.ones((64, 256), np.float32)})
    with pytest.raises(ValueError, match="`grad` of adam_8bit"):
        jax.eval_shape(tx.update, {"w": np.ones((1, 256), np.float32)}, state)


def test_decays_may_be_arrays_under_jit():
    tx = actjax.optim.scale_by_adam_8bit(b1=jnp.float32(0.9))
    params = np.ones((64, 256), np.float32)
    updates, _ = jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params))
    assert updates.shape == params.shape
