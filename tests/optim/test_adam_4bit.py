"""The transform, compared with `four_bit` of optax's Adam."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from kernels.kernel_cases import normal
from optim.nearest import nearest

import actjax
from actjax.optim import RankOneFourBit, SignedFourBit, four_bit, scale_by_adam_4bit

SETTINGS = {"group": 32, "min_size": 50}
SHAPES = {"w": (6, 40), "layers": [(60,), (2, 4, 34)], "small": (7, 2), "scalar": ()}
"""Of these, `w` and the second of the layers are coded."""


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
PLAIN = four_bit(optax.scale_by_adam(), **SETTINGS)


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


updates_of = {
    "default": jax.jit(OURS.update),
    "four_bit": jax.jit(PLAIN.update),
    "interpreted": jax.jit(lambda *args: OURS.update(*args)),
}


@pytest.mark.parametrize("scale", [1.0, 1e15, 1e-15])
@pytest.mark.parametrize("name", ["default", "interpreted"])
def test_it_is_four_bit_adam_in_a_compiled_step(name, scale):
    params, gradients = trees(4, scale)
    state, want_state = nearest((jax.jit(OURS.init)(params), jax.jit(PLAIN.init)(params)))
    for gradient in gradients:
        with actjax.kernels.use("interpreted" if name == "interpreted" else None):
            updates, state = updates_of[name](gradient, state)
        want, want_state = updates_of["four_bit"](gradient, want_state)
        assert jax.tree.structure(state) == jax.tree.structure(want_state)
        for got, expected in zip(jax.tree.leaves(updates), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
        for got, expected in zip(jax.tree.leaves(state), jax.tree.leaves(want_state), strict=True):
            if jnp.issubdtype(got.dtype, jnp.integer):
                np.testing.assert_array_equal(got, expected, strict=True)
            else:
                # A first moment is a sum in which terms may cancel, each rounded by 6e-8 of itself.
                is_first = np.any(np.asarray(expected) < 0)
                atol = 2e-7 * np.abs(expected).max(initial=0) if is_first else 0
                np.testing.assert_allclose(got, expected, rtol=1e-5, atol=atol)


def test_only_large_matrices_are_coded_and_no_gradient_changes_nothing():
    params, (gradient,) = trees(1, 0.0)
    state = jax.jit(OURS.init)(params)
    for moment, kind in ((state.inner.mu, SignedFourBit), (state.inner.nu, RankOneFourBit)):
        assert isinstance(moment["w"], kind)
        assert isinstance(moment["layers"][1], kind)
        small = [moment["layers"][0], moment["small"], moment["scalar"]]
        assert [leaf.dtype for leaf in small] == ["float32"] * 3
    updates, new = jax.jit(OURS.update)(gradient, state)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))
    assert new.inner.count == 1
    assert not any(np.any(x.decode()) for x in (new.inner.mu["w"], new.inner.nu["w"]))


def test_it_maps_over_a_leading_axis():
    params = {"w": np.zeros((3, 6, 40), "float32")}
    grads = {"w": normal(3, 6, 40)}
    state = nearest(jax.jit(jax.vmap(OURS.init))(params))
    mapped = jax.tree.map(np.asarray, jax.jit(jax.vmap(OURS.update))(grads, state))
    for i in range(3):
        layer = jax.tree.map(lambda x, i=i: np.asarray(x)[i], (grads, state))
        got = jax.tree.map(lambda x, i=i: x[i], mapped)
        want = updates_of["default"](*layer)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


def test_four_devices_compute_the_same_as_one():
    spec = PartitionSpec("a", "b")
    mesh = jax.make_mesh((2, 2), ("a", "b"))
    ours = scale_by_adam_4bit(group=64, min_size=8)
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
        if a.dtype == np.uint8:
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
