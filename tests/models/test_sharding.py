"""How a model divides its work over devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from tiny import batch, decoder

from models.sharding import head_repeats


@pytest.mark.parametrize(
    ("heads", "devices", "want"), [(4, 1, 1), (4, 2, 1), (4, 8, 2), (2, 8, 4), (6, 4, 2), (3, 2, 2)]
)
def test_keys_are_repeated_until_each_device_has_a_head(heads, devices, want):
    assert head_repeats(heads, devices) == want
    assert heads * want % devices == 0


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "sizes", [slow({"fsdp": 4}), {"fsdp": 2, "seq": 2}, slow({"tensor": 2, "seq": 2})]
)
def test_several_tpus_compute_the_loss_of_their_own_tokens(sizes, monkeypatch):
    """XLA for TPUs cannot call the functions of a part that GPUs call."""
    model = decoder()
    tokens, targets = batch(length=16, rows=4)
    mask = jnp.arange(16) < jnp.array([[3], [16], [0], [9]])

    def loss(model):
        return model.loss(tokens, targets, mask=mask, compute_dtype="float32", z_loss=1e-3)

    want = jax.jit(jax.value_and_grad(loss))(model)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))
    with jax.set_mesh(mesh):
        got = jax.jit(jax.value_and_grad(loss))(model)
    # Float32 sums of at most 64 tokens in another order.
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
