"""Tests of actjax/ops/token_log_probs.py that the contract of operators does not contain."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
from cheap_codecs import Coarse
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import nbytes, products
from ops.helpers import (
    BF16,
    KEY,
    assert_close,
    assert_equal,
    compiled_temporaries,
    normal,
    pullback,
    shaped,
)

import actjax
from actjax import FrozenWeight, NF4Weight, cross_entropy, token_log_probs
from train.planning.collectives import bytes_by_kind

RP = actjax.RandomProjection(3)
LABELS = np.random.default_rng(2).integers(0, 11, 13, np.int32)


def problem(dtype=None):
    return normal(0, 13, 6, dtype=dtype), normal(1, 6, 11, dtype=dtype)


def vjp(hidden, head, cotangent, labels=LABELS, **options):
    """Returns values and the cotangents of hidden states and head."""
    fun = lambda *args: token_log_probs(*args, labels, **options)  # noqa: E731
    values, pull = jax.vjp(fun, hidden, head)
    return values, pull(cotangent)


def naive(hidden, head, labels):
    log_probs = jax.nn.log_softmax(hidden @ head)
    return jnp.take_along_axis(log_probs, labels[..., None], -1)[..., 0]


def test_any_chunk_and_mask_gives_the_weighted_oracle(x64):
    hidden, head = problem()
    dy = np.random.default_rng(3).standard_normal(13)
    masks = None, np.arange(13) % 3 > 0, np.linspace(0, 5, 13)
    # One token at a time, ragged last chunks, one chunk.
    cases = [(chunk, None) for chunk in (1, 5, 12, None)] + [(5, mask) for mask in masks[1:]]

    @jax.jit
    def run(hidden, head):
        return [vjp(hidden, head, dy, chunk=chunk, mask=mask) for chunk, mask in cases]

    for (_, mask), (values, grads) in zip(cases, run(hidden, head), strict=True):
        assert values.dtype == jnp.float64
        weights = np.ones(13) if mask is None else np.float64(mask)
        want = weights * oracles.token_log_probs(hidden, head, LABELS)
        assert_close(values, want, 1e-12, 1e-14)
        want = oracles.token_log_probs_vjp(hidden, head, LABELS, weights * dy)
        assert_close(grads, want, 1e-12, 1e-13)


def test_a_masked_token_counts_for_nothing_and_another_label_outside_is_nan():
    hidden, head = problem()
    mask, dy = np.float32(np.arange(13) % 3 > 0), np.ones(13, np.float32)
    run = jax.jit(functools.partial(vjp, chunk=5))
    want = run(hidden, head, dy, LABELS, mask=mask)
    assert not np.any(want[0][mask == 0])
    assert not np.any(want[1][0][mask == 0])
    for anything in (-100, -1, 11, 2**31 - 1):
        changed = np.where(mask > 0, LABELS, np.int32(anything))
        # The cotangent of a loss that divides by the mask is NaN there.
        dy_of_masked = np.where(mask > 0, dy, np.nan)
        assert_equal(run(hidden, head, dy_of_masked, changed, mask=mask), want)
        changed[1] = anything
        values, (dhidden, dhead) = run(hidden, head, dy, changed, mask=mask)
        nan = np.arange(13) == 1
        np.testing.assert_array_equal(np.isnan(values), nan)
        np.testing.assert_array_equal(np.isnan(dhidden).all(1), nan)
        assert np.isnan(dhead).all()


def test_it_is_the_terms_of_cross_entropy_and_its_gradients_for_any_integers():
    hidden, _ = problem()
    head, labels = normal(1, 6, 256), np.arange(13) * 9
    weights = np.linspace(0, 1, 13, dtype=np.float32)

    @jax.jit
    def run(hidden, head, each):
        def total(*args, labels):
            return -jnp.sum(token_log_probs(*args, labels, mask=weights)) / weights.sum()

        def mean(*args, labels):
            return cross_entropy(*args, labels, mask=weights)

        losses = [(total, labels) for labels in each] + [(mean, each[0])]
        return [
            jax.value_and_grad(functools.partial(loss, labels=labels), (0, 1))(hidden, head)
            for loss, labels in losses
        ]

    *got, want = run(hidden, head, [labels.astype(d) for d in ("int32", "uint8", "int8")])
    for a in got:
        assert_close(a, want, 1e-5, 1e-6)


def test_bfloat16_hidden_states_give_float32_values_and_each_gradient_its_dtype():
    hidden, head = problem("bfloat16")
    dy = np.float32(np.linspace(-1, 1, 13))
    run = jax.jit(functools.partial(vjp, chunk=5))
    for dtype in ("bfloat16", "float32"):
        values, grads = run(hidden, np.asarray(head, dtype), dy)
        assert [x.dtype for x in (values, *grads)] == ["float32", "bfloat16", dtype]
        wide = np.float64(hidden), np.float64(head), LABELS
        np.testing.assert_allclose(values, oracles.token_log_probs(*wide), rtol=1e-5)
        for a, b in zip(grads, oracles.token_log_probs_vjp(*wide, dy), strict=True):
            # The gradient of the logits and the result are rounded: half of BF16 each, on average.
            assert np.linalg.norm(np.float64(a) - b) <= BF16 * np.linalg.norm(b)


def test_logits_far_apart_do_not_overflow():
    hidden, head = np.full((2, 1), 1e4, np.float32), np.float32([[1, -1]])
    values, (dhidden, _) = vjp(hidden, head, np.ones(2, np.float32), np.int32([0, 1]), chunk=1)
    np.testing.assert_array_equal(values, [0, -2e4])
    np.testing.assert_array_equal(dhidden, [[0], [-2]])


# Frozen heads.


def test_a_frozen_head_has_no_gradient_and_is_held_in_its_form():
    hidden, table = normal(0, 13, 64), normal(1, 70, 64)

    def run(hidden, head):
        fun = lambda hidden: token_log_probs(hidden, head, LABELS, chunk=13)  # noqa: E731
        return jax.vjp(fun, hidden)

    @jax.jit
    def both(hidden, table):
        coded = NF4Weight.quantize(table.T)
        heads = coded.astype("float32"), FrozenWeight(coded)
        dy = jnp.cos(jnp.arange(13.0))
        return [(value, pull(dy)) for value, pull in (run(hidden, head) for head in heads)]

    assert_equal(*both(hidden, table))
    coded = jax.eval_shape(lambda table: FrozenWeight(NF4Weight.quantize(table.T)), table)
    held = pullback(lambda h, w: token_log_probs(h, w, LABELS), hidden, coded)
    assert nbytes(held) == nbytes((hidden, coded)) + 13 * (4 + 4)
    fun = lambda h, w: run(h, w)[1](jnp.ones(13))  # noqa: E731
    # The logits in both passes, and the gradients.
    assert products(fun, hidden, FrozenWeight(table.T)) == [(13, 70), (13, 70), (13, 64)]
    both_gradients = lambda h, w: vjp(h, w, jnp.ones(13), chunk=13)  # noqa: E731
    assert products(both_gradients, hidden, table.T)[-1] == (64, 70)


# Memory.


def test_a_scan_holds_what_is_documented_and_never_all_logits():
    tokens, d, vocabulary, codec = 512, 16, 4096, actjax.Quantized(4, group=16)
    labels = np.arange(tokens, dtype=np.int32) * 7

    def temporaries(log_probs, layers):
        def loss(x, head, steps):
            def body(x, step):
                # A new activation in each layer. It needs no residual.
                return x + log_probs(x + step, head)[:, None], None

            return jnp.sum(jax.lax.scan(body, x, steps)[0] ** 2)

        floats = shaped(tokens, d), shaped(d, vocabulary), shaped(layers)
        return compiled_temporaries(jax.grad(loss, (0, 1)), *floats)

    def ours(hidden, head, codec=actjax.Exact()):
        return token_log_probs(hidden, head, labels, codec=codec, chunk=32)

    coded = functools.partial(ours, codec=codec)
    plain = functools.partial(naive, labels=labels)
    first = {fun: temporaries(fun, 4) for fun in (ours, coded, plain)}
    grown = {fun: temporaries(fun, 8) - size for fun, size in first.items()}
    all_logits = tokens * vocabulary * 4
    # Buffers are aligned.
    assert abs(grown[ours] - 4 * tokens * (4 * d + 4)) < 4096
    assert abs(grown[coded] - 4 * codec.stored_bytes((tokens, d), "float32")) < 4096
    assert grown[plain] >= 4 * all_logits
    assert max(first[ours], first[coded]) < all_logits / 2


def test_the_backward_pass_holds_no_cast_head_and_the_lse_beside_exact_hidden_states_alone():
    hidden, head, labels = shaped(13, 6, dtype="bfloat16"), shaped(6, 11), shaped(13, dtype="int32")
    for codec, extra in ((actjax.Exact(), 13 * 4), (Coarse(), 0)):

        def fun(hidden, head, labels, codec=codec):
            return token_log_probs(-hidden, head, labels, codec=codec)

        held = nbytes(pullback(fun, hidden, head, labels)) - nbytes((head, labels))
        assert held == codec.stored_bytes(hidden.shape, hidden.dtype) + extra


def test_a_barrier_keeps_the_two_passes_apart():
    # Without it XLA could merge the logits of both passes in the last chunk, and hold them. XLA for
    # CPUs removes barriers, so the program is looked at before.
    fun = lambda *args: jnp.sum(token_log_probs(*args, LABELS))  # noqa: E731
    assert "optimization_barrier" in str(jax.make_jaxpr(jax.grad(fun))(*problem()))


# Transformations.


def test_devices_take_their_own_tokens():
    hidden, head = normal(0, 8, 4, 64), normal(1, 64, 11)
    labels, mask = np.arange(32).reshape(8, 4) % 11, np.arange(32).reshape(8, 4) % 5 > 0
    run = jax.jit(functools.partial(vjp, codec=Coarse(), chunk=3))
    dy = np.float32(np.cos(np.arange(32))).reshape(8, 4)
    want = run(hidden, head, dy, labels, mask=mask)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))
    by_token = jax.device_put((dy, labels, mask), rows)
    with jax.set_mesh(mesh):
        hidden = jax.device_put(hidden, rows)
        head = jax.device_put(head, NamedSharding(mesh, P()))
        dy, labels, mask = by_token
        compiled = run.lower(hidden, head, dy, labels, mask=mask).compile()
        values, (dhidden, dhead) = compiled(hidden, head, dy, labels, mask=mask)
    # Sums of 32 tokens in another order.
    assert_close((values, (dhidden, dhead)), want, 1e-5, 1e-5)
    assert values.sharding == dhidden.sharding == rows
    exchanged = bytes_by_kind(compiled.as_text())
    assert exchanged["all-gather"] == 0
    assert exchanged["all-reduce"] == dhead.nbytes


def test_value_and_grad_gives_the_head_a_dense_gradient_and_other_weights_two_factors():
    x, w, head = normal(0, 13, 8), normal(1, 8, 6), normal(2, 6, 11)

    def loss(weights, codec):
        hidden = actjax.linear(x, weights["w"], codec=codec, key=KEY)
        return jnp.sum(token_log_probs(hidden, weights["head"], LABELS) ** 2)

    weights = {"w": w, "head": head}
    low_rank = jax.jit(actjax.value_and_grad(functools.partial(loss, codec=RP)))
    dense = jax.jit(jax.value_and_grad(functools.partial(loss, codec=RP)))
    (value, grads), (want, dense_grads) = low_rank(weights), dense(weights)
    assert isinstance(grads["w"], actjax.LowRank)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    got = grads["head"], grads["w"].dense()
    assert_close(got, (dense_grads["head"], dense_grads["w"]), 1e-4, 1e-4)
