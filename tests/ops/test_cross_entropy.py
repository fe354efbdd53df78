"""Tests of actjax/ops/cross_entropy.py: exact, without the logits ever being there at once."""

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

from actjax import cross_entropy

BF16 = 2.0**-8
"""Unit roundoff of bfloat16: the relative error of one rounding."""


def problem(tokens=13, features=6, vocabulary=11, dtype=None):
    rng = np.random.default_rng(tokens)
    hidden = jnp.asarray(rng.standard_normal((tokens, features)), dtype)
    head = jnp.asarray(rng.standard_normal((features, vocabulary)), dtype)
    return hidden, head, jnp.asarray(rng.integers(0, vocabulary, tokens))


@functools.partial(jax.jit, static_argnames=("chunk", "z_loss"))
def run(hidden, head, labels, mask=None, **options):
    """Returns loss, dhidden and dhead."""
    fun = lambda *args: cross_entropy(*args, labels, mask=mask, **options)  # noqa: E731
    return jax.tree.leaves(jax.value_and_grad(fun, argnums=(0, 1))(hidden, head))


def oracle(hidden, head, labels, mask=None, z_loss=0.0):
    """The oracle with weights for a mask: the mean of the tokens' own losses, weighted."""
    weights = np.ones(len(labels)) if mask is None else np.asarray(mask, np.float64)
    total = max(weights.sum(), np.finfo(np.float64).tiny)
    sums = [0.0, np.zeros(hidden.shape), np.zeros(head.shape)]
    for t in np.flatnonzero(weights):
        one = slice(t, t + 1)
        arguments = hidden[one], head, labels[one], None, z_loss
        dhidden, dhead = oracles.cross_entropy_vjp(*arguments)
        sums[0] += weights[t] / total * oracles.cross_entropy(*arguments)
        sums[1][one] = weights[t] / total * dhidden
        sums[2] += weights[t] / total * dhead
    return sums


def assert_agree(got, want, rtol, atol=None):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.float64(a), b, rtol=rtol, atol=rtol if atol is None else atol)


def test_the_weighted_oracle_is_the_oracle():
    hidden, head, labels = problem()
    mask = np.arange(13) % 3 > 0
    options = {"mask": mask, "z_loss": 0.1}
    want = oracles.cross_entropy(hidden, head, labels, **options)
    want = want, *oracles.cross_entropy_vjp(hidden, head, labels, **options)
    assert_agree(oracle(hidden, head, labels, mask, 0.1), want, 1e-12)


# Values and gradients.


# One token at a time, ragged last chunks (13 = 2 x 5 + 3 = 12 + 1), one chunk, more than there are.
@pytest.mark.parametrize("chunk", [1, 5, 12, 13, 100, None])
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_value_and_gradients_agree_with_the_oracle(chunk, z_loss, x64):
    arguments = problem()
    got = run(*arguments, chunk=chunk, z_loss=z_loss)
    assert all(x.dtype == jnp.float64 for x in got)
    assert_agree(got, oracle(*arguments, z_loss=z_loss), 1e-12, 1e-14)


@pytest.mark.parametrize("shape", [(), (13,), (2, 3), (2, 2, 3)], ids=str)
def test_any_number_of_leading_axes(shape, x64):
    count = int(np.prod(shape))
    hidden, head, labels = problem(count)
    mask = jnp.arange(1, count + 1) % 2
    loss, dhidden, dhead = run(
        hidden.reshape(*shape, 6), head, labels.reshape(shape), mask.reshape(shape), chunk=4
    )
    assert dhidden.shape == (*shape, 6)
    got = loss, dhidden.reshape(count, 6), dhead
    assert_agree(got, oracle(hidden, head, labels, mask), 1e-12, 1e-14)


