"""Tests of attention with lossy codecs: exact values, and gradients at the decoded q, k and v."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import nbytes
from ops.attention_cases import SHAPES, merge, oracle, problem, rotated_oracle
from ops.helpers import (
    BF16,
    assert_close,
    assert_raises,
    compiled_temporaries,
    ones,
    pullback,
    shaped,
    tables,
)

from actjax import Exact, Quantized, attention, explain

KEY = jax.random.key(5)
NEAREST = Quantized(4, group=3)
DITHER = Quantized(2, group=4, rounding="dither")
CODECS = {"one": DITHER, "three": (NEAREST, DITHER, NEAREST), "k exact": [DITHER, Exact(), NEAREST]}


def triple(codec) -> list:
    return list(codec) if isinstance(codec, tuple | list) else [codec] * 3


def decoded(codec, *inputs: jax.Array, key=KEY) -> list[jax.Array]:
    """Returns what the backward pass sees: inputs coded before rotation, with merged heads."""
    keys = key if isinstance(key, tuple) else [jax.random.fold_in(key, i) for i in range(3)]
    given = zip(triple(codec), inputs, keys, strict=True)
    return [one.decode(one.encode(merge(x), key)).reshape(x.shape) for one, x, key in given]


@pytest.mark.parametrize(
    ("name", "causal", "rotates", "own_keys"),
    [("k exact", True, True, False), ("one", False, False, True)],
)
def test_gradients_are_those_at_the_decoded_inputs(name, causal, rotates, own_keys, x64):
    codec, (*inputs, dout) = CODECS[name], problem(*SHAPES)

    @jax.jit
    def run(q, k, v):
        key = tuple(jax.random.split(KEY, 3)) if own_keys else KEY
        rope = tables(5, 4) if rotates else None
        exact = functools.partial(attention, causal=causal, rope=rope)
        fun = functools.partial(exact, codec=codec, key=key)
        out, pull = jax.vjp(fun, q, k, v)
        # With and without a backward pass.
        values = out, fun(q, k, v, merge_heads=True).reshape(q.shape)
        return values, exact(q, k, v), pull(dout), decoded(codec, q, k, v, key=key)

    values, exact, got, hats = run(*inputs)
    for out in values:
        np.testing.assert_array_equal(out, exact)
    for one, x, x_hat in zip(triple(codec), inputs, hats, strict=True):
        assert np.array_equal(x, x_hat) == (one == Exact())
    find = rotated_oracle if rotates else oracle
    want = find(*map(np.asarray, (*hats, dout)), causal)[1:]
    # Sums of 10 terms of size 1.
    assert_close(got, want, 1e-11, 1e-13)


def test_bfloat16_accumulates_in_float32():
    *inputs, dout = problem(1, 64, 4, 2, 16, jnp.bfloat16)

    @jax.jit
    def run(q, k, v):
        out, pull = jax.vjp(functools.partial(attention, codec=NEAREST), q, k, v)
        return out, attention(q, k, v), pull(dout), decoded(NEAREST, q, k, v)

    out, exact, got, hats = run(*inputs)
    np.testing.assert_array_equal(out, exact)
    for grad, want in zip(got, oracle(*hats, dout)[1:], strict=True):
        assert grad.dtype == jnp.bfloat16
        # The output, weights or scores' gradients, and the result: three roundings, each of which
        # is at most BF16 of what it rounds, and on average half of that.
        assert np.linalg.norm(np.float64(grad) - want) <= 1.5 * BF16 * np.linalg.norm(want)


def test_backward_holds_the_codes_and_no_output():
    for dtype in ("float32", "bfloat16"):
        for codec in CODECS.values():
            *inputs, _ = problem(*SHAPES, dtype)
            fun = functools.partial(attention, codec=codec, key=KEY, merge_heads=True)
            stored = zip(triple(codec), inputs, strict=True)
            size = sum(one.stored_bytes(merge(x).shape, dtype) for one, x in stored)
            assert nbytes(pullback(fun, *inputs)) == size, (codec, dtype)


def test_a_layer_of_a_scan_takes_the_bytes_of_its_codes_and_no_more():
    codec = Quantized(4, group=32)
    # Autodiff would keep most in this form: 1 MiB of scores per head.
    attend = functools.partial(attention, codec=codec, implementation="dense")

    def temporaries(layers):
        def loss(x):
            body = lambda x, _: (attend(x, 0.5 * x[:, :, :2], -x[:, :, 2:]), None)  # noqa: E731
            return jnp.sum(jax.lax.scan(body, x, None, layers)[0] ** 2)

        return compiled_temporaries(jax.grad(loss), shaped(1, 512, 4, 16))

    # Buffers are aligned. The narrowest float array kept in one of eight layers would be 64 KiB.
    stored = sum(codec.stored_bytes((512, width), "float32") for width in (64, 32, 32))
    assert abs(temporaries(12) - temporaries(4) - 8 * stored) < 4096


def test_gradients_are_the_same_under_checkpoint_and_vmap():
    *inputs, dout = problem(*SHAPES)

    @jax.jit
    def run(*inputs):
        mapped = jax.vmap(jax.checkpoint(functools.partial(attention, codec=NEAREST)))
        pull = jax.vjp(mapped, *(x[:, None] for x in inputs))[1]
        return [x[:, 0] for x in pull(dout[:, None])], decoded(NEAREST, *inputs)

    # Groups lie within tokens: examples are coded alike, alone or in a batch.
    got, hats = run(*inputs)
    assert_close(got, list(oracle(*hats, dout)[1:]), 1e-5, 1e-5)  # Float32.


def test_explain_names_the_codes():
    codec = {"q": DITHER, "k": NEAREST, "v": DITHER}
    inputs = problem(*SHAPES)[:3]

    def fun(*inputs):
        return jnp.sum(attention(*inputs, codec=tuple(codec.values()), key=KEY, name="mine"))

    found = explain(fun, *inputs).residuals
    stored = {e.name: (e.operator, e.codec, e.stored_bytes) for e in found if e.codec}
    assert stored == {
        f"mine {name}": ("attention", repr(one), one.stored_bytes(merge(x).shape, "float32"))
        for (name, one), x in zip(codec.items(), inputs, strict=True)
    }


def test_errors_name_the_argument():
    q, k = ones(2, 5, 4, 8), ones(2, 5, 2, 8)
    rope = (ones(5, 3),) * 2
    cases = {
        "class": ({"codec": Exact}, TypeError, "must be an actjax.Codec (an instance, not the"),
        "text": ({"codec": (NEAREST, "k", NEAREST)}, TypeError, "must be an actjax.Codec, for"),
        "two codecs": (
            {"codec": (NEAREST,) * 2},
            ValueError,
            "one codec, or one for each of q, k, v: got 2.",
        ),
        "no key": (
            {"codec": DITHER},
            ValueError,
            f"`codec` {DITHER} draws random numbers, but got key=None",
        ),
        "a number as key": (
            {"codec": DITHER, "key": 1},
            ValueError,
            "but got key=1: pass `key`",
        ),
        "two keys": (
            {"codec": DITHER, "key": (KEY,) * 2},
            ValueError,
            "`key` must be one key, or one for each of q, k, v: got 2.",
        ),
        "implementation": (
            {"codec": NEAREST, "implementation": "triton"},
            ValueError,
            "got 'triton'.",
        ),
        "tables": ({"rope": rope}, ValueError, "`cos` and `sin` [S, D / 2]"),
        "tables beside a codec": (
            {"codec": NEAREST, "rope": rope},
            ValueError,
            "`cos` and `sin` [S, D",
        ),
    }
    assert_raises(
        {
            case: (lambda given=given: attention(q, k, k, **given), kind, message)
            for case, (given, kind, message) in cases.items()
        }
    )
