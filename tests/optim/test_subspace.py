"""GaLore, CompAct and "Ours+": against NumPy, against optax, through changes of the subspace."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from optim.optim_oracles import galore_adam, rotate_moments, top_left_singular_vectors

import actjax
from actjax import LowRank, optim
from models import Storage

pytestmark = pytest.mark.usefixtures("quick_compile")

ADAM = {"b1": 0.9, "b2": 0.999, "eps": 1e-8}
RATE = 0.1


def outer(weight_decay: float = 0.0):
    return optax.chain(optax.add_decayed_weights(weight_decay), optax.scale_by_learning_rate(RATE))


def subspace(rank: int, **options):
    weight_decay = options.pop("weight_decay", 0.0)
    return optim.subspace(optax.scale_by_adam(**ADAM), rank, outer=outer(weight_decay), **options)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float64)


# A basis that does not change.


def problem(d: int = 12, n: int = 8, tokens: int = 30):
    """A loss whose gradient is different at every step, x and w."""
    x, w, target = normal(0, 10, tokens, d), normal(1, d, n), normal(2, 10, tokens, n)

    def loss(params, i):
        z = actjax.linear(x[i], params["w"], codec=actjax.RandomizedSVD(4), key=jax.random.key(0))
        return jnp.sum(jnp.tanh(z - target[i]) ** 2)

    def plain(params, i):
        return jnp.sum(jnp.tanh(x[i] @ params["w"] - target[i]) ** 2)

    return loss, plain, {"w": w}


def ten_steps(tx, loss, params, **options):
    """Ten steps as a user runs them: inputs stored in the basis, no gradient but the projected."""
    state = tx.init(params)

    @jax.jit
    def step(params, state, i):
        _, grads = actjax.value_and_grad(loss, bases=tx.bases(state), **options)(params, i)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    history = []
    for i in range(10):
        params, state = step(params, state, i)
        history.append(params["w"])
    return history, state


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("source", ["gradient", "random"])
def test_ten_steps_are_those_of_galore_in_numpy(source, weight_decay):
    loss, plain, params = problem()
    tx = subspace(4, scale=0.25, weight_decay=weight_decay, source=source)
    (basis,) = tx.init(params).bases.values()
    got, _ = ten_steps(tx, loss, params)
    # The oracle has a trajectory of its own: each of its gradients is at its own weights.
    grads: list = []
    for i in range(10):
        history = galore_adam(
            params["w"], grads, basis, lr=RATE, scale=0.25, weight_decay=weight_decay, **ADAM
        )
        at = history[-1] if history else params["w"]
        grads.append(jax.grad(plain)({"w": jnp.asarray(at)}, i)["w"])
    want = galore_adam(
        params["w"], grads, basis, lr=RATE, scale=0.25, weight_decay=weight_decay, **ADAM
    )
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("x64")
def test_ten_steps_are_those_of_optax_where_it_projects_the_input_side():
    loss, plain, params = problem(d=12, n=8)  # It projects the larger side: d rows of 12.
    rival = optax.contrib.galore(
        RATE, rank=4, update_proj_gap=100, scale=0.25, base_optimizer=optax.scale_by_adam(**ADAM)
    )
    state, theirs, history = rival.init(params), params, []
    for i in range(10):
        updates, state = rival.update(jax.grad(plain)(theirs, i), state, theirs)
        theirs = optax.apply_updates(theirs, updates)
        history.append(theirs["w"])
    projector = state[0].projector["w"]
    assert projector.shape == (12, 4)

    tx = subspace(4, scale=0.25)
    ours, mine = params, tx.init(params)
    mine = tx.refresh(jax.grad(plain)(params, 0), mine, params)
    # The same subspace, of which a sketch found all but the noise, and then the very same basis.
    overlap = np.linalg.svd(mine.bases["w"].T @ projector)[1]
    assert overlap.min() > 0.99
    mine = mine._replace(bases={"w": projector})
    for i in range(10):
        _, grads = actjax.value_and_grad(loss, bases=tx.bases(mine))(ours, i)
        updates, mine = tx.update(grads, mine, ours)
        ours = optax.apply_updates(ours, updates)
        np.testing.assert_allclose(ours["w"], history[i], rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("side", "d", "n"), [("output", 12, 8), ("smaller", 12, 8),
                                              ("smaller", 8, 12)])  # fmt: skip
def test_other_sides_are_plain_galore_on_dense_gradients(side, d, n):
    _, plain, params = problem(d, n)
    tx = subspace(4, scale=0.5, side=side)
    state, weights, grads = tx.init(params), params, []
    (basis,) = state.bases.values()
    assert tx.bases(state).arrays == {}
    for i in range(10):
        grads.append(jax.grad(plain)(weights, i)["w"])
        updates, state = tx.update({"w": grads[-1]}, state, weights)
        weights = optax.apply_updates(weights, updates)
    oracle_side = "input" if side == "smaller" and d < n else "output"
    want = galore_adam(params["w"], grads, basis, lr=RATE, scale=0.5, side=oracle_side, **ADAM)
    np.testing.assert_allclose(weights["w"], want[-1], rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("x64")
def test_what_is_not_projected_is_updated_in_full():
    params = {"w": normal(0, 12, 8), "b": normal(1, 8), "other": normal(2, 5, 6)}
    grads = {"w": normal(3, 12, 8), "b": normal(4, 8), "other": normal(5, 5, 6)}
    tx = subspace(4, groups={"w": "w"})
    plain = optax.chain(optax.scale_by_adam(**ADAM), outer())
    updates, _ = tx.update(grads, tx.init(params), params)
    expected, _ = plain.update(grads, plain.init(params), params)
    np.testing.assert_allclose(updates["b"], expected["b"], rtol=1e-12)
    np.testing.assert_allclose(updates["other"], expected["other"], rtol=1e-12)
    assert np.linalg.matrix_rank(updates["w"]) == 4


@pytest.mark.usefixtures("x64")
def test_8_bit_inputs_err_within_their_bound():
    loss, _, params = problem()
    exact, _ = ten_steps(subspace(4), loss, params)
    rounded, _ = ten_steps(subspace(4, bits=8), loss, params)
    assert 0 < np.abs(rounded[-1] - exact[-1]).max() < 0.1 * np.abs(exact[-1] - params["w"]).max()


# Where bases come from.


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("form", ["factored", "dense"])
def test_a_new_basis_is_that_of_the_leading_singular_vectors(form):
    # Three weights of one input, singular values that fall.
    d, k = 20, 4
    left = normal(0, d, 6) * 10.0 ** -jnp.arange(6)
    factored = {name: LowRank(left, normal(i, 6, n)) for i, (name, n) in enumerate(
        {"q": 9, "k": 5, "v": 5}.items(), start=1)}  # fmt: skip
    dense = {name: g.dense() for name, g in factored.items()}
    params = {name: jnp.zeros_like(g) for name, g in dense.items()}
    tx = subspace(k, groups=dict.fromkeys(params, "q"))
    grads = factored if form == "factored" else dense
    state = tx.refresh(grads, tx.init(params), params)
    assert list(state.bases) == ["q"]
    got = np.asarray(state.bases["q"])
    want = top_left_singular_vectors(np.concatenate(list(dense.values()), axis=1), k)
    np.testing.assert_allclose(got.T @ got, np.eye(k), atol=1e-12)
    np.testing.assert_allclose(got @ got.T, want @ want.T, atol=1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("size", [0.0, 1.0, 1e300, 1e-300])
@pytest.mark.parametrize("shape", [np.ones((12, 8)), np.eye(12, 8)], ids=["rank 1", "rank 8"])
def test_a_basis_is_orthonormal_whatever_the_gradient(size, shape):
    grad = jnp.asarray(size * shape)
    tx, params = subspace(4), {"w": jnp.zeros((12, 8))}
    for one in (grad, LowRank(grad @ jnp.eye(8), jnp.eye(8))):
        basis = tx.refresh({"w": one}, tx.init(params), params).bases["w"]
        np.testing.assert_allclose(basis.T @ basis, np.eye(4), atol=1e-10)


def test_random_bases_have_the_moments_of_compact_and_follow_the_seed():
    params = {"w": jnp.zeros((400, 300))}
    tx = optim.subspace(optax.scale_by_adam(), 100, source="random", seed=3)
    state = tx.init(params)
    basis = np.asarray(state.bases["w"])
    # Entries N(0, 1/k): 40,000 of them give their variance to one percent. S Sᵀ is I on average.
    assert basis.var() == pytest.approx(1 / 100, rel=0.03)
    assert np.trace(basis @ basis.T) / 400 == pytest.approx(1, rel=0.03)
    again = optim.subspace(optax.scale_by_adam(), 100, source="random", seed=3).init(params)
    other = optim.subspace(optax.scale_by_adam(), 100, source="random", seed=4).init(params)
    np.testing.assert_array_equal(again.bases["w"], basis)
    assert np.abs(other.bases["w"] - basis).max() > 0.1
    drawn = tx.refresh(None, state, params)
    assert np.abs(drawn.bases["w"] - basis).max() > 0.1


# What a change does to moments.


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize("policy", ["keep", "reset", "rotate"])
@pytest.mark.parametrize("name", ["w", "nu"])
def test_moments_are_kept_reset_or_rotated(policy, side, name):
    params, grads = {name: jnp.zeros((12, 8))}, {name: normal(0, 12, 8)}
    tx = subspace(4, moments=policy, side=side)
    _, state = tx.update(grads, tx.init(params), params)
    new = tx.refresh({name: normal(1, 12, 8)}, state, params)
    m, v = state.inner.mu[name], state.inner.nu[name]
    expected = {"keep": (m, v), "reset": (0 * m, 0 * v)}.get(policy)
    if expected is None:
        bases = state.bases[name], new.bases[name]
        transposed = side == "output"
        moments = (m.T, v.T) if transposed else (m, v)
        expected = rotate_moments(*moments, *bases)
        expected = tuple(x.T for x in expected) if transposed else expected
    np.testing.assert_allclose(new.inner.mu[name], expected[0], atol=1e-12)
    np.testing.assert_allclose(new.inner.nu[name], expected[1], atol=1e-12)
    assert int(new.inner.count) == int(state.inner.count)


def test_moments_in_8_bits_are_rotated_too():
    params = {"w": jnp.zeros((128, 128))}
    grads = [{"w": jax.random.normal(jax.random.key(i), (128, 128))} for i in range(2)]
    moved = {}
    for name, wrap in {"full": lambda tx: tx, "eight": optim.eight_bit}.items():
        tx = optim.subspace(wrap(optax.scale_by_adam()), 32, moments="rotate")
        _, state = tx.update(grads[0], tx.init(params), params)
        new = tx.refresh(grads[1], state, params)
        moved[name] = new.inner if name == "full" else new.inner.inner
    assert moved["eight"].mu["w"].codes.dtype == jnp.int8
    for field in ("mu", "nu"):
        full, eight = getattr(moved["full"], field)["w"], getattr(moved["eight"], field)["w"]
        # Rounded once before and once after, each within 0.7% of the largest of a block.
        error = np.abs(eight.decode() - full).max() / np.abs(full).max()
        assert error < 0.1


# A model.


def storage(rank: int) -> Storage:
    codec = actjax.RandomizedSVD(rank)
    return Storage(codec, codec, codec, codec)


def model_loss(model, tokens, targets, key, rank: int = 6):
    return model.loss(tokens, targets, storage=storage(rank), key=key, compute_dtype="float32")


@functools.cache
def groups():
    key = jax.random.key(0)
    return actjax.input_groups(model_loss, tiny.decoder(), *tiny.batch(), key)


def test_weights_of_one_input_share_a_basis_and_its_stored_copy():
    model = tiny.decoder()
    tx = optim.subspace(optax.scale_by_adam(), 6, groups=groups())
    state = optim.init(tx, model)
    names = {"layers.attention.k", "layers.attention.o", "layers.mlp.down", "layers.mlp.gate"}
    assert set(state.layers.bases) == names
    assert state.layers.bases["layers.mlp.down"].shape == (3, 44, 6)
    # Each layer has bases of its own.
    first, second, _ = state.layers.bases["layers.mlp.down"]
    assert np.abs(first - second).max() > 0.1
    explained = actjax.explain(
        actjax.with_bases(model_loss, tx.bases(state)), model, *tiny.batch(), jax.random.key(0)
    )
    linear = [r for r in explained.residuals if r.operator == "linear"]
    assert {r.codec for r in linear if r.name != "head"} == {"Basis(rank=6)"}
    assert {r.name for r in linear} >= {"attention_in", "attention_out", "mlp_in", "mlp_out"}


@pytest.mark.parametrize("options", [{}, {"source": "random", "bits": 8}])
def test_a_model_trains_through_changes_of_its_subspace(options):
    model = tiny.decoder()
    tx = optim.subspace(
        optax.scale_by_adam(), 6, groups=groups(), outer=optax.scale_by_learning_rate(2e-2),
        scale=1.0, **options,
    )  # fmt: skip
    state, data = optim.init(tx, model), tiny.batch()

    @functools.partial(jax.jit, static_argnames="refresh")
    def step(model, state, key, refresh):
        if refresh and tx.source == "random":
            state = optim.redraw(tx, state, model)
        in_gradient = refresh and tx.source == "gradient"
        bases = None if in_gradient else tx.bases(state)
        loss, grads = actjax.value_and_grad(model_loss, bases=bases)(model, *data, key)
        model, state = optim.apply(tx, grads, state, model, refresh=in_gradient)
        return model, state, loss

    losses = []
    for i in range(12):
        model, state, loss = step(model, state, jax.random.key(i), i % 6 == 0)
        losses.append(float(loss))
    assert losses[-1] < 0.6 * losses[0]
    assert int(state.layers.step[0]) == 12


def test_some_layers_can_be_refreshed_and_not_the_others():
    model = tiny.decoder()
    tx = optim.subspace(optax.scale_by_adam(), 6, groups=groups())
    state = optim.init(tx, model)
    _, grads = actjax.value_and_grad(model_loss)(model, *tiny.batch(), jax.random.key(0))
    due = jnp.array([True, False, True])
    _, new = jax.jit(lambda d: optim.apply(tx, grads, state, model, refresh=d))(due)
    for name, old in state.layers.bases.items():
        changed = np.abs(new.layers.bases[name] - old).max((1, 2)) > 1e-3
        np.testing.assert_array_equal(changed, due)
    drawn = optim.subspace(optax.scale_by_adam(), 6, groups=groups(), source="random")
    state = optim.init(drawn, model)
    new = optim.redraw(drawn, state, model, due=np.array([False, True, False]))
    for name, old in state.layers.bases.items():
        changed = np.abs(new.layers.bases[name] - old).max((1, 2)) > 1e-3
        np.testing.assert_array_equal(changed, [False, True, False])


def test_no_square_matrix_is_decomposed_in_a_refresh():
    # Of a weight [48, 40] and factors of rank 4: nothing of 40 columns goes through LAPACK.
    params = {"w": jnp.zeros((48, 40))}
    tx = optim.subspace(optax.scale_by_adam(), 4)
    grads = {"w": LowRank(jnp.ones((48, 4)), jnp.ones((4, 40)))}
    state = tx.init(params)
    text = str(jax.make_jaxpr(lambda g, s: tx.refresh(g, s, params))(grads, state))
    assert "svd" not in text
    assert "[48,40]" not in text.replace(" ", "")


# Bad input.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, r"`rank` of subspace must be an integer >= 1, got 0"),
        ({"rank": 2.5}, r"`rank` of subspace must be an integer >= 1, got 2.5"),
        ({"gap": 0}, r"`gap` of subspace must be an integer >= 1, got 0"),
        ({"moments": "drop"}, r"`moments` of subspace must be one of .*'rotate'.*'drop'"),
        ({"source": "svd"}, r"`source` of subspace must be one of .*'svd'"),
        ({"side": "left"}, r"`side` of subspace must be one of .*'left'"),
        ({"bits": 5}, r"`bits` of Bases must be one of \(4, 8, 16\), got 5"),
        ({"scale": 0}, r"`scale` of subspace must be a finite number above 0, got 0"),
        ({"scale": "a"}, r"`scale` of subspace must be a finite number above 0, got 'a'"),
        ({"scale": float("nan")}, r"`scale` of subspace must be .* got nan"),
        ({"seed": 1.5}, r"`seed` of subspace must be an integer >= 0, got 1.5"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        optim.subspace(optax.scale_by_adam(), **{"rank": 4, **options})


def test_bad_ranks_groups_and_gradients_are_named():
    params = {"w": jnp.zeros((12, 8)), "b": jnp.zeros(8)}
    adam = optax.scale_by_adam()
    with pytest.raises(
        ValueError, match=r"`rank` 13 of subspace is above the 12 dimensions of `w`"
    ):
        optim.subspace(adam, 13).init(params)
    with pytest.raises(ValueError, match=r"`groups` names `b` of shape \(8,\), which is no matrix"):
        optim.subspace(adam, 4, groups={"b": "b"}).init(params)
    with pytest.raises(
        ValueError, match=r"`groups` of subspace names \['v'\], but the parameters are: b, w"
    ):
        optim.subspace(adam, 4, groups={"v": "v"}).init(params)
    tx = optim.subspace(adam, 4)
    state = tx.init(params)
    with pytest.raises(ValueError, match="`grads` of refresh is None"):
        tx.refresh(None, state, params)
    thin = {"w": LowRank(jnp.ones((12, 3)), jnp.ones((3, 8))), "b": jnp.zeros(8)}
    with pytest.raises(ValueError, match=r"a basis of rank 4 for `w` cannot be taken .* of rank 3"):
        tx.refresh(thin, state, params)
    random = optim.subspace(adam, 4, source="random")
    with pytest.raises(ValueError, match="random bases are drawn before the gradient"):
        random.refresh(thin, random.init(params), params)


def test_what_is_no_transform_or_no_groups_is_named():
    for options in ({"inner": optax.adam}, {"inner": None}, {"outer": 0.1}):
        (name,) = options
        with pytest.raises(TypeError, match=rf"`{name}` must be an optax transform"):
            optim.subspace(**{"inner": optax.scale_by_adam(), "rank": 4, **options})
    for groups in (["w"], {"w": 3}):
        with pytest.raises(TypeError, match=r"`groups` of subspace must map paths of weights"):
            optim.subspace(optax.scale_by_adam(), 4, groups=groups)


def test_weights_of_one_basis_have_as_many_rows():
    tx = optim.subspace(optax.scale_by_adam(), 2, groups={"a": "g", "b": "g"})
    with pytest.raises(ValueError, match=r"gives `a` and `b` one basis, but .* \(6,\) and \(7,\)"):
        tx.init({"a": jnp.zeros((6, 5)), "b": jnp.zeros((7, 5))})


def test_an_inner_transform_that_wants_parameters_is_told_where_it_belongs():
    params = {"w": jnp.zeros((12, 8))}
    tx = optim.subspace(optax.adamw(1e-3), 4)
    with pytest.raises(ValueError, match="params") as caught:
        tx.update(params, tx.init(params), params)
    assert any("belongs in `outer`" in note for note in caught.value.__notes__)


def test_a_gradient_in_the_old_basis_gives_no_new_one():
    params = {"w": jnp.ones((12, 8))}
    tx = optim.subspace(optax.scale_by_adam(), 4)
    state = tx.init(params)
    grads = {"w": LowRank(state.bases["w"], jnp.ones((4, 8)), "w")}
    with pytest.raises(ValueError, match=r"gradient of `w` was taken in the basis that is to be"):
        tx.refresh(grads, state, params)


@pytest.mark.parametrize("moments", ["keep", "rotate"])
def test_a_gradient_that_is_no_number_does_not_outlive_its_step(moments):
    params = {"a": jnp.ones((3, 12, 8)), "b": jnp.ones((12, 8))}
    groups = {"a": "a", "b": "b"}
    tx = optim.subspace(
        optax.apply_if_finite(optax.scale_by_adam(), 5), 4, groups=groups, moments=moments
    )
    state = tx.init(params)
    grads = {"a": jax.random.normal(jax.random.key(0), (3, 12, 8))}
    grads["b"] = jnp.full((12, 8), jnp.nan)
    # One matrix of a stack, and one that is no stack.
    grads["a"] = grads["a"].at[1, 2, 3].set(jnp.inf)
    new = tx.refresh(grads, state, params)
    np.testing.assert_array_equal(new.bases["b"], state.bases["b"])
    np.testing.assert_array_equal(new.bases["a"][1], state.bases["a"][1])
    assert np.abs(new.bases["a"][0] - state.bases["a"][0]).max() > 0.1
    updates, after = tx.update(grads, new, params)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves((updates, after)))


def test_bases_are_those_of_a_state():
    params = {"layers": {"w": jnp.ones((3, 12, 8))}}
    tx = optim.subspace(optax.scale_by_adam(), 4, groups={"layers.w": "layers.w"})
    update = optim.in_backward(lambda p, x: x, lambda p, x, i, s: x, lambda p, x, i: x.sum(), tx)
    state = update.init(params)
    assert tx.bases(state.optimizer).arrays["layers.w"].shape == (3, 12, 4)
    with pytest.raises(TypeError, match=r"InBackwardState it is `state.optimizer`: got InBackward"):
        tx.bases(state)


def test_a_state_is_plain_arrays():
    tx = optim.subspace(optim.eight_bit(optax.scale_by_adam()), 6, groups=groups())
    state = optim.init(tx, tiny.decoder())
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
    assert not any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(state))
    assert dataclasses.is_dataclass(actjax.Bases({}))
