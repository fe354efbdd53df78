"""The optimizer in the backward pass, compared with an ordinary step with the same clipping."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim.nearest import to_nearest

import actjax
from actjax import optim

DEPTH, WIDTH, TOKENS, CLASSES, STEPS = 4, 24, 40, 12, 10
ADAMW = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10), weight_decay=0.1)


def parameters(tied: bool = False, depth: int = DEPTH, width: int = WIDTH, dtype: str = "float32"):
    rng = np.random.default_rng(0)
    layers = {
        "w1": rng.normal(size=(depth, width, 2 * width)) / width**0.5,
        "w2": rng.normal(size=(depth, 2 * width, width)) / (2 * width) ** 0.5,
        "scale": np.ones((depth, width)),
    }
    embedding = rng.normal(size=(CLASSES, width))
    head = None if tied else rng.normal(size=(width, CLASSES)) / width**0.5
    params = {"embedding": embedding, "layers": layers, "head": head}
    return jax.tree.map(lambda x: x.astype(dtype), params)


def data(step: int):
    tokens = np.random.default_rng(step).integers(0, CLASSES, TOKENS, "int32")
    return {"tokens": tokens, "labels": np.roll(tokens, 1), "shift": np.float32(0.1)}


def layer_keys(step: int, depth: int = DEPTH):
    return jax.random.split(jax.random.key(100 + step), depth)


def before(params, inputs):
    return params["embedding"][inputs["tokens"]]


def layer_function(first=actjax.Exact(), second=actjax.Exact()):
    def layer(block, x, inputs, key):
        h = actjax.rms_norm(x, block["scale"]) + inputs["shift"]
        h = jnp.tanh(actjax.linear(h, block["w1"], codec=first, key=key))
        return x + actjax.linear(h, block["w2"], codec=second, key=key)

    return layer


def after(params, x, inputs):
    head = params["embedding"].T if params["head"] is None else params["head"]
    return actjax.cross_entropy(x, head, inputs["labels"])


def last_output(layer, params, inputs, keys):
    def body(x, xs):
        block, key = xs
        return layer(block, x, inputs, key), None

    return jax.lax.scan(body, before(params, inputs), (params["layers"], keys))[0]


def whole_loss(layer, params, inputs, keys):
    return after(params, last_output(layer, params, inputs, keys), inputs)


def estimated_norms(of_after, seen, typical):
    """Returns the estimate of the gradient's norm for each layer, from the first to the last.

    Args:
      of_after: norm of the gradient of `after`.
      seen: norms of the layers in the order of the backward pass, [layers].
      typical: typical norms of the layers, and of what the embedding adds; zeros in the first step.
    """
    results = []
    for known in range(1, DEPTH + 1):
        growth = jnp.prod(seen[:known] / typical[:known]) ** (1 / known)
        later = sum(typical[known:] ** 2) * growth**2
        as_large = jnp.mean(seen[:known] ** 2) * (DEPTH + 1 - known)
        unknown = jnp.where(typical[0] > 0, later, as_large)
        results.append(jnp.sqrt(of_after**2 + sum(seen[:known] ** 2) + unknown))
    return jnp.stack(results[::-1])


def ordinary(layer, tx, params, clip, refreshes=()):
    """Runs steps that compute a gradient of all weights and clip it by the same rule."""

    def scaled(tree, reference):
        factor = jnp.where(reference > clip, clip / reference, 1.0)
        return jax.tree.map(lambda g: g * factor, tree, is_leaf=lambda g: hasattr(g, "dense"))

    def step(carry, inputs, keys, refresh):
        params, state, typical = carry
        in_bases = isinstance(tx, optim.SubspaceTransformation) and not refresh
        loss, grads = actjax.value_and_grad(
            functools.partial(whole_loss, layer), bases=tx.bases(state) if in_bases else None
        )(params, inputs, keys)
        norm = actjax.global_norm(grads)
        layers = grads.pop("layers")
        of_layers, of_rest = jax.vmap(actjax.global_norm)(layers), actjax.global_norm(grads)
        x = last_output(layer, params, inputs, keys)
        of_after = actjax.global_norm(jax.grad(after)(params, x, inputs))
        of_embedding = jnp.sqrt(jnp.maximum(of_rest**2 - of_after**2, 0))
        seen = jnp.concatenate([of_layers[::-1], of_embedding[None]])
        of_layers, of_rest = estimated_norms(of_after, seen[:-1], typical), norm
        grads = scaled(grads, of_rest) | {"layers": jax.vmap(scaled)(layers, of_layers)}
        params, state = optim.apply(tx, grads, state, params, refresh=refresh)
        typical = jnp.where(typical > 0, typical**0.8 * seen**0.2, seen)
        return (params, state, typical), loss

    return run(step, (params, optim.init(tx, params), jnp.zeros(DEPTH + 1)), refreshes)


def in_backward(layer, tx, params, clip, refreshes=()):
    update = optim.in_backward(before, layer, after, tx, clip=clip)

    def step(carry, inputs, keys, refresh):
        *carry, loss, _ = update.step(*carry, inputs, keys, refresh)
        return tuple(carry), loss

    return run(step, (params, update.init(params)), refreshes)


def run(step, carry, refreshes):
    """Returns the parameters, the losses and the last state of ten steps, in one loop."""
    inputs = jax.tree.map(lambda *x: np.stack(x), *map(data, range(STEPS)))
    keys = jnp.stack([layer_keys(i) for i in range(STEPS)])
    due = np.isin(np.arange(STEPS), refreshes)

    def body(carry, x):
        inputs, keys, is_due = x
        if not refreshes:
            return step(carry, inputs, keys, False)
        steps = [functools.partial(step, refresh=refresh) for refresh in (True, False)]
        return jax.lax.cond(is_due, *steps, carry, inputs, keys)

    (params, state, *_), losses = jax.lax.scan(body, carry, (inputs, keys, due))
    return params, losses, state


SUBSPACE = optim.subspace(
    optax.scale_by_adam(), 5, outer=optax.scale_by_learning_rate(1e-2),
    groups={"layers.w1": "layers.w1"},
)  # fmt: skip
FIRA = optim.subspace(
    optim.scale_by_factored_adam(), 5, outer=optax.scale_by_learning_rate(1e-2), side="smaller",
    groups={"layers.w1": "layers.w1", "layers.w2": "layers.w2"},
    remainder=optim.ScaledRemainder(),
)  # fmt: skip


def kinds(params):
    """Returns the name of a transform in `SMALL` for each parameter."""
    return jax.tree.map(lambda x: "4 bits" if x.ndim == 2 else "8 bits", params)


# Stochastic rounding follows the last bits of a number, in which the two programs differ.
SMALL = to_nearest(
    optax.chain(
        optax.partition(
            {
                "4 bits": optim.four_bit(optim.scale_by_factored_adam(), min_size=64),
                "8 bits": optim.eight_bit(optax.scale_by_adam(), min_size=16),
            },
            kinds,
        ),
        optax.scale(-1e-3),
    )
)
PROJECTED, SVD = (
    jax.checkpoint(layer_function(actjax.RandomProjection(5)), prevent_cse=False),
    layer_function(actjax.RandomizedSVD(5)),
)

# By name: transform, layer, clip, whether embedding and head are tied, refreshes, tolerance.
RUNS = {
    "unclipped, factored": (ADAMW, PROJECTED, math.inf, True, (), 1e-10),
    # The norm is float32 and decides how far a step is clipped.
    "subspace": (SUBSPACE, SVD, 0.1, False, (0, 6), 1e-6),
    "fira": (FIRA, layer_function(), 0.1, True, (), 1e-6),
    # A moment halfway between two levels may be rounded either way.
    "small states": (SMALL, layer_function(), 0.1, False, (), 3e-3),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", RUNS)
def test_ten_steps_equal_those_of_the_ordinary_step(name):
    tx, layer, clip, tied, refreshes, atol = RUNS[name]

    @jax.jit
    def both(params):
        return [run_all(layer, tx, params, clip, refreshes) for run_all in (in_backward, ordinary)]

    ours, theirs = both(parameters(tied, dtype="float64"))
    np.testing.assert_allclose(ours[1], theirs[1], rtol=1e-4)
    for a, b in zip(jax.tree.leaves(ours[0]), jax.tree.leaves(theirs[0]), strict=True):
        np.testing.assert_allclose(a, b, atol=atol)
    if clip == math.inf:
        assert ours[2].clip_error == 0


@pytest.mark.usefixtures("x64")
def test_micro_batches_give_the_steps_of_the_whole_batch():
    # The mean over labels of two micro-batches is the mean over all: their shares are one half.
    params, keys = parameters(dtype="float64"), layer_keys(0)
    whole = {k: v for k, v in data(0).items() if k != "shift"}
    micro = {k: v.reshape(2, -1) for k, v in whole.items()} | {"shift": np.full(2, 0.1)}
    whole["shift"] = np.array(0.1)
    make = functools.partial(optim.in_backward, before, layer_function(), after, ADAMW, clip=0.1)
    shares = jnp.array([0.5, 0.5])

    def steps(update, *arguments):
        def step(carry, _):
            *carry, loss, moved = update.step(*carry, *arguments)
            return tuple(carry), (loss, moved)

        (new, state), measured = jax.lax.scan(step, (params, update.init(params)), None, 2)
        return new, state.grad_norm, measured

    two = make(accumulate=2)
    np.testing.assert_array_equal(two._check_batches(micro, None), shares)
    got, want = jax.jit(
        lambda: (
            steps(two, micro, jnp.stack([keys, keys]), False, shares),
            steps(make(), whole, keys),
        )
    )()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)


def test_codes_are_stored_and_no_gradient_of_all_weights():
    depth, width = 12, 128
    params = parameters(depth=depth, width=width)
    layer = jax.checkpoint(layer_function(), prevent_cse=False)
    update = optim.in_backward(before, layer, after, ADAMW)
    arguments = params, jax.eval_shape(update.init, params), data(0), layer_keys(0, depth)
    program = jax.jit(update.step, donate_argnums=(0, 1)).lower(*arguments).compile()
    stats = program.memory_analysis()
    weights = sum(x.nbytes for x in jax.tree.leaves(params["layers"]))
    residual_stream = depth * TOKENS * width * 4
    # A dense gradient alone would be as large as the weights; this is the gradient of few layers.
    assert stats.temp_size_in_bytes < residual_stream + 0.8 * weights
    assert stats.alias_size_in_bytes > 2.9 * weights


def test_a_growing_gradient_is_clipped_in_the_same_step():
    # Plain descent adds the clipped gradient to the parameters.
    update = optim.in_backward(before, layer_function(), after, optax.sgd(1.0), clip=1e-3)
    params, keys = parameters(), layer_keys(0)
    step, state = jax.jit(update.step), jax.jit(update.init)(params)
    first = step(params, state, data(0), keys)
    _, state, _, moved = first
    # In a first step, layers that are not known count as much as the others; the next step is
    # clipped as a whole.
    assert moved < 2e-3
    assert 0.01 < state.clip_error < 1
    # Parts that were smaller before: their growth is seen in the first of them.
    for factor in (1, 1 / 16, 1e-6):
        smaller = state._replace(typical=np.asarray(state.typical) * np.float32(factor))
        _, new, _, moved = step(params, smaller, data(0), keys)
        assert moved == pytest.approx(1e-3, rel=1e-5)
        assert factor < 0.01 or new.clip_error < 1e-5
    # After a gradient that was not finite, a step is clipped as the first.
    for bad in (np.nan, np.inf):
        lost = update.init(params)._replace(typical=np.full(DEPTH + 2, bad, "float32"))
        jax.tree.map(np.testing.assert_array_equal, step(params, lost, data(0), keys), first)
    # A layer whose gradient was always zero, or nearly so, does not make a step of inf or nan.
    for odd in (0, 1e-38):
        small = state._replace(typical=state.typical.at[1].set(odd))
        assert 0 < step(params, small, data(0), keys)[3] < 2e-3
