"""8-bit states in `nnx.Optimizer`, in an optax loop on nnx states, and in Flax's serialisation."""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from actjax import LowRank, optim

TRANSFORMS = {
    "eight_bit": optim.eight_bit(optax.adamw(1e-3), min_size=64),
    "scale_by_adam_8bit": optax.chain(optim.scale_by_adam_8bit(min_size=64), optax.scale(-1e-3)),
    "masked": optax.masked(
        optim.eight_bit(optax.adamw(1e-3), min_size=64),
        lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree),
    ),
    "four_bit": optim.four_bit(optax.adamw(1e-3), min_size=64),
    "factored": optax.chain(optim.scale_by_factored_adam(), optax.scale(-1e-3)),
    "subspace": optax.chain(
        optim.subspace(optax.scale_by_adam(), 2, gap=1, remainder=optim.ScaledRemainder()),
        optax.scale(-1e-3),
    ),
    "rounded": optim.stochastic_rounding(optim.eight_bit(optax.adamw(1e-3), min_size=64)),
}
STEPS = 2


def model_of(tx):
    dtype = jnp.bfloat16 if tx is TRANSFORMS["rounded"] else jnp.float32
    return nnx.Linear(8, 16, param_dtype=dtype, rngs=nnx.Rngs(0))


def gradient_like(tree):
    return jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), tree)


def with_optimizer(tx):
    """Returns the weights after some steps of `nnx.Optimizer`."""
    model = model_of(tx)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    structure = jax.tree.structure(nnx.state(optimizer))
    for _ in range(STEPS):
        optimizer.update(model, gradient_like(nnx.state(model, nnx.Param)))
    # A checkpoint of a new optimizer and of one after some steps have the same arrays.
    assert jax.tree.structure(nnx.state(optimizer)) == structure
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def with_optax(tx, params):
    """Returns the weights after some steps of an optax loop."""
    state = tx.init(params)
    for _ in range(STEPS):
        updates, state = tx.update(gradient_like(params), state, params)
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("name", TRANSFORMS)
def test_an_nnx_optimizer_and_nnx_states_take_the_steps_of_an_optax_loop_on_a_dict(name):
    tx = TRANSFORMS[name]

    @jax.jit
    def steps():
        params = nnx.state(model_of(tx), nnx.Param)
        with_states = nnx.to_pure_dict(with_optax(tx, params))
        return with_optax(tx, nnx.to_pure_dict(params)), with_states, with_optimizer(tx)

    want, *others = steps()
    for got in others:
        jax.tree.map(np.testing.assert_array_equal, got, want)


class Stack(nnx.Module):
    """Three layers in one array, and a head."""

    def __init__(self, rngs: nnx.Rngs):
        make = nnx.vmap(lambda rngs: nnx.Linear(8, 16, rngs=rngs))
        self.layers = make(rngs.split(3))
        self.head = nnx.Linear(16, 4, use_bias=False, rngs=rngs)


@pytest.mark.parametrize("name", ["eight_bit", "factored", "subspace"])
def test_apply_on_nnx_states_with_factored_gradients_takes_the_step_of_a_dict(name):
    tx = TRANSFORMS[name]
    tx = optim.subspace(optax.adamw(1e-3), 2, remainder=None) if name == "subspace" else tx

    def stepped(params):
        def factored(path, x):
            if "bias" in jax.tree_util.keystr(path):
                return gradient_like(x)
            left, right = jnp.ones((*x.shape[:-1], 3)), jnp.ones((*x.shape[:-2], 3, x.shape[-1]))
            return LowRank(*map(gradient_like, (left, right)))

        grads = jax.tree_util.tree_map_with_path(factored, params)
        state = optim.init(tx, params)
        return optim.apply(tx, grads, state, params, refresh=name == "subspace")[0]

    @jax.jit
    def both():
        params = nnx.state(Stack(nnx.Rngs(0)), nnx.Param)
        return nnx.to_pure_dict(stepped(params)), stepped(nnx.to_pure_dict(params))

    jax.tree.map(np.testing.assert_array_equal, *both())


def test_flax_serialises_an_8_bit_state():
    tx = TRANSFORMS["eight_bit"]
    params = {"w": jnp.ones((8, 16))}
    first = jax.jit(tx.init)(params)
    _, state = jax.jit(tx.update)(gradient_like(params), first, params)
    data = flax.serialization.to_bytes(state)
    restored = flax.serialization.from_bytes(first, data)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
