"""Tests of the errors of operators with a rebuilt input."""

import numpy as np
from ops.helpers import KEY, assert_raises, ones
from ops.operator_cases import DITHER

from actjax import Exact, attention_linear, gelu_linear, norm_linear, swiglu_linear

X, W, Q, K = ones(6, 8), ones(8, 5), ones(2, 5, 4, 2), ones(2, 5, 2, 2)
SCALE, LIST, INTEGERS = ones(8), (Exact(),) * 4, ones(6, 8, dtype=np.int32)
WT, W7, W4, X5 = ones(5, 8), ones(7, 5), ones(4, 5), ones(5, 8)
NO_KEY = "`codec` Quantized(bits=2, group=4, rounding='dither') draws random numbers, but got key="
COUNT = "`codec` must be one codec, or one for each of "


def test_errors_of_norm_linear():
    assert_raises({
        "scale": (
            lambda: norm_linear(X, ones(7), W), ValueError, "`scale` must be (8,) for x(6, 8)",
        ),
        "weight": (
            lambda: norm_linear(X, SCALE, WT),
            ValueError,
            "`w` must be [d, n] with d = (8,) features of `x`: got x(6, 8) @ w(5, 8). Did you pass",
        ),
        "second weight": (lambda: norm_linear(X, SCALE, (W, W7)), ValueError, "@ w[1](7, 5)"),
        "no weight": (lambda: norm_linear(X, SCALE, ()), ValueError, "`w` is an empty tuple"),
        "bias": (
            lambda: norm_linear(X, SCALE, W, bias=SCALE),
            ValueError,
            "the bias of `w`(8, 5) must be (5,), got (8,).",
        ),
        "bias count": (
            lambda: norm_linear(X, SCALE, (W, W), bias=(None,)),
            ValueError,
            "`bias` has 1 entries for 2 weights",
        ),
        "integers": (
            lambda: norm_linear(INTEGERS, SCALE, W),
            TypeError,
            "`x` must be a floating point array, got int32",
        ),
        "codec class": (
            lambda: norm_linear(X, SCALE, W, codec=Exact),
            TypeError,
            "`codec` must be an actjax.Codec (an instance, not the class)",
        ),
        "codec name": (lambda: norm_linear(X, SCALE, W, codec="exact"), TypeError, "got 'exact'"),
        "codec count": (
            lambda: norm_linear(X, SCALE, W, codec=LIST), ValueError, COUNT + "x: got 4.",
        ),
        "no key": (
            lambda: norm_linear(X, SCALE, W, codec=DITHER), ValueError, NO_KEY + "None: pass `key`",
        ),
        "a number as key": (
            lambda: norm_linear(X, SCALE, W, codec=DITHER, key=0),
            ValueError,
            NO_KEY + "0: pass `key`",
        ),
    })  # fmt: skip


def test_errors_of_swiglu_linear():
    assert_raises({
        "shapes": (
            lambda: swiglu_linear(X, X5, W), ValueError, "`gate` and `up` must agree in shape",
        ),
        "integers": (
            lambda: swiglu_linear(X, INTEGERS, W), TypeError, "`up` must be a floating point",
        ),
        "weight": (lambda: swiglu_linear(X, X, W7), ValueError, "got x(6, 8) @ w(7, 5)"),
        "no codec": (lambda: swiglu_linear(X, X, W, codec=None), TypeError, "got None"),
        "no codec in a pair": (
            lambda: swiglu_linear(X, X, W, codec=(Exact(), "exact")), TypeError, "got 'exact'",
        ),
        "codec count": (
            lambda: swiglu_linear(X, X, W, codec=LIST), ValueError, COUNT + "gate, up: got 4.",
        ),
        "no key": (
            lambda: swiglu_linear(X, X, W, codec=(Exact(), DITHER)), ValueError, NO_KEY + "None",
        ),
        "key count": (
            lambda: swiglu_linear(X, X, W, codec=DITHER, key=(KEY,)),
            ValueError,
            "`key` must be one key, or one for each of gate, up: got 1.",
        ),
    })  # fmt: skip


def test_errors_of_gelu_linear():
    assert_raises({
        "integers": (lambda: gelu_linear(INTEGERS, W), TypeError, "`x` must be a floating point"),
        "weight": (lambda: gelu_linear(X, W7), ValueError, "got x(6, 8) @ w(7, 5)"),
        "no codec": (lambda: gelu_linear(X, W, codec=None), TypeError, "got None"),
        "codec count": (
            lambda: gelu_linear(X, W, codec=LIST), ValueError, COUNT + "x: got 4.",
        ),
        "no key": (lambda: gelu_linear(X, W, codec=DITHER), ValueError, NO_KEY + "None"),
    })  # fmt: skip


def test_errors_of_attention_linear():
    k = ones(2, 4, 2, 2)
    assert_raises({
        "length": (
            lambda: attention_linear(Q, k, k, W),
            ValueError,
            "`q` and `k` must agree in batch, length and head size",
        ),
        "weight": (
            lambda: attention_linear(Q, K, K, W4), ValueError, "got x(2, 5, 8) @ w(4, 5)",
        ),
        "implementation": (
            lambda: attention_linear(Q, K, K, W, implementation="triton"),
            ValueError,
            "or None, got 'triton'.",
        ),
        "tables": (
            lambda: attention_linear(Q, K, K, W, rope=(ones(4, 1),) * 2),
            ValueError,
            "`cos` and `sin` [S, D / 2]",
        ),
        "codec count": (
            lambda: attention_linear(Q, K, K, W, codec=[Exact()] * 2),
            ValueError,
            COUNT + "q, k, v: got 2.",
        ),
        "no codec": (
            lambda: attention_linear(Q, K, K, W, codec=(Exact(), Exact(), Exact)),
            TypeError,
            "`codec` must be an actjax.Codec (an instance, not the class)",
        ),
        "no key": (
            lambda: attention_linear(Q, K, K, W, codec=DITHER), ValueError, NO_KEY + "None",
        ),
        "no key of one": (
            lambda: attention_linear(Q, K, K, W, codec=DITHER, key=(KEY, None, KEY)),
            ValueError,
            NO_KEY + "None",
        ),
    })  # fmt: skip
