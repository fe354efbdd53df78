"""A traced function computes what the function computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

from actjax.residuals.graph.programs import Search, close, inlined, run_inlined

X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3)), "float32")


C = jnp.asarray(np.random.default_rng(1).standard_normal(3), "float32")


def primitives(fun, *args) -> list[str]:
    return [eqn.primitive.name for eqn in jax.make_jaxpr(fun)(*args).eqns]


def same(got, want) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_closed_program_takes_its_constants_as_inputs():
    closed = close(lambda tree: {"y": jnp.sin(tree["x"]) * C, "none": None}, ({"x": X},))
    assert [c.shape for c in closed.constants] == [C.shape]
    assert [a.shape for a in closed.arguments] == [X.shape]
    run = closed.run(closed.constants, closed.arguments)
    same(closed.unflatten(run), {"y": jnp.sin(X) * C, "none": None})
    same(closed.run([2 * C], [X])[0], jnp.sin(X) * (2 * C))


def test_a_function_is_traced_once():
    calls = []
    closed = close(lambda x: calls.append(1) or jnp.sin(x), (X,))
    closed.run(closed.constants, closed.arguments)
    assert calls == [1]


@pytest.mark.parametrize(
    ("fun", "args"),
    [
        (lambda: jnp.sin(C), ()),
        (lambda x: (), (X,)),
        (lambda x: x, (X,)),
        (lambda x: (x, 2.0, C, np.arange(3)), (X,)),
        (lambda x, n, flag: jnp.sin(x) * n + flag, (X, 2, True)),
        (lambda key: jax.random.normal(key, (3,)), (jax.random.key(0),)),
        (lambda tree: [tree["a"][0], tree["none"]], ({"a": (X, X), "none": None},)),
        (lambda x: x + jnp.arange(3), (X[:0],)),
    ],
    ids=["nothing in", "nothing out", "identity", "constants", "numbers", "key", "tree", "empty"],
)
def test_odd_functions_are_closed(fun, args):
    closed = close(fun, args)
    got = closed.unflatten(closed.run(closed.constants, closed.arguments))
    # The function runs operation by operation, the program fused: they may differ by a rounding.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, fun(*args))


def test_tracers_may_be_constants():
    def outer(c, x):
        closed = close(lambda y: jnp.sin(y) * c, (x,))
        assert any(constant is c for constant in closed.constants)
        return closed.run(closed.constants, [x])[0].sum()

    want = jax.grad(lambda c: (jnp.sin(X) * c).sum())(C)
    np.testing.assert_allclose(jax.grad(outer)(C, X), want, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(outer))(C, X), want, rtol=1e-6)
    each = jax.vmap(outer, (0, None))(jnp.stack([C, 2 * C]), X)
    np.testing.assert_allclose(each[1], 2 * each[0], rtol=1e-6)


@jax.custom_vjp
def tripled(x):
    return jnp.sin(x)


tripled.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cos, g: (3 * g * cos,))


def test_custom_rules_stay_under_a_scan():
    def layer(x, w):
        def fun(x):
            return tripled(x * w)

        closed = close(fun, (x,))
        return closed.run(closed.constants, closed.arguments)[0], None

    got = jax.grad(lambda ws: lax.scan(layer, X, ws)[0].sum())(C)
    want = jax.grad(lambda ws: lax.scan(lambda x, w: (tripled(x * w), None), X, ws)[0].sum())(C)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def nested(x):
    inner = jax.jit(lambda y: jnp.sin(y) * C)
    table = np.arange(3.0, dtype="float32")
    y = jax.jit(lambda x: (inner(x) + table, jax.nn.relu(x), 2.0))(x)
    return [*y, lax.cond(x[0, 0] > 0, jnp.cos, jnp.exp, x), lax.sort_key_val(x, x)[1]]


def test_calls_are_inlined():
    program = jax.make_jaxpr(nested)(X)
    assert "jit" in primitives(nested, X)
    for custom in (False, True):
        run = core.jaxpr_as_fun(inlined(program, custom=custom))
        names = primitives(run, X)
        assert not {"jit", "pjit", "closed_call", "core_call"} & {*names}
        assert ("custom_jvp_call" in names) == (not custom)
        assert "cond" in names
        jax.tree.map(
            # Operation by operation or fused.
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), run(X), nested(X)
        )  # fmt: skip


def test_constants_of_a_program_are_read():
    program = jax.make_jaxpr(lambda x: jax.jit(lambda y: y * C + 1)(x))(X)
    np.testing.assert_allclose(run_inlined(program, [X])[0], X * C + 1, rtol=1e-6)


def test_custom_rules_are_kept_for_differentiation():
    program = jax.make_jaxpr(lambda x: jax.jit(tripled)(x))(X)
    for custom, factor in ((False, 3), (True, 1)):
        run = lambda x: core.jaxpr_as_fun(inlined(program, custom=custom))(x)[0].sum()  # noqa: E731
        np.testing.assert_allclose(jax.grad(run)(X), factor * jnp.cos(X), rtol=1e-6)


def test_a_handler_gets_all_equations_but_calls_and_may_decline():
    program = jax.make_jaxpr(lambda x: jax.jit(lambda y: jnp.sin(jax.jit(jnp.tanh)(y)) * 2)(x))(X)
    offered = []

    def handle(eqn, inputs):
        offered.append(eqn.primitive.name)
        return [inputs[0] + 1] if eqn.primitive.name == "sin" else None

    (got,) = run_inlined(program, [X], handle)
    assert offered == ["tanh", "sin", "mul"]
    np.testing.assert_allclose(got, (jnp.tanh(X) + 1) * 2, rtol=1e-6)


def test_a_handler_gets_equations_of_inlined_custom_rules():
    program = jax.make_jaxpr(lambda x: tripled(x) + jax.nn.relu(x))(X)
    for custom in (False, True):
        offered = []
        flat = inlined(program, custom=custom)
        run_inlined(flat, [X], lambda e, _: offered.append(e.primitive.name))
        assert ("sin" in offered) == ("max" in offered) == custom


def test_a_program_that_is_called_twice_has_two_sets_of_variables():
    twice = jax.jit(lambda x: jnp.sin(x) * C)
    program = jax.make_jaxpr(lambda x: twice(twice(x)))(X)
    flat = inlined(program)
    made = [x for eqn in flat.jaxpr.eqns for x in eqn.outvars]
    assert len(made) == len(set(made)) > 2
    (got,) = core.jaxpr_as_fun(flat)(X)
    np.testing.assert_allclose(got, jnp.sin(jnp.sin(X) * C) * C, rtol=1e-6)
    within = Search({"sin"})
    assert within(program.jaxpr)
    assert not Search({"cos"})(program.jaxpr)


def test_calls_are_run_as_they_are_if_nothing_is_wanted_of_them():
    program = jax.make_jaxpr(lambda x: jax.jit(jnp.sin)(x) + jax.jit(jnp.cos)(x))(X)
    names = primitives(lambda x: run_inlined(program, [x], into=Search({"sin"})), X)
    assert "sin" in names
    assert names.count("jit") + names.count("pjit") == 1


def test_an_output_may_be_an_argument_or_a_number():
    program = jax.make_jaxpr(lambda x, y: (y, 2.0, x, jax.jit(lambda z: (z, 1))(x)))(X, C)
    y, two, x, z, one = run_inlined(program, [X, C])
    assert (y is C, x is X, z is X) == (True, True, True)
    assert (two, one) == (2.0, 1)
