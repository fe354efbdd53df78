"""Tests of actjax/ops/cross_entropy.py: exact, and the logits never exist at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
from ops.helpers import (
    BF16,
    assert_equal,
    assert_gradients_are_differences,
    compiled_temporaries,
    composed,
    ones,
    pullback,
    shaped,
)

from actjax import cross_entropy


def problem(tokens=13, features=6, vocabulary=11, dtype=None):
    rng = np.random.default_rng(tokens)
    dtype = dtype or jax.dtypes.canonicalize_dtype(float)
    hidden = rng.standard_normal((tokens, features)).astype(dtype)
    head = rng.standard_normal((features, vocabulary)).astype(dtype)
    return *jax.device_put((hidden, head)), rng.integers(0, vocabulary, tokens, np.int32)


@functools.partial(jax.jit, static_argnames=("chunk", "z_loss"))
def run(hidden, head, labels, mask=None, **options):
    """Returns loss, dhidden and dhead."""
    fun = lambda *args: cross_entropy(*args, labels, mask=mask, **options)  # noqa: E731
    return jax.tree.leaves(jax.value_and_grad(fun, argnums=(0, 1))(hidden, head))


def oracle(hidden, head, labels, mask=None, z_loss=0.0):
    """Extends the oracle to weights as a mask: the weighted mean of the losses of tokens."""
    weights = np.ones(len(labels)) if mask is None else np.asarray(mask, np.float64)
    total = max(weights.sum(), np.finfo(np.float64).tiny)
    sums = [0.0, np.zeros(hidden.shape), np.zeros(head.shape)]
    for t in np.flatnonzero(weights):
        token = slice(t, t + 1)
        arguments = hidden[token], head, labels[token], None, z_loss
        dhidden, dhead = oracles.cross_entropy_vjp(*arguments)
        sums[0] += weights[t] / total * oracles.cross_entropy(*arguments)
        sums[1][token] = weights[t] / total * dhidden
        sums[2] += weights[t] / total * dhead
    return sums


def assert_agree(got, want, rtol, atol=None):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.float64(a), b, rtol=rtol, atol=rtol if atol is None else atol)


# One token at a time, ragged last chunks (13 = 2 x 5 + 3 = 12 + 1), one chunk, more than there are.
def test_value_and_gradients_agree_with_the_oracle(x64):
    arguments = problem()
    cases = [{"chunk": chunk} for chunk in (1, 5, 12, 13, None)]
    cases += [{"chunk": 5, "z_loss": 0.1}]
    results = jax.jit(lambda *args: [run(*args, **case) for case in cases])(*arguments)
    want = {z_loss: oracle(*arguments, z_loss=z_loss) for z_loss in (0.0, 0.1)}
    for case, got in zip(cases, results, strict=True):
        assert all(x.dtype == jnp.float64 for x in got)
        assert_agree(got, want[case.get("z_loss", 0.0)], 1e-12, 1e-14)


def test_any_number_of_leading_axes(x64):
    problems = []
    for shape in ((), (2, 3)):
        hidden, head, labels = map(np.asarray, problem(int(np.prod(shape))))
        mask = np.arange(1, labels.size + 1) % 2
        problems.append(
            (hidden.reshape(*shape, 6), head, labels.reshape(shape), mask.reshape(shape))
        )
    results = jax.jit(lambda problems: [run(*args, chunk=4) for args in problems])(problems)
    for (hidden, head, labels, mask), got in zip(problems, results, strict=True):
        assert got[1].shape == hidden.shape
        flat = hidden.reshape(-1, 6), head, labels.reshape(-1), mask.reshape(-1)
        assert_agree((got[0], np.reshape(got[1], (-1, 6)), got[2]), oracle(*flat), 1e-12, 1e-14)


MASKS = {
    "some zeros": np.arange(13) % 3 > 0,
    "fractions": np.linspace(0, 1, 13) ** 2,
    "above one": np.linspace(0, 5, 13),
    "the last chunk alone": np.arange(13) == 12,
    "a tiny sum": np.where(np.arange(13) == 4, 1e-20, 0.0),
}


def test_a_mask_weighs_tokens(x64):
    hidden, head, labels = problem()
    for mask in MASKS.values():
        # In float64, so that all masks share a program.
        got = run(hidden, head, labels, mask.astype(np.float64), chunk=5, z_loss=0.1)
        assert_agree(got, oracle(hidden, head, labels, mask, 0.1), 1e-12, 1e-14)


def test_masked_tokens_count_for_nothing():
    hidden, head, labels = problem()
    masked = functools.partial(run, hidden, head, chunk=5, z_loss=0.1)
    for x in masked(labels, np.zeros(13, np.float32)):
        np.testing.assert_array_equal(x, 0)
    # Their labels may be anything.
    mask = np.float32(np.arange(13) % 3 > 0)
    want = masked(labels, mask)
    for anything in (-100, -1, 11, 2**31 - 1, -(2**31)):
        changed = np.where(mask > 0, labels, np.int32(anything))
        assert_equal(masked(changed, mask), want)


def test_a_label_outside_the_vocabulary_makes_all_nan():
    hidden, head, labels = problem()
    mask = np.float32(np.arange(len(labels)) != 3)
    for label in (-100, -1, 11):
        labels[3] = label
        unmasked = run(hidden, head, labels, np.ones_like(mask), chunk=5, z_loss=0.1)
        assert all(jnp.isnan(x).all() for x in unmasked)
        masked = run(hidden, head, labels, mask, chunk=5, z_loss=0.1)
        assert all(jnp.isfinite(x).all() for x in masked)


def test_labels_and_mask_may_be_any_integers():
    hidden, head, labels = problem(vocabulary=256)
    labels, mask = labels % 128, np.arange(13) % 2
    dtypes = np.int32, np.uint8, np.int8, np.uint32
    each = [(labels.astype(dtype), mask.astype(dtype)) for dtype in dtypes]
    results = jax.jit(lambda each: [run(hidden, head, *args, chunk=5) for args in each])(each)
    for got in results[1:]:
        assert_equal(got, results[0])
    assert_agree(results[0], oracle(hidden, head, labels, mask), 1e-5)  # Float32.


def test_the_mask_has_no_gradient_and_hidden_and_head_have_differences_of_values(x64):
    hidden, head, labels = problem(7)

    def fun(*args, mask=np.linspace(0, 1, 7)):
        return cross_entropy(*args, labels, mask=mask, z_loss=0.1, chunk=3)

    assert_gradients_are_differences(fun, hidden, head)
    gradient = jax.jit(jax.grad(lambda mask: fun(hidden, head, mask=mask)))(np.linspace(0, 1, 7))
    np.testing.assert_array_equal(gradient, 0)


def test_the_cotangent_scales_the_gradients_and_the_value_alone_is_the_same(x64):
    arguments = problem()

    @jax.jit
    def both(hidden, head):
        value = functools.partial(cross_entropy, labels=arguments[2], chunk=5, z_loss=0.1)
        scaled = lambda *args: 3 * value(*args) ** 2  # noqa: E731
        return value(hidden, head), *jax.grad(scaled, argnums=(0, 1))(hidden, head)

    loss, dhidden, dhead = oracle(*arguments, z_loss=0.1)
    want = loss, 6 * loss * dhidden, 6 * loss * dhead
    assert_agree(both(*arguments[:2]), want, 1e-12, 1e-14)


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
    wide = run(hidden, np.float32(head), labels, chunk=24)
    narrow = run(hidden, head, labels, chunk=24)
    assert [x.dtype for x in wide] == ["float32", "bfloat16", "float32"]
    # The head is cast to bfloat16 for the products, here without loss.
    np.testing.assert_allclose(wide[0], narrow[0], rtol=1e-6)
    # But its gradient stays as it was summed: nothing else rounds it.
    rounded = np.asarray(wide[2]).astype(jnp.bfloat16)
    np.testing.assert_array_equal(rounded, narrow[2])
    assert not np.array_equal(wide[2], np.float32(rounded))


def test_sums_over_tokens_are_taken_in_float32():
    # 4096 equal tokens: bfloat16 sums, of weights or of gradients, would stop at 256 of them.
    bf16 = functools.partial(ones, dtype=jnp.bfloat16)
    zeros, labels = np.zeros((1, 2), jnp.bfloat16), np.zeros(4096, np.int32)
    loss, _, dhead = run(bf16(4096, 1), zeros, labels, bf16(4096), chunk=64)
    np.testing.assert_allclose(loss, np.log(2), rtol=1e-5)
    np.testing.assert_array_equal(np.float32(dhead), [[-0.5, 0.5]])


def test_the_gradient_of_a_float32_head_is_not_rounded_between_chunks():
    # A chunk adds 3 * 0.5 * (1 + 2^-7), which bfloat16 would round; float32 sums it exactly.
    hidden = np.full((512, 1), 1 + 2.0**-7, jnp.bfloat16)
    _, _, dhead = run(hidden, np.zeros((1, 2), np.float32), np.zeros(512, np.int32), chunk=3)
    np.testing.assert_array_equal(dhead, [[-0.50390625, 0.50390625]])


def test_any_logits_give_a_finite_loss():
    head, rng = np.linspace(-1, 1, 15, dtype=np.float32).reshape(3, 5), np.random.default_rng(0)
    scales = np.repeat([0.0, 1e-20, 1.0, 1e4, 1e15], 8)
    hidden = np.float32(scales[:, None, None] * rng.uniform(-1, 1, (40, 4, 3)))
    labels = rng.integers(0, 5, (40, 4), np.int32)
    results = jax.vmap(lambda h, y: run(h, head, y, chunk=3))(hidden, labels)
    for scale, h, y, *got in zip(scales, hidden, labels, *results, strict=True):
        want = oracle(h, head, y)
        # Logits are up to 3 scale and rounded by 6e-8 each; so do weights of the softmax change.
        error = 1e-6 * (1 + 3 * scale)
        np.testing.assert_allclose(got[0], want[0], rtol=1e-6, atol=error)
        for a, b, size in zip(got[1:], want[1:], (1, max(scale, 1)), strict=True):
            assert np.isfinite(a).all()
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=min(error, 1.0) * size)


def test_logits_far_apart_do_not_overflow():
    hidden, head = np.full((2, 1), 1e4, np.float32), np.float32([[1, -1]])
    loss, dhidden, _ = run(hidden, head, np.int32([0, 1]), chunk=1)
    np.testing.assert_array_equal(loss, 1e4)  # Nothing for the first, 2e4 for the second.
    np.testing.assert_array_equal(dhidden, [[0], [1]])


def test_gradients_in_float16_do_not_underflow():
    # A share of 1 / 8,192 of the mean gives each logit a gradient of 1 / (8,192 * 5,000), which
    # float16 cannot hold. The last token has nearly all of the weight, and no part in `dhead`.
    features, vocabulary, rng = 2, 5_000, np.random.default_rng(0)
    hidden = rng.normal(size=(64, features)).astype(np.float16)
    hidden[-1] = 0
    head = rng.normal(size=(features, vocabulary)).astype(np.float32)
    labels, mask = np.zeros(64, np.int32), np.ones(64, np.float32)
    mask[-1] = 8_192 - 63

    @jax.jit
    def gradients(hidden, head):
        # A loss is scaled by a power of two for float16, so that `dhidden` can be held too.
        loss = functools.partial(cross_entropy, labels=labels, mask=mask, chunk=32)
        return jax.grad(lambda *args: 2.0**16 * loss(*args), (0, 1))(hidden, head)

    (dhidden, dhead), want = gradients(hidden, head), gradients(np.float32(hidden), head)
    for a, b in ((dhidden[:-1], want[0][:-1]), (dhead, want[1])):
        error = np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)
        # Head, logit gradients and results are rounded to 11 bits each.
        assert error < 4 * 2**-11


# Memory.


def test_backward_holds_only_the_two_gradients_and_a_number():
    for dtype in ("float32", "bfloat16"):
        hidden, head, labels = problem(13, 6, 11, dtype)
        fun = lambda *args, labels=labels: cross_entropy(*args, labels, chunk=5)  # noqa: E731
        leaves = jax.tree.leaves(pullback(fun, hidden, head))
        shapes = sorted((leaf.shape, leaf.dtype.name) for leaf in leaves)
        assert shapes == [((), "float32"), ((6, 11), dtype), ((13, 6), dtype)]


def test_the_logits_never_exist_at_once():
    features, vocabulary, chunk = 16, 4096, 32

    def compiled(tokens: int):
        def value(hidden, head, labels):
            return cross_entropy(hidden, head, labels, chunk=chunk)

        def both(*args):
            return value(*args), jax.value_and_grad(value, argnums=(0, 1))(*args)

        floats = shaped(tokens, features), shaped(features, vocabulary)
        return compiled_temporaries(both, *floats, shaped(tokens, dtype="int32"))

    # 256 tokens more: weights and dhidden grow, a few KiB, where their logits would take 4 MiB.
    # 1 KiB of slack for padding. The last of 506 tokens are a shorter chunk.
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


def test_gradients_are_the_same_under_scan_vmap_and_checkpoint():
    hidden, head, labels = map(np.asarray, problem(14))
    hidden, labels = hidden.reshape(1, 2, 7, 6), labels.reshape(1, 2, 7)

    @jax.jit
    def gradients(hidden, head):
        def loss(hidden, head):
            each = composed(lambda h, y: cross_entropy(h, head, y, chunk=5))
            return jnp.sum(each(hidden, labels))

        return jax.grad(loss, argnums=(0, 1))(hidden, head)

    wants = [oracle(h, head, y)[1:] for h, y in zip(hidden[0], labels[0], strict=True)]
    want = np.stack([w[0] for w in wants])[None], sum(w[1] for w in wants)
    # Float32 sums of some tens of terms of at most size 1.
    assert_agree(gradients(hidden, head), want, 1e-5)
