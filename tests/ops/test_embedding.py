"""Tests of actjax/ops/embedding.py: exact rows, and a gradient that is a segment sum."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxprs import nbytes
from ops.helpers import (
    assert_close,
    assert_equal,
    normal,
    ones,
    pullback,
)

from actjax import embedding, explain

VOCAB, SIZE = 7, 3


@functools.partial(jax.jit, static_argnames="fill_value")
def run(table, ids, dy, fill_value=math.nan):
    y, pull = jax.vjp(lambda table: embedding(table, ids, fill_value=fill_value), table)
    return y, *pull(dy)


def oracle(table, ids, dy, fill_value=math.nan):
    """Returns rows and gradient token by token, in NumPy float64."""
    table, ids, dy = np.asarray(table, np.float64), np.asarray(ids), np.asarray(dy, np.float64)
    y, dtable = np.full((*ids.shape, table.shape[1]), fill_value), np.zeros_like(table)
    for at in np.ndindex(ids.shape):
        if 0 <= int(ids[at]) < len(table):
            y[at] = table[ids[at]]
            dtable[ids[at]] += dy[at]
    return y, dtable


def random_ids(*shape: int, dtype=np.int32) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, shape).astype(dtype)


def test_rows_and_gradient_agree_with_the_oracle(x64):
    table, shapes = normal(0, VOCAB, SIZE), ((), (1,), (20,), (2, 3, 5))
    inputs = [(table, random_ids(*shape), normal(1, *shape, SIZE)) for shape in shapes]
    found = jax.jit(lambda inputs: [run(*one) for one in inputs])(inputs)
    for got, arguments in zip(found, inputs, strict=True):
        want_y, want_dtable = oracle(*arguments)
        np.testing.assert_array_equal(got[0], want_y)
        # Float64, sums of at most 30 terms of size 1.
        np.testing.assert_allclose(got[1], want_dtable, rtol=1e-13, atol=1e-14)


def test_rows_and_gradient_agree_with_flax():
    table, ids, dy = normal(0, VOCAB, SIZE), random_ids(4, 5), normal(1, 4, 5, SIZE)
    layer = linen.Embed(VOCAB, SIZE)

    @jax.jit
    def flax(table):
        apply = lambda table: layer.apply({"params": {"embedding": table}}, ids)  # noqa: E731
        y, pull = jax.vjp(apply, table)
        return y, *pull(dy)

    # Float32, sums of at most 20 terms of size 1.
    assert_close(run(table, ids, dy), flax(table), 1e-6, 1e-6)


def test_the_gradient_does_not_depend_on_the_table():
    # The operator is linear in the table and stores no code, so there is nothing to bias it.
    ids, dy = random_ids(20), normal(1, 20, SIZE)
    gradients = [run(normal(seed, VOCAB, SIZE), ids, dy)[1] for seed in (0, 2)]
    np.testing.assert_array_equal(*gradients)


# Ids outside the table.

OUTSIDE = [-(2**31), -VOCAB - 1, -VOCAB, -1, VOCAB, VOCAB + 1, 2**16, 2**31 - 1]


@pytest.mark.parametrize("fill_value", [math.nan, 0.0, -2.5])
def test_an_id_outside_the_table_gives_the_fill_value_and_no_gradient(fill_value):
    table, ids = normal(0, VOCAB, SIZE), np.asarray([*OUTSIDE, 0, VOCAB - 1], np.int32)
    dy = normal(1, len(ids), SIZE)
    got, want = run(table, ids, dy, fill_value), oracle(table, ids, dy, fill_value)
    assert_equal(got, jax.tree.map(np.float32, want))
    assert np.all(np.asarray(got[0])[: len(OUTSIDE)] == fill_value) == (not math.isnan(fill_value))


def test_the_fill_value_is_nan_if_not_given():
    table, ids = normal(0, VOCAB, SIZE), np.asarray([2, VOCAB], np.int32)
    y = np.asarray(jax.jit(embedding)(table, ids))
    np.testing.assert_array_equal(np.isnan(y), [[False] * SIZE, [True] * SIZE])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32", "int64", "uint64"])
def test_ids_may_have_any_integer_dtype(dtype, x64):
    # 300 rows: more than 8 bits can count. The largest ids end in the bits of row 1, or of none.
    table, limits = normal(0, 300, 2), np.iinfo(dtype)
    ids = [0, 1, 100, 100, 299, 300, 2**32 + 1, limits.max, limits.max - 2**32, limits.min, -1]
    ids = np.asarray([i for i in ids if limits.min <= i <= limits.max], dtype)
    dy = normal(1, len(ids), 2)
    want_y, want_dtable = oracle(table, ids, dy)
    y, dtable = run(table, ids, dy)
    np.testing.assert_array_equal(y, want_y)
    np.testing.assert_allclose(dtable, want_dtable, rtol=1e-13)


# Precision.


def test_the_gradient_is_summed_in_float32_and_rounded_once():
    # A sum of 4096 ones in bfloat16 would stop at 256.
    table, dy = ones(2, 1, dtype=jnp.bfloat16), ones(4096, 1, dtype=jnp.bfloat16)
    y, dtable = run(table, np.zeros(4096, np.int32), dy)
    assert (y.dtype, dtable.dtype) == ("bfloat16", "bfloat16")
    np.testing.assert_array_equal(np.float32(dtable), [[4096], [0]])


numbers = st.floats(-(2.0**100), 2.0**100, width=32)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_ids_and_numbers_give_what_the_oracle_gives(data):
    # Few shapes, each of which compiles once.
    shape = data.draw(st.sampled_from([(0,), (1,), (2, 4)]))
    count = math.prod(shape)
    dtype = data.draw(st.sampled_from(["float32", "bfloat16"]))
    draw = lambda strategy, n: data.draw(st.lists(strategy, min_size=n, max_size=n))  # noqa: E731
    table = np.reshape(draw(numbers, VOCAB * SIZE), (VOCAB, SIZE)).astype(dtype)
    ids = np.reshape(np.asarray(draw(st.integers(-2, VOCAB + 1), count), np.int32), shape)
    dy = np.reshape(draw(numbers, count * SIZE), (*shape, SIZE)).astype(dtype)
    y, dtable = run(table, ids, dy)
    want_y, want_dtable = oracle(table, ids, dy)
    np.testing.assert_array_equal(np.float64(y), want_y)
    # Up to eight terms, seven sums in float32, and one rounding to the dtype of the table.
    terms = oracle(table, ids, np.abs(np.float64(dy)))[1]
    rounding = 2.0**-8 if dtype == "bfloat16" else 2.0**-24
    bound = 7 * 2.0**-24 * terms + 1.01 * rounding * np.abs(want_dtable)
    # Numbers below the smallest normal one may be flushed to zero.
    assert np.all(np.abs(np.float64(dtable) - want_dtable) <= bound + 8 * 2.0**-126)


# What the backward pass holds.


def test_backward_holds_only_the_ids():
    for dtype in ("int32", "uint8"):
        table, ids = normal(0, VOCAB, SIZE), random_ids(4, 5, dtype=dtype)
        program = jax.make_jaxpr(lambda *args: jax.vjp(embedding, *args)[1])(table, ids).jaxpr
        assert program.outvars == [program.invars[1]]
        assert nbytes(pullback(lambda t, ids=ids: embedding(t, ids), table)) == ids.nbytes


def test_explain_names_the_ids():
    def fun(table, ids):
        return jnp.sum(embedding(table, ids + 1, name="mine"))

    (entry,) = explain(fun, normal(0, VOCAB, SIZE), random_ids(4, 5)).residuals
    assert (entry.operator, entry.name, entry.codec) == ("embedding", "mine", "Exact()")
    assert (entry.dtype, entry.stored_bytes) == ("int32", 80)


# Transformations.

TRANSFORMS = {
    "checkpoint": lambda f: jax.vmap(jax.checkpoint(f), in_axes=(None, 0)),
    "scan": lambda f: lambda t, ids: jax.lax.scan(lambda _, i: (None, f(t, i)), None, ids)[1],
    "vmap": lambda f: jax.vmap(f, in_axes=(None, 0)),
}


def test_rows_and_gradient_are_the_same_under_transformations():
    table, ids, dy = normal(0, VOCAB, SIZE), random_ids(3, 4) - 1, normal(1, 3, 4, SIZE)

    @jax.jit
    def run(table):
        found = []
        for transform in TRANSFORMS.values():
            fun = transform(functools.partial(embedding, fill_value=0.0))
            y, pull = jax.vjp(lambda table, fun=fun: fun(table, ids), table)
            found.append((y, *pull(dy)))
        return found

    want = oracle(table, ids, dy, 0.0)
    for got in run(table):
        assert_close(got, want, 1e-6, 1e-6)  # Float32, sums of at most 12 terms of size 1.


def test_each_example_may_have_its_own_table():
    tables, ids, dy = normal(0, 3, VOCAB, SIZE), random_ids(3, 4), normal(1, 3, 4, SIZE)
    y, dtables = jax.jit(jax.vmap(run))(tables, ids, dy)
    for i in range(3):
        assert_close((y[i], dtables[i]), oracle(tables[i], ids[i], dy[i]), 1e-6, 1e-6)


def test_a_second_call_does_not_trace_again():
    traces = []

    @jax.jit
    def fun(table, ids):
        traces.append(None)
        return jax.grad(lambda table: jnp.sum(embedding(table, ids)))(table)

    for seed in range(2):
        fun(normal(seed, VOCAB, SIZE), random_ids(5))
    assert len(traces) == 1
