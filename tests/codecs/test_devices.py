"""Bytes that devices exchange for the gradient of a weight whose input is stored as a code.

They are those that the docstrings of the codecs state, read from the compiled program.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import actjax
from actjax import (
    Exact,
    Offloaded,
    PointApproximation,
    Quantized,
    RandomizedSVD,
    RandomProjection,
)
from train.planning.collectives import bytes_by_kind

B, S, D, N, K = 8, 64, 128, 96, 8
FLOAT = 4
SCALARS = 64 * FLOAT
"""The loss, counts, and norms that guard a factorization."""
DENSE, FACTORED = D * N, K * N


@functools.cache
def exchanged(codec, divided):
    """Returns the bytes by kind of a step on four devices, which divide `x` along one axis."""
    mesh = jax.make_mesh((4,), ("fsdp",), (AxisType.Auto,))
    axis = {"sequences": PartitionSpec("fsdp"), "tokens": PartitionSpec(None, "fsdp")}[divided]
    x = jax.ShapeDtypeStruct((B, S, D), "float32", sharding=NamedSharding(mesh, axis))
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    w = jax.ShapeDtypeStruct((D, N), "float32", sharding=rows)

    def loss(x, w):
        return jnp.sum(actjax.linear(x, w, codec=codec, key=jax.random.key(0)) ** 2)

    with jax.set_mesh(mesh):
        step = jax.jit(actjax.value_and_grad(loss, argnums=1)).lower(x, w).compile()
    return bytes_by_kind(step.as_text())


SVD = K * D + FACTORED + 2 * K * K
CASES = (
    (Quantized(4), DENSE, 0),
    (Quantized(4, balance=True), DENSE, 2 * B * D),
    (Quantized(4, scaling="channel", outlier_fraction=0.05), DENSE + 2 * D, 0),
    (Offloaded(Quantized(4, rounding="dither")), DENSE, 0),
    (RandomizedSVD(K), SVD, 0),
    (RandomizedSVD(K, 1), SVD + K * D + 2 * K * K, 0),
    (RandomProjection(K), FACTORED, 0),
    (PointApproximation(points=K), K * D + FACTORED, 0),
)


@pytest.mark.parametrize("divided", ["sequences", "tokens"])
@pytest.mark.parametrize(("codec", "summed", "of_tokens"), CASES, ids=lambda x: repr(x)[:40])
def test_a_codec_exchanges_what_its_docstring_says(codec, summed, of_tokens, divided):
    exact, coded = exchanged(Exact(), divided), exchanged(codec, divided)
    # The weight is gathered, and never an activation.
    assert coded["all-gather"] == exact["all-gather"] == DENSE * FLOAT
    assert coded["all-to-all"] == coded["collective-permute"] == 0
    numbers = summed + (of_tokens if divided == "tokens" else 0)
    assert coded["all-reduce"] + coded["reduce-scatter"] <= numbers * FLOAT + SCALARS
    assert coded["all-reduce"] + coded["reduce-scatter"] >= numbers * FLOAT - 2 * K * K * FLOAT
