"""Tests of actjax/ops/attention.py: exact, in blocks, with memory linear in the length.

What runs here is the form in plain JAX; cuDNN's is held to the same oracle in test_gpu.py.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from actjax import Codec, Exact, HeadNorm, Quantized, attention, attention_linear, explain, linear

BF16 = 2.0**-8
"""Unit roundoff of bfloat16: the relative error of one rounding."""


def problem(batch, length, heads, groups, size, dtype=None) -> list[jax.Array]:
    """Returns q, k, v and the cotangent of the output."""
    rng = np.random.default_rng(length)
    shapes = [(batch, length, h, size) for h in (heads, groups, groups, heads)]
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


@functools.partial(jax.jit, static_argnames=("causal", "recompute", "merge_heads"))
def run(q, k, v, dout, **options):
    fun = functools.partial(attention, implementation="blockwise", **options)
    out, pullback = jax.vjp(fun, q, k, v)
    return out, *pullback(dout.reshape(out.shape))


def oracle(q, k, v, dout, causal=True):
    return oracles.attention(q, k, v, causal), *oracles.attention_vjp(q, k, v, dout, causal)


# Blocks are of 256: one query, less than a block, a block and one, three of which one is ragged.
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("length", "heads", "groups"),
    [(1, 2, 1), (2, 1, 1), (255, 4, 2), (256, 2, 1), (257, 6, 2), (512, 2, 2), (600, 3, 1)],
)
def test_value_and_gradients_agree_with_the_oracle(length, heads, groups, causal, x64):
    arguments = problem(2 if length < 512 else 1, length, heads, groups, 4)
    for got, want in zip(run(*arguments, causal=causal), oracle(*arguments, causal), strict=True):
        assert got.dtype == jnp.float64
        # Sums of up to 600 terms of size 1, in another order.
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("argument", [0, 1, 2])
def test_finite_differences(argument, x64):
    arguments = problem(1, 5, 2, 1, 4)[:3]

    def fun(one):
        return attention(*(one if i == argument else a for i, a in enumerate(arguments)))

    # The defaults of check_grads would let an error of 0.1% pass. With steps of 1e-5 truncation and
    # cancellation err by about 1e-10 each.
    check_grads(jax.jit(fun), [arguments[argument]], 1, ["rev"], 1e-8, 1e-8, 1e-5)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_recomputed_gradients_are_the_same(causal):
    arguments = problem(1, 300, 4, 2, 8)
    kept = run(*arguments, causal=causal)
    again = run(*arguments, causal=causal, recompute=True)
    # The same operations on the same numbers.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), again, kept)


def test_merged_heads_are_the_heads_in_order():
    arguments = problem(2, 6, 4, 2, 8)
    apart, merged = (run(*arguments, merge_heads=merge) for merge in (False, True))
    assert (apart[0].shape, merged[0].shape) == ((2, 6, 4, 8), (2, 6, 32))
    jax.tree.map(np.testing.assert_array_equal, apart[0].reshape(2, 6, 32), merged[0])
    jax.tree.map(np.testing.assert_array_equal, apart[1:], merged[1:])


def test_causal_attention_is_the_default_and_sees_no_future():
    q, k, v, _ = problem(1, 300, 1, 1, 4)
    run = jax.jit(attention)
    out = run(q, k, v)
    for position in (0, 255, 256, 299):
        seen = [x.at[:, position + 1 :].set(1e3) for x in (q, k, v)]
        # Positions after it do not even change the rounding.
        np.testing.assert_array_equal(run(*seen)[:, position], out[:, position])


# Precision.


def test_bfloat16_accumulates_in_float32():
    q, k, v, dout = problem(1, 300, 4, 2, 16, jnp.bfloat16)
    got, want = run(q, k, v, dout), oracle(q, k, v, dout)
    assert all(x.dtype == jnp.bfloat16 for x in got)
    out, *grads = (np.float64(x) for x in got)
    # Weights and output are rounded once each; float32 inside errs by 1e-5 at most.
    terms = oracles.attention(q, k, np.abs(np.float64(v)), True)
    assert np.all(np.abs(out - want[0]) <= BF16 * terms + BF16 * np.abs(want[0]) + 1e-5)
    for grad, exact in zip(grads, want[1:], strict=True):
        # The output, weights or scores' gradients, and the result: three roundings, each of which
        # is at most BF16 of what it rounds, and on average half of that.
        assert np.linalg.norm(grad - exact) <= 1.5 * BF16 * np.linalg.norm(exact)


def test_equal_scores_give_the_mean_of_all_values():
    # The weights are 1 / 2048: sums of them in bfloat16 would stop at 256 / 2048.
    q = jnp.zeros((1, 2048, 1, 1), jnp.bfloat16)
    out, _, _, dv = run(q, q, q + 3, q + 1, causal=False)
    np.testing.assert_array_equal(out.astype(jnp.float32), 3)
    np.testing.assert_array_equal(dv.astype(jnp.float32), 1)


@settings(deadline=None, max_examples=30)
@given(
    # Scores stay below 2e7, where float32 still tells 1 apart.
    st.lists(st.floats(-(2.0**10), 2.0**10, width=32), min_size=18, max_size=18),
    st.sampled_from([0.0, 1e-30, 1.0, 4.0]),
    st.booleans(),
)
def test_output_lies_between_the_values_and_all_is_finite(numbers, scale, causal):
    x = scale * np.reshape(np.float32(numbers), (3, 1, 3, 1, 2))
    q, k, v = x
    out, *grads = map(np.float64, run(q, k, v, np.ones_like(q), causal=causal))
    size = np.abs(v).max() * 1e-6
    assert np.all(out >= v.min(1) - size)
    assert np.all(out <= v.max(1) + size)
    if causal:
        # It sees itself alone; what is subnormal may be flushed to zero.
        np.testing.assert_allclose(out[:, 0], v[:, 0], rtol=1e-6, atol=2e-38)
    assert all(np.isfinite(grad).all() for grad in grads)


def test_scores_far_below_zero_are_no_padding(x64):
    # All scores of a padded block are about -1e4: the padding's, of zeros, must not win.
    q, k, v, dout = problem(1, 257, 1, 1, 4)
    q, k = jnp.abs(q) + 50, -jnp.abs(k) - 50
    for causal in (True, False):
        got, want = run(q, k, v, dout, causal=causal), oracle(q, k, v, dout, causal)
        for a, b in zip(got, want, strict=True):
            # A score of 1e4 is rounded by 1e-12, and so is the exponential of it, relatively.
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


# What is held.


def held(fun, *args) -> list[jax.Array]:
    """Returns the arrays that the backward pass of `fun` holds, each once."""
    return list({id(leaf): leaf for leaf in jax.tree.leaves(jax.vjp(fun, *args)[1])}.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_backward_holds_inputs_output_and_log_sum_exp(dtype):
    q, k, v, _ = problem(2, 16, 4, 2, 8, dtype)
    leaves = held(attention, q, k, v)
    assert all(any(leaf is x for leaf in leaves) for x in (q, k, v))
    # The log-sum-exp is a float32 for each head and query.
    assert sum(x.nbytes for x in leaves) == 2 * q.nbytes + 2 * k.nbytes + 2 * 16 * 4 * 4


def test_recomputation_holds_the_inputs_alone():
    q, k, v, _ = problem(2, 16, 4, 2, 8)
    leaves = held(functools.partial(attention, recompute=True), q, k, v)
    assert {id(x) for x in leaves} == {id(q), id(k), id(v)}


def test_a_linear_that_follows_stores_the_output_no_second_time():
    q, k, v, _ = problem(2, 16, 4, 2, 8)
    w = jnp.ones((32, 5))

    def fun(q, k, v, w):
        return linear(attention(q, k, v, merge_heads=True), w)

    together = sum(x.nbytes for x in held(fun, q, k, v, w))
    assert together == sum(x.nbytes for x in held(attention, q, k, v)) + w.nbytes


def temporary(length: int, **options) -> int:
    """Returns the workspace of value and gradients, in bytes, as XLA compiles them."""
    q, k, v, dout = (jax.ShapeDtypeStruct((1, length, h, 8), jnp.float32) for h in (2, 1, 1, 2))
    return run.lower(q, k, v, dout, **options).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"recompute": True}], ids=str)
def test_memory_is_linear_in_the_length(options):
    # Scores of 4096 tokens would take 2 x 64 MiB; twice the length would take four times as much.
    first, second = temporary(2048, **options), temporary(4096, **options)
    assert second < 2.1 * first
    assert second < 2**24


def test_recomputation_keeps_no_output_across_a_scan():
    def compiled(layers: int) -> int:
        def loss(scales, q):
            def body(q, scale):
                # What reads the output keeps no copy of it.
                return q + scale * attention(q, q, q, recompute=True), None

            return jnp.sum(jax.lax.scan(body, q, scales)[0])

        arrays = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((layers,), (1, 512, 2, 16))]
        lowered = jax.jit(jax.grad(loss, argnums=1)).lower(*arrays)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    size = 512 * 2 * 16 * 4
    # A layer more keeps q, which is k and v too; its output would be as much again.
    assert size <= (compiled(8) - compiled(4)) / 4 < 1.1 * size


def test_a_barrier_keeps_the_two_forward_passes_apart():
    # XLA could merge two equal ones, and keep the output after all. It does not merge loops on a
    # CPU, so it is the program that is looked at, and not what it compiles to.
    q, k, v, _ = problem(1, 4, 1, 1, 4)

    def has_barrier(recompute: bool) -> bool:
        fun = lambda *args: jnp.sum(attention(*args, recompute=recompute))  # noqa: E731
        return "optimization_barrier" in str(jax.make_jaxpr(jax.grad(fun, (0, 1, 2)))(q, k, v))

    assert has_barrier(recompute=True)
    assert not has_barrier(recompute=False)


# Under transformations of JAX.

TRANSFORMS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
    "scan": lambda f: lambda *xs: jax.lax.scan(lambda _, x: (None, f(*x)), None, xs)[1],
    "vmap": jax.vmap,
}


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_gradients_are_the_same_under(name, recompute):
    q, k, v, _ = problem(3, 7, 4, 2, 4)
    run = functools.partial(attention, recompute=recompute)
    stacked = name in ("scan", "vmap")
    lead = [x[:, None] for x in (q, k, v)] if stacked else (q, k, v)

    @jax.jit
    def gradients(*args):
        return jax.grad(lambda *args: jnp.sum(jnp.sin(TRANSFORMS[name](run)(*args))), (0, 1, 2))(
            *args
        )

    dout = np.cos(oracles.attention(q, k, v, True))
    want = oracles.attention_vjp(q, k, v, dout, True)
    for got, exact in zip(gradients(*lead), want, strict=True):
        np.testing.assert_allclose(got.reshape(exact.shape), exact, rtol=1e-5, atol=1e-6)


# Errors.


def arrays(q, k, v, dtypes=("float32",) * 3):
    return [jnp.ones(shape, dtype) for shape, dtype in zip((q, k, v), dtypes, strict=True)]


Q, K = (2, 5, 4, 8), (2, 5, 2, 8)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ((Q[1:], K, K), "`q` must be [B, S, H, D] and `k` and `v` both [B, S, G, D], got q(5, 4"),
        ((Q, K, (2, 5, 4, 8)), "`k` and `v` both [B, S, G, D], got q(2, 5, 4, 8), k(2, 5, 2, 8)"),
        ((Q, (2, 6, 2, 8), (2, 6, 2, 8)), "`q` and `k` must agree in batch, length and head size"),
        ((Q, (1, 5, 2, 8), (1, 5, 2, 8)), "`q` and `k` must agree in batch, length and head size"),
        ((Q, (2, 5, 2, 4), (2, 5, 2, 4)), "`q` and `k` must agree in batch, length and head size"),
        ((Q, (2, 5, 3, 8), (2, 5, 3, 8)), "the heads of `q` must be a multiple of those of `k`"),
    ],
)  # fmt: skip
def test_errors_give_the_shapes_that_came(shapes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        attention(*arrays(*shapes))


def test_dtypes_must_agree():
    message = "`q`, `k` and `v` must have one dtype, got float32, float32, bfloat16."
    with pytest.raises(ValueError, match=re.escape(message)):
        attention(*arrays(Q, K, K, ("float32", "float32", "bfloat16")))


@pytest.mark.parametrize("letter", "qkv")
def test_integers_are_refused(letter):
    dtypes = ["int32" if name == letter else "float32" for name in "qkv"]
    with pytest.raises(TypeError, match=f"`{letter}` must be a floating point array, got int32"):
        attention(*arrays(Q, K, K, dtypes))


def test_an_unknown_implementation_is_refused():
    message = (
        "`implementation` must be one of ('blockwise', 'cudnn', 'dense') or None, got 'triton'."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        attention(*arrays(Q, K, K), implementation="triton")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU has cuDNN")
def test_an_implementation_that_is_asked_for_and_not_there_raises():
    with pytest.raises((ValueError, RuntimeError, NotImplementedError)):
        attention(*arrays(Q, K, K, ("bfloat16",) * 3), implementation="cudnn")


def test_no_positions_are_refused():
    q = jnp.ones((2, 0, 4, 8))
    with pytest.raises(ValueError, match="`q` must not be empty"):
        attention(q, q, q)


# Rotation.


def tables(length: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines of RoPE with the base 100."""
    angles = np.arange(length)[:, None] * 100.0 ** (-2 * np.arange(size // 2) / size)
    return jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))


