"""The transforms, compared with `four_bit` of optax's Adam and of Adam with factored moments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from kernels.kernel_cases import normal
from optim.nearest import nearest

import actjax
from actjax.optim import (
    RankOneFourBit,
    SignedFourBit,
    four_bit,
    scale_by_adam_4bit,
    scale_by_adam_8bit,
    scale_by_factored_adam,
    scale_by_factored_adam_4bit,
)

SETTINGS = {"group": 32, "min_size": 50}
SHAPES = {"w": (6, 40), "layers": [(60,), (2, 4, 34)], "small": (7, 2), "scalar": ()}
"""The matrix `w` and the second of the layers are coded."""


def trees(steps, scale=1.0):
    """Returns parameters, one of them None, and the gradients of each step."""
    is_shape = lambda s: isinstance(s, tuple)  # noqa: E731
    params = jax.tree.map(lambda s: np.zeros(s, "float32"), SHAPES, is_leaf=is_shape)
    flat, treedef = jax.tree.flatten(params)

    def gradient(step):
        drawn = [
            np.asarray(scale * normal(*x.shape, seed=10 * step + i), x.dtype)
            for i, x in enumerate(flat)
        ]
        return {**treedef.unflatten(drawn), "none": None}

    return {**params, "none": None}, [gradient(step) for step in range(steps)]


OURS = scale_by_adam_4bit(**SETTINGS)
PAIRS = {
    "adam": (OURS, four_bit(optax.scale_by_adam(), **SETTINGS)),
    "factored": (
        scale_by_factored_adam_4bit(**SETTINGS),
        four_bit(scale_by_factored_adam(), **SETTINGS),
    ),
}


def test_it_equals_four_bit_adam_exactly():
    # Products of these decays and numbers are exact, and so are the hashes of the new moments.
    ours = scale_by_adam_4bit(0.5, 0.5, **SETTINGS)
    plain = four_bit(optax.scale_by_adam(0.5, 0.5), **SETTINGS)
    params = {"w": np.zeros((6, 40), "float32")}
    gradient = {"w": normal(6, 40, seed=0).astype("bfloat16").astype("float32")}

    def step(tx):
        return jax.jit(lambda p, g: (tx.init(p), tx.update(g, tx.init(p))))(params, gradient)

    with actjax.kernels.use("reference"):
        (first, (updates, state)), (want_first, (want, want_state)) = step(ours), step(plain)
    jax.tree.map(np.testing.assert_array_equal, first, want_first)
    jax.tree.map(np.testing.assert_array_equal, state, want_state)
    # The corrections of the bias are rounded in another order.
    np.testing.assert_allclose(updates["w"], want["w"], rtol=3e-5)


@functools.cache
def trained(kind):
    """Returns the updates and states of four steps on gradients of four sizes, ours and plain."""
    ours, plain = PAIRS[kind]
    scales = 0.0, 1.0, 1e15, 1e-15
    params, _ = trees(0)
    grads = [jax.tree.map(lambda *x: np.stack(x), *trees(4, scale)[1]) for scale in scales]

    @jax.jit
    def run(grads):
        def steps(tx, grads):
            def step(state, g):
                updates, state = tx.update(g, state)
                return state, (updates, state)

            return jax.lax.scan(step, nearest(tx.init(params)), grads)[1]

        return [jax.lax.map(lambda g, tx=tx: steps(tx, g), grads) for tx in (ours, plain)]

    return jax.device_get(run(jax.tree.map(lambda *x: np.stack(x), *grads)))


@pytest.mark.parametrize("kind", PAIRS)
def test_it_is_four_bit_adam_in_a_compiled_step(kind):
    (updates, state), (want, want_state) = trained(kind)
    assert jax.tree.structure(state) == jax.tree.structure(want_state)
    for got, expected in zip(jax.tree.leaves(updates), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
        assert not np.any(got[0])
    for got, expected in zip(jax.tree.leaves(state), jax.tree.leaves(want_state), strict=True):
        if jnp.issubdtype(got.dtype, jnp.integer):
            np.testing.assert_array_equal(got, expected, strict=True)
            continue
        for a, b in zip(got, np.asarray(expected), strict=True):
            # A first moment is a sum in which terms may cancel, each rounded by 6e-8 of itself.
            atol = 2e-7 * np.abs(b).max(initial=0) if np.any(b < 0) else 0
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol)


def test_a_moment_that_is_not_factored_stays_whole():
    which = {"w": False, "v": True}
    params = {name: np.zeros((6, 40), "float32") for name in which}
    grads = {name: normal(6, 40, seed=i) for i, name in enumerate(which)}
    ours = scale_by_factored_adam_4bit(factored=which, **SETTINGS)
    plain = four_bit(scale_by_factored_adam(factored=which), **SETTINGS)

    @jax.jit
    def both(grads):
        return [tx.update(grads, nearest(tx.init(params))) for tx in (ours, plain)]

    (updates, state), (want, want_state) = both(grads)
    assert state.inner.rows["w"].shape == (6, 40)
    assert isinstance(state.inner.mu["w"], SignedFourBit)
    for pair in ((updates, want), (state.inner.rows, want_state.inner.rows)):
        for a, b in zip(*map(jax.tree.leaves, pair), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


def test_only_large_matrices_are_coded():
    state = jax.eval_shape(OURS.init, trees(0)[0])
    for moment, kind in ((state.inner.mu, SignedFourBit), (state.inner.nu, RankOneFourBit)):
        assert isinstance(moment["w"], kind)
        assert isinstance(moment["layers"][1], kind)
        small = [moment["layers"][0], moment["small"], moment["scalar"]]
        assert [leaf.dtype for leaf in small] == ["float32"] * 3


def test_it_maps_over_a_leading_axis():
    params, grads = {"w": np.zeros((3, 6, 40), "float32")}, {"w": normal(3, 6, 40)}

    @jax.jit
    def run(grads):
        state = nearest(jax.vmap(OURS.init)(params))
        loop = lambda g: jax.lax.map(lambda args: OURS.update(*args), (g, state))  # noqa: E731
        return jax.vmap(OURS.update)(grads, state), loop(grads)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *run(grads))


@pytest.mark.parametrize(
    "ours",
    [
        scale_by_adam_4bit(group=64, min_size=8),
        scale_by_adam_8bit(block=64, min_size=8),
        scale_by_factored_adam_4bit(group=64, min_size=8),
    ],
    ids=("4 bits", "8 bits", "4 bits, factored"),
)
def test_a_mesh_of_explicit_axes_computes_the_same_as_one_device(ours):
    spec = PartitionSpec("a", "b")
    mesh = jax.make_mesh((2, 2), ("a", "b"))
    params = {"w": np.zeros((64, 1024), "float32")}
    grads = [{"w": normal(64, 1024, seed=i)} for i in range(2)]

    def trained(place):
        state = nearest(jax.jit(ours.init)(jax.tree.map(place, params)))
        step = jax.jit(ours.update)
        for grad in grads:
            updates, state = step(jax.tree.map(place, grad), state)
        return jax.device_get((updates, state))

    want = trained(jnp.asarray)
    with jax.set_mesh(mesh):
        got = trained(lambda x: jax.device_put(x, NamedSharding(mesh, spec)))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if a.dtype.itemsize == 1:
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