MASKS = {
    "some zeros": np.arange(13) % 3 > 0,
    "integers": (np.arange(13) % 2).astype(int),
    "fractions": np.linspace(0, 1, 13) ** 2,
    "above one": np.linspace(0, 5, 13),
    "the last chunk alone": np.arange(13) == 12,
    "a tiny sum": np.where(np.arange(13) == 4, 1e-20, 0.0),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_weighs_tokens(name, x64):
    hidden, head, labels = problem()
    mask = MASKS[name]
    got = run(hidden, head, labels, jnp.asarray(mask), chunk=5, z_loss=0.1)
    assert_agree(got, oracle(hidden, head, labels, mask, 0.1), 1e-12, 1e-14)


def test_all_masked_is_a_loss_of_zero_without_gradient():
    hidden, head, labels = problem()
    for x in run(hidden, head, labels, jnp.zeros(13), chunk=5, z_loss=0.1):
        np.testing.assert_array_equal(x, 0)


@pytest.mark.parametrize("anything", [-100, -1, 11, 2**31 - 1, -(2**31)])
def test_labels_of_masked_tokens_may_be_anything(anything):
    hidden, head, labels = problem()
    mask = jnp.arange(13) % 3 > 0
    got = run(hidden, head, jnp.where(mask, labels, anything), mask, chunk=5)
    jax.tree.map(np.testing.assert_array_equal, got, run(hidden, head, labels, mask, chunk=5))


def test_no_gradient_reaches_the_mask():
    hidden, head, labels = problem()
    fun = lambda mask: cross_entropy(hidden, head, labels, mask=mask)  # noqa: E731
    np.testing.assert_array_equal(jax.grad(fun)(jnp.linspace(0, 1, 13)), 0)


@pytest.mark.parametrize("argument", [0, 1])
def test_finite_differences(argument, x64):
    arguments, mask = list(problem(7)), jnp.linspace(0, 1, 7)

    def fun(one):
        given = [one if i == argument else a for i, a in enumerate(arguments)]
        return cross_entropy(*given, mask=mask, z_loss=0.1, chunk=3)

    # The defaults of check_grads would let an error of 0.1% pass. With steps of 1e-5 truncation and
    # cancellation err by about 1e-10 each.
    check_grads(jax.jit(fun), [arguments[argument]], 1, ["rev"], 1e-8, 1e-8, 1e-5)


def test_the_cotangent_scales_the_gradients(x64):
    arguments = problem()

    def scaled(hidden, head):
        loss = cross_entropy(hidden, head, arguments[2], chunk=5)
        return 3 * loss**2

    got = jax.jit(jax.grad(scaled, argnums=(0, 1)))(*arguments[:2])
    loss, dhidden, dhead = oracle(*arguments)
    assert_agree(got, (6 * loss * dhidden, 6 * loss * dhead), 1e-12, 1e-14)


def test_value_is_the_same_without_differentiation():
    arguments = problem()
    value = jax.jit(functools.partial(cross_entropy, chunk=5, z_loss=0.1))(*arguments)
    # The same sums in float32, in programs that may fuse them otherwise.
    np.testing.assert_allclose(value, run(*arguments, chunk=5, z_loss=0.1)[0], rtol=1e-6)


# Precision.


def test_bfloat16_hidden_and_head():
    hidden, head, labels = problem(64, 32, 50, jnp.bfloat16)
    loss, dhidden, dhead = run(hidden, head, labels, chunk=24, z_loss=0.01)
    assert (loss.dtype, dhidden.dtype, dhead.dtype) == ("float32", "bfloat16", "bfloat16")
    want = oracle(hidden, head, labels, z_loss=0.01)
    # Logits and loss are float32 throughout: 32 products of size 1, summed.
    np.testing.assert_allclose(loss, want[0], rtol=1e-5)
    for got, exact in ((dhidden, want[1]), (dhead, want[2])):
        # The gradient of the logits and the result are rounded: half of BF16 each, on average.
        error = np.linalg.norm(np.float64(got) - exact)
        assert error <= BF16 * np.linalg.norm(exact)


def test_bfloat16_hidden_with_a_float32_head():
    hidden, head, labels = problem(64, 32, 50, jnp.bfloat16)
    wide = run(hidden, head.astype(jnp.float32), labels, chunk=24)
    narrow = run(hidden, head, labels, chunk=24)
    assert [x.dtype for x in wide] == ["float32", "bfloat16", "float32"]
    # The head is cast to bfloat16 for the products, here without loss.
    np.testing.assert_allclose(wide[0], narrow[0], rtol=1e-6)
    # But its gradient stays as it was summed, and is rounded nowhere else.
    np.testing.assert_array_equal(wide[2].astype(jnp.bfloat16), narrow[2])
    assert not np.array_equal(wide[2], wide[2].astype(jnp.bfloat16).astype(jnp.float32))


def test_sums_over_tokens_are_taken_in_float32():
    # 4096 equal tokens: bfloat16 sums, of weights or of gradients, would stop at 256 of them.
    hidden, head = jnp.ones((4096, 1), jnp.bfloat16), jnp.zeros((1, 2), jnp.bfloat16)
    ones = jnp.ones(4096, jnp.bfloat16)
    loss, _, dhead = run(hidden, head, jnp.zeros(4096, int), ones, chunk=64)
    np.testing.assert_allclose(loss, np.log(2), rtol=1e-5)
    np.testing.assert_array_equal(dhead.astype(jnp.float32), [[-0.5, 0.5]])


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.floats(-1, 1, width=32), min_size=12, max_size=12),
    st.sampled_from([0.0, 1e-20, 1.0, 1e4, 1e15]),
    st.lists(st.integers(0, 4), min_size=4, max_size=4),
)
def test_any_logits_give_a_finite_loss(numbers, scale, labels):
    hidden = scale * np.reshape(np.float32(numbers), (4, 3))
    head = np.linspace(-1, 1, 15, dtype=np.float32).reshape(3, 5)
    got = run(jnp.asarray(hidden, jnp.float32), head, jnp.asarray(labels), chunk=3)
    want = oracle(np.float32(hidden), head, np.asarray(labels))
    # Logits are up to 3 scale and rounded by 6e-8 each; weights of the softmax change by as much.
    error = 1e-6 * (1 + 3 * scale)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6, atol=error)
    for a, b, size in zip(got[1:], want[1:], (1, max(scale, 1)), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=min(error, 1.0) * size)


