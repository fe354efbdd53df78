"""Tests of weights whose factored gradients cannot be added: an error, or the right gradient."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factored.gradient_helpers import (
    BOTH,
    RP,
    SVD,
    XS,
    assert_same,
    compare,
    factored,
    normal,
    project,
    run_jitted,
    total,
)

import actjax
from actjax import Exact, LowRank, RandomProjection

ADVICE = "give the operator codec=Exact(), or differentiate with jax.value_and_grad."
FOREIGN = (
    "the weight `layer.w` has a factored gradient, so only actjax's linear operators may read it,"
    " but `{}` does too: " + ADVICE
)
TWICE = (
    "the weight `layer.w` is read by 2 linear operators, whose factors cannot be added: " + ADVICE
)
OFTEN = (
    "the weight `layer.w` is read with a factored codec {} times, in a loop that does not slice it"
    " or under a vmap that does not map it, and the factors cannot be added: pass all tokens to the"
    " operator at once, or " + ADVICE
)
TWO_OPERATORS = {
    "two operators": lambda w, c: (project(XS[0], w, c), project(XS[1], w, c)),
    "the second exact": lambda w, c: (project(XS[0], w, c), project(XS[1], w, Exact())),
    "the first exact": lambda w, c: (project(XS[0], w, Exact()), project(XS[1], w, c)),
    "one of them in a scan": lambda w, c: (
        project(XS[0], w, c), jax.lax.map(lambda x: project(x, w, c), XS)
    ),
    "in jitted functions": lambda w, c: [
        jax.jit(project, static_argnums=2)(x, w, c) for x in XS[:2]
    ],
    "twice in one operator": lambda w, c: project(XS[0], (w, w), c),
}  # fmt: skip
OTHER_READERS = {
    "a sum": (lambda w: w.sum(), "reduce_sum"),
    "a power": (lambda w: w**2, "__POWER__"),
    "a product": (lambda w: jnp.dot(XS[1], w), "dot_general"),
    "a transpose": (lambda w: w.T, "transpose"),
    "a slice": (lambda w: w[:1], "__SLICE__"),
    "another operator of actjax": (lambda w: actjax.swiglu(w, 2 * w), "__SWIGLU__"),
    "no gradient": (jax.lax.stop_gradient, "stop_gradient"),
}
"""Other readers of the weight, and the primitive that the error names."""


def in_a_loop(w, c):
    add = lambda _, x: x + project(x, w, c)[:, :1]  # noqa: E731
    return jax.lax.fori_loop(0, 3, add, jnp.asarray(XS[0]))


REPEATED = {
    "a scan that does not slice it": (lambda w, c: jax.lax.map(lambda x: project(x, w, c), XS), 4),
    "a carry": (lambda w, c: jax.lax.scan(lambda w, x: (w, project(x, w, c)), w, XS)[1], 4),
    "a loop": (in_a_loop, 3),
    "a vmap that does not map it": (
        lambda w, c: jax.vmap(lambda x: project(x, w, c))(jnp.asarray(XS)), 4
    ),
}  # fmt: skip
"""Repeated reads of the weight, and their number."""
SITUATIONS = {
    **{name: (lambda w, c, f=f: total(*f(w, c)), TWICE) for name, f in TWO_OPERATORS.items()},
    **{
        name: (lambda w, c, f=f: total(project(XS[0], w, c), f(w)), FOREIGN.format(primitive))
        for name, (f, primitive) in OTHER_READERS.items()
    },
    **{
        name: (lambda w, c, f=f: total(f(w, c)), OFTEN.format(times))
        for name, (f, times) in REPEATED.items()
    },
}
"""From a weight and a codec to a scalar, and the error that a factored codec raises."""
PARAMS = {"layer": {"w": normal(1, 8, 5)}}


def message_pattern(message: str) -> str:
    pattern = re.escape(message)
    names = {"POWER": "(integer_pow|square)", "SLICE": r"(slice|dynamic_slice)", "SWIGLU": r"\w+"}
    for name, names_of_primitive in names.items():
        pattern = pattern.replace(f"__{name}__", names_of_primitive)
    return f"^{pattern}$"


def situation(name):
    """Returns a function of parameters and a codec."""
    fun = SITUATIONS[name][0]
    return lambda params, codec: fun(params["layer"]["w"], codec)


@pytest.mark.parametrize("name", SITUATIONS)
def test_factors_that_cannot_be_added_raise_an_error_that_names_the_weight(name):
    with pytest.raises(ValueError, match=message_pattern(SITUATIONS[name][1])):
        actjax.value_and_grad(situation(name))(PARAMS, RP)


@pytest.mark.parametrize("name", SITUATIONS)
def test_with_an_exact_codec_the_program_of_these_situations_is_that_of_jax(name):
    fun = functools.partial(situation(name), codec=Exact())
    programs = [str(jax.make_jaxpr(f(fun))(PARAMS)) for f in BOTH]
    assert programs[0] == programs[1]


def test_with_several_arguments_the_path_begins_with_the_position():
    fun = lambda x, params: situation("a sum")(params, RP) + total(x)  # noqa: E731
    with pytest.raises(ValueError, match=r"^the weight `1\.layer\.w` has a factored gradient"):
        actjax.value_and_grad(fun, (0, 1))(normal(0, 3), PARAMS)


def test_a_weight_that_jnp_casts_has_a_dense_gradient():
    fun = lambda p: total(project(XS[0], jnp.asarray(p["layer"]["w"], jnp.bfloat16), RP))  # noqa: E731
    (_, got), (_, dense) = run_jitted([f(fun) for f in BOTH], PARAMS)
    np.testing.assert_array_equal(got["layer"]["w"], dense["layer"]["w"])


def test_a_loop_of_one_iteration_is_allowed(x64):
    def fun(params):
        xs = jnp.asarray(XS[:1])
        looped = jax.lax.map(lambda x: project(x, params["map"]), xs)
        return total(looped, jax.vmap(lambda x: project(x, params["vmap"]))(xs))

    assert factored(compare(fun, {name: normal(1, 8, 5) for name in ("map", "vmap")})) == {
        "map",
        "vmap",
    }


@pytest.mark.parametrize("codec", [RP, Exact()], ids=repr)
def test_a_weight_is_returned_unchanged(codec):
    fun = lambda p: (total(project(XS[0], p["w"], codec)), p)  # noqa: E731
    params = {"w": normal(1, 8, 5)}
    (_, aux), gradient = jax.jit(actjax.value_and_grad(fun, has_aux=True))(params)
    assert isinstance(gradient["w"], LowRank) == (codec == RP)
    np.testing.assert_array_equal(aux["w"], params["w"])


# Where an error is right, and a wrong gradient is not.


def casted(call):
    """Returns a function that reads a weight in one operator, and its cast in another."""
    cast = call(lambda w: w.astype("float32"))
    return lambda p, _: total(
        project(XS[0], p["a"]), project(XS[1].astype("float32"), cast(p["a"]))
    )


def between(first, second):
    """Returns a function that reads weights in one of two branches."""

    def fun(params, pred):
        branches = (lambda: project(XS[0], *first(params)), lambda: project(XS[1], *second(params)))
        return total(jax.lax.cond(pred, *branches))

    return fun


HARD = {
    "cond of two weights": between(lambda p: (p["a"],), lambda p: (p["b"],)),
    "cond of two weights, one exact": between(lambda p: (p["a"], Exact()), lambda p: (p["b"],)),
    "cond of codecs": between(lambda p: (p["a"], Exact()), lambda p: (p["a"],)),
    "cond of ranks": between(lambda p: (p["a"], RandomProjection(2)), lambda p: (p["a"],)),
    "cast in a jitted function": casted(jax.jit),
    "cast in a checkpoint": casted(jax.checkpoint),
    "vmap over another axis": lambda p, _: total(
        jax.vmap(lambda x: project(x, p["a"], SVD), 1)(jnp.asarray(XS)[None])
    ),
    "vmap over another axis of the weights": lambda p, _: total(
        jax.vmap(lambda w: project(XS[0], w), 1)(p["inner"])
    ),
    "vmap over weights, and over inputs within": lambda p, _: total(
        jax.vmap(lambda w, xs: jax.vmap(lambda x: project(x, w, SVD))(xs))(
            p["stack"], jnp.asarray(XS).reshape(2, 2, 12, 8)
        )
    ),
}


@pytest.mark.parametrize("name", HARD)
def test_no_gradient_is_silently_wrong(name, x64):
    shapes = {"a": (8, 5), "b": (8, 5), "stack": (2, 8, 5), "inner": (8, 2, 5)}
    params = {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    run = jax.jit(lambda *args: [f(HARD[name])(*args) for f in BOTH])
    for pred in (True, False) if "cond" in name else (True,):
        try:
            (_, gradient), (_, want) = run(params, pred)
        except ValueError as error:
            assert "the weight `" in str(error)  # noqa: PT017
        else:
            assert_same(gradient, want)
