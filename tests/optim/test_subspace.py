"""Updates in a subspace that does not change, compared with GaLore in NumPy and in optax."""

import functools

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

STEPS, TOKENS = 10, 30


def problem(d=12, n=8):
    """Returns the first weight, and inputs and targets of each step."""
    return normal(1, d, n), normal(0, STEPS, TOKENS, d), normal(2, STEPS, TOKENS, n)


def loss(params, x, target, codec=actjax.RandomizedSVD(4)):
    z = actjax.linear(x, params["w"], codec=codec, key=jax.random.key(0))
    return jnp.sum(jnp.tanh(z - target) ** 2)


def gradient(w, x, target):
    """Returns the gradient of the loss in NumPy."""
    error = np.tanh(x @ w - target)
    return x.T @ (2 * error * (1 - error**2))


dense = jax.grad(functools.partial(loss, codec=actjax.Exact()))


def ten_steps(tx, grad, state, w, *data):
    """Returns the weight after each step. `grad` takes parameters, state and the data of a step."""

    def step(carry, data):
        params, state = carry
        updates, state = tx.update(grad(params, state, *data), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params["w"]

    return jax.lax.scan(step, ({"w": w}, state), data)[1]


def in_bases(tx):
    """Returns the gradient as a user takes it: inputs are stored in the bases of the state."""
    return lambda params, state, *data: actjax.value_and_grad(loss, bases=tx.bases(state))(
        params, *data
    )[1]


def in_full(params, state, *data):
    del state
    return dense(params, *data)


# Options, the shape of the weight, and the side that the oracle projects.
CASES = {
    "input": ({"scale": 0.25, "weight_decay": 0.3}, (12, 8), "input"),
    "random": ({"scale": 0.25, "source": "random"}, (12, 8), "input"),
    "output": ({"scale": 0.5, "side": "output"}, (12, 8), "output"),
    "smaller, tall": ({"scale": 0.5, "side": "smaller"}, (12, 8), "output"),
    "smaller, wide": ({"scale": 0.5, "side": "smaller"}, (8, 12), "input"),
}


@pytest.mark.parametrize("name", CASES)
def test_ten_steps_equal_those_of_galore_in_numpy(name):
    options, shape, side = CASES[name]
    tx, (w, *data) = subspace(4, **options), problem(*shape)

    @jax.jit
    def run(w, *data):
        state = first_state(tx, {"w": w})
        # Other sides than the input need the dense gradient.
        assert set(tx.bases(state).arrays) == (set() if "side" in options else {"w"})
        return state.bases, ten_steps(
            tx, in_full if "side" in options else in_bases(tx), state, w, *data
        )

    bases, got = run(w, *data)
    (basis,) = bases.values()
    # The oracle follows a separate trajectory: each gradient is taken at the oracle's weights.
    settings = {"scale": options["scale"], "weight_decay": options.get("weight_decay", 0.0)}
    grads, weight = [], w
    for x, target in zip(*data, strict=True):
        grads.append(gradient(weight, x, target))
        want = galore_adam(w, grads, basis, lr=RATE, side=side, **settings, **ADAM)
        weight = want[-1]
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


def test_ten_steps_equal_those_of_optax_on_the_input_side():
    # optax projects the larger side: d = 12 rows.
    rival = optax.contrib.galore(
        RATE, rank=4, update_proj_gap=100, scale=0.25, base_optimizer=optax.scale_by_adam(**ADAM)
    )
    tx, arguments = subspace(4, scale=0.25), problem()

    @jax.jit
    def run(w, *data):
        params, first_data = {"w": w}, [x[0] for x in data]
        first = rival.init(params)
        grads = dense(params, *first_data)
        projector = rival.update(grads, first, params)[1][0].projector["w"]
        state = tx.refresh(grads, first_state(tx, params), params)
        ours = state._replace(bases={"w": projector})
        return (
            (state.bases["w"], projector),
            ten_steps(tx, in_bases(tx), ours, w, *data),
            ten_steps(rival, in_full, first, w, *data),
        )

    bases, got, want = run(*arguments)
    # Both bases span the same subspace, up to the error of the sketch. Then use optax's basis.
    ours, projector = map(np.asarray, bases)
    assert projector.shape == (12, 4)
    assert np.linalg.svd(ours.T @ projector)[1].min() > 0.99
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


def test_inputs_in_8_bits_err_within_their_bound():
    @jax.jit
    def run(w, *data):
        return [
            ten_steps(tx, in_bases(tx), first_state(tx, {"w": w}), w, *data)[-1]
            for tx in (subspace(4), subspace(4, bits=8))
        ]

    w, *data = problem()
    exact, rounded = map(np.asarray, run(w, *data))
    assert 0 < np.abs(rounded - exact).max() < 0.1 * np.abs(exact - w).max()


def test_parameters_outside_the_groups_are_updated_in_full_space():
    params, grads = (
        {"w": normal(i, 12, 8), "b": normal(i + 1, 8), "other": normal(i + 2, 5, 6)} for i in (0, 3)
    )
    tx = subspace(4, groups={"w": "w"})
    plain = optax.chain(optax.scale_by_adam(**ADAM), outer())

    @jax.jit
    def run(params, grads):
        return (
            tx.update(grads, first_state(tx, params), params)[0],
            plain.update(grads, plain.init(params), params)[0],
        )

    updates, expected = run(params, grads)
    np.testing.assert_allclose(updates["b"], expected["b"], rtol=1e-12)
    np.testing.assert_allclose(updates["other"], expected["other"], rtol=1e-12)
    assert np.linalg.matrix_rank(updates["w"]) == 4


def test_a_gradient_and_the_parameters_are_projected_on_each_side():
    # GaLore, Definition 3.4: `Pᵀ G Q`, and `P N Qᵀ` back.
    params, grads = ({"w": normal(i, 12, 8)} for i in (0, 1))
    inner = optax.add_decayed_weights(2.0)

    @jax.jit
    def run(params, grads):
        results = {}
        for side in ("input", "output", "both"):
            tx = optim.subspace(inner, 4, side=side, scale=0.5)
            state = tx.refresh(grads, first_state(tx, params), params)
            results[side] = state.bases, tx.update(grads, state, params)[0]["w"]
        return results

    w, g = params["w"], grads["w"]
    u, _, vt = np.linalg.svd(g)
    for side, (bases, got) in run(params, grads).items():
        projectors = [np.eye(12), np.eye(8)]
        for name, basis in bases.items():
            at = int(side == "output" or name == "w:output")
            basis = np.asarray(basis)
            projectors[at] = basis @ basis.T
            # The sketch of the range finder is random: both span nearly the leading vectors.
            leading = (u[:, :4], vt[:4].T)[at]
            assert np.linalg.svd(basis.T @ leading)[1].min() > 0.9
        assert len(bases) == (2 if side == "both" else 1)
        left, right = projectors
        np.testing.assert_allclose(got, 0.5 * left @ (g + 2 * w) @ right, atol=1e-12)


def test_transforms_that_need_parameters_run_inside():
    params = {"w": normal(0, 12, 8), "b": normal(1, 8)}

    @jax.jit
    def run(params):
        inners = optax.scale_by_factored_rms(), optax.adafactor(1e-2)
        transforms = [optim.subspace(inner, 4) for inner in inners]
        return [tx.update(params, tx.init(params), params) for tx in transforms]

    for updates, state in run(params):
        assert np.linalg.matrix_rank(updates["w"]) == 4
        assert int(state.step) == 1


def test_bases_of_parameters_without_layers_are_read_and_updates_are_mapped():
    params = {"w": normal(0, 12, 8).astype("float32")}
    tx = optim.subspace(optax.scale_by_adam(), 4)
    assert set(tx.bases(jax.eval_shape(lambda: optim.init(tx, params))).arrays) == {"w"}

    @jax.jit
    def run(params):
        state = tx.refresh(params, tx.init(params), params)
        grads = {"w": actjax.LowRank(state.bases["w"], jnp.ones((4, 8), "float32"), "w")}
        # Under `vmap` both branches of the check run.
        two = jax.tree.map(lambda x: jnp.stack([x, x]), (grads, state))
        return jax.vmap(tx.update)(*two)[0]["w"][0], tx.update(grads, state)[0]["w"]

    got, want = jax.block_until_ready(run(params))
    np.testing.assert_allclose(got, want, rtol=1e-5)
