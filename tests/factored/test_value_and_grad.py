"""Tests of `actjax.value_and_grad`: factored gradients are the gradients that JAX computes."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factored.gradient_helpers import (
    BOTH,
    KEY,
    KINDS,
    RP,
    SVD,
    assert_same,
    by_path,
    compare,
    dense,
    factored,
    mlp,
    mlp_params,
    normal,
    project,
    run_jitted,
    total,
)

import actjax
from actjax import Exact, LowRank, RandomizedSVD, qkv_projection


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        *((codec, "float64") for codec in KINDS),
        (SVD, "float32"),
    ],
    ids=str,
)
def test_factors_multiply_to_the_gradient_of_jax_and_the_rest_is_equal(codec, dtype, x64):
    params, x = mlp_params(dtype), normal(5, 2, 6, 8, dtype=dtype)
    fun = functools.partial(mlp, codec=codec)
    both = run_jitted([f(fun, (0, 1)) for f in BOTH], params, x)
    (value, (gradient, dx)), (want_value, (want, want_dx)) = both
    np.testing.assert_array_equal(value, want_value)
    np.testing.assert_array_equal(dx, want_dx)
    assert factored(gradient) == {"in.w", "out.w"}
    got, want = by_path(gradient), by_path(want)
    for path in got.keys() - factored(gradient):
        np.testing.assert_array_equal(got[path], want[path])
    for path in factored(gradient):
        g = got[path]
        assert (g.shape, g.dtype, g.basis_name) == (want[path].shape, want[path].dtype, None)
        assert g.rank == codec.gradient_rank(x.shape)
        # Two products of the same factors, each with k roundings a term.
        scale = np.abs(g.left) @ np.abs(g.right)
        error = np.abs(np.asarray(g.left) @ np.asarray(g.right) - want[path])
        assert np.all(error <= g.rank * jnp.finfo(dtype).eps * scale)


@pytest.mark.parametrize("shape", [(12, 8), (2, 3, 8)], ids=["d features", "T tokens"])
def test_at_full_rank_the_factors_multiply_to_the_exact_gradient(shape, x64):
    x, w = normal(0, *shape), normal(1, 8, 5)
    codec = RandomizedSVD(min(math.prod(shape[:-1]), shape[-1]))
    run = actjax.value_and_grad(lambda w: total(project(x, w, codec)))
    (_, gradient), want = run_jitted([run, jax.grad(lambda w: total(x @ w))], w)
    assert gradient.rank == codec.rank
    np.testing.assert_allclose(dense(gradient), want, rtol=1e-10, atol=1e-10)


def test_weights_of_one_call_share_one_left_factor():
    ws = {name: normal(i, 8, n) for i, (name, n) in enumerate({"q": 6, "k": 4, "v": 4}.items())}
    x, other = normal(4, 12, 8), normal(5, 8, 3)

    def fun(params):
        ws, other = params
        q, k, v = qkv_projection(x, ws["q"], ws["k"], ws["v"], codec=RP, key=KEY)
        return total(q, k, v, project(x, other, RP))

    lefts = []

    def run(params):
        value, gradient = actjax.value_and_grad(fun)(params)
        lefts.extend([*(gradient[0][name].left for name in "qkv"), gradient[1].left])
        return value, gradient

    # In the program they are one array too.
    outputs = jax.make_jaxpr(run)((ws, other)).jaxpr.outvars
    q, k, v, of_other = lefts
    assert q is k is v
    assert of_other is not q
    assert len({id(var) for var in outputs}) == 1 + 1 + 3 + 2


def test_weights_of_one_call_agree_with_jax(x64):
    def fun(ws, bias):
        return total(*project(x, tuple(ws.values()), bias=(None, bias, None)))

    x, ws = normal(4, 12, 8), {name: normal(i, 8, i + 2) for i, name in enumerate("abc")}
    gradient, _ = compare(fun, ws, normal(5, 3), argnums=(0, 1))
    assert factored(gradient) == {"a", "b", "c"}


def test_an_exact_codec_gives_a_dense_gradient(x64):
    x = normal(0, 12, 8)

    def fun(params):
        h = jnp.tanh(project(x, params["exact"], Exact()))
        return total(project(h, params["lossy"]), h @ params["plain"])

    params = {name: normal(i, 8, 8) for i, name in enumerate(("exact", "lossy", "plain", "unused"))}
    assert factored(compare(fun, params)) == {"lossy"}


def test_without_a_factored_codec_results_equal_those_of_jax():
    params, x = mlp_params(), normal(5, 12, 8)
    fun = functools.partial(mlp, codec=Exact())
    got, want = run_jitted([f(fun) for f in BOTH], params, x)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("weight_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("codec", KINDS, ids=repr)
def test_factors_have_the_dtype_of_the_weight(codec, weight_dtype):
    x, params = normal(0, 12, 8, dtype=jnp.bfloat16), {"w": normal(1, 8, 5, dtype=weight_dtype)}

    def fun(params):
        return total(project(x, params["w"], codec).astype(jnp.float32))

    got, want = (gradient["w"] for _, gradient in run_jitted([f(fun) for f in BOTH], params))
    assert got.left.dtype == got.right.dtype == want.dtype == weight_dtype
    left, right = (np.asarray(a, np.float64) for a in (got.left, got.right))
    # The right factor and the product are each rounded once; sums of k terms are in float32.
    error = jnp.finfo(weight_dtype).eps + got.rank * jnp.finfo("float32").eps
    np.testing.assert_array_less(
        np.abs(left @ right - np.asarray(want, np.float64)), error * np.abs(left) @ np.abs(right)
    )


def test_a_weight_that_the_function_casts_keeps_its_dtype():
    x, w = normal(0, 12, 8, dtype=jnp.bfloat16), normal(1, 8, 5)
    fun = lambda w: total(project(x, w, RP).astype(jnp.float32))  # noqa: E731
    functions = (lambda w: fun(w.astype(jnp.bfloat16)), fun)
    got, want = (g for _, g in run_jitted([actjax.value_and_grad(f) for f in functions], w))
    assert got.dtype == "float32"
    # The operator casts the weight to the same numbers.
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_weights_of_one_call_may_have_different_dtypes():
    x, ws = normal(0, 12, 8), {"k": normal(1, 8, 5), "q": normal(2, 8, 5, dtype=jnp.bfloat16)}
    fun = lambda ws: total(*project(x, (ws["q"], ws["k"]), RP))  # noqa: E731
    _, gradient = jax.eval_shape(actjax.value_and_grad(fun), ws)
    assert {name: g.dtype for name, g in gradient.items()} == {"k": "float32", "q": "bfloat16"}


# Arguments, as in JAX.


def test_argnums(x64):
    params, x = mlp_params(), normal(5, 12, 8)
    flipped = lambda x, params: mlp(params, x, RP)  # noqa: E731
    for argnums in (1, -1):
        assert factored(compare(flipped, x, params, argnums=argnums)) == {"in.w", "out.w"}
    for argnums in ((1,), (0, 1), (1, 0), [1]):
        gradient = compare(flipped, x, params, argnums=argnums)
        assert isinstance(gradient, tuple)
        at = list(argnums).index(1)
        assert factored(gradient) == {f"{at}.in.w", f"{at}.out.w"}


@pytest.mark.parametrize("argnums", [0, (0, 1)])
def test_has_aux(argnums, x64):
    params, x = mlp_params(), normal(5, 12, 8)

    def fun(params, x):
        return mlp(params, x, RP), {"twice": 2 * x, "scale": params["scale"]}

    got, want = run_jitted([f(fun, argnums, has_aux=True) for f in BOTH], params, x)
    jax.tree.map(np.testing.assert_array_equal, got[0][1], want[0][1])
    np.testing.assert_allclose(got[0][0], want[0][0], rtol=1e-13)
    assert_same(got[1], want[1])
    assert len(factored(got[1])) == 2


def test_keyword_arguments(x64):
    def fun(params, x, *, codec, key):
        return mlp(params, x, codec, key=key)

    params, x = mlp_params(), normal(5, 12, 8)
    run = lambda params, x, key: actjax.value_and_grad(fun)(params, x, codec=RP, key=key)  # noqa: E731
    _, got = jax.jit(run)(params, x, KEY)
    assert_same(got, dense(compare(functools.partial(fun, codec=RP), params, x, key=KEY)))


def test_the_wrapper_has_the_name_and_docstring_of_the_function():
    def loss_of_mine(w):
        """Mine."""
        return total(w)

    wrapped = actjax.value_and_grad(loss_of_mine)
    assert (wrapped.__name__, wrapped.__doc__) == ("loss_of_mine", "Mine.")


def test_trees_of_any_kind(x64):
    x = normal(0, 12, 8)

    def fun(params):
        a, (b, none), c = params["list"]
        assert none is None
        return params["number"] * total(*project(x, (a, b))) + total(project(x, c["w"], RP))

    params = {
        "list": [normal(1, 8, 5), (normal(2, 8, 1), None), {"w": normal(3, 8, 2)}],
        "number": 2.0,
    }
    assert factored(compare(fun, params)) == {"list.0", "list.1.0", "list.2.w"}


def test_a_single_weight_may_be_the_argument(x64):
    gradient = compare(lambda w: total(project(normal(0, 12, 8), w)), normal(1, 8, 5))
    assert isinstance(gradient, LowRank)
