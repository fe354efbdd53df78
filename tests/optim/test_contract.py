"""Every optimizer with small states: by layers, in loops of optax and Flax, on four devices."""

import functools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.interpreters import partial_eval
from jax.sharding import NamedSharding, PartitionSpec
from optim.nearest import to_nearest
from optim.rounded import assert_same_bits

from actjax import LowRank, optim
from actjax.optim.layers import layers_of, split
from train.run.checkpoint import Checkpoints
from train.run.sharding import make_mesh, state_shardings

ADAMW, DOWN = optax.adamw(1e-2, weight_decay=0.1), optax.scale(-1e-2)
SUBSPACE = functools.partial(optim.subspace, optax.scale_by_adam(), 2, gap=1, outer=DOWN)


def matrices(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


# Two programs differ in the bits that moments in 4 bits are rounded by.
TRANSFORMS = {
    "eight_bit": optim.eight_bit(ADAMW, min_size=64),
    "scale_by_adam_8bit": optax.chain(optim.scale_by_adam_8bit(min_size=64), DOWN),
    "masked": optax.masked(optim.eight_bit(ADAMW, min_size=64), matrices),
    "four_bit": optim.four_bit(ADAMW, min_size=64),
    "scale_by_adam_4bit": to_nearest(
        optax.chain(optim.scale_by_adam_4bit(min_size=64, group=32), DOWN)
    ),
    "factored": optax.chain(optim.scale_by_factored_adam(), DOWN),
    "factored, 4 bits": to_nearest(
        optax.chain(optim.scale_by_factored_adam_4bit(min_size=64, group=32), DOWN)
    ),
    "subspace": SUBSPACE(),
    "fira": SUBSPACE(remainder=optim.ScaledRemainder()),
    "rounded": optim.stochastic_rounding(optim.eight_bit(ADAMW, min_size=64)),
}
every = pytest.mark.parametrize("name", TRANSFORMS)


def normal(seed, *shape, dtype="float32"):
    return np.random.default_rng(seed).normal(size=shape).astype(jnp.dtype(dtype))


def stepped(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


# Programs, which are traced and not compiled.


class Stack(nnx.Module):
    """Three layers in one array, and a head."""

    def __init__(self, dtype):
        make = nnx.vmap(lambda rngs: nnx.Linear(8, 16, rngs=rngs, param_dtype=dtype))
        self.layers = make(nnx.Rngs(0).split(3))
        self.head = nnx.Linear(16, 4, use_bias=False, rngs=nnx.Rngs(1), param_dtype=dtype)


def program_of(fun, *args):
    """Returns the equations that the results of a function need, as text."""
    jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(fun(*args)))(*args).jaxpr
    return str(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])


@every
def test_nnx_states_and_optimizers_take_the_steps_of_a_dict(name):
    tx = TRANSFORMS[name]
    is_managed = isinstance(tx, optim.SubspaceTransformation)
    shapes = jax.eval_shape(
        lambda: nnx.state(Stack("bfloat16" if name == "rounded" else "float32"), nnx.Param)
    )

    def in_optax(convert, params, grads):
        params, grads = convert(params), convert(grads)
        return stepped(tx, grads, tx.init(params), params)[0]

    def by_apply(convert, params, grads):
        params, grads = convert(params), convert(grads)
        return optim.apply(tx, grads, optim.init(tx, params), params, refresh=is_managed)

    def in_nnx(convert, params, grads):
        model = nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: Stack("float32"))), params)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        structure = jax.tree.structure(nnx.state(optimizer))
        optimizer.update(model, grads)
        # A checkpoint of a new optimizer and of one after a step have the same arrays.
        assert jax.tree.structure(nnx.state(optimizer)) == structure
        return nnx.state(model, nnx.Param)

    def program(run, convert=lambda x: x):
        return program_of(functools.partial(run, convert), shapes, shapes)

    want = program(in_optax, nnx.to_pure_dict)
    assert program(in_optax) == want
    assert program(in_nnx) == want
    assert program(by_apply) == program(by_apply, nnx.to_pure_dict)


@every
def test_states_of_the_next_step_have_the_same_types(name):
    tx, dtype = TRANSFORMS[name], "bfloat16" if name == "rounded" else "float32"
    params = {"w": normal(0, 9, 16, dtype=dtype), "b": normal(1, 16, dtype=dtype)}
    state = jax.eval_shape(tx.init, params)
    assert jax.eval_shape(functools.partial(stepped, tx), params, state, params)[1] == state


# Numbers.