def rotated_oracle(q, k, v, dout, causal):
    """Returns what `oracle` does, q and k rotated before: the gradients are rotated back."""
    positions = np.arange(q.shape[1])
    turn = functools.partial(oracles.rope, theta=100.0)
    out, dq, dk, dv = oracle(turn(q, positions), turn(k, positions), v, dout, causal)
    return out, turn(dq, -positions), turn(dk, -positions), dv


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_queries_and_keys_are_rotated_and_values_are_not(recompute, x64, quick_compile):
    arguments = problem(2, 7, 4, 2, 4)

    @jax.jit
    def run(q, k, v, dout):
        fun = functools.partial(attention, rope=tables(7, 4), recompute=recompute)
        out, pullback = jax.vjp(fun, q, k, v)
        return out, *pullback(dout)

    for got, want in zip(run(*arguments), rotated_oracle(*arguments, True), strict=True):
        # Sums of 7 terms of size 1.
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-13)


# All scores at once.


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_the_dense_form_agrees_with_the_oracle(causal, quick_compile):
    arguments = problem(2, 7, 4, 2, 4)

    @jax.jit
    def run(q, k, v, dout):
        fun = functools.partial(attention, causal=causal, implementation="dense")
        out, pullback = jax.vjp(fun, q, k, v)
        return out, *pullback(dout)

    for got, want in zip(run(*arguments), oracle(*arguments, causal), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)  # Float32.


