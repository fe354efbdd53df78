"""Errors of weights: a row is a call and a part of its message. Nothing is compiled."""

import math

import jax
import numpy as np
from messages import assert_messages
from ops.helpers import KEY, ones, shaped
from ops.operator_cases import DRAWN

from actjax import (
    FrozenWeight,
    LoRA,
    LowRankSum,
    NF4Weight,
    attention,
    cross_entropy,
    linear,
    norm_linear,
    swiglu,
)

X, W, A, B, AT, BT = ones(6, 8), ones(8, 5), ones(8, 2), ones(2, 5), ones(2, 8), ones(5, 2)
INTEGERS, LABELS = ones(8, 5, dtype=np.int32), np.zeros(6, np.int32)
FLOATS = "`w` must be a floating point array, got int32"
PARTS = "`w` is a LoRA of a weight (8, 5), so `a` must be [8, r] and `b` [r, 5]: got "


def quantized(*shape):
    return jax.eval_shape(NF4Weight.quantize, shaped(*shape))


def test_messages_of_frozen_weights():
    assert_messages(ValueError, [
        (lambda: linear(X, FrozenWeight(ones(5, 8))), "got x(6, 8) @ w(5, 8). Did you pass it"),
        (lambda: linear(X, quantized(7, 5)), "got x(6, 8) @ w(7, 5)"),
        (lambda: linear(X, FrozenWeight(W), bias=ones(4)), "must be (5,), got (4,)"),
        (lambda: cross_entropy(X, FrozenWeight(ones(5, 8)), LABELS),
         "got hidden(6, 8) @ head(5, 8)"),
        *((lambda shape=shape: NF4Weight.quantize(ones(*shape)), f"must be [d, n], got {shape}")
          for shape in ((), (64,), (2, 64, 3))),
    ])  # fmt: skip
    assert_messages(TypeError, [
        (lambda: linear(X, FrozenWeight(INTEGERS)), FLOATS),
        (lambda: linear(X, FrozenWeight(3.0)), "`w` must be a floating point"),
        (lambda: cross_entropy(X, FrozenWeight(INTEGERS), LABELS), "`head` must be"),
        *((lambda dtype=dtype: NF4Weight.quantize(ones(64, 2, dtype=dtype)),
           f"must be floating point, got {dtype}") for dtype in ("int32", "uint8", "bool")),
    ])  # fmt: skip


def test_messages_of_adapters():
    part = LowRankSum(ones(6, 5), ones(6, 2), B)
    assert_messages(ValueError, [
        (lambda: linear(X, LoRA(ones(5, 8), A, B)), "@ w(5, 8). Did you"),
        (lambda: linear(ones(6, 7), LoRA(W, A, B)), "@ w(8, 5)"),
        (lambda: linear(X, LoRA(W, AT, B)), PARTS + "a(2, 8), b(2, 5)"),
        (lambda: linear(X, LoRA(W, ones(7, 2), B)), PARTS + "a(7, 2)"),
        (lambda: linear(X, LoRA(W, A, BT)), PARTS + "a(8, 2), b(5, 2)"),
        (lambda: linear(X, LoRA(W, A, ones(2, 4))), "b(2, 4)"),
        (lambda: linear(X, LoRA(W, A, ones(1, 5))), PARTS + "a(8, 2), b(1, 5)"),
        (lambda: linear(X, LoRA(W, ones(8), B)), PARTS + "a(8,)"),
        (lambda: linear(X, (W, LoRA(W, AT, B))), "`w[1]` is a LoRA of a weight"),
        (lambda: linear(X, LoRA(quantized(8, 5), AT, B)), PARTS + "a(2, 8)"),
        (lambda: linear(X, LoRA(ones(1, 8, 5), *(ones(1, 2, 2),) * 2)), "`w` must be [d, n]"),
        (lambda: linear(X, LoRA(W, A, B), bias=ones(4)), "must be (5,), got (4,)"),
        (lambda: linear(X, LoRA(W, A, B, KEY, dropout=1.0)),
         "`dropout` of `w` must be in [0, 1), got 1.0"),
        (lambda: linear(X, LoRA(W, A, B, KEY, dropout=-0.1)), "[0, 1), got -0.1"),
        (lambda: linear(X, LoRA(W, ones(8, 0), ones(0, 5))), "factors of `w` must not be empty"),
        (lambda: linear(X, LoRA(W, A, B, scale=math.nan)), "`scale` of `w` must be fini"),
        (lambda: linear(X, LoRA(W, A, B), codec=DRAWN), "got key=None: pass `key`"),
        (lambda: norm_linear(X, ones(8), LoRA(W, AT, B)), PARTS + "a(2, 8)"),
        (lambda: swiglu(part, ones(5, 5)), "`gate` and `up` must agree in shape"),
        (lambda: attention(part, part, part), "`q` must be [B, S, H, D]"),
    ])  # fmt: skip
    assert_messages(TypeError, [
        (lambda: linear(X, LoRA(INTEGERS, A, B)), FLOATS),
    ])  # fmt: skip
