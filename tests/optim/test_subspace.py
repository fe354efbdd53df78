"""Updates in a subspace that does not change, compared with GaLore in NumPy and in optax."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim.optim_oracles import galore_adam
from optim.projected import ADAM, RATE, first_state, normal, outer, subspace

import actjax
from actjax import optim

pytestmark = pytest.mark.usefixtures("x64")


def problem(d: int = 12, n: int = 8, tokens: int = 30):
    """Returns a loss whose inputs have a codec, the gradient of the same loss, and parameters.

    Both depend on the number of the step.
    """
    w = jnp.asarray(normal(1, d, n))
    x, target = jnp.asarray(normal(0, 10, tokens, d)), jnp.asarray(normal(2, 10, tokens, n))

    def loss(params, i):
        z = actjax.linear(x[i], params["w"], codec=actjax.RandomizedSVD(4), key=jax.random.key(0))
        return jnp.sum(jnp.tanh(z - target[i]) ** 2)

    def plain(params, i):
        return jnp.sum(jnp.tanh(x[i] @ params["w"] - target[i]) ** 2)

    return loss, jax.jit(jax.grad(plain)), {"w": w}


def step_in_bases(tx, loss):
    """Returns a step as a user runs it: inputs are stored in the bases of the state."""

    @jax.jit
    def step(params, state, i):
        _, grads = actjax.value_and_grad(loss, bases=tx.bases(state))(params, i)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def ten_steps(step, params, state):
    history = []
    for i in range(10):
        params, state = step(params, state, i)
        history.append(np.asarray(params["w"]))
    return history


@pytest.mark.parametrize(("source", "weight_decay"), [("gradient", 0.3), ("random", 0.0)])
def test_ten_steps_equal_those_of_galore_in_numpy(source, weight_decay):
    loss, gradient, params = problem()
    tx = subspace(4, scale=0.25, weight_decay=weight_decay, source=source)
    state = first_state(tx, params)
    (basis,) = state.bases.values()
    got = ten_steps(step_in_bases(tx, loss), params, state)
    # The oracle follows a separate trajectory: each gradient is taken at the oracle's weights.
    options = {"lr": RATE, "scale": 0.25, "weight_decay": weight_decay, **ADAM}
    grads, weight = [], params["w"]
    for i in range(10):
        grads.append(np.asarray(gradient({"w": weight}, i)["w"]))
        want = galore_adam(params["w"], grads, basis, **options)
        weight = jnp.asarray(want[-1])
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


def test_ten_steps_equal_those_of_optax_on_the_input_side():
    loss, gradient, params = problem(d=12, n=8)  # optax projects the larger side: d = 12 rows.
    rival = optax.contrib.galore(
        RATE, rank=4, update_proj_gap=100, scale=0.25, base_optimizer=optax.scale_by_adam(**ADAM)
    )

    @jax.jit
    def rival_step(params, state, i):
        updates, state = rival.update(gradient(params, i), state, params)
        return optax.apply_updates(params, updates), state

    rival_state = jax.jit(rival.init)(params)
    _, after_one = rival_step(params, rival_state, 0)
    projector = after_one[0].projector["w"]
    assert projector.shape == (12, 4)

    tx = subspace(4, scale=0.25)
    state = jax.jit(tx.refresh)(gradient(params, 0), first_state(tx, params), params)
    # Both bases span the same subspace, up to the error of the sketch. Then use optax's basis.
    overlap = np.linalg.svd(np.asarray(state.bases["w"]).T @ np.asarray(projector))[1]
    assert overlap.min() > 0.99
    state = dataclasses.replace(state, bases={"w": projector})
    got = ten_steps(step_in_bases(tx, loss), params, state)
    want = ten_steps(rival_step, params, rival_state)
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("side", "d", "n"), [("output", 12, 8), ("smaller", 12, 8), ("smaller", 8, 12)]
)
def test_other_sides_equal_galore_on_dense_gradients(side, d, n):
    _, gradient, params = problem(d, n)
    tx = subspace(4, scale=0.5, side=side)
    state, weights, grads = first_state(tx, params), params, []
    (basis,) = state.bases.values()
    assert tx.bases(state).arrays == {}

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for i in range(10):
        grads.append(gradient(weights, i)["w"])
        weights, state = step(weights, state, {"w": grads[-1]})
    oracle_side = "input" if side == "smaller" and d < n else "output"
    want = galore_adam(params["w"], grads, basis, lr=RATE, scale=0.5, side=oracle_side, **ADAM)
    np.testing.assert_allclose(weights["w"], want[-1], rtol=1e-10, atol=1e-10)


def test_parameters_outside_the_groups_are_updated_in_full_space():
    params = {"w": normal(0, 12, 8), "b": normal(1, 8), "other": normal(2, 5, 6)}
    grads = {"w": normal(3, 12, 8), "b": normal(4, 8), "other": normal(5, 5, 6)}
    tx = subspace(4, groups={"w": "w"})
    plain = optax.chain(optax.scale_by_adam(**ADAM), outer())
    updates, _ = jax.jit(tx.update)(grads, first_state(tx, params), params)
    expected, _ = jax.jit(lambda g, p: plain.update(g, plain.init(p), p))(grads, params)
    np.testing.assert_allclose(updates["b"], expected["b"], rtol=1e-12)
    np.testing.assert_allclose(updates["other"], expected["other"], rtol=1e-12)
    assert np.linalg.matrix_rank(updates["w"]) == 4


def test_inputs_in_8_bits_err_within_their_bound():
    loss, _, params = problem()
    exact, rounded = (
        ten_steps(step_in_bases(tx, loss), params, first_state(tx, params))[-1]
        for tx in (subspace(4), subspace(4, bits=8))
    )
    assert 0 < np.abs(rounded - exact).max() < 0.1 * np.abs(exact - params["w"]).max()


# Arguments.


@pytest.mark.parametrize("side", ["input", "output", "both"])
def test_the_inner_transform_sees_projected_parameters(side):
    params, grads = {"w": jnp.asarray(normal(0, 12, 8))}, {"w": jnp.asarray(normal(1, 12, 8))}
    decay = optax.chain(optax.scale(0.0), optax.add_decayed_weights(2.0))
    tx = optim.subspace(decay, 4, side=side, scale=0.5)
    state = first_state(tx, params)
    updates, _ = jax.jit(tx.update)(grads, state, params)
    w = np.asarray(params["w"])
    projectors = [np.asarray(b) @ np.asarray(b).T for b in state.bases.values()]
    # The names of the bases of both sides: `w` and `w:output`, in this order.
    left, right = {
        "input": lambda: (projectors[0], np.eye(8)),
        "output": lambda: (np.eye(12), projectors[0]),
        "both": lambda: projectors,
    }[side]()
    np.testing.assert_allclose(updates["w"], 0.5 * 2.0 * left @ w @ right, atol=1e-12)


@pytest.mark.parametrize("inner", [optax.scale_by_factored_rms(), optax.adafactor(1e-2)])
def test_transforms_that_need_parameters_run_inside(inner):
    params = {"w": jnp.asarray(normal(0, 12, 8)), "b": jnp.asarray(normal(1, 8))}
    tx = optim.subspace(inner, 4)
    updates, state = jax.jit(tx.update)(params, jax.jit(tx.init)(params), params)
    assert np.linalg.matrix_rank(updates["w"]) == 4
    assert int(state.step) == 1


def test_a_gradient_is_projected_on_both_sides():
    # GaLore, Definition 3.4: `Pᵀ G Q`, and `P N Qᵀ` back.
    params, grads = {"w": jnp.asarray(normal(0, 12, 8))}, {"w": jnp.asarray(normal(1, 12, 8))}
    tx = optim.subspace(optax.scale(1.0), 4, side="both", scale=1.0)

    @jax.jit
    def refreshed(params, grads):
        state = tx.refresh(grads, first_state(tx, params), params)
        return state.bases, tx.update(grads, state, params)[0]

    bases, updates = refreshed(params, grads)
    u, _, vt = np.linalg.svd(np.asarray(grads["w"]))
    p, q = np.asarray(bases["w"]), np.asarray(bases["w:output"])
    # The sketch of the range finder is random: both span nearly the leading singular vectors.
    assert np.linalg.svd(p.T @ u[:, :4])[1].min() > 0.9
    assert np.linalg.svd(q.T @ vt[:4].T)[1].min() > 0.9
    np.testing.assert_allclose(updates["w"], p @ (p.T @ grads["w"] @ q) @ q.T, atol=1e-12)


def test_bases_of_parameters_without_layers_are_read_and_updates_are_mapped():
    params = {"w": jnp.asarray(normal(0, 12, 8), "float32")}
    tx = optim.subspace(optax.scale_by_adam(), 4)
    assert set(tx.bases(jax.eval_shape(lambda: optim.init(tx, params))).arrays) == {"w"}
    state = jax.jit(lambda p: tx.refresh(p, tx.init(p), p))(params)
    grads = {"w": actjax.LowRank(state.bases["w"], np.ones((4, 8), "float32"), "w")}
    # Under `vmap` both branches of the check run.
    two = jax.tree.map(lambda x: np.stack([x, x]), (grads, state))
    updates, _ = jax.jit(jax.vmap(tx.update))(*two)
    jax.block_until_ready(updates)
    want, _ = jax.jit(tx.update)(grads, state)
    np.testing.assert_allclose(updates["w"][0], want["w"], rtol=1e-5)
