"""Helpers of the tests of rounded weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

ADAMW = optax.adamw(1e-3, weight_decay=0.1)


def parameters(seed: int = 0, scale: float = 1.0):
    """Returns three layers and two other weights; one is float32."""
    rng = np.random.default_rng(seed)
    shapes = {"layers": {"w": (3, 16, 24)}, "head": (24, 8), "norm": (8,)}
    params = jax.tree.map(
        lambda shape: (scale * rng.normal(size=shape)).astype("bfloat16"),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    return params | {"norm": params["norm"].astype("float32")}


GRADIENTS = [parameters(seed, scale=0.1) for seed in (1, 2, 3)]


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def widened(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def loop(tx, params, gradients=GRADIENTS):
    """Returns parameters and state after an optax loop over the gradients."""

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def run(params, gradients):
        return jax.lax.scan(step, (params, tx.init(params)), gradients)[0]

    return run(params, jax.tree.map(lambda *x: np.stack(x), *gradients))
