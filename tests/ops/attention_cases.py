"""Inputs, oracles and forms of attention for its tests."""

import functools

import jax
import numpy as np
import oracles
from ops.helpers import THETA

from actjax import Codec, Exact, attention


def problem(batch, length, heads, kv_heads, size, dtype=None) -> list[jax.Array]:
    """Returns q, k, v and the cotangent of the output."""
    rng = np.random.default_rng(length)
    dtype = dtype or jax.dtypes.canonicalize_dtype(float)
    shapes = [(batch, length, h, size) for h in (heads, kv_heads, kv_heads, heads)]
    return [jax.device_put(rng.standard_normal(shape).astype(dtype)) for shape in shapes]


def value_and_gradients(q, k, v, dout, **options):
    """Returns the output of attention, dq, dk and dv."""
    out, pullback = jax.vjp(functools.partial(attention, **options), q, k, v)
    return out, *pullback(dout.reshape(out.shape))


def run_each(arguments, cases):
    """Returns value and gradients for each dictionary of options, computed by one program."""
    run = jax.jit(lambda *arguments: [value_and_gradients(*arguments, **case) for case in cases])
    return run(*arguments)


def oracle(q, k, v, dout, causal=True, window=None):
    """Returns output, dq, dk and dv in float64."""
    out = oracles.attention(q, k, v, causal, window)
    return out, *oracles.attention_vjp(q, k, v, dout, causal, window)


def rotated_oracle(q, k, v, dout, causal=True):
    """Returns the same with q and k rotated first: their gradients are rotated back."""
    positions = np.arange(q.shape[1])
    turn = functools.partial(oracles.rope, theta=THETA)
    out, dq, dk, dv = oracle(turn(q, positions), turn(k, positions), v, dout, causal)
    return out, turn(dq, -positions), turn(dk, -positions), dv


def merge(x):
    """[B, S, H, D] to [B, S, H * D]."""
    return x.reshape(*x.shape[:2], -1)


class Same(Codec):
    """Stores an array as it is, but takes the path of a lossy codec."""

    biased, needs_key = False, False

    def encode(self, x, key=None):
        return x

    def decode(self, code):
        return code

    def weight_grad(self, code, dz):
        return Exact().weight_grad(code, dz)

    def stored_bytes(self, shape, dtype):
        return Exact().stored_bytes(shape, dtype)


FORMS = {
    "blockwise": {"implementation": "blockwise"},
    "dense": {"implementation": "dense"},
    "coded": {"implementation": "blockwise", "codec": Same()},
}
