"""Tests of actjax/kernels/copies: small results of a layer in their stacks."""

import jax
import jax.numpy as jnp
import numpy as np
from optim.calls import calls_on_layers

from actjax.kernels.copies.api import KERNEL
from actjax.optim.stepping import in_place

DEPTH = 3
# One number, a block and a part of another, two axes, and as many bytes as are copied.
SHAPES = {
    "float32": (),
    "int32": (1500,),
    "uint16": (3, 700),
    "bfloat16": (2, 2, 5),
    "float16": (2**19,),
    "uint8": (2**20 + 1,),  # A byte too many.
    "bool": (4,),
    "complex64": (3,),
    "float8_e4m3fn": (3,),
}
XS = jnp.asarray(np.random.default_rng(0).normal(size=(DEPTH, 7)).astype("float32"))


def layer(carry, x):
    """Returns arrays of all shapes, which differ from layer to layer, and one of them twice."""
    made = {
        dtype: (100 * jnp.sin(carry + jnp.arange(np.prod(shape)))).reshape(shape).astype(dtype)
        for dtype, shape in SHAPES.items()
    }
    return carry + jnp.sum(x), (made, made["int32"], 1.0)


def test_results_are_those_of_a_scan():
    got = jax.jit(lambda xs: in_place.scan(layer, 1.0, xs))(XS)
    expected = jax.jit(lambda xs: jax.lax.scan(layer, 1.0, xs))(XS)
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_small_results_are_one_kernel():
    program = jax.make_jaxpr(lambda xs: in_place.scan(layer, 1.0, xs))(XS)
    assert calls_on_layers(program) == {"copies": (5, 5)}


def test_layers_that_stay_and_a_single_result_are_not_copied():
    def update(layer, _):
        small, untouched = layer
        return (small + 1, untouched), jnp.sum(small)

    stacks = jnp.ones((DEPTH, 5)), jnp.ones((DEPTH, 5))
    step = lambda stacks: in_place.update(update, jnp.int32(1), stacks, ())  # noqa: E731
    program = jax.make_jaxpr(step)(stacks)
    (small, untouched), total = jax.jit(step)(stacks)
    assert calls_on_layers(program) == {}
    np.testing.assert_array_equal(small[:, 0], [1, 2, 1])
    np.testing.assert_array_equal(untouched, np.ones((DEPTH, 5)))
    assert total == 5


def test_without_stacks_they_are_the_arrays():
    arrays = [jnp.arange(3), jnp.ones((2, 2))]
    for a, b in zip(KERNEL(arrays), arrays, strict=True):
        np.testing.assert_array_equal(a, b)
