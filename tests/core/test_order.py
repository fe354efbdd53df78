"""Tests of the order of operations: encode before the next layer, decode when its gradient arrives.

XLA may reorder independent operations. Where it can, it encodes or decodes the arrays of many
layers in one fusion, and holds all of them as floats until then. In layers that are written out one
after the other, data dependences keep the memory low.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import actjax
from actjax.residuals.graph.programs import inlined

CODEC = actjax.Quantized(4, group=8, rounding="stochastic")


def tanh(x, w):
    return jnp.tanh(x @ w)


def attention(x, **options):
    q = x.reshape(1, 16, 2, 4)
    return actjax.attention(q, q, q, merge_heads=True, **options)[0]


OPERATORS = {
    "linear": lambda x, w, **o: actjax.linear(x, w, **o),
    "norm": lambda x, w, **o: actjax.rms_norm(x @ w, np.ones(8), **o),
    "swiglu": lambda x, w, **o: actjax.swiglu(x @ w, x, **o),
    "attention": lambda x, w, **o: attention(x @ w, **o),
    "rebuilt input": lambda x, w, **o: actjax.norm_linear(x, np.ones(8), w, **o),
    "checkpoint": lambda x, w, codec, key: actjax.checkpoint(tanh, codec, key=key)(x, w),
    "residuals": lambda x, w, codec, key: actjax.compress_residuals(
        tanh, codec, activations=0, key=key
    )(x, w),
}
every_operator = pytest.mark.parametrize("name", OPERATORS)


X, WEIGHTS = np.ones((16, 8), np.float32), (np.eye(8, dtype=np.float32),) * 2


@functools.cache
def programs(name):
    """Returns the forward program of two layers, with its residuals, and the backward program."""
    arguments = X, WEIGHTS, jax.random.key(0)
    structure = []

    def forward(x, weights, key):
        def layers(x, weights):
            for i, w in enumerate(weights):
                x = OPERATORS[name](x, w, codec=CODEC, key=jax.random.fold_in(key, i))
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


@every_operator
def test_the_output_waits_for_every_code(name):
    forward, _ = programs(name)
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


@every_operator
def test_no_code_is_read_before_the_gradient_of_the_next_layer(name):
    _, backward = programs(name)
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

    jaxpr = flat(forward, X, WEIGHTS, jax.random.key(0))
    _, second = (e for e in jaxpr.eqns if e.primitive.name == "dot_general")
    assert any(is_packed(x) for x in needed_by(jaxpr, second.outvars[0]))