def test_logits_far_apart_do_not_overflow():
    hidden, head = jnp.full((2, 1), 1e4), jnp.asarray([[1.0, -1.0]])
    loss, dhidden, _ = run(hidden, head, jnp.asarray([0, 1]), chunk=1)
    np.testing.assert_array_equal(loss, 1e4)  # Nothing for the first, 2e4 for the second.
    np.testing.assert_array_equal(dhidden, [[0], [1]])


# What is held.


def test_gradients_in_float16_do_not_underflow():
    # Of 65,536 tokens, the mean gives each logit a gradient of 1 / (65,536 * 5,000): no float16.
    tokens, features, vocabulary = 65_536, 4, 5_000
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(tokens, features)), "float16")
    head = jnp.asarray(rng.normal(size=(features, vocabulary)), "float32")
    labels = jnp.zeros(tokens, "int32")

    def gradients(hidden):
        # A loss is scaled by a power of two for float16, so that `dhidden` can be held too.
        fun = lambda hidden, head: 2.0**16 * cross_entropy(hidden, head, labels, chunk=4096)  # noqa: E731
        return jax.jit(jax.grad(fun, (0, 1)))(hidden, head)

    got = gradients(hidden)
    want = gradients(hidden.astype("float32"))
    for a, b in zip(got, want, strict=True):
        error = np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)
        # Head, logit gradients and results are rounded to 11 bits each.
        assert error < 4 * 2**-11


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_backward_holds_the_two_gradients_and_a_number_alone(dtype):
    hidden, head, labels = problem(13, 6, 11, dtype)
    fun = lambda hidden, head: cross_entropy(hidden, head, labels, chunk=5)  # noqa: E731
    leaves = jax.tree.leaves(jax.vjp(fun, hidden, head)[1])
    shapes = sorted((leaf.shape, leaf.dtype.name) for leaf in leaves)
    assert shapes == [((), "float32"), ((6, 11), dtype), ((13, 6), dtype)]


@pytest.mark.parametrize("mode", ["value", "gradient"])
def test_the_logits_never_exist_at_once(mode):
    features, vocabulary, chunk = 16, 4096, 32

    def compiled(tokens: int):
        def value(hidden, head, labels):
            return cross_entropy(hidden, head, labels, chunk=chunk)

        shapes = (tokens, features), (features, vocabulary)
        floats = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        fun = value if mode == "value" else jax.value_and_grad(value, argnums=(0, 1))
        lowered = jax.jit(fun).lower(*floats, jax.ShapeDtypeStruct((tokens,), jnp.int32))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    # 240 tokens more, 250 with a ragged chunk: weights and dhidden grow, a few KiB, where their
    # logits would take 4 MiB. 1 KiB of slack for padding.
    first, second, ragged = compiled(256), compiled(512), compiled(506)
    growth = 256 * (features + 2) * 4
    assert second - first <= 2 * growth + 1024
    # Two chunks' worth of logits, softmax and their gradient, and the head's gradient twice.
    assert ragged <= 8 * chunk * vocabulary * 4 + 2 * features * vocabulary * 4


