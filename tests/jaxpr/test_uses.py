"""Tests of actjax/taps.py: who reads a weight, and what a tapped weight lets be done with it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CODECS
from flax import nnx
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
from actjax._core.paths import path_name
from actjax._jaxpr.uses import Use, find_uses
from actjax.weights.tapped import TappedWeight, plain_weights

KEY = jax.random.key(5)
RP = RandomProjection(3)
X, W = jnp.ones((6, 8)), jnp.ones((8, 5))
SQUARE, STACK = jnp.ones((8, 8)), jnp.ones((3, 8, 8))


def project(x, w, codec: Codec = RP):
    return linear(x, w, codec=codec, key=KEY)


def uses(fun, *args) -> list[list[Use]]:
    """Returns the uses of each array of `args` in `fun`, which is made a scalar."""
    scalar = lambda *args: sum(jnp.sum(y) for y in jax.tree.leaves(fun(*args)))  # noqa: E731
    return find_uses(jax.make_jaxpr(scalar)(*args).jaxpr)


def use(fun, *args) -> Use:
    """Returns the one use of the one argument."""
    ((found,),) = uses(fun, *args)
    return found


def what(found: list[Use]) -> list[tuple[str, int, int]]:
    return [(u.operator, u.rank, u.times) for u in found]


# Operators.


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_linear_operator_is_found_with_the_rank_of_its_gradient(codec):
    found = use(lambda w: project(X, w, codec), W)
    rank = codec.gradient_rank(X.shape) or 0
    assert (found.operator, found.rank, found.times) == ("linear", rank, 1)
    assert (rank == 0) == isinstance(codec, Exact | Offloaded | Quantized)


def test_weights_of_one_call_have_the_call_in_common():
    def fun(a, b, c, d):
        return project(X, (a, b)), project(X, c), qkv_projection(X, d, W, W)

    (a,), (b,), (c,), (d,) = uses(fun, W, W, W, W)
    assert a.call == b.call
    assert len({a.call, c.call, d.call}) == 3


def test_inputs_and_biases_are_no_weights():
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


def test_what_is_not_read_has_no_use():
    assert uses(lambda a, b: project(X, a), W, W)[1] == []


def test_other_operators_of_actjax_are_seen_as_what_reads_the_weight():
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
def test_a_weight_that_is_changed_on_its_way_is_read_by_what_changes_it(fun, primitive):
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
def test_casts_are_looked_through(cast):
    found = use(lambda w: project(X, cast(w)), W)
    assert (found.operator, found.rank) == ("linear", 3)


CAST_IN_BODY = {
    "jit": jax.jit(lambda w: w.astype(jnp.bfloat16)),
    "checkpoint": jax.checkpoint(lambda w: w.astype(jnp.bfloat16)),
}


@pytest.mark.parametrize("cast", CAST_IN_BODY.values(), ids=CAST_IN_BODY)
def test_casts_inside_calls_are_looked_through(cast):
    assert what(uses(lambda w: project(X, cast(w)), W)[0]) == [("linear", 3, 1)]


# Bodies.


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
def test_bodies_of_calls_are_looked_into(call):
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


def test_a_weight_that_a_scan_does_not_slice_is_read_as_often_as_it_runs():
    fun = lambda w: jax.lax.map(lambda x: project(x, w), jnp.ones((4, 6, 8)))  # noqa: E731
    assert what(uses(fun, W)[0]) == [("linear", 3, 4)]


def test_loops_in_loops_multiply():
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


def test_branches_that_read_alike_count_once_and_others_all():
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


def test_what_a_while_loop_reads_is_read_by_it():
    def fun(w):
        return jax.lax.while_loop(lambda i: i < 3, lambda i: i + w[0, 0], 0.0)

    assert [u.operator for u in uses(fun, W)[0]] == ["while"]


def test_the_value_of_the_function_is_a_use():
    (found,) = find_uses(jax.make_jaxpr(lambda w: w)(W).jaxpr)
    assert what(found) == [("the value of the function", 0, 1)]


def test_an_auxiliary_output_is_no_use():
    (found,) = find_uses(jax.make_jaxpr(lambda w: (jnp.sum(project(X, w)), w))(W).jaxpr)
    assert what(found) == [("linear", 3, 1)]


def test_a_stack_of_slices_is_a_use_where_it_is_read():
    def fun(ws):
        return jax.lax.scan(lambda x, w: (project(x, w), w), X, ws)

    unread = lambda ws: fun(ws)[0]  # noqa: E731
    assert what(uses(unread, STACK)[0]) == [("linear", 3, 1)]
    read = lambda ws: fun(ws)[0].sum() + jnp.sum(fun(ws)[1])  # noqa: E731
    assert ("reduce_sum", 0, 1) in what(uses(read, STACK)[0])


# Paths.


def test_paths_are_joined_by_dots():
    tree = {"layers": [{"q": W}, (W, nnx.Param(W))], "norm": W}
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert paths == ["layers.0.q", "layers.1.0", "layers.1.1", "norm"]
    assert path_name(()) == ""


# Tapped weights.


@pytest.fixture
def tapped():
    return TappedWeight(W, jnp.zeros((8, 3)), jnp.zeros((3, 5)), None, "layers.w", 16)


def test_a_tapped_weight_looks_like_its_weight(tapped):
    assert (tapped.shape, tapped.ndim, tapped.dtype) == ((8, 5), 2, "float32")
    assert repr(tapped) == "TappedWeight(layers.w)"
    assert tapped[...] is tapped
    assert all(w is W for w in plain_weights([tapped, W]))


def test_a_cast_leaves_the_taps_as_they_are(tapped):
    cast = tapped.astype(jnp.bfloat16)
    assert (cast.dtype, cast.left.dtype, cast.right.dtype) == ("bfloat16", "float32", "float32")


def test_a_tapped_weight_is_a_pytree(tapped):
    stacked = jax.tree.map(lambda *a: jnp.stack(a), tapped, tapped, tapped)
    assert (stacked.shape, stacked.path, stacked.basis) == ((3, 8, 5), "layers.w", None)
    # Modules of linen take the first leaf for the array.
    assert jax.tree.leaves(tapped)[0] is W


REFUSED = {
    "add": lambda w: w + 1,
    "add from the right": lambda w: 1 + w,
    "subtract": lambda w: w - 1,
    "subtract from the right": lambda w: 1 - w,
    "multiply": lambda w: w * 2,
    "multiply from the right": lambda w: 2 * w,
    "divide": lambda w: w / 2,
    "power": lambda w: w**2,
    "negative": lambda w: -w,
    "product": lambda w: w @ X,
    "product from the right": lambda w: X @ w,
    "transpose": lambda w: w.T,
    "index": lambda w: w[0],
    "iterate": lambda w: list(w),
    "sum": jnp.sum,
    "dot": lambda w: jnp.dot(X, w),
    "asarray": lambda w: jnp.asarray(w, jnp.bfloat16),
    "numpy": np.asarray,
}


@pytest.mark.parametrize("operation", REFUSED.values(), ids=REFUSED)
def test_nothing_else_can_read_a_tapped_weight(operation, tapped):
    message = (
        "the weight `layers.w` has a factored gradient, so only `actjax.linear` and"
        " `actjax.qkv_projection` can read it, and only `.astype` can cast it: use these, give the"
        " operator codec=Exact(), or differentiate with jax.value_and_grad."
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        operation(tapped)


def test_only_its_taps_have_a_gradient(tapped):
    fun = lambda w: jnp.sum(project(X, w))  # noqa: E731
    gradient = jax.grad(fun)(tapped)
    assert np.all(gradient.weight == 0)
    assert np.any(gradient.left != 0)
    assert np.any(gradient.right != 0)
