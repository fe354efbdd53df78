"""Tests of actjax/factored/tapped.py: what a tapped weight can do, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import assert_messages

from actjax import RandomProjection, linear
from actjax.factored.tapped import TappedWeight, plain_weights

X, W = np.ones((6, 8), np.float32), jnp.ones((8, 5))


@pytest.fixture
def tapped():
    return TappedWeight(W, jnp.zeros((8, 3)), jnp.zeros((3, 5)), None, "layers.w", 16)


def test_a_tapped_weight_has_the_shape_and_dtype_of_its_weight(tapped):
    assert (tapped.shape, tapped.ndim, tapped.dtype) == ((8, 5), 2, "float32")
    assert repr(tapped) == "TappedWeight(layers.w)"
    assert tapped[...] is tapped
    assert all(w is W for w in plain_weights([tapped, W]))


def test_a_cast_does_not_change_the_taps(tapped):
    cast = tapped.astype(jnp.bfloat16)
    assert (cast.dtype, cast.left.dtype, cast.right.dtype) == ("bfloat16", "float32", "float32")


def test_a_tapped_weight_is_a_pytree(tapped):
    stacked = jax.tree.map(lambda *a: jnp.stack(a), tapped, tapped, tapped)
    assert (stacked.shape, stacked.path, stacked.basis) == ((3, 8, 5), "layers.w", None)
    # Modules of linen use the first leaf as the array.
    assert jax.tree.leaves(tapped)[0] is W


REFUSED = {
    "add": lambda w: w + 1,
    "add from the right": lambda w: 1 + w,
    "subtract": lambda w: w - 1,
    "subtract from the right": lambda w: 1 - w,
    "multiply": lambda w: w * 2,
    "multiply from the right": lambda w: 2 * w,
    "divide": lambda w: w / 2,
    "power": lambda w: w**2,
    "negative": lambda w: -w,
    "product": lambda w: w @ X,
    "product from the right": lambda w: X @ w,
    "transpose": lambda w: w.T,
    "index": lambda w: w[0],
    "iterate": lambda w: list(w),
    "sum": jnp.sum,
    "dot": lambda w: jnp.dot(X, w),
    "asarray": lambda w: jnp.asarray(w, jnp.bfloat16),
    "numpy": np.asarray,
}


def test_other_operations_on_a_tapped_weight_are_refused(tapped):
    message = (
        "the weight `layers.w` has a factored gradient, so only `actjax.linear` and"
        " `actjax.qkv_projection` can read it, and only `.astype` can cast it: use these, give"
        " the operator codec=Exact(), or differentiate with jax.value_and_grad."
    )
    assert_messages(
        TypeError,
        [(functools.partial(operation, tapped), message) for operation in REFUSED.values()],
    )


def test_only_the_taps_have_a_gradient(tapped):
    codec, key = RandomProjection(3), jax.random.key(5)
    fun = lambda w: jnp.sum(linear(X, w, codec=codec, key=key))  # noqa: E731
    gradient = jax.jit(jax.grad(fun))(tapped)
    assert np.all(gradient.weight == 0)
    assert np.any(gradient.left != 0)
    assert np.any(gradient.right != 0)
