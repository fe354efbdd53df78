"""Tests of `actjax.value_and_grad`: factored gradients are the gradients that JAX computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from factored.gradient_helpers import (
    BOTH,
    KEY,
    KINDS,
    RP,
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


@pytest.mark.parametrize("codec", KINDS, ids=repr)
def test_factors_multiply_to_the_gradient_of_jax_and_the_others_are_equal(codec, x64):
    params, x = mlp_params(), normal(5, 2, 6, 8)
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
        assert np.all(error <= g.rank * jnp.finfo(g.dtype).eps * scale)


def test_at_full_rank_the_factors_multiply_to_the_exact_gradient(x64):
    # The rank is the number of features, or of tokens.
    xs = {"features": normal(0, 12, 8), "tokens": normal(0, 2, 3, 8)}
    codecs = {"features": RandomizedSVD(8), "tokens": RandomizedSVD(6)}

    def fun(ws):
        return total(*(project(xs[name], w, codecs[name]) for name, w in ws.items()))

    exact = jax.grad(lambda ws: total(*(xs[name] @ w for name, w in ws.items())))
    ws = {name: normal(1, 8, 5) for name in xs}
    (_, gradient), want = run_jitted([actjax.value_and_grad(fun), exact], ws)
    for name, g in gradient.items():
        assert g.rank == codecs[name].rank
        np.testing.assert_allclose(dense(g), want[name], rtol=1e-10, atol=1e-10)


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


def test_without_a_factored_codec_the_program_is_that_of_jax():
    params, x = mlp_params(), normal(5, 12, 8)
    programs = [
        str(jax.make_jaxpr(f(functools.partial(mlp, codec=Exact())))(params, x)) for f in BOTH
    ]
    assert programs[0] == programs[1]


def test_factors_have_the_dtype_of_the_weight():
    x = normal(0, 12, 8, dtype=jnp.bfloat16)
    codecs = {repr(codec): codec for codec in KINDS}
    params = {
        name: {d: normal(1, 8, 5, dtype=d) for d in ("bfloat16", "float32")} for name in codecs
    }

    def fun(params):
        outputs = [project(x, w, codecs[name]) for name, ws in params.items() for w in ws.values()]
        return total(*(y.astype(jnp.float32) for y in outputs))

    gradients = [by_path(g) for _, g in run_jitted([f(fun) for f in BOTH], params)]
    for path, got in gradients[0].items():
        dtype, want = path.rpartition(".")[2], gradients[1][path]
        assert got.left.dtype == got.right.dtype == want.dtype == dtype
        left, right = (np.asarray(a, np.float64) for a in (got.left, got.right))
        # The right factor and the product are each rounded once; sums of k terms are in float32.
        error = jnp.finfo(dtype).eps + got.rank * jnp.finfo("float32").eps
        difference = np.abs(left @ right - np.asarray(want, np.float64))
        np.testing.assert_array_less(difference, error * np.abs(left) @ np.abs(right))


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
    for argnums in (1, -1, (1,), (0, 1), (1, 0), [1]):
        got, want = (jax.eval_shape(f(flipped, argnums), x, params)[1] for f in BOTH)
        assert type(got) is type(want)
        prefix = "" if isinstance(argnums, int) else f"{list(argnums).index(1)}."
        assert factored(got) == {f"{prefix}in.w", f"{prefix}out.w"}
    compare(flipped, x, params, argnums=(1, 0))


def test_has_aux(x64):
    params, x = mlp_params(), normal(5, 12, 8)

    def fun(params, x):
        return mlp(params, x, RP), {"twice": 2 * x, "scale": params["scale"]}

    got, want = run_jitted([f(fun, (0, 1), has_aux=True) for f in BOTH], params, x)
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
