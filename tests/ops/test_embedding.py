"""Tests of actjax/ops/embedding.py: exact rows, and a gradient that is a segment sum."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxprs import nbytes
from ops.helpers import assert_close, assert_equal, composed, normal, of_all_sizes, ones, pullback

from actjax import embedding, explain

VOCAB, SIZE = 7, 3


@functools.partial(jax.jit, static_argnames="fill_value")
def run(table, ids, dy, fill_value=math.nan):
    y, pull = jax.vjp(lambda table: embedding(table, ids, fill_value=fill_value), table)
    return y, *pull(dy)


@jax.jit
def run_each(inputs):
    """Returns rows and gradient for each list of arguments."""
    return [run(*arguments) for arguments in inputs]


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
    table, shapes = normal(0, VOCAB, SIZE), ((), (0,), (20,), (2, 3, 5))
    inputs = [(table, random_ids(*shape), normal(1, *shape, SIZE)) for shape in shapes]
    for got, arguments in zip(run_each(inputs), inputs, strict=True):
        want_y, want_dtable = oracle(*arguments)
        np.testing.assert_array_equal(got[0], want_y)
        # Float64, sums of at most 30 terms of size 1.
        np.testing.assert_allclose(got[1], want_dtable, rtol=1e-13, atol=1e-14)


def test_an_id_outside_the_table_gives_the_fill_value_or_nan_and_no_gradient():
    outside = [-(2**31), -VOCAB - 1, -VOCAB, -1, VOCAB, VOCAB + 1, 2**16, 2**31 - 1]
    table, ids = normal(0, VOCAB, SIZE), np.asarray([*outside, 0, VOCAB - 1], np.int32)
    dy, values = normal(1, len(ids), SIZE), (math.nan, 0.0, -2.5)

    @jax.jit
    def run_all(table):
        return [run(table, ids, dy, value) for value in values], embedding(table, ids)

    results, default = run_all(table)
    for got, value in zip(results, values, strict=True):
        assert_equal(got, jax.tree.map(np.float32, oracle(table, ids, dy, value)))
    np.testing.assert_array_equal(default, results[0][0])


def test_ids_may_have_any_integer_dtype(x64):
    # 300 rows: more than 8 bits can count. The largest ids end in the bits of row 1, or of none.
    table, inputs = normal(0, 300, 2), []
    for dtype in ("int8", "uint8", "int16", "uint16", "uint32", "int64", "uint64"):
        limits = np.iinfo(dtype)
        ids = [0, 1, 100, 100, 299, 300, 2**32 + 1, limits.max, limits.max - 2**32, limits.min, -1]
        ids = np.asarray([i for i in ids if limits.min <= i <= limits.max], dtype)
        inputs.append((table, ids, normal(1, len(ids), 2)))
    for arguments, got in zip(inputs, run_each(inputs), strict=True):
        y, dtable = oracle(*arguments)
        np.testing.assert_array_equal(got[0], y)
        np.testing.assert_allclose(got[1], dtable, rtol=1e-13)


def test_the_gradient_is_summed_in_float32_and_rounded_once():
    # A sum of 4096 ones in bfloat16 would stop at 256.
    table, dy = ones(2, 1, dtype=jnp.bfloat16), ones(4096, 1, dtype=jnp.bfloat16)
    y, dtable = run(table, np.zeros(4096, np.int32), dy)
    assert (y.dtype, dtable.dtype) == ("bfloat16", "bfloat16")
    np.testing.assert_array_equal(np.float32(dtable), [[4096], [0]])


def test_numbers_of_any_size_give_what_the_oracle_gives():
    count = 8 * VOCAB
    ids = np.random.default_rng(0).integers(-2, VOCAB + 2, count, np.int32)
    table, dy = of_all_sizes(0, VOCAB, SIZE, largest=100), of_all_sizes(1, count, SIZE, largest=100)
    dtypes = ("float32", "bfloat16")
    inputs = [(table.astype(dtype), ids, dy.astype(dtype)) for dtype in dtypes]
    for (y, dtable), arguments, rounding in zip(
        run_each(inputs), inputs, (2.0**-24, 2.0**-8), strict=True
    ):
        want_y, want_dtable = oracle(*arguments)
        np.testing.assert_array_equal(np.float64(y), want_y)
        # One rounding to the dtype of the table, and of sums in float32 one for each term.
        terms = oracle(table, ids, np.abs(np.float64(arguments[2])))[1]
        bound = count * 2.0**-24 * terms + 1.01 * rounding * np.abs(want_dtable)
        # Numbers below the smallest normal one may be flushed to zero.
        assert np.all(np.abs(np.float64(dtable) - want_dtable) <= bound + count * 2.0**-126)


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


def test_rows_and_gradient_are_the_same_under_scan_vmap_and_checkpoint():
    table, ids, dy = normal(0, VOCAB, SIZE), random_ids(3, 2, 4) - 1, normal(1, 3, 2, 4, SIZE)

    @jax.jit
    def run(table):
        call = functools.partial(embedding, fill_value=0.0)
        y, pull = jax.vjp(lambda table: composed(functools.partial(call, table))(ids), table)
        return y, *pull(dy)

    # Float32, sums of at most 24 terms of size 1.
    assert_close(run(table), oracle(table, ids, dy, 0.0), 1e-6, 1e-6)


def test_each_example_may_have_its_own_table():
    tables, ids, dy = normal(0, 3, VOCAB, SIZE), random_ids(3, 4), normal(1, 3, 4, SIZE)
    y, dtables = jax.jit(jax.vmap(run))(tables, ids, dy)
    for i in range(3):
        assert_close((y[i], dtables[i]), oracle(tables[i], ids[i], dy[i]), 1e-6, 1e-6)
