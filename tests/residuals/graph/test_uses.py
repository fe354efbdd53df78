"""Tests of actjax/residuals/graph/uses.py: which operators read a weight, and how often."""

import jax
import jax.numpy as jnp
import pytest
from cases import CODECS
from jax.ad_checkpoint import checkpoint_name

from actjax import (
    Codec,
    Exact,
    Offloaded,
    Quantized,
    RandomProjection,
    cross_entropy,
    linear,
    qkv_projection,
)
from actjax.residuals.graph.uses import Use, find_uses

KEY = jax.random.key(5)


RP = RandomProjection(3)


X, W = jnp.ones((6, 8)), jnp.ones((8, 5))


SQUARE, STACK = jnp.ones((8, 8)), jnp.ones((3, 8, 8))


def project(x, w, codec: Codec = RP):
    return linear(x, w, codec=codec, key=KEY)


def uses(fun, *args) -> list[list[Use]]:
    """Returns the uses of each array of `args` in `fun`, whose outputs are summed."""
    scalar = lambda *args: sum(jnp.sum(y) for y in jax.tree.leaves(fun(*args)))  # noqa: E731
    return find_uses(jax.make_jaxpr(scalar)(*args).jaxpr)


def use(fun, *args) -> Use:
    """Returns the single use of the single argument."""
    ((found,),) = uses(fun, *args)
    return found


def what(found: list[Use]) -> list[tuple[str, int, int]]:
    return [(u.operator, u.rank, u.times) for u in found]


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_linear_operator_is_found_with_the_rank_of_its_gradient(codec):
    found = use(lambda w: project(X, w, codec), W)
    rank = codec.gradient_rank(X.shape) or 0
    assert (found.operator, found.rank, found.times) == ("linear", rank, 1)
    assert (rank == 0) == isinstance(codec, Exact | Offloaded | Quantized)


def test_weights_of_one_call_share_the_call():
    def fun(a, b, c, d):
        return project(X, (a, b)), project(X, c), qkv_projection(X, d, W, W)

    (a,), (b,), (c,), (d,) = uses(fun, W, W, W, W)
    assert a.call == b.call
    assert len({a.call, c.call, d.call}) == 3


def test_inputs_and_biases_are_not_weights():
    x, b = uses(lambda x, b: linear(x, W, bias=b, codec=RP, key=KEY), X, jnp.ones(5))
    assert all(u.operator != "linear" for u in (*x, *b))


def test_every_use_counts():
    def fun(w):
        return project(X, w), project(2 * X, w, Exact()), jnp.sin(w), X @ w

    (found,) = uses(fun, W)
    assert what(found) == [
        ("linear", 3, 1),
        ("linear", 0, 1),
        ("sin", 0, 1),
        ("dot_general", 0, 1),
    ]


def test_a_weight_twice_in_one_call_is_two_uses_of_that_call():
    (found,) = uses(lambda w: project(X, (w, w)), W)
    assert what(found) == [("linear", 3, 1)] * 2
    assert found[0].call == found[1].call


def test_an_unread_array_has_no_use():
    assert uses(lambda a, b: project(X, a), W, W)[1] == []


def test_other_operators_of_actjax_are_plain_uses():
    labels = jnp.zeros(6, int)
    (found,) = uses(lambda head: cross_entropy(X, head, labels), W)
    assert found
    assert all(u.operator != "linear" and u.rank == 0 for u in found)


@pytest.mark.parametrize(
    ("fun", "primitive"),
    [
        (lambda w: project(X, w.T.T), "transpose"),
        (lambda w: project(X, w.reshape(5, 8).T), "reshape"),
        (lambda w: project(X, w * 2), "mul"),
        (lambda w: project(X[:, :1], w[:1]), "slice"),
        (lambda w: project(X, jax.lax.stop_gradient(w)), "stop_gradient"),
    ],
    ids=["transposed", "reshaped", "scaled", "sliced", "stopped"],
)
def test_an_operation_on_the_weight_is_its_use(fun, primitive):
    assert what(uses(fun, W)[0]) == [(primitive, 0, 1)]