def test_the_dense_form_has_second_derivatives(quick_compile):
    q, k, v, direction = problem(1, 5, 2, 2, 4)

    def by_definition(q, k, v):
        scores = jnp.einsum("bshd,bthd->bhst", q, k) / 2
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        return jnp.einsum("bhst,bthd->bshd", weights, v)

    def curvature(fun, *inputs):
        loss = lambda *args: jnp.sum(jnp.sin(fun(*args)))  # noqa: E731
        along = lambda *args: jnp.vdot(jax.grad(loss)(*args), direction)  # noqa: E731
        return jax.grad(along, (0, 1, 2))(*inputs)

    dense = functools.partial(attention, implementation="dense")
    run = jax.jit(lambda *args: [curvature(f, *args) for f in (dense, by_definition)])
    # Float32, sums of at most 40 terms.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), *run(q, k, v))


# Codecs.

KEY = jax.random.key(5)
NEAREST = Quantized(4, group=3)
DITHER = Quantized(2, group=4, rounding="dither")
CODECS = {"one": DITHER, "three": (NEAREST, DITHER, NEAREST), "k exact": [DITHER, Exact(), NEAREST]}
SHAPES = (2, 5, 4, 2, 4)
"""Of the problem: batch, length, heads, groups, features of a head."""


def triple(codec) -> list:
    return list(codec) if isinstance(codec, tuple | list) else [codec] * 3


