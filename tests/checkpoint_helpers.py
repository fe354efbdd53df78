"""What the tests of `actjax.checkpoint` share."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cheap_codecs import Coarse, CoarseRandom

KEY = jax.random.key(3)


NEAREST = Coarse()


DRAWN = CoarseRandom()


def normal(seed: int, *shape: int, dtype=None) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def layer(x, w):
    """Two products, whose residuals are stored or recomputed."""
    return x + jnp.tanh(jnp.sin(x @ w) @ w.T)


def total(*ys: jax.Array) -> jax.Array:
    """Returns a scalar whose cotangents are not constant."""
    return sum((jnp.sum(jnp.sin(y)) for y in ys), jnp.zeros(()))


def hat(codec, x: jax.Array, number: int = 0, key=KEY) -> jax.Array:
    """Returns what the backward pass must read for the encoded array of this number."""
    return codec.decode(codec.encode(x, jax.random.fold_in(key, number)))


def nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def assert_close(got: Any, want: Any) -> None:
    # Float64 sums of at most 60 terms of size 1 to 10, perhaps in another order.
    same = functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-12)
    jax.tree.map(same, got, want)
