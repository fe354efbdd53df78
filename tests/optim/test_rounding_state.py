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
    WRAPPERS,
    applied,
    apply_step,
    assert_same_bits,
    parameters,
    wrappers,
)

from actjax import optim
from train.run.checkpoint import Checkpoints
from train.run.sharding import make_mesh, state_shardings

# Subspaces.

SUBSPACE = optim.subspace(
    optax.scale_by_adam(), 4, outer=optax.scale_by_learning_rate(0.1), gap=2,
    groups={"layers.w": "layers.w"},
)  # fmt: skip


@wrappers
def test_a_subspace_inside_is_refreshed_and_gives_its_bases(wrap):
    tx = wrap(SUBSPACE)
    assert isinstance(tx, optim.SubspaceTransformation)
    assert (tx.gap, tx.source) == (2, "gradient")
    params = parameters()

    def trained(tx, params):
        step = jax.jit(functools.partial(optim.apply, tx), static_argnames="refresh")
        state = jax.jit(functools.partial(optim.init, tx))(params)
        for i, grads in enumerate(GRADIENTS):
            params, state = step(grads, state, params, refresh=i % 2 == 0)
        return params, state

    ours, state = trained(tx, params)
    theirs, want = trained(SUBSPACE, params)
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


def test_some_layers_of_a_random_subspace_inside_are_redrawn():
    tx = optim.stochastic_rounding(optim.subspace(optax.scale_by_adam(), 4, source="random"))
    params = {"layers": parameters()["layers"]}
    state = jax.jit(functools.partial(optim.init, tx))(params)
    due = np.array([True, False, True])
    drawn = jax.jit(functools.partial(optim.redraw, tx))(state, params, due=due)
    (name,) = tx.bases(state).arrays
    old, new = (np.asarray(tx.bases(s).arrays[name], np.float32) for s in (state, drawn))
    np.testing.assert_array_equal(np.any(old != new, axis=(1, 2)), due)


# States.


def test_the_state_has_one_byte_for_each_weight_or_none():
    def nbytes(state) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))

    params, count = parameters(), 3 * 16 * 24 + 24 * 8
    sizes = {
        name: nbytes(jax.eval_shape(wrap(optax.sgd(1.0)).init, params))
        for name, wrap in WRAPPERS.items()
    }
    assert sizes == {"stochastic": 12, "compensated": 12 + count}
    for name, wrap in WRAPPERS.items():
        state = jax.eval_shape(functools.partial(optim.init, wrap(optax.sgd(1.0))), params)
        assert nbytes(state) == sizes[name] + 3 * 12
    assert state.layers.remainder["layers"]["w"].dtype == jnp.int8
    assert state.rest.remainder["norm"] is None


@wrappers
def test_a_run_continues_from_a_checkpoint_with_equal_bits(tmp_path, wrap):
    tx, params = wrap(ADAMW), parameters()
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


@wrappers
def test_no_float32_copy_of_all_layers_exists(wrap):
    tx = wrap(ADAMW)
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


@wrappers
def test_weights_of_other_dtypes_are_refused(wrap):
    tx, wide = wrap(ADAMW), {"layers": np.ones((2, 4, 4), "float32")}
    for init in (tx.init, functools.partial(optim.init, tx)):
        message = rf"{tx.rounding.name} has no effect, because no weight is bfloat16 .*float32"
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(init, wide)
        with pytest.raises(ValueError, match="some weights are float16"):
            jax.eval_shape(init, wide | {"head": np.ones(3, "float16")})
        # The weights outside the layers may be in float32.
        jax.eval_shape(init, {"layers": jnp.ones((2, 4), jnp.bfloat16), "norm": np.ones(3)})


@wrappers
def test_it_must_be_the_outermost(wrap):
    tx, params = wrap(ADAMW), parameters()
    name = tx.rounding.name
    for wrapper, make in (
        ("eight_bit", optim.eight_bit),
        ("subspace", lambda tx: optim.subspace(tx, 2)),
        ("subspace", lambda tx: optim.subspace(optax.scale_by_adam(), 2, outer=tx)),
    ):
        with pytest.raises(ValueError, match=rf"` of {wrapper} rounds weights, which only the"):
            make(tx)
    for make in (optim.stochastic_rounding, optim.compensated):
        with pytest.raises(ValueError, match="rounds weights already: drop one of both"):
            make(tx)
    with pytest.raises(ValueError, match="`tx` has stochastic_rounding or compensated inside"):
        jax.eval_shape(functools.partial(optim.init, optax.chain(optax.clip(1.0), tx)), params)
    state = jax.eval_shape(tx.init, params)
    with pytest.raises(ValueError, match=rf"{name} reads the weights that it rounds: call"):
        tx.update(GRADIENTS[0], state)
    with pytest.raises(ValueError, match=r"what `tx\.init` returned, got LayerwiseState"):
        tx.update(GRADIENTS[0], jax.eval_shape(functools.partial(optim.init, tx), params), params)
    (other,) = {optim.stochastic_rounding, optim.compensated} - {wrap}
    of_other = jax.eval_shape(other(ADAMW).init, params)
    with pytest.raises(ValueError, match=rf"`state` is of {other.__name__}, but this is {name}"):
        tx.update(GRADIENTS[0], of_other, params)
    with pytest.raises(ValueError, match=rf"{name} got no weights. Inside `optax.masked`"):
        jax.eval_shape(tx.init, {"layers": optax.MaskedNode()})


@wrappers
def test_bad_arguments_are_named(wrap):
    name = wrap(ADAMW).rounding.name
    for inner in (None, optax.adam, 1e-3):
        with pytest.raises(TypeError, match="`inner` must be an optax transform"):
            wrap(inner)
    for seed in (-1, 0.5, True):
        message = f"`seed` of {name} must be an integer >= 0, got {seed!r}."
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            wrap(ADAMW, seed=seed)
