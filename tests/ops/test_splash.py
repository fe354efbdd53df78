"""Attention by JAX's kernels for TPUs, interpreted: equal to attention with all scores at once."""

import functools
import re

import jax
import numpy as np
import pytest

from actjax import attention

LENGTH, SIZE = 256, 16


def arrays(heads, kv_heads):
    draw = np.random.default_rng(0).standard_normal
    shapes = [(2, LENGTH, n, SIZE) for n in (heads, kv_heads, kv_heads, heads)]
    return [draw(shape).astype(np.float32) for shape in shapes]


def value_and_gradients(implementation, **options):
    attend = functools.partial(attention, implementation=implementation, **options)

    def run(q, k, v, dy):
        y, pullback = jax.vjp(attend, q, k, v)
        return y, pullback(dy)

    return run


MASKED = {"window": 100, "segments": np.arange(2).repeat((150, 106))[None].repeat(2, 0)}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "options", "fused_length"),
    [
        pytest.param(2, 2, {}, 4096, marks=pytest.mark.slow),
        (4, 2, MASKED, 4096),
        (4, 2, MASKED, 128),
        pytest.param(2, 2, {"causal": False}, 4096, marks=pytest.mark.slow),
    ],
    ids=["plain", "window and segments", "window and segments, long", "not causal"],
)
def test_values_and_gradients_are_those_of_all_scores_at_once(
    heads, kv_heads, options, fused_length, monkeypatch
):
    monkeypatch.setattr("actjax.ops.splash._FUSED_LENGTH", fused_length)
    inputs = arrays(heads, kv_heads)
    got, want = (
        jax.jit(value_and_gradients(name, **options))(*inputs) for name in ("splash", "dense")
    )
    # Sums of at most 2 * 256 float32 products of size 1 to 10, in another order.
    same = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-5)
    jax.tree.map(same, got, want)


def test_a_length_that_no_block_divides_is_refused_if_it_is_asked_for(monkeypatch):
    short = [x[:, :100] for x in arrays(2, 2)]
    message = "'splash' of attention takes lengths that are multiples of 128, got 100: use"
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(value_and_gradients("splash"), *short)
    # By default, a TPU then takes blocks of any length.
    want = jax.make_jaxpr(value_and_gradients("blockwise"))(*short)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert str(jax.make_jaxpr(value_and_gradients(None))(*short)) == str(want)
