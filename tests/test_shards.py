"""Functions that each device computes on its part of the arrays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from actjax._shards import Dims, InPieces, Sum, gathered, on_shards
from train.planning.collectives import bytes_by_kind

ROWS, SUMMED = Dims(("rows", None)), Dims((None, None), summed=True)
X = np.arange(96.0, dtype=np.float32).reshape(8, 12) / 7


@functools.cache
def mesh(**sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))


def compiled(function, *args, over=None, spec=PartitionSpec("a"), out=None):
    """Returns the results on several devices, and the bytes that they exchanged."""
    over = over or mesh(a=4)
    shard = NamedSharding(over, spec)
    placed = [jax.device_put(x, shard if np.ndim(x) else NamedSharding(over, PartitionSpec()))
              for x in args]  # fmt: skip
    out = None if out is None else NamedSharding(over, out)
    with jax.set_mesh(over):
        program = jax.jit(function, out_shardings=out).lower(*placed).compile()
    return program(*placed), bytes_by_kind(program.as_text())


def of_rows(x):
    """Needs whole rows, and looks at a part as if it were all: the mean row is subtracted."""
    return x - jnp.mean(x, axis=1, keepdims=True), jnp.sum(x, axis=0)


def both(x):
    return on_shards(of_rows, (x,), (ROWS,), (ROWS, Dims((None,), summed=True)))


def assert_right(results):
    rows, total = results
    np.testing.assert_allclose(rows, of_rows(X)[0], rtol=1e-6)
    np.testing.assert_allclose(total, X.sum(0), rtol=1e-6)


def test_parts_are_computed_apart_and_sums_are_added_up():
    results, exchanged = compiled(both, X)
    assert_right(results)
    assert exchanged["all-gather"] == 0
    assert exchanged["all-reduce"] == results[1].nbytes


def test_an_axis_that_must_be_whole_is_gathered():
    results, exchanged = compiled(both, X, spec=PartitionSpec(None, "a"))
    assert_right(results)
    assert exchanged["all-gather"] >= X.nbytes


@pytest.mark.parametrize("spec", [PartitionSpec(("a", "b")), PartitionSpec("b"),
                                  PartitionSpec(("b", "a")), PartitionSpec("a", "b")])  # fmt: skip
def test_an_axis_may_be_split_over_any_axes_of_the_mesh(spec):
    assert_right(compiled(both, X, over=mesh(a=2, b=2), spec=spec)[0])


def scales_of(x):
    """One scale for three features: the axes of both are split alike."""
    return jnp.max(x.reshape(8, -1, 3), axis=-1)


def grouped(x):
    return on_shards(scales_of, (x,), (Dims((None, "f")),), Dims((None, "f")))


def test_axes_of_one_name_may_differ_in_size():
    scales, exchanged = compiled(grouped, X, spec=PartitionSpec(None, "a"))
    np.testing.assert_array_equal(scales, X.reshape(8, -1, 3).max(-1))
    assert scales.sharding.spec == PartitionSpec(None, "a")
    assert not any(exchanged.values())


def test_an_axis_that_does_not_split_evenly_is_computed_whole():
    # Two groups of six features, and four devices.
    halves = lambda x: on_shards(  # noqa: E731
        lambda x: jnp.max(x.reshape(8, -1, 6), axis=-1), (x,), (Dims((None, "f")),),
        Dims((None, "f")),
    )  # fmt: skip
    got, _ = compiled(halves, X, spec=PartitionSpec(None, "a"))
    np.testing.assert_array_equal(got, X.reshape(8, 2, 6).max(-1))


def products(x, y, pieces):
    """Returns half of `xᵀ y`, a sum over the rows of all devices."""
    finish = lambda z: z / 2  # noqa: E731
    if not pieces:
        return Sum(x.T @ y, finish)
    return InPieces(lambda rows: jnp.take(x, rows, axis=1).T @ y, x.shape[1], finish, pieces)


@pytest.mark.parametrize(
    ("pieces", "out"),
    [(0, PartitionSpec()), (1, PartitionSpec("a")), (2, PartitionSpec(None, "a")),
     (3, PartitionSpec()), (5, PartitionSpec("a"))],
)  # fmt: skip
def test_a_sum_in_pieces_is_the_whole_sum(pieces, out):
    function = functools.partial(products, pieces=pieces)
    split = lambda x, y: on_shards(function, (x, y), (ROWS, ROWS), SUMMED)  # noqa: E731
    got, exchanged = compiled(split, X, X[:, :8], out=out)
    np.testing.assert_allclose(got, X.T @ X[:, :8] / 2, rtol=1e-5)
    # Each device gives its sum once, whatever the pieces.
    assert exchanged["all-gather"] == 0
    assert sum(exchanged.values()) <= got.nbytes


def test_constants_and_vmap_pass():
    table = jax.device_put(np.array([1, 2, 3], np.float32))
    scaled = lambda x: on_shards(lambda x: x * table[1], (x,), (ROWS,), ROWS)  # noqa: E731
    both = np.stack([X, X + 1])
    with jax.set_mesh(mesh(a=4)):
        alone, stacked = jax.jit(lambda x: (scaled(x[0]), jax.vmap(scaled)(x)))(both)
    np.testing.assert_array_equal(alone, 2 * X)
    np.testing.assert_array_equal(stacked, 2 * both)


def test_without_a_mesh_nothing_is_split():
    assert "custom_partitioning" not in str(jax.make_jaxpr(both)(X))
    assert gathered(X, axes=(0,)) is X
    function = functools.partial(products, pieces=3)
    got = jax.jit(lambda x: on_shards(function, (x, x), (ROWS, ROWS), SUMMED))(X)
    np.testing.assert_allclose(got, X.T @ X / 2, rtol=1e-5)


def test_a_program_whose_arguments_are_on_one_device_is_divided_by_its_constraints():
    def divided(x):
        return both(jax.lax.with_sharding_constraint(x, PartitionSpec("b")))

    with jax.set_mesh(mesh(a=2, b=2)):
        results = jax.jit(divided)(X)
    assert_right(results)
    assert results[0].sharding.spec[0] == "b"
