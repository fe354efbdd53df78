"""Optimizer states in the memory of the host: the same bits as on the device."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from optim.rounded import assert_same_bits

from actjax import optim
from actjax.optim.states.host_states import HOST, host_sharding
from actjax.optim.stepping import pieces
from train.run.checkpoint import Checkpoints
from train.run.sharding import state_shardings

TX = optim.stochastic_rounding(
    optax.chain(
        optim.four_bit(optim.scale_by_factored_adam(), min_size=64),
        optim.eight_bit(optax.trace(0.9), min_size=64),
        optax.scale(-1e-2),
    )
)
LAYERS, WIDTH = 3, 64


def parameters():
    rng = np.random.default_rng(0)
    layers = rng.normal(size=(LAYERS, WIDTH, WIDTH)) / WIDTH**0.5
    head = rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5
    return {"layers": layers.astype("bfloat16"), "head": head.astype("bfloat16")}


def layer(block, x, _inputs, _slice):
    return x + jnp.tanh(x @ block)


def after(params, x, _inputs):
    return jnp.mean(jnp.square((x @ params["head"]).astype(jnp.float32)))


def in_backward():
    update = optim.in_backward(
        lambda _, x: x, layer, after, TX, layers=lambda p: p["layers"], clip=0.1
    )
    return update.init, lambda *args: update.step(*args)[:2]


def by_apply():
    def step(params, state, x):
        def loss(p):
            body = lambda x, w: (layer(w, x, None, None), None)  # noqa: E731
            return after(p, jax.lax.scan(body, x, p["layers"])[0], None)

        return optim.apply(TX, jax.grad(loss)(params), state, params)

    return functools.partial(optim.init, TX), step


def places(tree):
    return [x.sharding.memory_kind for x in jax.tree.leaves(tree)]


def copied(tree):
    return jax.tree.map(lambda x: jax.device_put(np.array(x), x.sharding), tree)


def test_states_on_the_host_of_four_devices_give_the_same_bits(monkeypatch):
    monkeypatch.setattr(pieces, "LARGEST", WIDTH * WIDTH // 2)
    init, step = in_backward()
    params = parameters()
    state = jax.jit(init)(params)
    x = np.random.default_rng(1).normal(size=(8, WIDTH)).astype("bfloat16")
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
    params, state = jax.device_put((params, state), state_shardings((params, state), mesh))
    moved = optim.to_host(state, smallest=1)
    assert places(moved).count(HOST) == 4  # Codes of both moments, of layers and of pieces.
    results = []
    for now in (state, moved):
        shardings = jax.tree.map(lambda a: a.sharding, (params, now))
        program = jax.jit(step, donate_argnums=1, out_shardings=shardings)
        weights, before, now = params, places(now), copied(now)
        for _ in range(2):
            weights, now = program(weights, now, x)
        assert places(now) == before
        results.append(jax.device_get((weights, now)))
    assert_same_bits(*results)


def test_a_state_on_the_host_of_one_device_is_saved_and_restored_with_equal_bits(tmp_path):
    init, step = by_apply()
    params, x = parameters(), np.ones((8, WIDTH), "bfloat16")
    step = jax.jit(step)
    state = jax.jit(init)(params)
    on_device = step(params, state, x)
    params, state = step(params, optim.to_host(state, smallest=1), x)
    assert HOST in places(state)
    assert_same_bits((params, state), on_device)
    first = Checkpoints(tmp_path, keep=1)
    first.save(1, (params, state), {}, {})
    first.close()
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), (params, state)
    )
    again = Checkpoints(tmp_path, keep=1)
    restored, _ = again.restore(1, like, {})
    again.close()
    assert places(restored) == places((params, state))
    assert_same_bits(restored, (params, state))


def test_a_device_without_memory_of_the_host_is_named():
    class Device:
        device_kind = "odd chip"

        def addressable_memories(self):
            return [types.SimpleNamespace(kind="device")]

    sharding = types.SimpleNamespace(memory_kind="device", device_set={Device()})
    with pytest.raises(ValueError, match="odd chip reaches the memories device, and not pinned_ho"):
        host_sharding(sharding)
