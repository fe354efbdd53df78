"""Tests of windows, documents and norms of heads in attention.

Every form runs on short sequences; long ones, of three blocks, are for the blockwise form.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from ops.attention_cases import (
    FORMS,
    Same,
    oracle,
    plain_cudnn_call,
    problem,
    rotated_oracle,
    run_each,
    value_and_gradients,
)
from ops.helpers import assert_close, tables

from actjax import HeadNorm, attention, attention_linear, linear
from actjax.ops import cudnn_packed
from actjax.ops.mask import Mask


def test_a_window_ends_where_it_should(x64):
    arguments = problem(1, 7, 2, 1, 4)
    cases = [form | {"window": 3} for form in FORMS.values()]
    # The narrowest, and one that is longer than the sequence.
    cases += [FORMS["blockwise"] | {"window": window} for window in (1, 9)]
    for case, got in zip(cases, run_each(arguments, cases), strict=True):
        assert_close(got, oracle(*arguments, window=case["window"]), 1e-11, 1e-13)


# Windows that are shorter and longer than a block of 256.
def test_a_window_skips_the_blocks_that_nothing_sees(x64):
    arguments = problem(1, 600, 2, 1, 4)
    cases = [FORMS["blockwise"] | {"window": window} for window in (100, 300)]
    for case, got in zip(cases, run_each(arguments, cases), strict=True):
        assert_close(got, oracle(*arguments, window=case["window"]), 1e-11, 1e-13)


@pytest.mark.parametrize(
    ("ends", "forms"), [((3, 4, 9), tuple(FORMS)), ((1, 300, 520), ("blockwise",))], ids=str
)
def test_documents_that_share_a_sequence_see_only_themselves(ends, forms, x64):
    arguments = problem(1, ends[-1], 2, 1, 4)
    starts = (0, *ends[:-1])
    # Segment numbers in no order: only their equality counts.
    segments = np.concatenate(
        [np.full(end - start, 7 - i) for i, (start, end) in enumerate(zip(starts, ends))]  # noqa: B905
    )
    common = {"segments": segments[None]}
    cases = [FORMS[form] | common | {"causal": True} for form in forms]
    # The other forms see the same through the code of the blockwise one.
    full = [form for form in ("blockwise", "dense") if form in forms]
    cases += [FORMS[form] | common | {"causal": False} for form in full]
    for case, got in zip(cases, run_each(arguments, cases), strict=True):
        for start, end in zip(starts, ends, strict=True):
            alone = oracle(*(x[:, start:end] for x in map(np.asarray, arguments)), case["causal"])
            assert_close([np.asarray(x)[:, start:end] for x in got], list(alone), 1e-11, 1e-13)


# Packed rows on a GPU: chunks of queries, with cuDNN in plain JAX.

DOCUMENTS = [
    [[1] * 16 + [2] * 21, [1] * 3 + [2] * 13 + [3] * 13 + [0] * 8],
    # Numbers in no order, which come back; another document for each position.
    [[5, -2, 2**31 - 1, 5] * 9 + [-2], [*range(37)]],
]


@pytest.fixture
def plain_cudnn(monkeypatch):
    monkeypatch.setattr(cudnn_packed, "cudnn_call", plain_cudnn_call)
    monkeypatch.setattr(cudnn_packed, "CHUNK", 8)
    monkeypatch.setattr(cudnn_packed, "ONE_CALL", 9)


@pytest.mark.parametrize("length", [37, 9], ids=["chunks", "one call"])
def test_chunks_of_packed_rows_agree_with_all_scores_at_once(length, plain_cudnn, x64):
    @jax.jit
    def run(arguments, segments):
        return [
            [
                value_and_gradients(*arguments, **case, segments=segments, implementation=name)
                for case in ({}, {"causal": False}, {"window": 5, "codec": Same()})
            ]
            for name in ("cudnn", "dense")
        ]

    arguments = problem(2, length, 4, 2, 4)
    for rows in DOCUMENTS:
        got, want = run(arguments, np.asarray(rows, np.int32)[:, :length])
        # The log-sum-exp that the backward pass reads is rounded to float32.
        assert_close(got, want, 1e-6, 2e-6)


def test_the_backward_pass_of_chunks_reads_the_stored_output_and_log_sum_exp(plain_cudnn, x64):
    q, k, v, dout = problem(1, 11, 4, 2, 4)
    segments = np.asarray([[1] * 4 + [2] * 7])

    @jax.jit
    def run(q, k, v, dout):
        out, lse = cudnn_packed.packed_forward(Mask(True, None), q, k, v, segments)
        pull = lambda out, lse: cudnn_packed.packed_backward(  # noqa: E731
            Mask(True, None), q, k, v, segments, out, lse, dout
        )
        return pull(out, lse), pull(out, lse + np.float32(np.log(2))), pull(out + 1, lse)

    (dq, _, dv), (_, _, half_dv), (other_dq, _, same_dv) = run(q, k, v, dout)
    assert_close(half_dv, dv / 2, 1e-6, 1e-6)
    assert_close(same_dv, dv, 1e-12, 1e-12)
    assert np.abs(other_dq - dq).max() > 1e-2


def test_chunks_take_the_keys_of_their_documents_alone(plain_cudnn):
    documents, in_turn = [1] * 4 + [2] * 20 + [0] * 16, [0, 1] * 20
    # Ranges are 1, 2, 4 or 5 chunks long.
    cases = [
        (Mask(True, None), np.arange(40) // 8, [1, 1, 1, 1, 1]),
        (Mask(True, None), documents, [1, 2, 4, 1, 2]),
        (Mask(False, None), documents, [4, 4, 4, 2, 2]),
        (Mask(True, None), in_turn, [1, 2, 4, 4, 5]),
        (Mask(True, 9), in_turn, [1, 2, 2, 2, 2]),
    ]

    @jax.jit
    def orders_and_bounds():
        rows = [cudnn_packed._Rows.of(mask, jnp.asarray([x])) for mask, x, _ in cases]
        return [(row.order, row.bounds) for row in rows]

    for (order, bounds), (_, _, want) in zip(orders_and_bounds(), cases, strict=True):
        widths = np.repeat([1, 2, 4, 5], np.diff(bounds))
        np.testing.assert_array_equal(widths[np.argsort(order)], want)


def test_heads_are_normalized_before_they_are_rotated(x64):
    q, k, v, dout = problem(2, 7, 4, 2, 4)
    rng = np.random.default_rng(0)
    scales = tuple(rng.standard_normal(4) for _ in "qk")

    @jax.jit
    def run(q, k, v, q_scale, k_scale, dout):
        results = []
        for form in FORMS.values():

            def fun(q, k, v, q_scale, k_scale, form=form):
                norm = HeadNorm(q_scale, k_scale, 1e-5)
                return attention(q, k, v, rope=tables(7, 4), norm=norm, **form)

            out, pullback = jax.vjp(fun, q, k, v, q_scale, k_scale)
            results.append((out, *pullback(dout)))
        return results

    normal = [oracles.rms_norm(x, scale, 1e-5) for x, scale in zip((q, k), scales, strict=True)]
    out, dq, dk, dv = rotated_oracle(*normal, v, dout)
    dq, dq_scale = oracles.rms_norm_vjp(q, scales[0], 1e-5, dq)
    dk, dk_scale = oracles.rms_norm_vjp(k, scales[1], 1e-5, dk)
    for got in run(q, k, v, *scales, dout):
        assert_close(got, (out, dq, dk, dv, dq_scale, dk_scale), 1e-10, 1e-12)


def test_attention_linear_takes_windows_segments_and_norms_and_need_not_be_causal(x64):
    q, k, v, _ = problem(2, 7, 4, 1, 4)
    w = np.random.default_rng(1).standard_normal((16, 3))
    norm = HeadNorm(np.full(4, 0.5), np.full(4, 2.0))
    segments = np.asarray([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 2]])
    masked = {"window": 2, "segments": segments, "norm": norm, "rope": tables(7, 4)}

    @jax.jit
    def run(*arguments):
        results = []
        for options in (masked, {"causal": False}):
            apart = functools.partial(attention, merge_heads=True, **options)
            together = functools.partial(attention_linear, codec=Same(), **options)
            for fun in (lambda q, k, v, w, f=apart: linear(f(q, k, v), w), together):
                out, pullback = jax.vjp(fun, *arguments)
                results.append((out, *pullback(jnp.cos(out))))
        return results

    apart, together, full_apart, full_together = run(q, k, v, w)
    assert_close((apart, full_apart), (together, full_together), 1e-11, 1e-13)
