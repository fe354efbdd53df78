"""Optimizers that round bfloat16 weights: their states, subspaces inside them, and arguments."""

import functools

import jax
import numpy as np
import optax
from optim.rounded import (
    ADAMW,
    GRADIENTS,
    assert_same_bits,
    parameters,
)

from actjax import optim

# Subspaces.

SUBSPACE = optim.subspace(
    optax.scale_by_adam(), 4, outer=optax.scale_by_learning_rate(0.1), gap=2,
    groups={"layers.w": "layers.w"},
)  # fmt: skip


def test_a_subspace_inside_is_refreshed_and_gives_its_bases():
    tx = optim.stochastic_rounding(SUBSPACE)
    assert isinstance(tx, optim.SubspaceTransformation)
    assert (tx.gap, tx.source) == (2, "gradient")
    params = parameters()

    @jax.jit
    def trained(params, gradients):
        results = []
        for inner in (tx, SUBSPACE):
            new, state = params, optim.init(inner, params)
            for i, grads in enumerate(gradients):
                new, state = optim.apply(inner, grads, state, new, refresh=i == 0)
            results.append((new, state))
        return results

    (ours, state), (theirs, want) = trained(params, GRADIENTS[:2])
    # Bases depend on gradients alone; the plain subspace rounds to nearest.
    assert_same_bits(tx.bases(state).arrays, SUBSPACE.bases(want).arrays)
    got, nearest = (np.asarray(p["layers"]["w"], np.float64) for p in (ours, theirs))
    np.testing.assert_allclose(got, nearest, atol=1e-3, rtol=3 * 2**-7)
    # As a plain transform, it refreshes itself.

    @jax.jit
    def refreshed(params, grads):
        state = tx.init(params)
        return tx.refresh(grads, state, params), tx.update(grads, state, params)[1]

    by_hand, itself = refreshed(parameters(), GRADIENTS[0])
    assert_same_bits(tx.bases(itself).arrays, tx.bases(by_hand).arrays)


def test_a_random_subspace_inside_is_redrawn():
    tx = optim.stochastic_rounding(optim.subspace(optax.scale_by_adam(), 4, source="random"))
    params = {"layers": parameters()["layers"]}

    @jax.jit
    def drawn(params):
        state = optim.init(tx, params)
        return [tx.bases(s).arrays for s in (state, optim.redraw(tx, state, params))]

    old, new = (np.asarray(x, np.float32) for arrays in drawn(params) for x in arrays.values())
    assert np.all(np.any(old != new, axis=(1, 2)))


# States.


def test_the_state_has_twelve_bytes_for_each_layer():
    def nbytes(state) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))

    params, tx = parameters(), optim.stochastic_rounding(optax.sgd(1.0))
    assert nbytes(jax.eval_shape(tx.init, params)) == 12
    assert nbytes(jax.eval_shape(functools.partial(optim.init, tx), params)) == 4 * 12


def test_no_float32_copy_of_all_layers_exists():
    tx = optim.stochastic_rounding(ADAMW)
    sizes = []
    for count in (8, 24):
        params = {"layers": jax.ShapeDtypeStruct((count, 256, 256), "bfloat16")}
        state = jax.eval_shape(functools.partial(optim.init, tx), params)
        step = jax.jit(lambda p, s, g: optim.apply(tx, g, s, p), donate_argnums=(0, 1))
        stats = step.lower(params, state, params).compile().memory_analysis()
        sizes.append(stats.temp_size_in_bytes)
        donated = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state, params)))
        assert stats.alias_size_in_bytes >= donated
    one_layer = 256 * 256 * 4
    assert abs(sizes[1] - sizes[0]) < one_layer / 10
    # For one layer: gradient, weight and moments, the new ones, and the sum.
    assert sizes[0] < 9 * one_layer


# Arguments.
