"""Tests of windows, documents and norms of heads in attention.

Every form runs on short sequences; long ones, of three blocks, are for the blockwise form.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from ops.attention_cases import FORMS, Same, oracle, problem, rotated_oracle, run_each
from ops.helpers import assert_close, tables

from actjax import HeadNorm, attention, attention_linear, linear


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