def test_a_small_chunk_is_not_the_default():
    # At least 256 tokens: each chunk reads and writes the head's gradient once.
    hidden, head, labels = problem(300)
    text = str(jax.make_jaxpr(jax.grad(cross_entropy))(hidden, head, labels))
    assert "f32[256,11]" in text
    assert "f32[44,11]" in text


# Under transformations of JAX.


def assert_gradients(run, *arguments):
    """Compares the gradients of `run(hidden, head, labels)`, losses stacked, with the oracle."""
    hidden, head, labels = arguments
    got = jax.jit(jax.grad(lambda *x: jnp.sum(run(*x, labels)), argnums=(0, 1)))(hidden, head)
    wants = [oracle(h, head, y)[1:] for h, y in zip(hidden, labels, strict=True)]
    want = np.stack([w[0] for w in wants]), sum(w[1] for w in wants)
    # Float32 sums of some tens of terms of at most size 1.
    assert_agree(got, want, 1e-5)


OP = functools.partial(cross_entropy, chunk=5)
TRANSFORMS = {
    "eager": lambda xs, head, ys: jnp.stack([OP(x, head, y) for x, y in zip(xs, ys, strict=True)]),
    "vmap": jax.vmap(OP, in_axes=(0, None, 0)),
    "vmap of jit": jax.vmap(jax.jit(OP), in_axes=(0, None, 0)),
    "checkpoint": jax.vmap(jax.checkpoint(OP), in_axes=(0, None, 0)),
    "scan": lambda xs, head, ys: jax.lax.scan(
        lambda _, xy: (None, OP(xy[0], head, xy[1])), None, (xs, ys)
    )[1],
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_gradients_are_the_same_under(name):
    hidden, head, labels = problem(14)
    assert_gradients(TRANSFORMS[name], hidden.reshape(2, 7, 6), head, labels.reshape(2, 7))


# Errors.

ERRORS = {
    "transposed head": (
        lambda h, w, y: cross_entropy(h, w.T, y),
        ValueError,
        "`head` must be [d, V] with d = (6,) features of `hidden`, got hidden(13, 6) @ head(11, 6)",
    ),
    "head of one axis": (lambda h, w, y: cross_entropy(h, w[0], y), ValueError, "`head` must be"),
    "scalar hidden": (lambda h, w, y: cross_entropy(h[0, 0], w, y), ValueError, "hidden() @ head"),
    "float labels": (
        lambda h, w, y: cross_entropy(h, w, y * 1.0),
        TypeError,
        "`labels` must be an array of integers, got float32.",
    ),
    "labels of another shape": (
        lambda h, w, y: cross_entropy(h, w, y[1:]),
        ValueError,
        "`labels` must be (13,) for hidden(13, 6), got (12,).",
    ),
    "mask of another shape": (
        lambda h, w, y: cross_entropy(h, w, y, mask=jnp.ones((13, 1))),
        ValueError,
        "`mask` must be (13,) for hidden(13, 6), got (13, 1).",
    ),
    "no chunk": (
        lambda h, w, y: cross_entropy(h, w, y, chunk=0),
        ValueError,
        "`chunk` must be at least 1 token, got 0.",
    ),
    "integer hidden": (
        lambda h, w, y: cross_entropy(h.astype(int), w, y),
        TypeError,
        "`hidden` must be a floating point array, got int32",
    ),
    "integer head": (
        lambda h, w, y: cross_entropy(h, w.astype(int), y),
        TypeError,
        "`head` must be a floating point array, got int32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_argument_and_what_came(case):
    call, kind, message = ERRORS[case]
    with pytest.raises(kind, match=re.escape(message)):
        call(*problem())


def test_no_tokens_are_refused():
    with pytest.raises(ValueError, match="`hidden` must hold at least one token"):
        cross_entropy(jnp.ones((0, 4)), jnp.ones((4, 5)), jnp.ones(0, int))