def merge(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:2], -1)


def decoded(codec, *inputs: jax.Array, key=KEY) -> list[jax.Array]:
    """Returns what the backward pass is to see: coded before rotation, with heads merged."""
    keys = key if isinstance(key, tuple) else [jax.random.fold_in(key, i) for i in range(3)]
    given = zip(triple(codec), inputs, keys, strict=True)
    return [one.decode(one.encode(merge(x), key)).reshape(x.shape) for one, x, key in given]


@pytest.mark.parametrize(
    ("name", "causal", "rotates", "own"),
    [
        ("one", True, True, False),
        ("three", False, False, False),
        ("k exact", True, False, False),
        ("one", False, True, True),
    ],
)
def test_with_a_codec_gradients_are_those_at_the_decoded_inputs(
    name, causal, rotates, own, x64, quick_compile
):
    codec, (*inputs, dout) = CODECS[name], problem(*SHAPES)
    key = tuple(jax.random.split(KEY, 3)) if own else KEY

    @jax.jit
    def run(q, k, v):
        rope = tables(5, 4) if rotates else None
        exact = functools.partial(attention, causal=causal, rope=rope)
        fun = functools.partial(exact, codec=codec, key=key)
        out, pullback = jax.vjp(fun, q, k, v)
        values = out, fun(q, k, v), fun(q, k, v, merge_heads=True).reshape(q.shape)
        return values, exact(q, k, v), pullback(dout), decoded(codec, q, k, v, key=key)

    values, exact, got, hats = run(*inputs)
    for out in values:
        np.testing.assert_array_equal(out, exact)
    for one, x, x_hat in zip(triple(codec), inputs, hats, strict=True):
        assert np.array_equal(x, x_hat) == (one == Exact())
    find = rotated_oracle if rotates else oracle
    for grad, want in zip(got, find(*map(np.asarray, (*hats, dout)), causal)[1:], strict=True):
        # Sums of 10 terms of size 1.
        np.testing.assert_allclose(grad, want, rtol=1e-11, atol=1e-13)