@pytest.mark.parametrize(
    "cast",
    [
        lambda w: w.astype(jnp.bfloat16),
        lambda w: w.astype(jnp.bfloat16).astype(jnp.float32),
        lambda w: checkpoint_name(w, "theirs"),
        jax.jit(lambda w: w),
    ],
    ids=["once", "twice", "named", "jitted identity"],
)
def test_casts_are_not_uses(cast):
    found = use(lambda w: project(X, cast(w)), W)
    assert (found.operator, found.rank) == ("linear", 3)


CAST_IN_BODY = {
    "jit": jax.jit(lambda w: w.astype(jnp.bfloat16)),
    "checkpoint": jax.checkpoint(lambda w: w.astype(jnp.bfloat16)),
}


@pytest.mark.parametrize("cast", CAST_IN_BODY.values(), ids=CAST_IN_BODY)
def test_casts_inside_calls_are_not_uses(cast):
    assert what(uses(lambda w: project(X, cast(w)), W)[0]) == [("linear", 3, 1)]


@jax.custom_vjp
def doubled_gradient(x, w):
    return project(x, w)


doubled_gradient.defvjp(
    lambda x, w: (project(x, w), (x, w)), lambda r, dz: (2 * dz @ r[1].T, 2 * r[0].T @ dz)
)


@jax.custom_jvp
def custom_jvp(x, w):
    return project(x, w)


custom_jvp.defjvp(lambda args, dots: (project(*args), dots[0] @ args[1] + args[0] @ dots[1]))


