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


def value_and_gradients(implementation, arrays, **options):
    attend = functools.partial(attention, implementation=implementation, **options)

    @jax.jit
    def run(q, k, v, dy):
        y, pullback = jax.vjp(attend, q, k, v)
        return y, pullback(dy)

    return run(*arrays)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "options"),
    [
        pytest.param(2, 2, {}, marks=pytest.mark.slow),
        (4, 2, {"window": 100}),
        (2, 1, {"segments": np.arange(4).repeat(64)[None].repeat(2, 0)}),
        pytest.param(2, 2, {"causal": False}, marks=pytest.mark.slow),
    ],
    ids=["plain", "window", "segments", "not causal"],
)
def test_values_and_gradients_are_those_of_all_scores_at_once(heads, kv_heads, options):
    given = arrays(heads, kv_heads)
    got, want = (value_and_gradients(name, given, **options) for name in ("splash", "dense"))
    # Sums of at most 2 * 256 float32 products of size 1 to 10, in another order.
    same = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-5)
    jax.tree.map(same, got, want)


def test_a_length_that_no_block_divides_is_refused_if_it_is_asked_for(monkeypatch):
    short = [x[:, :100] for x in arrays(2, 2)]
    message = "'splash' of attention takes lengths that are multiples of 128, got 100: use"
    with pytest.raises(ValueError, match=re.escape(message)):
        value_and_gradients("splash", short)
    # By default, a TPU then takes blocks of any length.
    want = value_and_gradients("blockwise", short)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    got = value_and_gradients(None, short)
    jax.tree.map(np.testing.assert_array_equal, got, want)
