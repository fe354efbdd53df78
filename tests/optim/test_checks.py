"""Arguments that are refused before anything is traced."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from actjax import optim
from actjax.optim.checks import check_callable, check_transform


def test_transforms_and_functions_are_accepted():
    check_transform("tx", optax.adam(1e-3))
    check_callable("layers", len)


@pytest.mark.parametrize(
    ("tx", "hint"),
    [(optax.adam, "Call it: it returns a transform."), (None, "got None"), (0.1, "0.1")],
)
def test_other_objects_are_named_with_a_remedy(tx, hint):
    with pytest.raises(TypeError, match=f"`tx` must be an optax transform, .*{hint}"):
        check_transform("tx", tx)


def test_an_object_that_cannot_be_called_is_named():
    with pytest.raises(TypeError, match="`layers` must be a function, got 'layers'"):
        check_callable("layers", "layers")


@pytest.mark.parametrize(
    "tx",
    [
        optim.scale_by_factored_adam(),
        optim.scale_by_adam_8bit(),
        optim.scale_by_adam_4bit(),
        optim.subspace(optax.scale_by_adam(), 2),
    ],
    ids=["factored", "8bit", "4bit", "subspace"],
)
def test_parameters_that_cannot_be_trained_are_named(tx):
    w = jnp.ones((4, 4))
    with pytest.raises(TypeError, match=r"takes arrays, but the parameter `b` is 1.0: convert it"):
        tx.init({"w": w, "b": 1.0})
    with pytest.raises(TypeError, match="numbers, but the parameter `n` is of int32: leave it out"):
        tx.init({"w": w, "n": np.zeros((4, 4), "int32")})
