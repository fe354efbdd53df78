"""Errors of the operators: each names the argument, what came, and what to do.

A row is a call and a part of its message. Nothing is compiled.
"""

import functools

import jax
import numpy as np
import pytest
from messages import assert_messages
from ops.helpers import KEY, ones, tables

from actjax import (
    Exact,
    FrozenWeight,
    LoRA,
    Quantized,
    RandomizedSVD,
    RandomProjection,
    attention,
    attention_linear,
    conv,
    cross_entropy,
    embedding,
    gelu,
    gelu_linear,
    layer_norm,
    linear,
    norm_linear,
    rms_norm,
    rope,
    swiglu,
    swiglu_linear,
    token_log_probs,
)

DITHER = Quantized(2, group=4, rounding="dither")
NO_KEY = f"`codec` {DITHER} draws random numbers, but got key="
CLASS = "`codec` must be an actjax.Codec (an instance, not the class)"
CODEC = "`codec` must be an actjax.Codec, for example Exact(), got "
COUNT = "`codec` must be one codec, or one for each of "
FLOATS = "must be a floating point array, got int32"
FEATURES = "`w` must be [d, n] with d = (8,) features of `x`: got x(6, 8) @ w(5, 8). Did you pass"


def integers(*shape):
    return ones(*shape, dtype=np.int32)


X, W, WT, W7, S = ones(6, 8), ones(8, 5), ones(5, 8), ones(7, 5), ones(8)
Q, K = ones(2, 5, 4, 2), ones(2, 5, 2, 2)
IMAGE, WINDOW = ones(2, 5, 4, 6), ones(3, 2, 6, 4)
TABLE, IDS = ones(7, 3), np.arange(4, dtype=np.int32)
HIDDEN, HEAD, LABELS = ones(13, 6), ones(6, 11), np.zeros(13, np.int32)
HALF = ones(2, 5, 2, 2, dtype="bfloat16")


def each_setting(*settings):
    """Returns rows of settings of strides and dilation that are not integers above zero."""
    text = "must be an integer >= 1, or 2 of them, one for each spatial axis of `x`: got"
    return [
        (lambda name=name, it=it: conv(IMAGE, WINDOW, **{name: it}), f"`{name}` {text} {it!r}.")
        for name in ("strides", "dilation")
        for it in settings
    ]


CALLS = {
    linear: (X, W), conv: (IMAGE, WINDOW), norm_linear: (X, S, W), gelu_linear: (X, W),
    rms_norm: (X, S), layer_norm: (X, S, S), gelu: (X,), swiglu_linear: (X, X, W),
    swiglu: (X, X), attention_linear: (Q, K, K, W), attention: (Q, K, K),
    token_log_probs: (HIDDEN, HEAD, LABELS),
}  # fmt: skip
"""Operators that take a codec and a key, and arguments."""
INPUTS = {
    **dict.fromkeys((norm_linear, gelu_linear, rms_norm, layer_norm, gelu), "x"),
    **dict.fromkeys((swiglu_linear, swiglu), "gate, up"),
    **dict.fromkeys((attention_linear, attention), "q, k, v"),
}
"""The inputs of operators that take a codec for each input."""


def row(operator, message, **options):
    return functools.partial(operator, *CALLS[operator], **options), message


CODEC_VALUES = [
    *(row(operator, f"{NO_KEY}{key}: pass `key`", codec=DITHER, key=key)
      for operator in CALLS for key in (None, 1)),
    *(row(operator, f"{COUNT}{inputs}: got {len(codecs)}.", codec=codecs)
      for operator, inputs in INPUTS.items() for codecs in ((Exact(),) * 4, [])),
    *(row(operator, f"`key` must be one key, or one for each of {inputs}: got 4.",
          codec=DITHER, key=(KEY,) * 4)
      for operator, inputs in INPUTS.items() if "," in inputs),
    # With several codecs or keys the one without a key is found.
    row(swiglu_linear, NO_KEY + "None", codec=(Exact(), DITHER)),
    row(swiglu, NO_KEY + "None", codec=DITHER, key=(KEY, None)),
    row(attention_linear, NO_KEY + "None", codec=DITHER, key=(KEY, None, KEY)),
]  # fmt: skip
NAMES = {
    **dict.fromkeys((linear, conv), "x w"), norm_linear: "x _ w", gelu_linear: "x w",
    rms_norm: "x _", layer_norm: "x scale bias", gelu: "x", swiglu_linear: "gate up w",
    swiglu: "gate up", attention_linear: "q k v w", attention: "q k v",
    token_log_probs: "hidden head _",
}  # fmt: skip
"""Names of the arguments, or _ where an integer is allowed."""


