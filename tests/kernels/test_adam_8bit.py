"""Tests of actjax/kernels/adam_8bit and its transform: Adam on moments in 8 bits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kernels.kernel_cases import TINY, f64, normal
from optim.optim_oracles import blockwise_round_trip

from actjax.formats.blockwise import blockwise_zeros
from actjax.kernels.adam_8bit.api import adam_8bit
from actjax.optim import eight_bit, scale_by_adam_8bit

HYPER = {"b1": 0.9, "b2": 0.99, "eps": 1e-6, "eps_root": 1e-9}
LEVEL = 4e-7
"""Relative error of a decoded level (tests/optim/test_eight_bit.py) and of a product."""

# Shape, block and dtype of gradients: whole blocks and a shorter last one, rows shorter than a
# block, and many rows.
CASES = [
    ((5, 70), 32, "float32"),
    ((2, 550, 3), 256, "bfloat16"),
]

every = pytest.mark.parametrize("case", CASES, ids=str)


@jax.jit
def stepped(grad, mu, nu, corrections):
    """Returns the results, and the moments after and before as numbers."""
    new = adam_8bit(grad, mu, nu, corrections, **HYPER)
    return new, [m.decode() for m in new[1:]], (mu.decode(), nu.decode())


def moments(shape, block, seed=0):
    """Returns moments with random codes, a block of zeros, and a row of zero second moments."""
    rng = np.random.default_rng(seed)
    mu, nu = (blockwise_zeros(shape, "float32", unsigned=u, block=block) for u in (False, True))
    codes = rng.integers(-127, 128, shape), rng.integers(1, 256, shape)
    scales = [10.0 ** rng.uniform(-3, 1, mu.scales.shape) for _ in range(2)]
    # A second moment is at least the square of the first, up to decay.
    scales[1] = scales[0] ** 2 * (1 + scales[1])
    codes[1][..., -1, :] = 0
    scales[0][..., 0, 0] = 0
    return (
        dataclasses.replace(old, codes=c.astype(old.codes.dtype), scales=s.astype("float32"))
        for old, c, s in zip((mu, nu), codes, scales, strict=True)
    )


@every
def test_a_step_is_that_of_adam_at_the_decoded_moments(case):
    shape, block, dtype = case
    mu, nu = moments(shape, block)
    grad = normal(*shape, seed=1).astype(dtype)
    # Some entries have no gradient.
    grad[..., ::4] = 0
    corrections = np.float32([0.19, 0.0199])
    (update, *after), values, (m, v) = stepped(grad, mu, nu, corrections)

    m, v, g = f64(m), f64(v), f64(grad)
    first, second = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    divisor = np.sqrt(second / f64(corrections)[1] + 1e-9) + 1e-6
    want = first / f64(corrections)[0] / divisor
    # For each moment a level, a product and a sum, halved for the second one by the root; a decay
    # in float32; two quotients, a root and two sums.
    scale = (0.9 * abs(m) + 0.1 * abs(g)) / f64(corrections)[0] / divisor
    slack = (2 * LEVEL + 20 * TINY) * scale
    terms = (0.9 * abs(m) + 0.1 * abs(g)), second
    assert update.dtype == "float32"
    assert np.all(abs(f64(update) - want) <= slack)
    for old, new, *numbers in zip((mu, nu), after, values, (first, second), terms, strict=True):
        assert jax.tree.structure(old) == jax.tree.structure(new)
        assert_nearest(new, *numbers)


def assert_nearest(code, decoded, exact, terms):
    """Asserts that codes are the nearest levels, up to the error of `exact`."""
    unsigned = code.codes.dtype == np.uint8
    want = blockwise_round_trip(exact, unsigned, code.block)
    if unsigned:
        # Positive values never become zero, so nothing is divided by zero.
        np.testing.assert_array_equal(np.asarray(code.codes) > 0, exact > 0)
    slack = (2 * LEVEL + 8 * TINY) * np.maximum(terms, abs(want))
    assert np.all(abs(f64(decoded) - exact) <= abs(want - exact) + slack)


# The transform.


def trees(steps, scale=1.0):
    """Returns parameters, some small and one None, and the gradients of each step."""
    shapes = {"w": (6, 40), "layers": [(5,), (7, 2)], "scalar": ()}
    is_shape = lambda s: isinstance(s, tuple)  # noqa: E731
    params = jax.tree.map(lambda s: np.zeros(s, "float32"), shapes, is_leaf=is_shape)

    def gradient(step):
        flat, treedef = jax.tree.flatten(params)
        drawn = [
            np.asarray(scale * normal(*x.shape, seed=10 * step + i), x.dtype)
            for i, x in enumerate(flat)
        ]
        return {**treedef.unflatten(drawn), "none": None}

    return {**params, "none": None}, [gradient(step) for step in range(steps)]


SETTINGS = {"block": 16, "min_size": 50}

inits = {
    "eight_bit": jax.jit(eight_bit(optax.scale_by_adam(), **SETTINGS).init),
    "ours": jax.jit(scale_by_adam_8bit(**SETTINGS).init),
}

updates_of = {
    "eight_bit": jax.jit(eight_bit(optax.scale_by_adam(), **SETTINGS).update),
    "ours": jax.jit(scale_by_adam_8bit(**SETTINGS).update),
}


@pytest.mark.parametrize("scale", [1.0, 0.0, 1e15, 1e-15])
def test_it_is_eight_bit_adam(scale):
    params, gradients = trees(5, scale)
    state, want_state = inits["ours"](params), inits["eight_bit"](params)
    jax.tree.map(np.testing.assert_array_equal, state, want_state)
    for gradient in gradients:
        updates, state = updates_of["ours"](gradient, state)
        want, want_state = updates_of["eight_bit"](gradient, want_state)
        assert jax.tree.structure(updates) == jax.tree.structure(want)
        assert jax.tree.structure(state) == jax.tree.structure(want_state)
        for got, expected in zip(jax.tree.leaves(updates), jax.tree.leaves(want), strict=True):
            assert np.isfinite(got).all()
            # Both decode the same codes; in a sum of two terms some cancel.
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
        for got, expected in zip(jax.tree.leaves(state), jax.tree.leaves(want_state), strict=True):
            if jnp.issubdtype(got.dtype, jnp.integer):
                np.testing.assert_array_equal(got, expected, strict=True)
            else:
                np.testing.assert_allclose(got, expected, rtol=1e-5, atol=0)
        if scale == 0:
            leaves = jax.tree.leaves((updates, state.inner.mu, state.inner.nu))
            assert not any(np.any(leaf) for leaf in leaves)
    assert state.inner.count == len(gradients)


def test_small_arrays_stay_in_float32():
    params, _ = trees(0)
    state = inits["ours"](params).inner
    for moment, dtype in ((state.mu, "int8"), (state.nu, "uint8")):
        assert moment["w"].codes.dtype == dtype
        small = [*moment["layers"], moment["scalar"]]
        assert [leaf.dtype for leaf in small] == ["float32"] * 3
        assert moment["none"] is None


@pytest.mark.parametrize("width", [512, 576], ids=["whole blocks", "shorter last block"])
def test_the_definition_needs_less_than_three_float32_arrays_of_workspace(width):
    tx, params = scale_by_adam_8bit(), jax.ShapeDtypeStruct((1024, width), jnp.float32)
    state = jax.eval_shape(tx.init, params)
    program = jax.jit(tx.update, donate_argnums=1).lower(params, state).compile()
    # The new moments before they are encoded, and their codes: ten bytes for each weight. (The
    # update is an output.) With logarithms and powers in the levels it was 34 bytes.
    assert program.memory_analysis().temp_size_in_bytes < 12 * params.size


def test_gradients_of_16_bits_are_cast_to_float32():
    params, (gradient,) = trees(1)
    rounded = jax.tree.map(lambda g: g.astype(jnp.bfloat16), gradient)
    transform = scale_by_adam_8bit(**SETTINGS)
    state = inits["ours"](jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    jax.tree.map(np.testing.assert_array_equal, state, inits["ours"](params))
    updates, new = jax.eval_shape(transform.update, rounded, state)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype("float32")}
    assert new == jax.eval_shape(lambda: state)
    # Small arrays too, whose moments are not encoded.
    small = {"b": rounded["layers"][0]}
    first = jax.jit(lambda grads: transform.update(grads, transform.init(small)))
    results = [first(grads) for grads in (small, {"b": small["b"].astype("float32")})]
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_decays_may_be_arrays_under_jit():
    tx, params = scale_by_adam_8bit(b1=jnp.float32(0.9)), np.ones((64, 256), np.float32)
    updates, _ = jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params))
    assert updates.shape == params.shape
