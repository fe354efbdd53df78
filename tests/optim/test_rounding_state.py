"""Optimizers that round bfloat16 weights: their states, subspaces inside them, and arguments."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim.rounded import (
    ADAMW,
    GRADIENTS,
    applied,
    apply_step,
    assert_same_bits,
    parameters,
)

from actjax import optim
from train.run.checkpoint import Checkpoints
from train.run.sharding import make_mesh, state_shardings

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


def test_a_run_continues_from_a_checkpoint_with_equal_bits(tmp_path):
    tx, params = optim.stochastic_rounding(ADAMW), parameters()
    step = apply_step(tx)
    half = applied(tx, params, GRADIENTS[:2], step)
    mesh = make_mesh("fsdp=4")
    saved = jax.device_put(half, state_shardings(half, mesh))
    first = Checkpoints(tmp_path, keep=1)
    first.save(2, saved, {}, {})
    first.close()
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), saved
    )
    again = Checkpoints(tmp_path, keep=1)
    restored, _ = again.restore(2, like, {})
    again.close()
    restored = jax.device_get(restored)
    assert_same_bits(restored, jax.device_get(half))
    assert_same_bits(step(GRADIENTS[2], *restored[::-1]), step(GRADIENTS[2], *half[::-1]))


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


def test_weights_of_other_dtypes_are_refused():
    tx, wide = optim.stochastic_rounding(ADAMW), {"layers": np.ones((2, 4, 4), "float32")}
    for init in (tx.init, functools.partial(optim.init, tx)):
        message = "stochastic_rounding has no effect, because no weight is bfloat16 .*float32"
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(init, wide)
        with pytest.raises(ValueError, match="some weights are float16"):
            jax.eval_shape(init, wide | {"head": np.ones(3, "float16")})
        # The weights outside the layers may be in float32.
        jax.eval_shape(init, {"layers": jnp.ones((2, 4), jnp.bfloat16), "norm": np.ones(3)})


def test_it_must_be_the_outermost():
    tx, params, grads = optim.stochastic_rounding(ADAMW), parameters(), GRADIENTS[0]
    outermost = "rounds weights, which only the"
    for make, message in (
        (lambda: optim.eight_bit(tx), f"` of eight_bit {outermost}"),
        (lambda: optim.subspace(tx, 2), f"` of subspace {outermost}"),
        (lambda: optim.subspace(optax.scale(1.0), 2, outer=tx), f"` of subspace {outermost}"),
        (lambda: optim.stochastic_rounding(tx), "rounds weights already: drop one of both"),
        (
            lambda: optim.init(optax.chain(optax.clip(1.0), tx), params),
            "`tx` has stochastic_rounding inside another transform",
        ),
        (
            lambda: tx.update(grads, tx.init(params)),
            "stochastic_rounding reads the weights that it rounds: call",
        ),
        (
            lambda: tx.update(grads, optim.init(tx, params), params),
            r"what `tx\.init` returned, got LayerwiseState",
        ),
        (
            lambda: tx.init({"layers": optax.MaskedNode()}),
            "stochastic_rounding got no weights. Inside `optax.masked`",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(make)


def test_bad_arguments_are_named():
    for inner in (None, optax.adam, 1e-3):
        with pytest.raises(TypeError, match="`inner` must be an optax transform"):
            optim.stochastic_rounding(inner)
    for seed in (-1, 0.5, True):
        message = f"`seed` of stochastic_rounding must be an integer >= 0, got {seed!r}."
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            optim.stochastic_rounding(ADAMW, seed=seed)
