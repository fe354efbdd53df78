"""Tests that need a GPU: cuDNN's attention, and equal bits of two runs. Skipped without one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

import actjax

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")

SHAPES = [(2, 128, 4, 4, 64), (2, 257, 8, 2, 64), (1, 1024, 4, 4, 128), (2, 96, 4, 4, 32)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("batch", "length", "heads", "kv_heads", "size"), SHAPES)
def test_cudnn_attention_agrees_with_the_oracle(batch, length, heads, kv_heads, size, recompute):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(batch, length, h, size) for h in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (
        jax.random.normal(key, shape, jnp.float32).astype(jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    )

    @jax.jit
    def run(q, k, v, dout):
        out, pullback = jax.vjp(
            lambda q, k, v: actjax.attention(
                q, k, v, implementation="cudnn", recompute=recompute
            ),
            q, k, v,
        )  # fmt: skip
        return out, *pullback(dout)

    wide = [np.asarray(x, np.float64) for x in (q, k, v, dout)]
    want = (oracles.attention(*wide[:3], True), *oracles.attention_vjp(*wide, True))
    for got, exact in zip(run(q, k, v, dout), want, strict=True):
        error = np.linalg.norm(np.asarray(got, np.float64) - exact) / np.linalg.norm(exact)
        # Operands, probabilities and results are rounded to 8 bits each: a few times 2^-9.
        assert error < 4 * 2**-8


# One call; chunks, the last of them padded.
@pytest.mark.parametrize("length", [512, 5001])
@pytest.mark.parametrize("options", [{}, {"window": 700}, {"causal": False}], ids=str)
def test_cudnn_attention_of_packed_rows_agrees_with_the_dense_form(length, options):
    rng = np.random.default_rng(length)
    shapes = [(2, length, h, 64) for h in (4, 2, 2, 4)]
    arguments = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    documents = np.sort(rng.integers(1, 9, length))
    documents[-length // 10 :] = 0
    segments = np.stack([documents, rng.integers(0, 3, length)])

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, q, k, v, dout):
        attend = functools.partial(
            actjax.attention, segments=segments, implementation=implementation, **options
        )
        out, pullback = jax.vjp(attend, q, k, v)
        return out, *pullback(dout)

    wide = [x.astype(jnp.float32) for x in arguments]
    for got, want in zip(run("cudnn", *arguments), run("dense", *wide), strict=True):
        error = jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want)
        # As above; XLA's float32 products on a GPU may be of TensorFloat-32, with 11 bits.
        assert error < 4 * 2**-8


def test_cudnn_keeps_its_output_merged_and_once():
    shape = (2, 128, 4, 64)
    q = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    w = jnp.ones((256, 8), jnp.bfloat16)

    def fun(q, w):
        out = actjax.attention(q, q, q, implementation="cudnn", merge_heads=True)
        return actjax.linear(out, w)

    leaves = jax.tree.leaves(jax.vjp(fun, q, w)[1])
    large = {id(x) for x in leaves if x.size == q.size}
    assert len(large) == 2  # q, which is k and v too, and the output.


@pytest.mark.parametrize(
    "codec",
    [actjax.RandomizedSVD(8), actjax.RandomProjection(8), actjax.PointApproximation(points=8)],
)
def test_two_runs_give_the_same_bits(codec):
    key = jax.random.key(0)
    x = jax.random.normal(key, (512, 128), jnp.bfloat16)
    w = jax.random.normal(key, (128, 64), jnp.bfloat16)

    @jax.jit
    def gradient(x, w):
        fun = lambda w: actjax.linear(x, w, codec=codec, key=key).astype(jnp.float32).sum()  # noqa: E731
        return jax.grad(fun)(w)

    np.testing.assert_array_equal(gradient(x, w), gradient(x, w))
