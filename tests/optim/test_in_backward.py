"""The optimizer in the backward pass, against the ordinary step with the same clipping rule."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import actjax
from actjax import optim

DEPTH, WIDTH, TOKENS, CLASSES = 4, 24, 40, 12
ADAMW = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10), weight_decay=0.1)


def parameters(tied: bool = False):
    width, keys = WIDTH, jax.random.split(jax.random.key(0), 4)
    layers = {
        "w1": jax.random.normal(keys[0], (DEPTH, width, 2 * width)) / width**0.5,
        "w2": jax.random.normal(keys[1], (DEPTH, 2 * width, width)) / (2 * width) ** 0.5,
        "scale": jnp.ones((DEPTH, width)),
    }
    embedding = jax.random.normal(keys[2], (CLASSES, width))
    head = None if tied else jax.random.normal(keys[3], (width, CLASSES)) / width**0.5
    return {"embedding": embedding, "layers": layers, "head": head}


def data(step: int):
    tokens = jax.random.randint(jax.random.key(step), (TOKENS,), 0, CLASSES)
    return {"tokens": tokens, "labels": jnp.roll(tokens, 1), "shift": jnp.float32(0.1)}


def before(params, inputs):
    return params["embedding"][inputs["tokens"]]


def layer_function(codec):
    def layer(block, x, inputs, key):
        h = actjax.rms_norm(x, block["scale"]) + inputs["shift"]
        h = jnp.tanh(actjax.linear(h, block["w1"], codec=codec, key=key))
        return x + actjax.linear(h, block["w2"], codec=codec, key=key)

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


def ordinary(layer, tx, params, steps, clip, clip_by, refreshes=()):
    """The step that keeps a gradient of all weights, with the same rule of clipping."""
    state, last, losses = optim.init(tx, params), None, []

    @functools.partial(jax.jit, static_argnames="refresh")
    def step(params, state, last, inputs, keys, refresh):
        in_bases = isinstance(tx, optim.SubspaceTransformation) and not refresh
        loss, grads = actjax.value_and_grad(
            functools.partial(whole_loss, layer), bases=tx.bases(state) if in_bases else None
        )(params, inputs, keys)
        norm = actjax.global_norm(grads)

        def scaled(tree, reference):
            factor = jnp.where(reference > clip, clip / reference, 1.0)
            return jax.tree.map(lambda g: g * factor, tree, is_leaf=lambda g: hasattr(g, "dense"))

        parts = [jax.tree.map(lambda g, i=i: g[i], grads["layers"]) for i in range(DEPTH)]
        rest = {name: g for name, g in grads.items() if name != "layers"}
        layer_norms = [actjax.global_norm(part) for part in parts]
        x = last_output(layer, params, inputs, keys)
        seen = jnp.array(
            [actjax.global_norm(jax.grad(after)(params, x, inputs)), *layer_norms[::-1]]
        )
        if clip_by == "last_norm":
            references = [jnp.zeros(()) if last is None else last[0]] * (DEPTH + 1)
        elif clip_by == "layer_norm":
            references = [*layer_norms, actjax.global_norm(rest)]
        else:
            references = [estimate(seen, last, DEPTH - i) for i in range(DEPTH)] + [norm]
        *parts, rest = map(scaled, [*parts, rest], references)
        grads = rest | {"layers": jax.tree.map(lambda *g: jnp.stack(g), *parts)}
        params, state = optim.apply(tx, grads, state, params, refresh=refresh)
        return params, state, (norm, seen), loss

    def estimate(seen, last, count):
        known = jnp.linalg.norm(seen[: count + 1])
        if last is None:
            return known
        norm, before = last
        return jnp.maximum(known, norm * known / jnp.linalg.norm(before[: count + 1]))

    for i in range(steps):
        keys = jax.random.split(jax.random.key(100 + i), DEPTH)
        params, state, last, loss = step(params, state, last, data(i), keys, i in refreshes)
        losses.append(float(loss))
    return params, state, losses


def in_backward(layer, tx, params, steps, clip, clip_by, refreshes=()):
    update = optim.in_backward(before, layer, after, tx, clip=clip, clip_by=clip_by)
    state, losses = update.init(params), []
    step = jax.jit(update.step, static_argnames="refresh")
    for i in range(steps):
        keys = jax.random.split(jax.random.key(100 + i), DEPTH)
        params, state, loss, _ = step(params, state, data(i), keys, refresh=i in refreshes)
        losses.append(float(loss))
    return params, state, losses


def assert_alike(ours, theirs, atol):
    np.testing.assert_allclose(ours[2], theirs[2], rtol=1e-4)
    for a, b in zip(jax.tree.leaves(ours[0]), jax.tree.leaves(theirs[0]), strict=True):
        np.testing.assert_allclose(a, b, atol=atol)


@pytest.mark.usefixtures("x64", "quick_compile")
@pytest.mark.parametrize(
    ("clip", "clip_by", "tied"),
    [
        (math.inf, "estimate", False),
        (0.1, "estimate", True),
        (0.1, "last_norm", True),
        (0.1, "layer_norm", True),
    ],
)
def test_ten_steps_are_those_of_the_ordinary_step(clip, clip_by, tied):
    params = jax.tree.map(lambda x: x.astype(jnp.float64), parameters(tied))
    arguments = layer_function(actjax.Exact()), ADAMW, params, 10, clip, clip_by
    ours, theirs = in_backward(*arguments), ordinary(*arguments)
    # In float64, but for the norm, which is kept in float32: it says how far a step is clipped.
    assert_alike(ours, theirs, atol=1e-10 if math.isinf(clip) else 1e-7)


FORMS = {
    "factored": (ADAMW, actjax.RandomizedSVD(5), ()),
    "8-bit states": (optim.eight_bit(ADAMW, min_size=64), actjax.Exact(), ()),
    "random projection": (ADAMW, actjax.RandomProjection(5), ()),
    "subspace": (
        optim.subspace(
            optax.scale_by_adam(), 5, outer=optax.scale_by_learning_rate(1e-2),
            groups={"layers.w1": "layers.w1", "layers.w2": "layers.w2"},
        ),
        actjax.RandomizedSVD(5),
        (0, 6),
    ),
}  # fmt: skip


@pytest.mark.usefixtures("x64", "quick_compile")
@pytest.mark.parametrize(("form", "checkpointed"), zip(FORMS, itertools.cycle([True, False])))
def test_factored_subspace_and_8_bit_steps_are_those_of_the_ordinary_step(form, checkpointed):
    tx, codec, refreshes = FORMS[form]
    layer = layer_function(codec)
    if checkpointed:
        layer = jax.checkpoint(layer, prevent_cse=False)
    params = jax.tree.map(lambda x: x.astype(jnp.float64), parameters())
    arguments = layer, tx, params, 10, 0.1, "last_norm", refreshes
    # The norm is kept in float32. An 8-bit moment between two levels may be rounded either way.
    atol = 3e-3 if form == "8-bit states" else 1e-6
    assert_alike(in_backward(*arguments), ordinary(*arguments), atol)


def test_codes_are_kept_and_no_gradient_of_all_weights():
    depth, width = 12, 128
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "embedding": jnp.ones((CLASSES, width)),
        "head": jnp.ones((width, CLASSES)),
        "layers": {
            "w1": jax.random.normal(keys[0], (depth, width, 2 * width)),
            "w2": jax.random.normal(keys[1], (depth, 2 * width, width)),
            "scale": jnp.ones((depth, width)),
        },
    }
    layer = jax.checkpoint(layer_function(actjax.Exact()), prevent_cse=False)
    update = optim.in_backward(before, layer, after, ADAMW)
    arguments = params, update.init(params), data(0), jax.random.split(jax.random.key(0), depth)
    program = jax.jit(update.step, donate_argnums=(0, 1)).lower(*arguments).compile()
    stats = program.memory_analysis()
    weights = sum(x.nbytes for x in jax.tree.leaves(params["layers"]))
    residual_stream = depth * TOKENS * width * 4
    # A dense gradient alone would be as large as the weights; here it is a few layers' worth.
    assert stats.temp_size_in_bytes < residual_stream + 0.8 * weights
    assert stats.alias_size_in_bytes > 2.9 * weights


def test_bad_input_is_named():
    three = before, layer_function(actjax.Exact()), after
    with pytest.raises(ValueError, match=r"`clip` of in_backward must be a number above 0, got 0"):
        optim.in_backward(*three, ADAMW, clip=0)
    with pytest.raises(ValueError, match=r"`clip_by` of in_backward must be one of .*'global'"):
        optim.in_backward(*three, ADAMW, clip_by="global")
    update = optim.in_backward(*three, ADAMW)
    state = update.init(parameters())
    with pytest.raises(ValueError, match=r"`refresh` is for actjax.optim.subspace"):
        update.step(parameters(), state, data(0), jax.random.split(jax.random.key(0), DEPTH), True)
    with pytest.raises(
        ValueError, match=r"`per_layer` must have a leading axis of 4 layers, got one of shape \(3,"
    ):
        update.step(parameters(), state, data(0), jax.random.split(jax.random.key(0), 3))
    with pytest.raises(TypeError, match=r"`tx` must be an optax transform, .* Call it"):
        optim.in_backward(*three, optax.adamw)
    with pytest.raises(TypeError, match=r"`before` must be a function, got None"):
        optim.in_backward(None, *three[1:], ADAMW)
    with pytest.raises(ValueError, match=r"`state` must be what `init`, .*got LayerwiseState"):
        update.step(parameters(), state.optimizer, data(0))
    other = optim.in_backward(*three, optax.sgd(1.0, 0.9)).init(parameters())
    with pytest.raises(ValueError, match=r"`state` must be what `actjax.optim.init"):
        update.step(parameters(), other, data(0))


@pytest.mark.parametrize("change", [lambda x: x * jnp.ones(3), lambda x: x.astype(int)])
def test_a_loss_that_is_no_floating_point_scalar_is_refused(change):
    last = lambda *args: change(after(*args))  # noqa: E731
    update = optim.in_backward(before, layer_function(actjax.Exact()), last, ADAMW)
    keys = jax.random.split(jax.random.key(0), DEPTH)
    with pytest.raises(ValueError, match="`after` must return a floating point scalar"):
        update.step(parameters(), update.init(parameters()), data(0), keys)


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("clip_by", ["estimate", "last_norm"])
def test_of_a_norm_that_was_no_number_nothing_follows(clip_by):
    update = optim.in_backward(
        before, layer_function(actjax.Exact()), after, ADAMW, clip=1e-3, clip_by=clip_by
    )
    params, keys = parameters(), jax.random.split(jax.random.key(0), DEPTH)
    state = update.init(params)
    step = jax.jit(update.step)
    want = step(params, state, data(0), keys)
    for bad in (jnp.nan, jnp.inf):
        lost = state._replace(grad_norm=jnp.float32(bad), squares=jnp.full(DEPTH + 1, bad))
        jax.tree.map(np.testing.assert_array_equal, step(params, lost, data(0), keys), want)


@pytest.mark.usefixtures("quick_compile")
def test_a_gradient_that_has_grown_is_clipped_in_the_same_step():
    """Plain descent, so that what is added to the parameters is the clipped gradient."""
    tx = optax.sgd(1.0)
    update = optim.in_backward(before, layer_function(actjax.Exact()), after, tx, clip=1e-3)
    params, keys = parameters(), jax.random.split(jax.random.key(0), DEPTH)
    step = jax.jit(update.step)
    _, state, _, moved = step(params, update.init(params), data(0), keys)
    # Of a first step only lower bounds of the norm are known; the next is clipped as a whole.
    assert moved < 2e-3
    assert step(params, state, data(0), keys)[3] == pytest.approx(1e-3, rel=1e-5)
    # All parts a thousandth of what they are: the last step says nothing of this one's size.
    small = state._replace(grad_norm=state.grad_norm / 1e3, squares=state.squares / 1e6)
    assert step(params, small, data(0), keys)[3] == pytest.approx(1e-3, rel=1e-5)
