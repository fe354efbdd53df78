"""Tests of what linear operators hold for the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxprs import nbytes
from ops.helpers import KEY, normal, pullback

from actjax import (
    Exact,
    RandomizedSVD,
    RandomProjection,
    linear,
)


def test_several_weights_share_one_stored_copy():
    x, ws = normal(0, 2, 16, 8), [normal(i, 8, 5) for i in range(3)]
    for codec in (Exact(), RandomProjection(3)):
        run = lambda x, *ws, codec=codec: linear(jnp.negative(x), ws, codec=codec, key=KEY)  # noqa: E731
        held = nbytes(pullback(run, x, *ws))
        assert held == codec.stored_bytes(x.shape, x.dtype) + nbytes(ws), codec


def test_a_wider_weight_is_cast_on_the_fly():
    x, w, b = normal(0, 16, 8, dtype=jnp.bfloat16), normal(1, 8, 5), normal(2, 5)
    codecs = Exact(), RandomProjection(3), RandomizedSVD(3)

    def call(codec):
        return lambda x, w, b: linear(x, w, bias=b, codec=codec, key=KEY)

    @jax.jit
    def run(x, w, b):
        found = []
        for codec in codecs:
            y, pull = jax.vjp(call(codec), x, w, b)
            found.append((y, *pull(y)))
        return found

    for codec, (y, dx, dw, db) in zip(codecs, run(x, w, b), strict=True):
        dtypes = y.dtype, dx.dtype, dw.dtype, db.dtype
        assert dtypes == ("bfloat16", "bfloat16", "float32", "float32")
        # No copy of w or b in bfloat16.
        held = nbytes(pullback(call(codec), x, w, b))
        assert held == codec.stored_bytes(x.shape, x.dtype) + w.nbytes + b.nbytes
        # The gradients of a float32 weight keep their float32 sums.
        wide = np.asarray(y, np.float64)
        np.testing.assert_allclose(db, wide.sum(0), rtol=1e-6, atol=1e-6)
        if codec == Exact():
            np.testing.assert_allclose(dw, np.float64(x).T @ wide, rtol=1e-5, atol=1e-5)
