"""Tests of actjax/residuals/graph/equations.py: running one equation, and the body of a call.

`test_scopes.py` and `test_residuals_kept.py` test that scopes and lines stay.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from actjax.residuals.graph.equations import called
from actjax.residuals.graph.programs import run_inlined

X = np.random.default_rng(0).standard_normal((4, 3)).astype("float32")


@jax.custom_vjp
def tripled(x):
    return jnp.sin(x)


tripled.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cos, g: (3 * g * cos,))


def equation(fun, *args) -> core.JaxprEqn:
    return jax.make_jaxpr(fun)(*args).eqns[0]


def test_an_equation_keeps_the_settings_of_its_trace():
    def fun(key):
        with jax.threefry_partitionable(False):
            return jax.random.bits(key, (2, 3))

    key = jax.random.key(0)
    with jax.threefry_partitionable(True):
        program = jax.make_jaxpr(fun)(key)
        np.testing.assert_array_equal(run_inlined(program, [key])[0], fun(key))


def test_the_body_of_a_call():
    jitted = equation(jax.jit(jnp.sin), X)
    body = called(jitted)
    assert [eqn.primitive.name for eqn in body.eqns] == ["sin"]
    custom = equation(tripled, X)
    assert called(custom) is None
    assert [eqn.primitive.name for eqn in called(custom, custom=True).eqns] == ["sin"]
    others = equation(jnp.sin, X), equation(jax.checkpoint(jnp.sin), X)
    loop = equation(lambda x: lax.scan(lambda c, _: (c, c), x, None, 2), X)
    for eqn in (*others, loop):
        assert called(eqn) is None
        assert called(eqn, custom=True) is None
