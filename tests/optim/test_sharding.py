"""Optimizers on four devices: the same values as on one, and few bytes gathered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optim.nearest import to_nearest

from actjax import optim
from train.planning.collectives import bytes_by_kind
from train.run.sharding import state_shardings

pytestmark = pytest.mark.usefixtures("x64")

ADAMW = optax.adamw(1e-2, weight_decay=0.1)
LAYERS, WIDTH, TOKENS = 4, 64, 8


def parameters():
    """Returns two stacks of weights, and one weight that is read before and after the layers."""
    rng = np.random.default_rng(0)
    w1, w2 = rng.normal(size=(2, LAYERS, WIDTH, WIDTH)) / WIDTH**0.5
    tied = rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5
    return {"tied": tied, "layers": {"w1": w1, "w2": w2}}


def before(params, x):
    return x @ params["tied"]


def layer(block, x, _inputs=None, _slice=None):
    return x + jnp.tanh(x @ block["w1"]) @ block["w2"]


def after(params, x, _inputs=None):
    return jnp.sum((x @ params["tied"].T) ** 2)


def whole_loss(params, x):
    x, _ = jax.lax.scan(lambda x, w: (layer(w, x), None), before(params, x), params["layers"])
    return after(params, x)


def apply_step():
    tx = optim.eight_bit(ADAMW, min_size=64)

    def step(params, state, x):
        return optim.apply(tx, jax.grad(whole_loss)(params, x), state, params)

    return functools.partial(optim.init, tx), step


def in_backward_step():
    # To nearest: sums over devices differ in their last bits, which stochastic rounding follows.
    moments = to_nearest(optim.four_bit(optax.scale_by_adam(), min_size=64, group=16))
    tx = optax.chain(moments, optax.scale_by_learning_rate(1e-2))
    update = optim.in_backward(before, layer, after, tx, clip=0.1)
    return update.init, lambda *args: update.step(*args)[:2]


STEPS = {"apply": apply_step, "in_backward": in_backward_step}


@functools.cache
def mesh():
    return jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))


def placed(tree):
    return jax.device_put(tree, state_shardings(tree, mesh()))


@pytest.mark.parametrize("name", STEPS)
def test_four_devices_step_as_one_and_gather_no_stack_of_layers(name):
    init, step = STEPS[name]()
    params, x = parameters(), np.random.default_rng(1).normal(size=(TOKENS, WIDTH))
    one = params, jax.jit(init)(params)
    four = placed(one)
    rows = jax.device_put(x, NamedSharding(mesh(), PartitionSpec("fsdp")))
    shardings = jax.tree.map(lambda a: a.sharding, four)
    # Layouts are pinned on one device only: the mesh is that of the arguments, or of the context.
    alone = jax.jit(step).lower(*one, x)
    with jax.set_mesh(mesh()):
        under_mesh = jax.jit(step).lower(*one, x)
    together = jax.jit(step, out_shardings=shardings).lower(*four, rows)
    programs = alone, under_mesh, together
    assert ["LayoutConstraint" in p.as_text() for p in programs] == [True, False, False]
    alone, together = alone.compile(), together.compile()
    for _ in range(2):
        one, four = alone(*one, x), together(*four, rows)
    for a, b in zip(jax.tree.leaves(four[0]), jax.tree.leaves(one[0]), strict=True):
        # In float64, except for the norm that decides how far `in_backward` clips.
        np.testing.assert_allclose(a, b, atol=1e-7)
    gathered = bytes_by_kind(together.as_text())["all-gather"]
    # Forward pass, backward pass and update may gather each weight once. With a layout pinned, each
    # stack of weights and moments is gathered once for each layer.
    assert gathered <= 3 * sum(w.nbytes for w in jax.tree.leaves(params))
