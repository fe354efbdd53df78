"""Refreshes: where new bases come from, moments that stay, and updates without a refresh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim.optim_oracles import top_left_singular_vectors
from optim.projected import first_state, normal, subspace

from actjax import LowRank, optim
from actjax.optim.checks import raise_if

# Refreshes of a plain optax transform.

GAP, STEPS = 2, 5


def gradients(steps):
    """Returns the gradients of all steps, with a leading axis of them."""
    w = np.stack([normal(i, 6, 5).astype("float32") for i in steps])
    return {"w": w, "b": np.ones((len(steps), 5), "float32")}


def by_hand(tx, grads):
    """Returns the updates of `w`, with a refresh wherever one is due."""
    params = {"w": np.zeros((6, 5), "float32")}

    def step(state, x):
        i, g = x[0], {"w": x[1]}
        gradient = None if tx.source == "random" else g
        refreshed = lambda: tx.refresh(gradient, state, params)  # noqa: E731
        updates, state = tx.update(g, jax.lax.cond(i % GAP == 0, refreshed, lambda: state), params)
        return state, updates["w"]

    state = tx.subspace.init_from(params, jax.random.key(0))
    return jax.lax.scan(step, state, (jnp.arange(len(grads)), grads))[1]


def updates_of(tx, grads, params):
    """Returns the updates of `w` in a plain optax loop."""

    def step(state, g):
        updates, state = tx.update(g, state, params)
        return state, updates["w"]

    return jax.lax.scan(step, tx.init(params), grads)[1]


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
    wrappers = WRAPPERS if source == "gradient" else {"alone": WRAPPERS["alone"]}

    @jax.jit
    def run(grads):
        results = {
            name: updates_of(wrap(tx), grads, params) for name, (wrap, _) in wrappers.items()
        }
        clipped = jnp.clip(grads["w"], -0.5, 0.5)
        by_hands = jax.lax.map(lambda g: by_hand(tx, g), jnp.stack([grads["w"], clipped]))
        return results, *by_hands

    results, plain, clipped = jax.tree.map(np.asarray, run(gradients(range(STEPS))))
    for name, (_, factor) in wrappers.items():
        want = clipped if name == "chain" else plain
        np.testing.assert_allclose(results[name], factor * want, rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_gradient_of_zeros_gives_no_basis_and_the_next_one_does():
    tx = optim.subspace(optax.scale_by_adam(), 2, gap=GAP)
    gradient = jax.tree.map(lambda x: x[0], gradients([1]))

    @jax.jit
    def run(gradient):
        first = tx.init(gradient)
        updates, state = tx.update(jax.tree.map(jnp.zeros_like, gradient), first)
        return updates, [tx.update(gradient, s)[1].bases for s in (state, first)]

    updates, (bases, want) = run(gradient)
    assert not any(np.any(x) for x in jax.tree.leaves(updates))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), bases, want)


def test_a_subspace_refreshes_itself_on_the_sums_of_multi_steps():
    tx = optim.subspace(optax.scale_by_adam(), 2, gap=GAP)
    params, grads = {"w": np.zeros((6, 5), "float32")}, gradients(range(2 * STEPS))["w"]

    @jax.jit
    def run(grads):
        results = updates_of(optax.MultiSteps(tx, 2), {"w": grads}, params)
        return results, by_hand(tx, (grads[::2] + grads[1::2]) / 2)

    results, want = map(np.asarray, run(grads))
    np.testing.assert_array_equal(results[::2], np.zeros((STEPS, 6, 5)))
    np.testing.assert_allclose(results[1::2], want, rtol=1e-4, atol=1e-5)


def test_hyperparameters_are_injected_into_a_subspace_itself():
    make = optax.inject_hyperparams(optim.subspace, static_args=("rank", "gap", "bits", "seed"))
    params, grads = {"w": np.zeros((6, 5), "float32")}, {"w": np.ones((6, 5), "float32")}
    tx = make(inner=optax.scale(1.0), rank=2, scale=0.5)

    @jax.jit
    def run(params, scale):
        state = tx.init(params)
        first = tx.update(grads, state, params)[0]["w"]
        state.hyperparams["scale"] = scale
        return first, tx.update(grads, state, params)[0]["w"]

    half, full = run(params, np.float32(1.0))
    np.testing.assert_allclose(full, 2 * np.asarray(half), rtol=1e-6)


@pytest.mark.parametrize("source", ["gradient", "random"])
def test_a_factored_gradient_where_a_refresh_is_due_is_an_error(source):
    params = {"w": normal(0, 6, 5).astype("float32")}
    tx = optim.subspace(optax.scale_by_adam(), 2, source=source, gap=GAP)
    chain = optax.chain(optim.clip_by_global_norm(1.0), tx)
    grads = "None" if source == "random" else "grads"
    remedy = (
        rf"(?s)refresh of the subspace is due.*tx\.refresh\({grads}, .*every 2 steps.*optim.init"
    )

    @jax.jit
    def init(params):
        state = chain.init(params)
        refreshed = tx.refresh(None if source == "random" else params, state[1], params)
        return state, (state[0], refreshed)

    @jax.jit
    def update(state):
        in_basis = LowRank(state[1].bases["w"], jnp.ones((2, 5), "float32"), "w")
        return chain.update({"w": in_basis}, state, params)[1]

    due, state = init(params)
    with pytest.raises(jax.errors.JaxRuntimeError, match=remedy):
        jax.block_until_ready(update(due))
    for _ in range(GAP):
        state = jax.block_until_ready(update(state))
    assert int(state[1].step) == GAP
    with pytest.raises(jax.errors.JaxRuntimeError, match=remedy):
        jax.block_until_ready(update(state))


def test_an_error_of_a_call_that_is_not_compiled_is_raised_at_once():
    raise_if(np.False_, "a refresh is due")
    with pytest.raises(ValueError, match="a refresh is due"):
        raise_if(np.True_, "a refresh is due")


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
    dense = {name: left @ g.right for name, g in factored.items()}
    tx = subspace(k, groups=dict.fromkeys(dense, "q"))
    want = top_left_singular_vectors(np.concatenate(list(dense.values()), axis=1), k)

    @jax.jit
    def bases_of(*gradients):
        return [tx.refresh(grads, first_state(tx, dense), dense).bases for grads in gradients]

    for bases in bases_of(factored, dense):
        assert list(bases) == ["q"]
        got = np.asarray(bases["q"])
        np.testing.assert_allclose(got.T @ got, np.eye(k), atol=1e-12)
        np.testing.assert_allclose(got @ got.T, want @ want.T, atol=1e-6)


@pytest.mark.usefixtures("x64")
def test_a_basis_is_orthonormal_for_any_size_and_rank_of_the_gradient():
    tx, params = subspace(4), {"w": np.zeros((12, 8))}
    sizes = 0.0, 1.0, 1e300, 1e-300

    @jax.jit
    def bases(grads):
        def refreshed(grad):
            state, forms = first_state(tx, params), (grad, LowRank(grad, jnp.eye(8)))
            return [tx.refresh({"w": g}, state, params).bases["w"] for g in forms]

        return jax.lax.map(refreshed, grads)

    grads = np.stack([size * x for x in (np.ones((12, 8)), np.eye(12, 8)) for size in sizes])
    for basis in map(np.asarray, bases(grads)):
        want = np.broadcast_to(np.eye(4), (len(grads), 4, 4))
        np.testing.assert_allclose(basis.mT @ basis, want, atol=1e-10)


def test_random_bases_have_the_moments_of_compact_and_follow_the_seed():
    params = {"w": np.zeros((400, 300), "float32")}

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


def test_every_layer_has_its_own_basis_and_gets_a_new_one():
    weights = {"layers": {"w": np.random.default_rng(0).normal(size=(3, 12, 8)).astype("float32")}}
    groups = {"layers.w": "w"}
    given, random = (
        optim.subspace(optax.scale_by_adam(), 4, source=source, groups=groups)
        for source in ("gradient", "random")
    )

    @jax.jit
    def bases(params):
        state = optim.init(given, params)
        _, refreshed = optim.apply(given, params, state, params, refresh=True)
        first = optim.init(random, params)
        states = state, refreshed, first, optim.redraw(random, first, params)
        return [x.layers.bases["w"] for x in states]

    for old, new in zip(*[iter(map(np.asarray, bases(weights)))] * 2, strict=True):
        for basis in (old, new):
            first, second, third = basis
            assert min(np.abs(first - second).max(), np.abs(second - third).max()) > 0.1
        assert np.all(np.abs(new - old).max((1, 2)) > 1e-3)


def test_a_refresh_keeps_moments_and_a_gradient_that_is_not_finite_keeps_its_basis():
    params = {"a": np.ones((3, 12, 8), "float32"), "b": np.ones((12, 8), "float32")}
    inner = optax.apply_if_finite(optim.eight_bit(optax.scale_by_adam(), min_size=8), 5)
    tx = optim.subspace(inner, 4, groups={"a": "a", "b": "b"})
    first, grads = (
        {name: normal(seed, *x.shape).astype("float32") for name, x in params.items()}
        for seed in range(2)
    )
    # One matrix of a stack, and one that is not in a stack.
    grads["a"][1, 2, 3], grads["b"][:] = np.inf, np.nan

    @jax.jit
    def step(first, grads):
        _, state = tx.update(first, tx.subspace.init_from(params, jax.random.key(0)), params)
        new = tx.refresh(grads, state, params)
        return state, new, tx.update(grads, new, params)

    state, new, after = step(first, grads)
    assert np.any(state.inner.inner_state.inner.mu["b"].codes)
    jax.tree.map(np.testing.assert_array_equal, new.inner, state.inner)
    old_a, new_a = np.asarray(state.bases["a"]), np.asarray(new.bases["a"])
    np.testing.assert_array_equal(new.bases["b"], state.bases["b"])
    np.testing.assert_array_equal(new_a[1], old_a[1])
    assert np.abs(new_a[0] - old_a[0]).max() > 0.1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after))
