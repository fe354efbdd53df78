"""Tests of the order of operations: encode before the next layer, decode when its gradient arrives.

XLA may reorder independent operations. Where it can, it encodes or decodes the arrays of many
layers in one fusion, and holds all of them as floats until then. In layers that are written out one
after the other, data dependences keep the memory low.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core

import actjax
from actjax.residuals.graph.programs import inlined

CODEC = actjax.Quantized(4, group=8, rounding="stochastic")


def by_linear(x, w, key):
    return actjax.linear(x, w, codec=CODEC, key=key)


def by_norm(x, w, key):
    return actjax.rms_norm(x @ w, jnp.ones(8), codec=CODEC, key=key)


def by_swiglu(x, w, key):
    return actjax.swiglu(x @ w, x, codec=CODEC, key=key)


def by_attention(x, w, key):
    q = (x @ w).reshape(1, 16, 2, 4)
    return actjax.attention(q, q, q, codec=CODEC, key=key, merge_heads=True)[0]


def by_rebuilt_input(x, w, key):
    (y,) = actjax.norm_linear(x, jnp.ones(8), (w,), codec=CODEC, key=key)
    return y


def by_checkpoint(x, w, key):
    return actjax.checkpoint(lambda x, w: jnp.tanh(x @ w), CODEC, key=key)(x, w)


def by_residuals(x, w, key):
    return actjax.compress_residuals(lambda x, w: jnp.tanh(x @ w), CODEC, activations=0, key=key)(
        x, w
    )


LAYERS = (
    by_linear,
    by_norm,
    by_swiglu,
    by_attention,
    by_rebuilt_input,
    by_checkpoint,
    by_residuals,
)


def programs(layer):
    """Returns the forward program of two layers, with its residuals, and the backward program."""
    arguments = jnp.ones((16, 8)), (jnp.eye(8), jnp.eye(8)), jax.random.key(0)
    structure = []

    def forward(x, weights, key):
        def layers(x, weights):
            for i, w in enumerate(weights):
                x = layer(x, w, jax.random.fold_in(key, i))
            return x

        y, pullback = jax.vjp(layers, x, weights)
        leaves, treedef = jax.tree.flatten(pullback)
        structure.append(treedef)
        return y, leaves

    def backward(leaves, dy):
        return jax.tree.unflatten(structure[0], leaves)(dy)

    y, leaves = jax.eval_shape(forward, *arguments)
    return flat(forward, *arguments), flat(backward, leaves, y)


def flat(fun, *args):
    return inlined(jax.make_jaxpr(fun)(*args), custom=True).jaxpr


def is_packed(x):
    return isinstance(x, core.Var) and x.aval.dtype == jnp.uint8 and x.aval.size >= 32


def needed_by(jaxpr, variable):
    """Returns all variables that a variable depends on."""
    makers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    needed, waiting = set(), [variable]
    while waiting:
        x = waiting.pop()
        if isinstance(x, core.Var) and x not in needed:
            needed.add(x)
            waiting += makers[x].invars if x in makers else []
    return needed


@pytest.mark.parametrize("layer", LAYERS)
def test_the_output_waits_for_every_code(layer):
    forward, _ = programs(layer)
    makers = {out: eqn for eqn in forward.eqns for out in eqn.outvars}
    y, *leaves = forward.outvars
    needed = needed_by(forward, y)
    codes = [x for x in leaves if is_packed(x)]
    assert len(codes) >= 2
    for code in codes:
        maker = makers[code]
        assert maker.primitive.name == "name"
        maker = makers[maker.invars[0]]
        assert maker.primitive.name == "optimization_barrier"
        assert any(x in needed for x in maker.outvars)


@pytest.mark.parametrize("layer", LAYERS)
def test_no_code_is_read_before_the_gradient_of_the_next_layer(layer):
    _, backward = programs(layer)
    *leaves, dy = backward.invars
    assert any(map(is_packed, leaves))
    behind = {dy}
    for eqn in backward.eqns:
        if any(isinstance(x, core.Var) and x in behind for x in eqn.invars):
            behind.update(eqn.outvars)
        else:
            assert not any(map(is_packed, eqn.invars)), eqn


def test_inside_a_function_a_layer_waits_for_the_codes_of_earlier_layers():
    def two(x, weights):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x

    def layers(x, weights, key):
        return actjax.compress_residuals(two, CODEC, activations=0, key=key)(x, weights)

    def forward(x, weights, key):
        y, pullback = jax.vjp(lambda *a: layers(*a, key), x, weights)
        return y, jax.tree.leaves(pullback)

    jaxpr = flat(forward, jnp.ones((16, 8)), (jnp.eye(8), jnp.eye(8)), jax.random.key(0))
    _, second = (e for e in jaxpr.eqns if e.primitive.name == "dot_general")
    assert any(is_packed(x) for x in needed_by(jaxpr, second.outvars[0]))
