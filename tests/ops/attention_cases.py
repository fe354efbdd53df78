"""Inputs, oracles and forms of attention for its tests."""

import functools
import math

import jax
import jax.numpy as jnp
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


# cuDNN's attention for a machine without it.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def plain_cudnn_call(mask, bias, q, k, v):
    """`cudnn_call` in plain JAX, with what is known of cuDNN: the bias has even lengths.

    Its backward pass reads the output and the float32 log-sum-exp of its forward pass.
    """
    return _plain_fwd(mask, bias, q, k, v)[0]


def _plain_scores(mask, bias, q, k):
    assert bias.shape == (len(q), 1, q.shape[1], k.shape[1])
    assert not any(length % 2 for length in bias.shape[2:])
    scores = jnp.einsum("bshd,bthd->bhst", q, k) / math.sqrt(q.shape[-1]) + bias
    seen = mask.sees(jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1]))
    return jnp.where(seen, scores, -jnp.inf)


def _plain_fwd(mask, bias, q, k, v):
    shared = q.shape[2] // k.shape[2]
    scores = _plain_scores(mask, bias, q, jnp.repeat(k, shared, 2))
    out = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores), jnp.repeat(v, shared, 2))
    return out, (bias, q, k, v, out, jax.nn.logsumexp(scores, -1).astype(jnp.float32))


def _plain_bwd(mask, residuals, dout):
    bias, q, k, v, out, lse = residuals
    shape = (*k.shape[:3], -1, k.shape[3])
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
    weights = jnp.exp(_plain_scores(mask, bias, q, k) - lse[..., None])
    delta = jnp.einsum("bshd,bshd->bhs", out, dout)[..., None]
    dscores = weights * (jnp.einsum("bshd,bthd->bhst", dout, v) - delta) / math.sqrt(q.shape[-1])
    dq = jnp.einsum("bhst,bthd->bshd", dscores, k)
    dk = jnp.einsum("bhst,bshd->bthd", dscores, q)
    dv = jnp.einsum("bhst,bshd->bthd", weights, dout)
    return None, dq, *(x.reshape(shape).sum(3) for x in (dk, dv))


plain_cudnn_call.defvjp(_plain_fwd, _plain_bwd)