def with_integers(operator, position):
    """Returns a call with integers as an argument."""
    arguments = list(CALLS[operator])
    arguments[position] = integers(*arguments[position].shape)
    return functools.partial(operator, *arguments)


CODEC_TYPES = [
    *((with_integers(operator, i), f"`{name}` {FLOATS}: cast it")
      for operator, names in NAMES.items() for i, name in enumerate(names.split()) if name != "_"),
    *(row(operator, CLASS, codec=Exact) for operator in CALLS),
    *(row(operator, f"{CODEC}{codec!r}", codec=codec)
      for operator in CALLS for codec in ("exact", None)),
    row(swiglu_linear, CODEC + "'exact'", codec=(Exact(), "exact")),
    row(attention_linear, CLASS, codec=(Exact(), Exact(), Exact)),
    row(attention, CODEC + "'k'", codec=(Exact(), "k", Exact())),
]  # fmt: skip
VALUE_ERRORS = [
    # linear
    (lambda: linear(X, WT), FEATURES + " it transposed?"),
    (lambda: linear(X, (W, W7)), "`w[1]` must be [d, n] with d = (8,) features of `x`: got x(6, 8) "
                                 "@ w[1](7, 5)."),
    (lambda: linear(X, ones(1, 8, 5)), "`w` must be [d, n]"),
    (lambda: linear(ones(), W), "got x() @ w(8, 5)"),
    (lambda: linear(X, W, bias=S), "the bias of `w`(8, 5) must be (5,), got (8,)."),
    (lambda: linear(X, ()), "`w` is an empty tuple"),
    (lambda: linear(X, (W, W), bias=(None,)), "`bias` has 1 entries for 2 weights"),
    (lambda: jax.grad(lambda x: linear(x, W, codec=RandomProjection(7), key=KEY).sum())(X),
     "`rank` 7 of RandomProjection(rank=7) is above min(T, d) = 6"),
    (lambda: jax.grad(lambda x: linear(x, W, codec=RandomizedSVD(7), key=KEY).sum())(X),
     "`rank` 7 of RandomizedSVD(rank=7) is above min(T, d) = 6"),
    # norm_linear, swiglu_linear, gelu_linear
    (lambda: norm_linear(X, ones(7), W), "`scale` must be (8,) for x(6, 8)"),
    (lambda: norm_linear(X, S, WT), FEATURES),
    (lambda: norm_linear(X, S, (W, W7)), "@ w[1](7, 5)"),
    (lambda: norm_linear(X, S, ()), "`w` is an empty tuple"),
    (lambda: norm_linear(X, S, W, bias=S), "the bias of `w`(8, 5) must be (5,), got (8,)."),
    (lambda: norm_linear(X, S, (W, W), bias=(None,)), "`bias` has 1 entries for 2 weights"),
    (lambda: swiglu_linear(X, WT, W), "`gate` and `up` must agree in shape"),
    (lambda: swiglu_linear(X, X, W, features=9), "an integer from 1 to the width 8, or None"),
    (lambda: swiglu(X, X, features=0), "`features` must be the number of features that are not"),
    (lambda: linear(X, W, features=9), "the width 8, or None for all: got 9"),
    (lambda: linear(X, W, features=4.0), "got 4.0"),
    (lambda: swiglu_linear(X, X, W7), "got x(6, 8) @ w(7, 5)"),
    (lambda: gelu_linear(X, W7), "got x(6, 8) @ w(7, 5)"),
    # attention_linear
    (lambda: attention_linear(Q, *(ones(2, 4, 2, 2),) * 2, W),
     "`q` and `k` must agree in batch, length and head size"),
    (lambda: attention_linear(Q, K, K, ones(4, 5)), "got x(2, 5, 8) @ w(4, 5)"),
    (lambda: attention_linear(Q, K, K, W, implementation="triton"), "or None, got 'triton'."),
    (lambda: attention_linear(Q, K, K, W, rope=(ones(4, 1),) * 2), "`cos` and `sin` [S, D / 2]"),
    # attention
    (lambda: attention(Q[0], K, K), "`q` must be [B, S, H, D] and `k` and `v` both [B, S, G, D], "
                                    "got q(5, 4"),
    (lambda: attention(Q, K, Q), "`k` and `v` both [B, S, G, D], got q(2, 5, 4, 2), k(2, 5, 2, 2)"),
    (lambda: attention(Q, *(ones(2, 6, 2, 2),) * 2), "agree in batch, length and head size"),
    (lambda: attention(Q, *(ones(1, 5, 2, 2),) * 2), "agree in batch, length and head size"),
    (lambda: attention(Q, *(ones(2, 5, 2, 4),) * 2), "agree in batch, length and head size"),
    (lambda: attention(Q, *(ones(2, 5, 3, 2),) * 2),
     "the heads of `q` must be a multiple of those of `k`"),
    (lambda: attention(*(ones(2, 0, 4, 8),) * 3), "`q` must not be empty"),
    (lambda: attention(Q, K, HALF), "`q`, `k` and `v` must have one dtype, got float32, float32, "
                                    "bfloat16."),
    (lambda: attention(Q, K, K, implementation="triton"),
     "`implementation` must be one of ('blockwise', 'cudnn', 'dense', 'splash') or None, got "
     "'triton'."),
    (lambda: attention(Q, K, K, codec=DITHER, key=KEY, implementation="triton"), "got 'triton'."),
    (lambda: attention(Q, K, K, rope=(ones(5, 3),) * 2), "`cos` and `sin` [S, D / 2]"),
    (lambda: attention(Q, K, K, codec=DITHER, key=KEY, rope=(ones(5, 3),) * 2),
     "`cos` and `sin` [S, D / 2]"),
    (lambda: attention(Q, K, K, window=0), "`window` must be at least 1"),
    (lambda: attention(Q, K, K, window=3, causal=False), "needs causal=True"),
    (lambda: attention(Q, K, K, segments=np.zeros((2, 6), int)), "must be integers (2, 5)"),
    (lambda: attention(Q, K, K, segments=np.zeros((2, 5), np.float32)),
     "`segments` must be integers (2, 5), got float32(2, 5)"),
    # rope
    *((lambda x=x, tables=tables: rope(ones(*x), *(ones(*t) for t in tables)),
       "with D even, and `cos` and `sin` [S, D / 2], got "
       f"x{x}, cos{tables[0]}, sin{tables[1]}.")
      for x, tables in (
          ((2, 5, 3, 6), ((4, 3), (5, 3))), ((2, 5, 3, 6), ((5, 3), (5, 6))),
          ((2, 5, 3, 6), ((5, 1, 3), (5, 1, 3))), ((2, 5, 3), ((5, 3), (5, 3))),
          ((2, 5, 3, 7), ((5, 3), (5, 3))),
      )),
    # norms
    (lambda: rms_norm(X, ones(7)), "`scale` must be (8,) for x(6, 8), got (7,)."),
    (lambda: rms_norm(ones(), ones(1)), "`scale` must be () for x()"),
    (lambda: layer_norm(X, ones(7), S),
     "`scale` must be (8,) for x(6, 8), got (7,): pass one number for each feature, or None"),
    (lambda: layer_norm(X, S, X), "`bias` must be (8,) for x(6, 8), got (6, 8)"),
    (lambda: layer_norm(ones(), None, None), "`x` must have features, [..., d]"),
    # swiglu, gelu
    (lambda: swiglu(X, S), "got gate float32(6, 8) and up float32(8,)."),
    (lambda: swiglu(K, HALF), "and up bfloat16(2, 5, 2, 2)"),
    # conv
    (lambda: conv(IMAGE, ones(3, 2, 5, 4)),
     "`w` must be [*window, C / groups, O] with C = 6 channels of `x` in `feature_group_count` = 1 "
     "groups, got x(2, 5, 4, 6) and w(3, 2, 5, 4)."),
    (lambda: conv(IMAGE, ones(3, 6, 4)), "with as many axes, got x(2, 5, 4, 6) and w(3, 6, 4)."),
    (lambda: conv(ones(6), ones(6)), "got x(6,) and w(6,)."),
    (lambda: conv(IMAGE, ones(3, 2, 2, 4), feature_group_count=3),
     "`feature_group_count` = 3 must divide the 4 outputs of w(3, 2, 2, 4)."),
    (lambda: conv(IMAGE, ones(3, 5, 6, 4), padding="VALID"),
     "the window of `w`, (3, 5) positions with its dilation, must fit into `x` with its padding, "
     "(5, 4) positions: got x(2, 5, 4, 6) and w(3, 5, 6, 4). Pad more, or pass"),
    (lambda: conv(IMAGE, ones(0, 2, 6, 4)), "the window of `w`, (0, 2) positions"),
    *each_setting(0, 1.5, True, (1,), (1, 0), "ab"),
    *((lambda it=it: conv(IMAGE, WINDOW, padding=it), f"`x`, got {it!r}.")
      for it in ("same", 1, (1, 1), [(1, 1)], [(1, 1), (1,)], [(1, 1), (0.5, 1)], None)),
    (lambda: conv(IMAGE, WINDOW, padding="FULL"),
     '`padding` must be "SAME", "SAME_LOWER", "VALID", or a pair of integers for each of the 2'),
    *((lambda it=it: conv(IMAGE, WINDOW, feature_group_count=it),
       f"`feature_group_count` must be an integer >= 1, got {it!r}.") for it in (0, 2.0, True)),
    (lambda: jax.grad(lambda x: conv(x, WINDOW, codec=RandomizedSVD(7), key=KEY).sum())(IMAGE),
     "`rank` 7 of RandomizedSVD(rank=7) is above min(T, d) = 6"),
    # embedding
    (lambda: embedding(ones(4), IDS), "`table` must be [vocab, d] with vocab > 0, got (4,)."),
    (lambda: embedding(ones(0, 2), IDS), "vocab > 0, got (0, 2)."),
    # cross_entropy
    (lambda: cross_entropy(HIDDEN, ones(11, 6), LABELS),
     "`head` must be [d, V] with d = (6,) features of `hidden`, got hidden(13, 6) @ head(11, 6)"),
    (lambda: cross_entropy(HIDDEN, ones(11), LABELS), "`head` must be"),
    (lambda: cross_entropy(ones(), HEAD, LABELS), "hidden() @ head"),
    (lambda: cross_entropy(HIDDEN, HEAD, LABELS[1:]),
     "`labels` must be (13,) for hidden(13, 6), got (12,)."),
    (lambda: cross_entropy(HIDDEN, HEAD, LABELS, mask=ones(13, 1)),
     "`mask` must be (13,) for hidden(13, 6), got (13, 1)."),
    (lambda: cross_entropy(HIDDEN, HEAD, LABELS, chunk=0), "`chunk` must be at least 1 token, "
                                                           "got 0."),
    (lambda: cross_entropy(ones(0, 4), ones(4, 5), LABELS[:0]),
     "`hidden` must hold at least one token"),
    # token_log_probs, which has the checks of cross_entropy
    (lambda: token_log_probs(HIDDEN, ones(11, 6), LABELS), "`head` must be [d, V] with d = (6,)"),
    (lambda: token_log_probs(HIDDEN, HEAD, LABELS, chunk=0), "`chunk` must be at least 1 token"),
]  # fmt: skip
TYPE_ERRORS = [
    (lambda: linear([1.0], W), "got list"),
    (lambda: linear(X, 3.0), "`w` must be a floating point array"),
    (lambda: linear(X, ones(8, 4, dtype="float8_e4m3fn")), "`w` must be a floating point array"),
    (lambda: linear(X, W, bias=3), "`bias` must be a floating point array, got int"),
    (lambda: linear(X, (W, W), bias=(None, integers(5))), f"`bias[1]` {FLOATS}"),
    (lambda: norm_linear(X, 1.0, W), "`scale` must be a floating point array, got float: cast it"),
    (lambda: rope(integers(2, 5, 3, 6), *tables(5, 6)), f"`x` {FLOATS}"),
    (lambda: layer_norm(X, S, 0.0), "`bias` must be a floating point array, got float"),
    (lambda: gelu(1.0), "`x` must be a floating point array, got float"),
    (lambda: conv(IMAGE, FrozenWeight(WINDOW)),
     "`w` must be an array, got FrozenWeight: only linear operators take such a weight."),
    (lambda: embedding(TABLE, ones(4)),
     "`ids` must be an array of integers, got float32: cast it with `jnp.asarray(ids, jnp."),
    (lambda: embedding(TABLE, IDS > 2), "of integers, got bool"),
    (lambda: embedding(TABLE, [1, 2]), "of integers, got list"),
    (lambda: embedding(integers(4, 2), IDS), f"`table` {FLOATS}"),
    (lambda: embedding(IDS, TABLE), "`table` must be a floating point"),
    (lambda: cross_entropy(HIDDEN, HEAD, np.float32(LABELS)),
     "`labels` must be an array of integers, got float32."),
    (lambda: cross_entropy(integers(13, 6), HEAD, LABELS), f"`hidden` {FLOATS}"),
    (lambda: cross_entropy(HIDDEN, integers(6, 11), LABELS), f"`head` {FLOATS}"),
    *((lambda fun=fun: fun(HIDDEN, LoRA(HEAD, ones(6, 2), ones(2, 11)), LABELS),
       "`head` is a LoRA, which only linear operators accept: pass `head.merged()`.")
      for fun in (cross_entropy, token_log_probs)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "rows"),
    [(ValueError, VALUE_ERRORS + CODEC_VALUES), (TypeError, TYPE_ERRORS + CODEC_TYPES)],
    ids=["value", "type"],
)
def test_messages(kind, rows):
    assert_messages(kind, rows)


def test_a_large_rank_is_no_error_without_a_backward_pass():
    for codec in (RandomProjection(7), RandomizedSVD(7)):
        jax.eval_shape(lambda x, codec=codec: linear(x, W, codec=codec, key=KEY), X)


def test_no_hint_of_a_transposed_weight_where_it_would_not_fit():
    with pytest.raises(ValueError) as error:
        linear(X, W7)
    assert "transposed" not in str(error.value)