CALLS = {
    "jit": jax.jit(project),
    "jit of jit": jax.jit(jax.jit(project)),
    "checkpoint": jax.checkpoint(project),
    "custom_vjp": doubled_gradient,
    "custom_jvp": custom_jvp,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_uses_inside_calls_are_found(call):
    assert what(uses(lambda w: call(X, w), W)[0]) == [("linear", 3, 1)]
    closed = lambda w: jax.jit(lambda x: call(x, w))(X)  # noqa: E731
    assert what(uses(closed, W)[0]) == [("linear", 3, 1)]


def test_two_calls_of_one_jitted_function_are_two_calls():
    jitted = jax.jit(project)
    (found,) = uses(lambda w: (jitted(X, w), jitted(2 * X, w)), W)
    assert what(found) == [("linear", 3, 1)] * 2
    assert found[0].call != found[1].call


def scanned(ws, x=X):
    return jax.lax.scan(lambda x, w: (project(x, w), None), x, ws)[0]


def test_a_weight_that_a_scan_slices_is_read_once():
    assert what(uses(scanned, STACK)[0]) == [("linear", 3, 1)]


def test_a_weight_that_a_scan_does_not_slice_is_read_in_each_iteration():
    fun = lambda w: jax.lax.map(lambda x: project(x, w), jnp.ones((4, 6, 8)))  # noqa: E731
    assert what(uses(fun, W)[0]) == [("linear", 3, 4)]


def test_counts_of_nested_loops_multiply():
    xs, stack = jnp.ones((4, 6, 8)), jnp.ones((2, 3, 8, 8))
    over_both = lambda ws: jax.lax.scan(lambda x, w: (scanned(w, x), None), X, ws)[0]  # noqa: E731
    assert what(uses(over_both, stack)[0]) == [("linear", 3, 1)]
    over_inner = lambda ws: jax.lax.map(lambda x: scanned(ws, x), xs)  # noqa: E731
    assert what(uses(over_inner, STACK)[0]) == [("linear", 3, 4)]

    def over_none(w):
        twice = lambda x: jax.lax.fori_loop(0, 2, lambda _, x: project(x, w), x)  # noqa: E731
        return jax.lax.map(twice, xs)

    assert what(uses(over_none, SQUARE)[0]) == [("linear", 3, 8)]


def test_a_weight_in_a_carry_is_followed():
    def fun(w):
        step = lambda w, x: (w, project(x, w))  # noqa: E731
        w, ys = jax.lax.scan(step, w, jnp.ones((4, 6, 8)))
        return ys, project(X, w)

    assert sorted(what(uses(fun, W)[0])) == [("linear", 3, 1), ("linear", 3, 4)]


def test_equal_branches_count_once_and_different_branches_all():
    once, twice = lambda w: project(X, w), lambda w: project(X, w) + project(2 * X, w)
    none = lambda w: jnp.zeros((6, 5))  # noqa: E731
    for funs, count in (((none, once), 1), ((once, once), 1), ((once, twice, none), 3)):
        fun = lambda i, w, funs=funs: jax.lax.switch(i, funs, w)  # noqa: E731
        assert what(uses(fun, jnp.int32(0), W)[1]) == [("linear", 3, 1)] * count


def test_calls_in_different_branches_are_different_calls():
    def fun(pred, a, b):
        return jax.lax.cond(pred, lambda: project(X, a), lambda: project(y, b))

    y = 2 * X
    _, (a,), (b,) = uses(fun, jnp.bool_(True), W, W)
    assert a.call != b.call


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_weight_that_vmap_maps_is_read_once(axis):
    ws = jnp.moveaxis(jnp.ones((3, 8, 5)), 0, axis)
    for xs, x_axis in ((X, None), (jnp.ones((3, 6, 8)), 0), (jnp.ones((6, 3, 8)), 1)):
        fun = lambda ws, xs=xs, i=x_axis: jax.vmap(project, (i, axis))(xs, ws)  # noqa: E731
        assert what(uses(fun, ws)[0]) == [("linear", 3, 1)]


def test_a_weight_that_vmap_does_not_map_is_read_for_each_example():
    fun = lambda w: jax.vmap(lambda x: project(x, w))(jnp.ones((4, 6, 8)))  # noqa: E731
    assert what(uses(fun, W)[0]) == [("linear", 3, 4)]
    assert what(uses(lambda w: jax.lax.map(jax.checkpoint(fun), w), STACK)[0]) == [("linear", 3, 4)]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_any_axis_may_be_the_mapped_one(axis):
    xs = jnp.moveaxis(jnp.ones((4, 1, 7, 8)), 0, axis)
    found = use(lambda w: jax.vmap(lambda x: project(x, w), axis)(xs), W)
    assert found.times == 4


def test_a_vmap_that_does_not_map_inside_one_that_does():
    def fun(ws):
        each = lambda w, xs: jax.vmap(lambda x: project(x, w))(xs)  # noqa: E731
        return jax.vmap(each)(ws, jnp.ones((3, 4, 6, 8)))

    assert what(uses(fun, jnp.ones((3, 8, 5)))[0]) == [("linear", 3, 4)]


def test_a_while_loop_is_the_use_of_what_it_reads():
    def fun(w):
        return jax.lax.while_loop(lambda i: i < 3, lambda i: i + w[0, 0], 0.0)

    assert [u.operator for u in uses(fun, W)[0]] == ["while"]


def test_the_value_of_the_function_is_a_use():
    (found,) = find_uses(jax.make_jaxpr(lambda w: w)(W).jaxpr)
    assert what(found) == [("the value of the function", 0, 1)]


def test_an_auxiliary_output_is_not_a_use():
    (found,) = find_uses(jax.make_jaxpr(lambda w: (jnp.sum(project(X, w)), w))(W).jaxpr)
    assert what(found) == [("linear", 3, 1)]


def test_stacked_slices_are_used_where_they_are_read():
    def fun(ws):
        return jax.lax.scan(lambda x, w: (project(x, w), w), X, ws)

    unread = lambda ws: fun(ws)[0]  # noqa: E731
    assert what(uses(unread, STACK)[0]) == [("linear", 3, 1)]
    read = lambda ws: fun(ws)[0].sum() + jnp.sum(fun(ws)[1])  # noqa: E731
    assert ("reduce_sum", 0, 1) in what(uses(read, STACK)[0])
