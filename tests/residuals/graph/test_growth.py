"""Errors grow along cheap operations as their derivatives say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from actjax.residuals.graph.growth import SPREADS, Growth
from actjax.residuals.graph.programs import inlined
from actjax.residuals.graph.rebuilding import is_cheap

X, W = np.ones((64, 32), "float32"), np.ones((32, 64), "float32")


def program(fun):
    closed = inlined(jax.make_jaxpr(fun)(X, W), custom=True)
    return closed.jaxpr, Growth(closed.jaxpr, is_cheap, SPREADS[0])


def growth_of(fun) -> float:
    """Returns the error of `fun(x @ w)` from a code of the product, over that of its own code."""
    jaxpr, growth = program(lambda x, w: fun(x @ w))
    product = next(e.outvars[0] for e in jaxpr.eqns if e.primitive.name == "dot_general")
    (result,) = jaxpr.outvars
    region = [e.outvars[0] for e in reversed(jaxpr.eqns)]
    region = region[region.index(result) : region.index(product) + 1]
    errors = growth.errors(region, growth.equal_weights([result])[result], ())
    return errors[product] / errors[result]


@pytest.mark.parametrize(
    ("fun", "least", "most"),
    [
        (lambda h: 3 * h + 2, 0.99, 1.01),
        (jnp.abs, 1.9, 2.1),  # Half the range, and the same error.
        (lambda h: h - h.mean(1, keepdims=True), 0.95, 1.1),
        (jnp.sin, 5, 10),  # A range of 24 for one of 2, with a slope of 0.7.
        (lambda h: jnp.sin(30 * h), 150, 300),
        (lambda h: jnp.exp(h - jnp.logaddexp(h, h[::-1])), 8, jnp.inf),
        (lambda h: jnp.where(h > 0, h, -1e9), 0.5, 2.5),
    ],
    ids=["scale", "abs", "mean", "sine", "frequency", "log space", "mask"],
)
def test_growth_of_an_error(fun, least, most):
    assert least <= growth_of(fun) <= most


def test_numbers_that_stand_for_infinity_are_found():
    for lowest in (-1e9, -jnp.inf, jnp.finfo("float32").min):
        jaxpr, growth = program(lambda x, w, low=lowest: jnp.where(x > 0, x, low) @ w)
        masked = next(e.outvars[0] for e in jaxpr.eqns if e.primitive.name == "select_n")
        assert growth.limit(masked) == 1e6
        assert growth.limit(jaxpr.outvars[0]) is None


def test_samples_do_not_depend_on_other_arrays():
    _, alone = program(lambda x, w: jnp.tanh(x @ w))
    _, other = program(
        lambda x, w: (jnp.tanh(x @ w), jax.random.normal(jax.random.key(0), (3,)))[0]
    )
    first, second = (
        [v for x, v in g._values.items() if getattr(x.aval, "shape", None) == (64, 64)]
        for g in (alone, other)
    )
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
