"""Arguments that pass an operation without a derivative."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from actjax.residuals.graph.one_way import passing_one_way

X = jax.ShapeDtypeStruct((4, 3), "float32")


def _loop(x):
    return lax.while_loop(lambda z: jnp.sum(z) > 1, lambda z: z / 2, x)


@pytest.mark.parametrize(
    ("fun", "want"),
    [
        (lambda a, b: _loop(a) + b, {0: "while"}),
        (lambda a, b: jax.jit(lambda b, a: _loop(a) + b)(b, jnp.sin(a)), {0: "while"}),
        (lambda a, b: lax.cond(b.sum() > 0, lambda a, b: _loop(b), jnp.add, a, b), {1: "while"}),
        (lambda a, b: _loop(lax.stop_gradient(a)) + b, {}),
        (lambda a, b: lax.scan(lambda c, b: (c + b, _loop(b)), a, b[None]), {1: "while"}),
        # The array that enters the loop in one iteration depends on both arguments.
        (
            lambda a, b: lax.scan(lambda c, _: (c[::-1] * b, _loop(c)), a, None, 3),
            dict.fromkeys((0, 1), "while"),
        ),
        # The first array becomes the second, and that the third. Only the third enters the loop.
        (
            lambda a, b: lax.scan(lambda c, _: ((*c[:1], *c[:2]), _loop(c[2])), (a, b, b), None, 3),
            dict.fromkeys((0, 1), "while"),
        ),
        (lambda a, b: jnp.sin(a) + b, {}),
        # No gradient reaches the results of these loops.
        (lambda a, b: (a * lax.stop_gradient(_loop(a)), b[jnp.argmax(_loop(a), 0)]), {}),
        (lambda a, b: a * jax.jit(lambda b: (_loop(b), jnp.sum(b)))(b)[1], {}),
        (lambda a, b: lax.cond(True, lambda a: jnp.argmax(_loop(a)), jnp.argmin, a) + b, {}),
    ],
)  # fmt: skip
def test_arguments_that_pass_an_operation_without_a_derivative(fun, want):
    jaxpr = jax.make_jaxpr(fun)(X, X).jaxpr
    assert passing_one_way(jaxpr) == want
