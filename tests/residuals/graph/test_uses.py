"""Tests of actjax/residuals/graph/uses.py: which operators read a weight, and how often."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CODECS
from jax import lax
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


def ones(*shape: int) -> jax.Array:
    return jax.device_put(np.ones(shape, np.float32))


X, XS, W, WS = ones(6, 8), ones(4, 6, 8), ones(8, 5), ones(3, 8, 5)
SQUARE, STACK = ones(8, 8), ones(3, 8, 8)


def project(x, w, codec: Codec = RP):
    return linear(x, w, codec=codec, key=KEY)


def uses(fun, *args) -> list[list[Use]]:
    """Returns the uses of each array of `args` in `fun`, whose outputs are summed."""
    scalar = lambda *args: sum(jnp.sum(y) for y in jax.tree.leaves(fun(*args)))  # noqa: E731
    return find_uses(jax.make_jaxpr(scalar)(*args).jaxpr)


def reads(times: int = 1, rank: int = 3) -> tuple[str, int, int]:
    """Returns a use by a linear operator."""
    return "linear", rank, times


def other(operator: str) -> tuple[str, int, int]:
    return operator, 0, 1


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_linear_operator_is_found_with_the_rank_of_its_gradient(codec):
    ((use,),) = uses(lambda w: project(X, w, codec), W)
    rank = codec.gradient_rank(X.shape) or 0
    assert (use.operator, use.rank, use.times) == reads(rank=rank)
    assert (rank == 0) == isinstance(codec, Exact | Offloaded | Quantized)


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


def scanned(ws, x=X):
    return lax.scan(lambda x, w: (project(x, w), None), x, ws)[0]


def twice_for_each(w):
    twice = lambda x: lax.fori_loop(0, 2, lambda _, x: project(x, w), x)  # noqa: E731
    return lax.map(twice, XS)


def in_a_carry(w):
    w, ys = lax.scan(lambda w, x: (w, project(x, w)), w, XS)
    return ys, project(X, w)


def for_each_example(w):
    return jax.vmap(lambda x: project(x, w))(XS)


def slices_returned(ws):
    return lax.scan(lambda x, w: (project(x, w), w), X, ws)


def bf16(w):
    return w.astype(jnp.bfloat16)


USES = {
    # Operations on a weight are uses.
    "every use counts": (
        lambda w: (project(X, w), project(2 * X, w, Exact()), jnp.sin(w), X @ w), W,
        [reads(), reads(rank=0), other("sin"), other("dot_general")],
    ),
    "twice in a call": (lambda w: project(X, (w, w)), W, [reads(), reads()]),
    "transposed": (lambda w: project(X, w.T.T), W, [other("transpose")]),
    "reshaped": (lambda w: project(X, w.reshape(5, 8).T), W, [other("reshape")]),
    "scaled": (lambda w: project(X, w * 2), W, [other("mul")]),
    "sliced": (lambda w: project(X[:, :1], w[:1]), W, [other("slice")]),
    "stopped": (lambda w: project(X, lax.stop_gradient(w)), W, [other("stop_gradient")]),
    "a while loop": (
        lambda w: lax.while_loop(lambda i: i < 3, lambda i: i + w[0, 0], 0.0), W,
        [other("while")],
    ),
    # Casts and calls are not.
    "cast": (lambda w: project(X, bf16(w)), W, [reads()]),
    "cast twice": (lambda w: project(X, bf16(w).astype(jnp.float32)), W, [reads()]),
    "named": (lambda w: project(X, checkpoint_name(w, "theirs")), W, [reads()]),
    "jitted identity": (lambda w: project(X, jax.jit(lambda w: w)(w)), W, [reads()]),
    "cast in jit": (lambda w: project(X, jax.jit(bf16)(w)), W, [reads()]),
    "cast in checkpoint": (lambda w: project(X, jax.checkpoint(bf16)(w)), W, [reads()]),
    "jit": (lambda w: jax.jit(jax.jit(project))(X, w), W, [reads()]),
    "jit, closed over": (lambda w: jax.jit(lambda x: project(x, w))(X), W, [reads()]),
    "checkpoint": (lambda w: jax.checkpoint(project)(X, w), W, [reads()]),
    "custom_vjp": (lambda w: jax.jit(lambda x: doubled_gradient(x, w))(X), W, [reads()]),
    "custom_jvp": (lambda w: custom_jvp(X, w), W, [reads()]),
    # Loops.
    "slice of a scan": (scanned, STACK, [reads()]),
    "constant of a loop": (lambda w: lax.map(lambda x: project(x, w), XS), W, [reads(4)]),
    "slice of both loops": (
        lambda ws: lax.scan(lambda x, w: (scanned(w, x), None), X, ws)[0], ones(2, 3, 8, 8),
        [reads()],
    ),
    "slice of the inner loop": (
        lambda ws: lax.map(lambda x: scanned(ws, x), XS), STACK, [reads(4)]
    ),
    "constant of both loops": (twice_for_each, SQUARE, [reads(8)]),
    "carry": (in_a_carry, W, [reads(4), reads()]),
    "slices returned, unread": (lambda ws: slices_returned(ws)[0], STACK, [reads()]),
    "slices returned, read": (slices_returned, STACK, [reads(), other("reduce_sum")]),
    # vmap.
    **{
        f"mapped axis {axis}, {name} {at}": (
            lambda ws, axis=axis, xs=xs, at=at: jax.vmap(project, (at, axis))(xs, ws),
            jax.device_put(np.moveaxis(WS, 0, axis)), [reads()],
        )
        for axis in range(3)
        for name, xs, at in (
            ("same input", X, None), ("inputs", ones(3, 6, 8), 0), ("inputs", ones(6, 3, 8), 1)
        )
    },
    **{
        f"inputs mapped along {axis}": (
            lambda w, axis=axis: jax.vmap(lambda x: project(x, w), axis)(
                jnp.moveaxis(ones(4, 1, 7, 8), 0, axis)
            ),
            W, [reads(4)],
        )
        for axis in range(3)
    },
    "read for each example": (for_each_example, W, [reads(4)]),
    "for each example in a loop": (
        lambda ws: lax.map(jax.checkpoint(for_each_example), ws), WS, [reads(4)]
    ),
    "not mapped within mapped": (
        lambda ws: jax.vmap(lambda w, xs: jax.vmap(lambda x: project(x, w))(xs))(
            ws, ones(3, 4, 6, 8)
        ),
        WS, [reads(4)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", USES)
def test_uses_of_a_weight(name):
    fun, weight, want = USES[name]
    (each,) = uses(fun, weight)
    assert sorted((u.operator, u.rank, u.times) for u in each) == sorted(want)


@pytest.mark.parametrize("functions", [(0, 1), (1, 1), (1, 2, 0)], ids=str)
def test_equal_branches_count_once_and_different_branches_all(functions):
    once, twice = lambda w: project(X, w), lambda w: project(X, w) + project(2 * X, w)
    none = lambda w: jnp.zeros((6, 5))  # noqa: E731
    funs = [(none, once, twice)[i] for i in functions]
    _, each = uses(lambda i, w: lax.switch(i, funs, w), np.int32(0), W)
    count = 1 if max(functions) == 1 else 3
    assert [(u.operator, u.rank, u.times) for u in each] == [reads()] * count


def test_weights_of_one_call_share_the_call():
    jitted = jax.jit(project)

    def fun(a, b, c, d, e):
        return project(X, (a, b)), project(X, c), qkv_projection(X, d, W, W), [
            jitted(X, e), jitted(2 * X, e)
        ]  # fmt: skip

    (a,), (b,), (c,), (d,), (e, f) = uses(fun, W, W, W, W, W)
    assert a.call == b.call
    assert len({use.call for use in (a, c, d, e, f)}) == 5
    ((first, second),) = uses(lambda w: project(X, (w, w)), W)
    assert first.call == second.call

    def in_branches(pred, a, b):
        return lax.cond(pred, lambda: project(X, a), lambda: project(2 * X, b))

    _, (a,), (b,) = uses(in_branches, np.bool_(True), W, W)
    assert a.call != b.call


def test_inputs_biases_and_weights_of_other_operators_are_not_weights():
    x, b = uses(lambda x, b: linear(x, W, bias=b, codec=RP, key=KEY), X, ones(5))
    (head,) = uses(lambda head: cross_entropy(X, head, np.zeros(6, int)), W)
    assert head
    assert all(u.operator != "linear" and u.rank == 0 for u in (*x, *b, *head))
    assert uses(lambda a, b: project(X, a), W, W)[1] == []


def test_the_value_of_the_function_is_a_use_and_an_auxiliary_output_is_not():
    ((value,),) = find_uses(jax.make_jaxpr(lambda w: w)(W).jaxpr)
    assert (value.operator, value.rank, value.times) == other("the value of the function")
    ((use,),) = find_uses(jax.make_jaxpr(lambda w: (jnp.sum(project(X, w)), w))(W).jaxpr)
    assert (use.operator, use.rank, use.times) == reads()