def test_with_a_codec_bfloat16_accumulates_in_float32(quick_compile):
    *inputs, dout = problem(1, 64, 4, 2, 16, jnp.bfloat16)

    @jax.jit
    def run(q, k, v):
        out, pullback = jax.vjp(functools.partial(attention, codec=NEAREST), q, k, v)
        return out, attention(q, k, v), pullback(dout), decoded(NEAREST, q, k, v)

    out, exact, got, hats = run(*inputs)
    np.testing.assert_array_equal(out, exact)
    for grad, want in zip(got, oracle(*hats, dout)[1:], strict=True):
        assert grad.dtype == jnp.bfloat16
        # The output, weights or scores' gradients, and the result: three roundings, each of which
        # is at most BF16 of what it rounds, and on average half of that.
        assert np.linalg.norm(np.float64(grad) - want) <= 1.5 * BF16 * np.linalg.norm(want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CODECS)
def test_with_a_codec_backward_holds_the_codes_and_no_output(name, dtype):
    codec, (*inputs, _) = CODECS[name], problem(*SHAPES, dtype)
    fun = functools.partial(attention, codec=codec, key=KEY, merge_heads=True)
    leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *inputs))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    stored = zip(triple(codec), inputs, strict=True)
    assert size == sum(one.stored_bytes(merge(x).shape, dtype) for one, x in stored)


