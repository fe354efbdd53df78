"""Refreshes: where new bases come from, what becomes of moments, and updates without a refresh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim.optim_oracles import rotate_moments, top_left_singular_vectors
from optim.projected import first_state, normal, subspace

from actjax import LowRank, optim
from actjax.optim.codes import decoded

# Refreshes of a plain optax transform.

GAP, STEPS = 2, 5


def gradients(steps):
    return [{"w": normal(i, 6, 5).astype("float32"), "b": np.ones(5, "float32")} for i in steps]


def by_hand(tx, grads):
    """Returns the updates of `w`, with a refresh wherever one is due."""
    params = {"w": np.zeros((6, 5), "float32")}
    state, found = tx.subspace.init_from(params, jax.random.key(0)), []
    for i, g in enumerate(grads):
        g = {"w": g["w"]}
        if i % GAP == 0:
            state = tx.refresh(None if tx.source == "random" else g, state, params)
        updates, state = tx.update(g, state, params)
        found.append(updates["w"])
    return found


def labels(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key, params)


# Each: from the subspace to the wrapper, and the factor by which the wrapper changes an update.
WRAPPERS = {
    "alone": (lambda tx: tx, 1),
    "chain": (lambda tx: optax.chain(optax.clip(0.5), tx, optax.scale(2)), 2),
    "masked": (lambda tx: optax.masked(tx, {"w": True, "b": False}), 1),
    "multi_transform": (
        lambda tx: optax.multi_transform({"w": tx, "b": optax.sgd(1.0)}, labels), 1),
    "inject_hyperparams": (
        lambda tx: optax.inject_hyperparams(lambda r: optax.chain(tx, optax.scale(r)))(r=3.0), 3),
    "apply_if_finite": (lambda tx: optax.apply_if_finite(tx, 3), 1),
}  # fmt: skip


@pytest.mark.parametrize("source", ["gradient", "random"])
def test_a_subspace_refreshes_itself_in_every_wrapper(source):
    tx = optim.subspace(optax.scale_by_adam(), 2, source=source, gap=GAP)
    params = {"w": np.zeros((6, 5), "float32"), "b": np.zeros(5, "float32")}
    grads = gradients(range(STEPS))

    @jax.jit
    def run(grads):
        found = {}
        for name, (wrap, _) in WRAPPERS.items():
            wrapped, found[name] = wrap(tx), []
            state = wrapped.init(params)
            for g in grads:
                updates, state = wrapped.update(g, state, params)
                found[name].append(updates["w"])
        clipped = [g | {"w": jnp.clip(g["w"], -0.5, 0.5)} for g in grads]
        return found, by_hand(tx, grads), by_hand(tx, clipped)

    found, plain, clipped = jax.tree.map(np.asarray, run(grads))
    for name, (_, factor) in WRAPPERS.items():
        want = clipped if name == "chain" else plain
        for got, expected in zip(found[name], want, strict=True):
            np.testing.assert_allclose(got, factor * expected, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_gradient_of_zeros_gives_no_basis_and_the_next_one_does():
    tx = optim.subspace(optax.scale_by_adam(), 2, gap=GAP)
    (gradient,) = gradients([1])
    state = tx.init(gradient)
    nothing = jax.tree.map(np.zeros_like, gradient)
    updates, state = jax.jit(tx.update)(nothing, state)
    assert not any(np.any(x) for x in jax.tree.leaves(updates))
    bases = jax.jit(tx.update)(gradient, state)[1].bases
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, atol=1e-6),
        bases,
        tx.update(gradient, tx.init(gradient))[1].bases,
    )


def test_a_subspace_refreshes_itself_on_the_sums_of_multi_steps():
    tx = optim.subspace(optax.scale_by_adam(), 2, gap=GAP)
    wrapped = optax.MultiSteps(tx, 2)
    params, grads = {"w": np.zeros((6, 5), "float32")}, gradients(range(2 * STEPS))

    @jax.jit
    def run(grads):
        state, found = wrapped.init(params), []
        for g in grads:
            updates, state = wrapped.update({"w": g["w"]}, state, params)
            found.append(updates["w"])
        means = [{"w": (a["w"] + b["w"]) / 2} for a, b in zip(grads[::2], grads[1::2], strict=True)]
        return found, by_hand(tx, means)

    found, want = jax.tree.map(np.asarray, run(grads))
    np.testing.assert_array_equal(found[::2], np.zeros((STEPS, 6, 5)))
    np.testing.assert_allclose(found[1::2], want, rtol=1e-4, atol=1e-5)


def test_hyperparameters_are_injected_into_a_subspace_itself():
    make = optax.inject_hyperparams(optim.subspace, static_args=("rank", "gap", "bits", "seed"))
    params, grads = {"w": np.zeros((6, 5), "float32")}, {"w": np.ones((6, 5), "float32")}
    tx = make(inner=optax.scale(1.0), rank=2, scale=0.5)

    @jax.jit
    def update(state):
        return tx.update(grads, state, params)[0]["w"]

    state = tx.init(params)
    half = update(state)
    state.hyperparams["scale"] = jnp.float32(1.0)
    np.testing.assert_allclose(update(state), 2 * half, rtol=1e-6)
    with pytest.raises(ValueError, match=r"`gap` of subspace .* got an array. .* `static_args="):
        optax.inject_hyperparams(optim.subspace, static_args="rank")(
            inner=optax.scale(1.0), rank=2
        ).init(params)


@pytest.mark.parametrize("source", ["gradient", "random"])
def test_a_factored_gradient_where_a_refresh_is_due_is_an_error(source):
    params = {"w": normal(0, 6, 5).astype("float32")}
    tx = optim.subspace(optax.scale_by_adam(), 2, source=source, gap=GAP)
    chain = optax.chain(optim.clip_by_global_norm(1.0), tx)
    grads = "None" if source == "random" else "grads"
    remedy = (
        rf"(?s)refresh of the subspace is due.*tx\.refresh\({grads}, .*every 2 steps.*optim.init"
    )
    state = chain.init(params)

    def in_basis(state):
        return {"w": LowRank(state[1].bases["w"], jnp.ones((2, 5), "float32"), "w")}

    with pytest.raises(ValueError, match=remedy):
        chain.update(in_basis(state), state, params)
    update = jax.jit(chain.update)
    with pytest.raises(jax.errors.JaxRuntimeError, match=remedy):
        jax.block_until_ready(update(in_basis(state), state, params))
    state = state[0], tx.refresh(None if source == "random" else params, state[1], params)
    for _ in range(GAP):
        _, state = jax.block_until_ready(update(in_basis(state), state, params))
    assert int(state[1].step) == GAP
    with pytest.raises(jax.errors.JaxRuntimeError, match=remedy):
        jax.block_until_ready(update(in_basis(state), state, params))


def test_the_structure_of_a_state_does_not_change_between_refreshes():
    params = {"layers": {"w": np.ones((3, 6, 5), "float32")}}
    tx = optim.subspace(optax.scale_by_adam(), 2)
    states = jax.eval_shape(lambda p: optim.init(tx, p), params)
    after = {
        refresh: jax.eval_shape(
            lambda p, s, refresh=refresh: optim.apply(tx, p, s, p, refresh=refresh)[1],
            params,
            states,
        )
        for refresh in (True, False)
    }
    assert after[True] == after[False] == states
    plain = jax.eval_shape(tx.init, params["layers"])
    assert jax.eval_shape(tx.refresh, params["layers"], plain, params["layers"]) == plain


def test_a_state_consists_of_plain_arrays_whose_paths_checkpoints_rely_on():
    tx = optim.subspace(optim.eight_bit(optax.scale_by_adam(), min_size=1), 2, groups={"w": "x"})
    params = {"w": np.ones((6, 5), "float32")}
    managed = jax.eval_shape(tx.subspace.init_from, params, jax.random.key(0))
    for state in (jax.eval_shape(tx.init, params), managed):
        paths, leaves = zip(*jax.tree_util.tree_flatten_with_path(state)[0], strict=True)
        assert [jax.tree_util.keystr(p, simple=True, separator=".") for p in paths] == [
            *("step", "key", "bases.x", "inner.inner.count"),
            *("inner.inner.mu.w.codes", "inner.inner.mu.w.scales"),
            *("inner.inner.nu.w.codes", "inner.inner.nu.w.scales"),
            *([] if state is managed else ["next_refresh"]),
        ]
        assert not any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves)


def test_attributes_of_a_transform_are_those_of_its_subspace():
    tx = optim.subspace(optax.scale_by_adam(), 4, gap=3, source="random", seed=5)
    assert isinstance(tx.subspace, optim.Subspace)
    assert (tx.gap, tx.source, tx.subspace.seed) == (3, "random", 5)


# Where bases come from.


@pytest.mark.usefixtures("x64")
def test_a_new_basis_spans_the_leading_singular_vectors():
    # Three weights of one input group, with decaying singular values.
    d, k = 20, 4
    left = normal(0, d, 6) * 10.0 ** -np.arange(6)
    widths = {"q": 9, "k": 5, "v": 5}
    factored = {
        name: LowRank(left, normal(i, 6, n)) for i, (name, n) in enumerate(widths.items(), start=1)
    }
    dense = {name: g.dense() for name, g in factored.items()}
    tx = subspace(k, groups=dict.fromkeys(dense, "q"))
    want = top_left_singular_vectors(np.concatenate(list(dense.values()), axis=1), k)
    refresh = jax.jit(lambda grads, state: tx.refresh(grads, state, dense).bases)
    for grads in (factored, dense):
        bases = refresh(grads, first_state(tx, dense))
        assert list(bases) == ["q"]
        got = np.asarray(bases["q"])
        np.testing.assert_allclose(got.T @ got, np.eye(k), atol=1e-12)
        np.testing.assert_allclose(got @ got.T, want @ want.T, atol=1e-6)


@pytest.mark.usefixtures("x64")
def test_a_basis_is_orthonormal_for_any_size_and_rank_of_the_gradient():
    tx, params = subspace(4), {"w": jnp.zeros((12, 8))}
    state = first_state(tx, params)

    @jax.jit
    def bases(grad):
        forms = grad, LowRank(grad, jnp.eye(8))
        return [tx.refresh({"w": g}, state, params).bases["w"] for g in forms]

    for shape in (np.ones((12, 8)), np.eye(12, 8)):
        for size in (0.0, 1.0, 1e300, 1e-300):
            for basis in map(np.asarray, bases(size * shape)):
                np.testing.assert_allclose(basis.T @ basis, np.eye(4), atol=1e-10)


def test_random_bases_have_the_moments_of_compact_and_follow_the_seed():
    params = {"w": jnp.zeros((400, 300))}

    @jax.jit
    def drawn():
        transforms = [
            optim.subspace(optax.scale_by_adam(), 100, source="random", seed=seed)
            for seed in (3, 3, 4)
        ]
        states = [tx.init(params) for tx in transforms]
        states.append(transforms[0].refresh(None, states[0], params))
        return [state.bases["w"] for state in states]

    basis, again, other, refreshed = map(np.asarray, drawn())
    # Entries are N(0, 1/k); 40,000 of them determine the variance to one percent. E[S Sᵀ] = I.
    assert basis.var() == pytest.approx(1 / 100, rel=0.03)
    assert np.trace(basis @ basis.T) / 400 == pytest.approx(1, rel=0.03)
    np.testing.assert_array_equal(again, basis)
    assert np.abs(other - basis).max() > 0.1
    assert np.abs(refreshed - basis).max() > 0.1


def test_a_refresh_decomposes_no_square_matrix():
    # For a weight [48, 40] with factors of rank 4, no matrix with 40 columns reaches LAPACK.
    params = {"w": np.zeros((48, 40), "float32")}
    tx = optim.subspace(optax.scale_by_adam(), 4)
    grads = {"w": LowRank(np.ones((48, 4), "float32"), np.ones((4, 40), "float32"))}
    state = jax.eval_shape(tx.init, params)
    text = str(jax.make_jaxpr(lambda g, s: tx.refresh(g, s, params))(grads, state))
    assert "svd" not in text
    assert "[48,40]" not in text.replace(" ", "")


def test_some_layers_can_be_refreshed_and_not_the_others():
    weights = {"layers": {"w": np.random.default_rng(0).normal(size=(3, 12, 8)).astype("float32")}}
    for source, due in (("gradient", [True, False, True]), ("random", [False, True, False])):
        tx = optim.subspace(optax.scale_by_adam(), 4, source=source, groups={"layers.w": "w"})

        @jax.jit
        def before_and_after(params, due, tx=tx, source=source):
            state = optim.init(tx, params)
            if source == "random":
                return state, optim.redraw(tx, state, params, due=due)
            return state, optim.apply(tx, params, state, params, refresh=due)[1]

        old, new = before_and_after(weights, np.array(due))
        if source == "random":
            first, second, third = np.asarray(old.layers.bases["w"])
            assert min(np.abs(first - second).max(), np.abs(second - third).max()) > 0.1
        moved = np.abs(np.asarray(new.layers.bases["w"]) - np.asarray(old.layers.bases["w"]))
        np.testing.assert_array_equal(moved.max((1, 2)) > 1e-3, due)


# What a refresh does to moments.


@pytest.mark.usefixtures("x64")
def test_moments_are_kept_reset_or_rotated():
    # A parameter may be named like a second moment.
    params = {"w": jnp.zeros((12, 8)), "nu": jnp.zeros((12, 8))}
    grads = [{"w": normal(i, 12, 8), "nu": normal(2 + i, 12, 8)} for i in range(2)]
    cases = [
        (policy, side) for policy in ("keep", "reset", "rotate") for side in ("input", "output")
    ]

    @jax.jit
    def refreshed(grads):
        states = []
        for policy, side in cases:
            tx = subspace(4, moments=policy, side=side)
            state = tx.subspace.init_from(params, jax.random.key(0))
            _, state = tx.update(grads[0], state, params)
            states.append((state, tx.refresh(grads[1], state, params)))
        return states

    for (policy, side), (old, new) in zip(cases, refreshed(grads), strict=True):
        assert int(new.inner.count) == int(old.inner.count) == 1
        for name in params:
            moments = np.asarray(old.inner.mu[name]), np.asarray(old.inner.nu[name])
            bases = old.bases[name], new.bases[name]
            want = {
                "keep": moments,
                "reset": (0 * moments[0], 0 * moments[1]),
                "rotate": rotate_moments(*moments, *bases)
                if side == "input"
                else [x.T for x in rotate_moments(*(m.T for m in moments), *bases)],
            }[policy]
            got = new.inner.mu[name], new.inner.nu[name]
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a, b, atol=1e-12, err_msg=f"{policy} {side} {name}")


def test_moments_in_8_bits_are_rotated_too():
    params = {"w": np.zeros((128, 128), "float32")}
    grads = [{"w": np.asarray(normal(i, 128, 128), "float32")} for i in range(2)]

    @jax.jit
    def rotated(grads):
        moments = []
        for inner in (optax.scale_by_adam(), optim.eight_bit(optax.scale_by_adam())):
            tx = optim.subspace(inner, 32, moments="rotate")
            state = tx.subspace.init_from(params, jax.random.key(0))
            _, state = tx.update(grads[0], state, params)
            moments.append(tx.refresh(grads[1], state, params).inner)
        full, eight = moments[0], moments[1].inner
        assert eight.mu["w"].codes.dtype == jnp.int8
        return full, decoded(eight)

    full, eight = jax.tree.map(np.asarray, rotated(grads))
    for want, got in ((full.mu, eight.mu), (full.nu, eight.nu)):
        # Two roundings, each within 0.7% of the largest value of a block.
        assert np.abs(got["w"] - want["w"]).max() / np.abs(want["w"]).max() < 0.1


@pytest.mark.parametrize("moments", ["keep", "rotate"])
def test_a_gradient_that_is_not_finite_has_no_effect_after_its_step(moments):
    params = {"a": jnp.ones((3, 12, 8)), "b": jnp.ones((12, 8))}
    inner = optax.apply_if_finite(optax.scale_by_adam(), 5)
    tx = optim.subspace(inner, 4, groups={"a": "a", "b": "b"}, moments=moments)
    # One matrix of a stack, and one that is not in a stack.
    grads = {"a": np.array(normal(0, 3, 12, 8)), "b": np.full((12, 8), np.nan)}
    grads["a"][1, 2, 3] = np.inf
    grads = jax.tree.map(lambda g: jnp.asarray(g, "float32"), grads)
    state = first_state(tx, params)

    @jax.jit
    def step(grads, state):
        new = tx.refresh(grads, state, params)
        return new, tx.update(grads, new, params)

    new, after = step(grads, state)
    old_a, new_a = np.asarray(state.bases["a"]), np.asarray(new.bases["a"])
    np.testing.assert_array_equal(new.bases["b"], state.bases["b"])
    np.testing.assert_array_equal(new_a[1], old_a[1])
    assert np.abs(new_a[0] - old_a[0]).max() > 0.1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after))


# Arguments.


def test_gradients_that_give_no_basis_are_named():
    params = {"w": np.zeros((12, 8), "float32"), "b": np.zeros(8, "float32")}
    adam = optax.scale_by_adam()
    tx, random = optim.subspace(adam, 4), optim.subspace(adam, 4, source="random")
    thin = {"w": LowRank(np.ones((12, 3)), np.ones((3, 8))), "b": np.zeros(8)}
    in_basis = thin | {"w": LowRank(np.ones((12, 4)), np.ones((4, 8)), "w")}
    for transform, grads, message in (
        (tx, None, "`grads` of refresh is None"),
        (tx, thin, r"a basis of rank 4 for `w` cannot be taken .* of rank 3"),
        (tx, in_basis, r"gradient of `w` was taken in the basis that is to be"),
        (random, thin, "random bases are drawn before the gradient"),
    ):
        state = jax.eval_shape(transform.init, params)
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda g, s, t=transform: t.refresh(g, s, params), grads, state)


def test_bases_are_read_from_the_states_of_every_step_function():
    params = {"layers": {"w": np.ones((3, 12, 8), "float32")}}
    tx = optim.subspace(optax.scale_by_adam(), 4, groups={"layers.w": "layers.w"})
    update = optim.in_backward(lambda p, x: x, lambda p, x, i, s: x, lambda p, x, i: x.sum(), tx)
    state = jax.eval_shape(update.init, params)
    assert tx.bases(state.optimizer).arrays["layers.w"].shape == (3, 12, 4)
    with pytest.raises(TypeError, match=r"InBackwardState pass `state.optimizer`: got InBackward"):
        tx.bases(state)