def assert_alike(got, want):
    """Asserts that arrays are equal up to rounding, after which a tie may take the other code."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.mean(~np.isclose(a, b, rtol=1e-6, atol=1e-7)) < 1e-3


def test_factored_gradients_are_multiplied_out_in_an_optax_loop():
    left, right = normal(0, 9, 2), normal(1, 2, 8)
    small = {
        "factored": optim.scale_by_factored_adam(),
        "8 bits": optim.scale_by_adam_8bit(min_size=1),
        "4 bits": optim.scale_by_adam_4bit(min_size=1),
    }

    @jax.jit
    def run(left, right):
        grads, outcomes = (LowRank(left, right), left @ right), {}
        for name, tx in small.items():
            state = tx.init({"w": grads[1]})
            outcomes[name] = [tx.update({"w": g}, state)[0]["w"] for g in grads]
        return outcomes

    for got, want in run(left, right).values():
        np.testing.assert_allclose(got, want, rtol=1e-5)
    # Bits that differ would be rounded otherwise: both are one program.
    tx = TRANSFORMS["rounded"]

    def update(make, params, left, right):
        state = tx.init(params)
        return tx.update(make(LowRank(left, right)), state, params)

    narrow = [x.astype("bfloat16") for x in (left @ right, left, right)]
    got, want = (
        program_of(functools.partial(update, make), *narrow)
        for make in (lambda g: g, LowRank.dense)
    )
    assert got == want


@pytest.mark.parametrize("name", ["eight_bit", "scale_by_adam_4bit", "rounded"])
def test_apply_takes_the_steps_of_optax_for_each_layer_and_the_rest(name):
    # A layer of 60 numbers stays as it is, although the stack has 180.
    tx, dtype = TRANSFORMS[name], "bfloat16" if name == "rounded" else "float32"
    shapes = {"layers": {"w": (3, 16, 24), "small": (3, 6, 10)}, "head": (24, 8)}
    params, *grads = (
        jax.tree.map(
            lambda shape, seed=seed: normal(seed, *shape, dtype=dtype),
            shapes, is_leaf=lambda x: isinstance(x, tuple),
        )
        for seed in range(3)
    )  # fmt: skip
    grads = jax.tree.map(lambda *x: np.stack(x), *grads)

    def loop(step, params, state, grads):
        body = lambda carry, g: (step(g, *carry[::-1]), None)  # noqa: E731
        return jax.lax.scan(body, (params, state), grads)[0]

    @jax.jit
    def run(params, grads):
        first = optim.init(tx, params)
        applied = loop(functools.partial(optim.apply, tx), params, first, grads)
        step = functools.partial(stepped, tx)
        (layers, rest), (layer_grads, rest_grads) = (
            split(tree, layers_of) for tree in (params, grads)
        )
        layer_grads = jax.tree.map(lambda g: jnp.swapaxes(g, 0, 1), layer_grads)
        each = jax.lax.map(lambda args: loop(step, *args), (layers, first.layers, layer_grads))
        return applied, each, loop(step, rest, first.rest, rest_grads)

    (new, state), layers, rest = jax.device_get(run(params, grads))
    small = state.layers.inner if name == "rounded" else state.layers
    small = small[0] if name == "scale_by_adam_4bit" else small
    moments = jax.tree.leaves(small, is_leaf=lambda x: hasattr(x, "codes"))
    assert sum(hasattr(x, "codes") for x in moments) == 2
    same = assert_same_bits if name == "rounded" else assert_alike
    stacked, others = split(new, layers_of)
    same((stacked, state.layers), layers)
    same((others, state.rest), rest)


# Places.

TRAINED = ("eight_bit", "scale_by_adam_4bit", "rounded")
WIDE = {
    "cut groups": ((16, 512), (None, "fsdp")),
    "ragged": ((16, 600), (None, "fsdp")),
    "rows": ((16, 40), ("fsdp", None)),
}
"""Shapes of weights and their division over four devices, which cut blocks of 256 columns, and in
the second weight groups of 32 columns."""


@functools.cache
def many():
    """Returns weights, states and gradients of several transforms."""
    params = {
        name: {
            key: normal(i, *shape, dtype="bfloat16" if name == "rounded" else "float32")
            for i, (key, (shape, _)) in enumerate(WIDE.items())
        }
        for name in TRAINED
    }
    states = jax.jit(lambda params: {k: TRANSFORMS[k].init(p) for k, p in params.items()})(params)
    return jax.device_put((params, states, jax.tree.map(np.sin, params)))


def step(params, states, grads):
    results = {k: stepped(TRANSFORMS[k], grads[k], states[k], params[k]) for k in TRAINED}
    return tuple({k: result[i] for k, result in results.items()} for i in range(2))


@functools.cache
def after_two_steps():
    params, states, grads = many()
    alone = jax.jit(step)
    for _ in range(2):
        params, states = alone(params, states, grads)
    assert alone._cache_size() == 1
    return jax.device_get((params, states))


def test_four_devices_take_the_steps_of_one():
    mesh = make_mesh("fsdp=4")
    specs = {key: NamedSharding(mesh, PartitionSpec(*spec)) for key, (_, spec) in WIDE.items()}
    params, states, grads = many()
    params, grads = jax.device_put((params, grads), (dict.fromkeys(TRAINED, specs),) * 2)
    states = jax.device_put(states, state_shardings(states, mesh))
    shardings = jax.tree.map(lambda x: x.sharding, (params, states))
    together = jax.jit(step, out_shardings=shardings)
    for _ in range(2):
        params, states = together(params, states, grads)
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(params)} == {4}
    for got, want in zip(jax.device_get((params, states)), after_two_steps(), strict=True):
        assert_same_bits(got["rounded"], want["rounded"])
        assert_alike(got, want)


def like(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def test_checkpoints_on_one_and_four_devices_and_flax_keep_the_bits(tmp_path):
    want = after_two_steps()
    mesh = make_mesh("fsdp=4")
    saved = {
        "one": jax.device_put(want),
        "four": jax.device_put(want, state_shardings(want, mesh)),
    }
    first = Checkpoints(tmp_path, keep=1)
    first.save(2, saved, {}, {})
    first.close()
    again = Checkpoints(tmp_path, keep=1)
    restored, _ = again.restore(2, like(saved), {})
    again.close()
    assert like(restored) == like(saved)
    for tree in restored.values():
        assert_same_bits(tree, want)
    data = flax.serialization.to_bytes(want[1])
    assert_same_bits(flax.serialization.from_bytes(many()[1], data), want[1])