def test_with_a_codec_a_layer_of_a_scan_takes_the_bytes_of_its_codes_and_no_more():
    codec = Quantized(4, group=32)
    # Of all forms the one of which autodiff would keep most: 1 MiB of scores a head.
    attend = functools.partial(attention, codec=codec, implementation="dense")

    def temporaries(layers):
        def loss(x):
            body = lambda x, _: (attend(x, 0.5 * x[:, :, :2], -x[:, :, 2:]), None)  # noqa: E731
            return jnp.sum(jax.lax.scan(body, x, None, layers)[0] ** 2)

        x = jax.ShapeDtypeStruct((1, 512, 4, 16), jnp.float32)
        return jax.jit(jax.grad(loss)).lower(x).compile().memory_analysis().temp_size_in_bytes

    # Buffers are aligned. One float kept in one of the eight more layers would be 64 KiB at least.
    stored = sum(codec.stored_bytes((512, width), "float32") for width in (64, 32, 32))
    assert abs(temporaries(12) - temporaries(4) - 8 * stored) < 4096


@pytest.mark.parametrize("name", ["checkpoint", "vmap"])
def test_with_a_codec_gradients_are_the_same_under(name, quick_compile):
    *inputs, dout = problem(*SHAPES)
    stacked = name in ("scan", "vmap")

    @jax.jit
    def run(*inputs):
        fun = TRANSFORMS[name](functools.partial(attention, codec=NEAREST))
        lead = [x[:, None] if stacked else x for x in (*inputs, dout)]
        return jax.vjp(fun, *lead[:3])[1](lead[3]), decoded(NEAREST, *inputs)

    # Groups lie within tokens: examples are coded alike, by themselves or in a batch.
    got, hats = run(*inputs)
    for grad, want in zip(got, oracle(*hats, dout)[1:], strict=True):
        np.testing.assert_allclose(grad.reshape(want.shape), want, rtol=1e-5, atol=1e-5)  # Float32.


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


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"codec": Exact}, TypeError, "`codec` must be an actjax.Codec (an instance, not the"),
        ({"codec": (NEAREST, "k", NEAREST)}, TypeError, "`codec` must be an actjax.Codec, for"),
        ({"codec": (NEAREST,) * 2}, ValueError, "one codec, or one for each of q, k, v: got 2."),
        ({"codec": DITHER}, ValueError, f"`codec` {DITHER} draws random numbers, but got key=None"),
        ({"codec": DITHER, "key": 1}, ValueError, "but got key=1: pass `key`"),
        (
            {"codec": DITHER, "key": (KEY,) * 2},
            ValueError,
            "`key` must be one key, or one for each of q, k, v: got 2.",
        ),
        ({"codec": NEAREST, "implementation": "triton"}, ValueError, "got 'triton'."),
        ({"rope": (jnp.ones((5, 3)),) * 2}, ValueError, "`cos` and `sin` [S, D / 2]"),
        ({"codec": NEAREST, "rope": (jnp.ones((5, 3)),) * 2}, ValueError, "`cos` and `sin` [S, D"),
    ],
)
def test_errors_of_codecs_name_the_argument(given, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        attention(*arrays(Q, K, K), **given)


# What a position sees.


class Same(Codec):
    """Stores an array as it is, by the road of codecs that do not."""

    biased, needs_key = False, False

    def encode(self, x, key=None):
        return x

    def decode(self, code):
        return code

    def weight_grad(self, code, dz):
        return Exact().weight_grad(code, dz)

    def stored_bytes(self, shape, dtype):
        return Exact().stored_bytes(shape, dtype)


FORMS = [
    {"implementation": "blockwise"},
    {"implementation": "blockwise", "recompute": True},
    {"implementation": "dense"},
    {"implementation": "blockwise", "codec": Same()},
]
FORM_NAMES = ["blockwise", "recomputed", "dense", "coded"]


def with_gradients(arguments, **options):
    @jax.jit
    def run(q, k, v, dout):
        out, pullback = jax.vjp(functools.partial(attention, **options), q, k, v)
        return out, *pullback(dout)

    return run(*arguments)


@pytest.mark.parametrize("form", FORMS, ids=FORM_NAMES)
@pytest.mark.parametrize(("length", "window"), [(7, 1), (7, 3), (7, 9), (600, 100), (520, 300)])
def test_a_window_ends_where_it_should(length, window, form, x64):
    if length > 7 and form["implementation"] == "dense":
        pytest.skip("the blocks are what a long sequence is for")
    arguments = problem(1, length, 2, 1, 4)
    got = with_gradients(arguments, window=window, **form)
    q, k, v, dout = arguments
    want = (
        oracles.attention(q, k, v, True, window),
        *oracles.attention_vjp(q, k, v, dout, True, window),
    )
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("form", FORMS, ids=FORM_NAMES)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("ends", [(3, 4, 9), (1, 300, 520)], ids=str)
def test_documents_that_share_a_sequence_see_themselves_alone(ends, causal, form, x64):
    if ends[-1] > 9 and form["implementation"] == "dense":
        pytest.skip("the blocks are what a long sequence is for")
    arguments = problem(1, ends[-1], 2, 1, 4)
    starts = (0, *ends[:-1])
    # Numbers that come again, elsewhere, in another order: what counts is that they are equal.
    segments = np.concatenate(
        [
            np.full(end - start, 7 - i)
            for i, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]
    )
    got = with_gradients(arguments, segments=jnp.asarray(segments)[None], causal=causal, **form)
    for start, end in zip(starts, ends, strict=True):
        alone = oracle(*(x[:, start:end] for x in arguments), causal)
        for one, other in zip(got, alone, strict=True):
            np.testing.assert_allclose(one[:, start:end], other, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("form", FORMS, ids=FORM_NAMES)
def test_heads_are_normalised_before_they_are_rotated(form, x64):
    arguments = problem(2, 7, 4, 2, 4)
    rng = np.random.default_rng(0)
    scales = [jnp.asarray(rng.standard_normal(4)) for _ in "qk"]

    @jax.jit
    def run(q, k, v, q_scale, k_scale, dout):
        def fun(q, k, v, q_scale, k_scale):
            norm = HeadNorm(q_scale, k_scale, 1e-5)
            return attention(q, k, v, rope=tables(7, 4), norm=norm, **form)

        out, pullback = jax.vjp(fun, q, k, v, q_scale, k_scale)
        return out, *pullback(dout)

    q, k, v, dout = arguments
    got = run(q, k, v, *scales, dout)
    normal = [oracles.rms_norm(x, scale, 1e-5) for x, scale in zip((q, k), scales, strict=True)]
    out, dq, dk, dv = rotated_oracle(*normal, v, dout, True)
    dq, dq_scale = oracles.rms_norm_vjp(q, scales[0], 1e-5, dq)
    dk, dk_scale = oracles.rms_norm_vjp(k, scales[1], 1e-5, dk)
    for one, other in zip(got, (out, dq, dk, dv, dq_scale, dk_scale), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def test_a_fused_projection_takes_windows_segments_and_norms(x64, quick_compile):
    q, k, v, _ = problem(2, 7, 4, 2, 4)
    w = jnp.asarray(np.random.default_rng(1).standard_normal((16, 3)))
    norm = HeadNorm(jnp.full(4, 0.5), jnp.full(4, 2.0))
    segments = jnp.asarray([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 2]])
    options = {"window": 2, "segments": segments, "norm": norm, "rope": tables(7, 4)}

    def apart(q, k, v, w):
        return linear(attention(q, k, v, merge_heads=True, **options), w)

    def together(q, k, v, w):
        return attention_linear(q, k, v, w, codec=Same(), **options)

    for fun in (apart, together):
        out, pullback = jax.vjp(fun, q, k, v, w)
        results = out, *pullback(jnp.cos(out))
        if fun is apart:
            want = results
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-13), results, want
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "`window` must be at least 1"),
        ({"window": 3, "causal": False}, "needs causal=True"),
        ({"segments": jnp.zeros((2, 6), int)}, r"`segments` must be integers \(2, 7\)"),
        ({"segments": jnp.zeros((2, 7))}, r"must be integers \(2, 7\), got float32\(2, 7\)"),
    ],
    ids=str,
)
def test_what_a_position_sees_is_checked(options, message):
    q, k, v, _ = problem(2, 7, 4, 2, 4)
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, **options)
