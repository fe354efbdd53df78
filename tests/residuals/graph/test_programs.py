"""A traced function computes what the function computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from actjax.residuals.graph.equations import called
from actjax.residuals.graph.programs import Search, close, inlined, run_inlined

X = jax.device_put(np.random.default_rng(0).standard_normal((4, 3)).astype("float32"))
C = jax.device_put(np.random.default_rng(1).standard_normal(3).astype("float32"))


def primitives(fun, *args) -> list[str]:
    return [eqn.primitive.name for eqn in jax.make_jaxpr(fun)(*args).eqns]


def assert_close(got, want) -> None:
    # A function may run fused in one program and not in the other: a rounding apart.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


def run_closed(closed, constants, arguments):
    return core.jaxpr_as_fun(core.ClosedJaxpr(closed.jaxpr, constants))(*arguments)


def test_a_closed_program_takes_its_constants_as_inputs_and_is_traced_once():
    calls = []

    def fun(tree):
        calls.append(1)
        return {"y": jnp.sin(tree["x"]) * C, "none": None}

    closed = close(fun, ({"x": X},))
    assert [c.shape for c in closed.constants] == [C.shape]
    assert [a.shape for a in closed.arguments] == [X.shape]
    run = jax.jit(functools.partial(run_closed, closed))
    assert_close(
        closed.unflatten(run(closed.constants, closed.arguments)),
        {"y": np.sin(X) * C, "none": None},
    )
    assert_close(run([2 * C], [X])[0], np.sin(X) * (2 * C))
    assert calls == [1]


def test_functions_without_inputs_or_outputs_are_closed():
    for fun, args in ((lambda: jnp.sin(C), ()), (lambda x: (), (X,))):
        closed = close(fun, args)
        got = closed.unflatten(run_closed(closed, closed.constants, closed.arguments))
        assert_close(got, fun(*args))


def test_tracers_may_be_constants():
    def constants(c):
        return [x is c for x in close(lambda y: jnp.sin(y) * c, (X,)).constants]

    seen = []
    jax.eval_shape(jax.vmap(jax.grad(lambda c: seen.append(constants(c)) or c.sum())), X)
    assert seen == [[True]]


@jax.custom_vjp
def tripled(x):
    return jnp.sin(x)


tripled.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cos, g: (3 * g * cos,))


def nested(x):
    inner = jax.jit(lambda y: jnp.sin(y) * C)
    table = np.arange(3.0, dtype="float32")
    y = jax.jit(lambda x: (inner(x) + table, jax.nn.relu(x), 2.0))(x)
    return [*y, lax.cond(x[0, 0] > 0, jnp.cos, jnp.exp, x), lax.sort_key_val(x, x)[1]]


def test_calls_are_inlined():
    program = jax.make_jaxpr(nested)(X)
    assert "jit" in primitives(nested, X)
    runs = [core.jaxpr_as_fun(inlined(program, custom=custom)) for custom in (False, True)]
    for custom, run in enumerate(runs):
        names = primitives(run, X)
        assert not {"jit", "pjit", "closed_call", "core_call"} & {*names}
        assert ("custom_jvp_call" in names) == (not custom)
        assert "cond" in names
    *results, want = jax.jit(lambda x: [run(x) for run in (*runs, nested)])(X)
    for got in results:
        assert_close(got, want)


def test_custom_rules_are_kept_for_differentiation():
    program = jax.make_jaxpr(lambda x: jax.jit(tripled)(x))(X)

    @jax.jit
    def gradients(x):
        runs = [core.jaxpr_as_fun(inlined(program, custom=custom)) for custom in (False, True)]
        return [jax.grad(lambda x, run=run: run(x)[0].sum())(x) for run in runs]

    assert_close(gradients(X), [3 * np.cos(X), np.cos(X)])


def test_a_handler_gets_all_equations_but_calls_and_may_decline():
    program = jax.make_jaxpr(lambda x: jax.jit(lambda y: jnp.sin(jax.jit(jnp.tanh)(y)) * 2)(x))(X)
    offered = []

    def handle(eqn, inputs):
        offered.append(eqn.primitive.name)
        return [inputs[0] + 1] if eqn.primitive.name == "sin" else None

    (got,) = jax.jit(lambda x: run_inlined(program, [x], handle))(X)
    assert offered == ["tanh", "sin", "mul"]
    assert_close(got, (np.tanh(X) + 1) * 2)


def test_a_handler_gets_equations_of_inlined_custom_rules():
    program = jax.make_jaxpr(lambda x: tripled(x) + jax.nn.relu(x))(X)
    for custom in (False, True):
        offered = []
        handle = lambda eqn, _, offered=offered: offered.append(eqn.primitive.name)  # noqa: E731
        flat = inlined(program, custom=custom)
        jax.eval_shape(lambda x, flat=flat, handle=handle: run_inlined(flat, [x], handle), X)
        assert ("sin" in offered) == ("max" in offered) == custom


def test_a_program_that_is_called_twice_has_two_sets_of_variables():
    twice = jax.jit(lambda x: jnp.sin(x) * C)
    program = jax.make_jaxpr(lambda x: twice(twice(x)))(X)
    flat = inlined(program)
    made = [x for eqn in flat.jaxpr.eqns for x in eqn.outvars]
    assert len(made) == len(set(made)) > 2
    (got,) = jax.jit(core.jaxpr_as_fun(flat))(X)
    assert_close(got, np.sin(np.sin(X) * C) * C)
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


# Equations. `test_scopes.py` and `test_residuals_kept.py` test that scopes and lines stay.


def equation_of(fun, *args) -> core.JaxprEqn:
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
    jitted = equation_of(jax.jit(jnp.sin), X)
    body = called(jitted)
    assert [eqn.primitive.name for eqn in body.eqns] == ["sin"]
    custom = equation_of(tripled, X)
    assert called(custom) is None
    assert [eqn.primitive.name for eqn in called(custom, custom=True).eqns] == ["sin"]
    others = equation_of(jnp.sin, X), equation_of(jax.checkpoint(jnp.sin), X)
    loop = equation_of(lambda x: lax.scan(lambda c, _: (c, c), x, None, 2), X)
    for eqn in (*others, loop):
        assert called(eqn) is None
        assert called(eqn, custom=True) is None
