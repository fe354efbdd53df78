"""Tests of actjax/gradients.py: a gradient in two factors is the gradient that JAX would give."""

import functools
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CODECS
from flax import linen, nnx
from jax.extend import core
from tiny import batch, decoder

import actjax
from actjax import (
    Bases,
    Codec,
    Exact,
    LowRank,
    PointApproximation,
    PrincipalPlusRandom,
    RandomizedSVD,
    RandomProjection,
    Residual,
    accumulate,
    explain,
    input_groups,
    linear,
    qkv_projection,
    with_bases,
)
from actjax._core.paths import path_name
from actjax._math.precision import accumulation_dtype
from actjax.codecs.base import FactoredCodec
from actjax.low_rank import is_low_rank
from models import Storage

KEY = jax.random.key(7)
BOTH = actjax.value_and_grad, jax.value_and_grad
FACTORED = {name: codec for name, codec in CODECS.items() if isinstance(codec, FactoredCodec)}
RP, SVD = RandomProjection(3), RandomizedSVD(3)
KINDS = RP, SVD, PrincipalPlusRandom(2, 2), PointApproximation(1 / 4)


def normal(seed: int, *shape: int, dtype=None) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def project(x, w, codec: Codec = RP, key=KEY, **options):
    return linear(x, w, codec=codec, key=key, **options)


def total(*ys: jax.Array) -> jax.Array:
    """A scalar whose cotangents are not constant."""
    return sum((jnp.sum(jnp.sin(y)) for y in ys), jnp.zeros(()))


def by_path(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_low_rank)
    return {path_name(path): leaf for path, leaf in leaves}


def factored(tree: Any) -> set[str]:
    """Returns the paths of the `LowRank`s."""
    return {path for path, leaf in by_path(tree).items() if is_low_rank(leaf)}


def assert_same(got: Any, want: Any) -> None:
    """Float64: sums of some tens of terms, in another order. A `LowRank` stands for its product."""
    got, want = by_path(got), by_path(want)
    assert list(got) == list(want)
    for path, leaf in got.items():
        dense = leaf.dense() if is_low_rank(leaf) else leaf
        assert (dense.dtype, dense.shape) == (want[path].dtype, want[path].shape), path
        size = np.max(np.abs(want[path]), initial=0)
        np.testing.assert_allclose(dense, want[path], rtol=0, atol=1e-12 * size, err_msg=path)


def compare(fun, *args, argnums: Any = 0, **kwargs) -> Any:
    """Returns the gradient, after comparing value and gradient with those of JAX."""
    got, want = (f(fun, argnums)(*args, **kwargs) for f in BOTH)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-13)
    assert_same(got[1], want[1])
    return got[1]


# Values.


def mlp_params(dtype=None) -> dict[str, Any]:
    return {
        "in": {"w": normal(0, 8, 8, dtype=dtype), "b": normal(1, 8, dtype=dtype)},
        "out": {"w": normal(2, 8, 8, dtype=dtype), "b": normal(3, 8, dtype=dtype)},
        "scale": normal(4, 8, dtype=dtype),
    }


def mlp(params, x, codec, key=KEY):
    keys = jax.random.split(key)
    h = jnp.tanh(project(x, params["in"]["w"], codec, keys[0], bias=params["in"]["b"]))
    y = project(h, params["out"]["w"], codec, keys[1], bias=params["out"]["b"])
    return total(y * params["scale"])


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
    value, (gradient, dx) = actjax.value_and_grad(fun, (0, 1))(params, x)
    want_value, (want, want_dx) = jax.value_and_grad(fun, (0, 1))(params, x)
    np.testing.assert_array_equal(value, want_value)
    np.testing.assert_array_equal(dx, want_dx)
    assert factored(gradient) == {"in.w", "out.w"}
    got, want = by_path(gradient), by_path(want)
    for path in got.keys() - factored(gradient):
        np.testing.assert_array_equal(got[path], want[path])
    for path in factored(gradient):
        g = got[path]
        assert (g.shape, g.dtype, g.basis) == (want[path].shape, want[path].dtype, None)
        assert g.rank == codec.gradient_rank(x.shape)
        # Two products of the same factors: k roundings of each term, in either.
        scale = np.abs(g.left) @ np.abs(g.right)
        error = np.abs(g.dense() - want[path])
        assert np.all(error <= g.rank * jnp.finfo(dtype).eps * scale)


@pytest.mark.parametrize("shape", [(12, 8), (2, 3, 8)], ids=["d features", "T tokens"])
def test_at_full_rank_the_factors_are_those_of_the_gradient_without_a_codec(shape, x64):
    x, w = normal(0, *shape), normal(1, 8, 5)
    codec = RandomizedSVD(min(math.prod(shape[:-1]), shape[-1]))
    gradient = jax.jit(actjax.value_and_grad(lambda w: total(project(x, w, codec))))(w)[1]
    want = jax.grad(lambda w: total(x @ w))(w)
    assert gradient.rank == codec.rank
    np.testing.assert_allclose(gradient.dense(), want, rtol=1e-10, atol=1e-10)


def test_weights_of_one_call_share_one_left_factor():
    ws = {name: normal(i, 8, n) for i, (name, n) in enumerate({"q": 6, "k": 4, "v": 4}.items())}
    x, other = normal(4, 12, 8), normal(5, 8, 3)

    def fun(params):
        ws, other = params
        q, k, v = qkv_projection(x, ws["q"], ws["k"], ws["v"], codec=RP, key=KEY)
        return total(q, k, v, project(x, other, RP))

    gradient, of_other = actjax.value_and_grad(fun)((ws, other))[1]
    assert gradient["q"].left is gradient["k"].left is gradient["v"].left
    assert of_other.left is not gradient["q"].left
    # Compiled too it is one array.
    outputs = jax.make_jaxpr(actjax.value_and_grad(fun))((ws, other)).jaxpr.outvars
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


def test_without_a_factored_codec_it_is_the_value_and_grad_of_jax():
    params, x = mlp_params(), normal(5, 12, 8)
    fun = functools.partial(mlp, codec=Exact())
    got, want = (f(fun)(params, x) for f in (actjax.value_and_grad, jax.value_and_grad))
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("weight_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("codec", KINDS, ids=repr)
def test_the_dtype_is_that_of_the_weight(codec, weight_dtype):
    x, params = normal(0, 12, 8, dtype=jnp.bfloat16), {"w": normal(1, 8, 5, dtype=weight_dtype)}

    def fun(params):
        return total(project(x, params["w"], codec).astype(jnp.float32))

    got, want = (
        jax.jit(f(fun))(params)[1]["w"] for f in (actjax.value_and_grad, jax.value_and_grad)
    )
    assert got.left.dtype == got.right.dtype == want.dtype == weight_dtype
    left, right = (np.asarray(a, np.float64) for a in (got.left, got.right))
    # Right factor and product are rounded to the dtype once each; sums of k terms in float32.
    error = jnp.finfo(weight_dtype).eps + got.rank * jnp.finfo("float32").eps
    np.testing.assert_array_less(
        np.abs(left @ right - np.asarray(want, np.float64)), error * np.abs(left) @ np.abs(right)
    )


def test_a_weight_that_the_function_casts_keeps_its_dtype():
    x, w = normal(0, 12, 8, dtype=jnp.bfloat16), normal(1, 8, 5)
    fun = lambda w: total(project(x, w, RP).astype(jnp.float32))  # noqa: E731
    got, want = (
        actjax.value_and_grad(f)(w)[1] for f in (lambda w: fun(w.astype(jnp.bfloat16)), fun)
    )
    assert got.dtype == "float32"
    # The operator casts it to the same numbers.
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_weights_of_one_call_may_have_different_dtypes():
    x, ws = normal(0, 12, 8), {"k": normal(1, 8, 5), "q": normal(2, 8, 5, dtype=jnp.bfloat16)}
    fun = lambda ws: total(*project(x, (ws["q"], ws["k"]), RP))  # noqa: E731
    gradient = actjax.value_and_grad(fun)(ws)[1]
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

    got, want = (
        jax.jit(f(fun, argnums, has_aux=True))(params, x)
        for f in (actjax.value_and_grad, jax.value_and_grad)
    )
    jax.tree.map(np.testing.assert_array_equal, got[0][1], want[0][1])
    np.testing.assert_allclose(got[0][0], want[0][0], rtol=1e-13)
    assert_same(got[1], want[1])
    assert len(factored(got[1])) == 2


def test_keyword_arguments(x64):
    def fun(params, x, *, codec, key):
        return mlp(params, x, codec, key=key)

    params, x = mlp_params(), normal(5, 12, 8)
    run = lambda params, x, key: actjax.value_and_grad(fun)(params, x, codec=RP, key=key)  # noqa: E731
    got = jax.jit(run)(params, x, KEY)
    want = jax.jit(jax.value_and_grad(functools.partial(fun, codec=RP)))(params, x, key=KEY)
    assert_same(got[1], want[1])
    compare(functools.partial(fun, codec=RP), params, x, key=KEY)


def test_name_and_docstring_are_those_of_the_function():
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


@pytest.mark.parametrize(
    ("fun", "kind", "message"),
    [
        (lambda params: params["w"], TypeError, "scalar-output functions"),
        (lambda params: total(params["w"]).astype(int), TypeError, "real-"),
    ],
    ids=["array", "integer"],
)
def test_what_is_no_scalar_is_refused_by_jax(fun, kind, message):
    with pytest.raises(kind, match=message):
        actjax.value_and_grad(fun)({"w": normal(0, 8, 5)})


def test_integers_are_refused_by_jax():
    with pytest.raises(TypeError, match="int32"):
        actjax.value_and_grad(lambda p: total(p["w"]))({"w": normal(0, 8, 5), "step": jnp.int32(0)})


# Under transformations of JAX.


def stack(layers=3, features=8):
    return {"w": normal(1, layers, features, features), "b": normal(2, layers, features)}


def run_stack(params, x, layer):
    keys = jax.random.split(KEY, 3)
    return jax.lax.scan(lambda x, p: (layer(*p, x), None), x, (params, keys))[0]


def tanh_layer(p, key, x, codec: Codec = RP):
    return jnp.tanh(project(x, p["w"], codec, key, bias=p["b"]))


@pytest.mark.parametrize("codec", [RP, SVD], ids=repr)
def test_scan_stacks_the_factors_of_its_layers(codec, x64):
    params, x = stack(), normal(0, 12, 8)
    layer = functools.partial(tanh_layer, codec=codec)
    gradient = compare(lambda p: total(run_stack(p, x, layer)), params)
    assert gradient["w"].left.shape == (3, 8, 3)
    assert gradient["w"].right.shape == (3, 3, 8)
    # Layer by layer, each of them with a weight of its own.
    keys = jax.random.split(KEY, 3)

    def unrolled(layers):
        y = x
        for i, p in enumerate(layers):
            y = layer(p, keys[i], y)
        return total(y)

    layers = [jax.tree.map(lambda a, i=i: a[i], params) for i in range(3)]
    for i, of_layer in enumerate(jax.jit(actjax.value_and_grad(unrolled))(layers)[1]):
        slices = jax.tree.map(lambda a, i=i: a[i], gradient)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), slices, of_layer
        )


def test_scans_in_scans(x64):
    x, keys = normal(0, 12, 8), jax.random.split(KEY, (2, 3))

    def fun(params):
        def outer(x, slices):
            inner = lambda x, s: (tanh_layer(s[0], s[1], x), None)  # noqa: E731
            return jax.lax.scan(inner, x, slices)[0], None

        return total(jax.lax.scan(outer, x, (params, keys))[0])

    params = {"w": normal(1, 2, 3, 8, 8), "b": normal(2, 2, 3, 8)}
    assert compare(fun, params)["w"].left.shape == (2, 3, 8, 3)


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_checkpoint_around_a_layer(policy, x64):
    layer = jax.checkpoint(tanh_layer, policy=policy)
    params, x = stack(), normal(0, 12, 8)
    assert factored(compare(lambda p: total(run_stack(p, x, layer)), params)) == {"w"}
    assert factored(
        compare(lambda p: total(layer(p, KEY, x)), {"w": normal(1, 8, 8), "b": normal(2, 8)})
    )


def test_vmap_over_examples_with_weights_of_their_own(x64):
    xs, keys = normal(0, 3, 12, 8), jax.random.split(KEY, 3)

    def fun(params):
        return total(*jax.vmap(tanh_layer)(params, keys, xs))

    assert compare(fun, stack())["w"].left.shape == (3, 8, 3)
    over_weights = lambda params: total(*jax.vmap(tanh_layer, (0, None, None))(params, KEY, xs[0]))  # noqa: E731
    assert factored(compare(over_weights, stack())) == {"w"}


def test_vmap_of_a_scan_moves_its_axis_and_has_a_dense_gradient(x64):
    params = jax.tree.map(lambda a: jnp.stack([a, -a]), stack())
    fun = lambda p: total(jax.vmap(lambda p: run_stack(p, XS[0], tanh_layer))(p))  # noqa: E731
    assert factored(compare(fun, params)) == set()


def test_vmap_of_the_gradient(x64):
    def fun(params, x):
        return total(tanh_layer(params, KEY, x))

    for params, axes in ((stack(), (0, 0)), ({"w": normal(1, 8, 8), "b": normal(2, 8)}, (None, 0))):
        xs = normal(0, 3, 12, 8)
        got, want = (
            jax.jit(jax.vmap(f(fun), axes))(params, xs)
            for f in (actjax.value_and_grad, jax.value_and_grad)
        )
        assert got[1]["w"].left.shape == (3, 8, 3)
        assert_same(got[1], want[1])


@pytest.mark.parametrize("pred", [True, False])
def test_cond_between_operators_of_one_weight(pred, x64):
    x, other = normal(0, 12, 8), normal(1, 12, 8)

    def fun(params, pred):
        return total(
            jax.lax.cond(pred, lambda: project(x, params["a"]), lambda: project(other, params["a"]))
        )

    assert factored(compare(fun, {"a": normal(2, 8, 5)}, pred)) == {"a"}


@pytest.mark.parametrize("pred", [True, False])
@pytest.mark.parametrize("flip", [False, True])
def test_cond_that_may_skip_a_weight(flip, pred, x64):
    x = normal(0, 12, 8)

    def fun(params, pred):
        branches = lambda: project(x, params["w"]), lambda: jnp.zeros((12, 5))
        return total(jax.lax.cond(pred, *(branches[::-1] if flip else branches)))

    gradient = compare(fun, {"w": normal(2, 8, 5)}, pred)
    assert factored(gradient) == {"w"}
    assert np.any(gradient["w"].right != 0) == (pred != flip)


@jax.custom_jvp
def sine(x):
    return jnp.sin(x)


sine.defjvp(lambda x, dx: (sine(x[0]), jnp.cos(x[0]) * dx[0]))


@jax.custom_gradient
def doubled(x):
    return x, lambda dx: 2 * dx


@jax.custom_vjp
def nested(x, w):
    return project(x, w)


nested.defvjp(lambda x, w: jax.vjp(project, x, w), lambda pullback, dy: pullback(2 * dy))

CUSTOM = {
    "beside, custom_jvp": lambda x, w: sine(project(x, w)),
    "beside, custom_vjp": lambda x, w: doubled(project(doubled(x), w)),
    "around": nested,
    "jit": jax.jit(project),
    "jit of a closure": lambda x, w: jax.jit(lambda x: project(x, w))(x),
}


@pytest.mark.parametrize("call", CUSTOM.values(), ids=CUSTOM)
def test_beside_and_within_functions_with_rules_of_their_own(call, x64):
    x = normal(0, 12, 8)
    assert factored(compare(lambda p: total(call(x, p["w"])), {"w": normal(1, 8, 5)})) == {"w"}


def test_a_rule_of_its_own_that_takes_the_weight_for_an_array_is_refused():
    @jax.custom_vjp
    def own(x, w):
        return project(x, w, RP)

    own.defvjp(lambda x, w: (own(x, w), (x, w)), lambda r, dy: (dy @ r[1].T, 2 * r[0].T @ dy))
    x, params = normal(0, 12, 8), {"w": normal(1, 8, 5)}
    with pytest.raises(TypeError, match="the weight `w` has a factored gradient, so only"):
        actjax.value_and_grad(lambda p: total(own(x, p["w"])))(params)


# In modules of Flax.


class NnxLayer(nnx.Module):
    def __init__(self, seed: int, read=lambda param: param[...]):
        self.w = nnx.Param(normal(seed, 8, 8))
        self.b = nnx.Param(normal(seed + 1, 8))
        self.read = read

    def __call__(self, x, key):
        return jnp.tanh(project(x, self.read(self.w), SVD, key, bias=self.b[...]))


@pytest.mark.parametrize(
    "read",
    [
        lambda param: param[...],
        lambda param: param.get_value(),
        lambda param: param,
    ],
    ids=["brackets", "get_value", "the variable itself"],
)
def test_inside_nnx_modules(read, x64):
    x, layers = normal(0, 12, 8), nnx.List([NnxLayer(1, read), NnxLayer(3, read)])
    graph, state = nnx.split(layers)

    def of_state(state):
        y = x
        for layer, key in zip(nnx.merge(graph, state), jax.random.split(KEY), strict=True):
            y = layer(y, key)
        return total(y)

    assert factored(compare(of_state, state)) == {"0.w", "1.w"}
    assert factored(compare(lambda layer: total(layer(x, KEY)), layers[0])) == {"w"}


def test_inside_transformations_of_nnx(x64):
    x, keys = normal(0, 12, 8), jax.random.split(KEY, 3)
    graph, state = nnx.split(NnxLayer(1))
    stacked = jax.tree.map(lambda a: normal(2, 3, *a.shape), state)

    def scanned(state):
        body = nnx.remat(lambda x, layer, key: layer(x, key))
        over_layers = nnx.scan(body, in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
        return total(over_layers(x, nnx.merge(graph, state), keys))

    def mapped(state):
        each = nnx.vmap(lambda layer, key: layer(x, key))
        return total(each(nnx.merge(graph, state), keys))

    for fun in (scanned, mapped):
        assert by_path(compare(fun, stacked))["w"].left.shape == (3, 8, 3)


class LinenLayer(linen.Module):
    @linen.compact
    def __call__(self, x):
        w = self.param("w", linen.initializers.lecun_normal(), (8, 8), x.dtype)
        b = self.param("b", linen.initializers.normal(), (8,), x.dtype)
        return jnp.tanh(project(x, w, SVD, self.make_rng("codec"), bias=b))


class LinenLayers(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.remat(LinenLayer)(name="remat")(LinenLayer(name="plain")(x))
        scanned = linen.scan(
            lambda layer, x, _: (layer(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True, "codec": True},
            length=3,
        )
        return scanned(LinenLayer(name="scanned"), x, None)[0]


def test_inside_linen_modules(x64):
    x, rngs = normal(0, 12, 8), {"params": jax.random.key(0), "codec": KEY}
    params = LinenLayers().init(rngs, x)
    apply: Any = LinenLayers().apply
    gradient = compare(lambda params: total(apply(params, x, rngs=rngs)), params)
    assert factored(gradient) == {f"params.{name}.w" for name in ("plain", "remat", "scanned")}
    assert gradient["params"]["scanned"]["w"].left.shape == (3, 8, 3)


# A whole model.

WEIGHTS = {
    **{f"layers.attention.{name}": "attention_in" for name in "kqv"},
    "layers.attention.o": "attention_out",
    **{f"layers.mlp.{name}": "mlp_in" for name in ("gate", "up")},
    "layers.mlp.down": "mlp_out",
}


def test_every_weight_of_a_decoder_can_have_its_gradient_in_factors(x64):
    storage, (tokens, targets) = Storage(RandomProjection(5), RP, SVD, RandomProjection(6)), batch()

    def loss(model, key):
        return model.loss(tokens, targets, storage=storage, key=key, compute_dtype="float64")

    model = jax.jit(functools.partial(decoder, dtype="float64"))()
    both = jax.jit(lambda *args: [f(loss)(*args) for f in BOTH])
    (value, gradient), (want_value, want) = both(model, KEY)
    np.testing.assert_allclose(value, want_value, rtol=1e-13)
    assert_same(gradient, want)
    assert factored(gradient) == set(WEIGHTS)
    leaves, weights = by_path(gradient), by_path(model)
    for path, site in WEIGHTS.items():
        g = leaves[path]
        assert g.shape == weights[path].shape
        assert g.left.shape == (*g.shape[:-1], getattr(storage, site).rank)


# Bases.


def exact_gradient(fun, *args):
    """Returns what `fun`, given `Exact` for its codec, has for its gradient."""
    return jax.jit(jax.grad(functools.partial(fun, codec=Exact())))(*args)


def assert_in_basis(g: LowRank, name: str, basis: jax.Array, exact: jax.Array) -> None:
    """The left factor is the basis, the right one the exact gradient in it."""
    assert g.basis == name
    np.testing.assert_array_equal(g.left, basis)
    np.testing.assert_allclose(g.right, basis.mT @ exact, rtol=1e-10, atol=1e-10)


def qkv_loss(params, x, codec: Codec = Exact()):
    ys = project(x, (params["q"], params["k"], params["v"]), codec, name="attention_in")
    return total(*ys, project(jnp.tanh(ys[0]), params["o"], codec, name="attention_out"))


def qkv_params():
    return {
        name: normal(i, 8, n)
        for i, (name, n) in enumerate({"q": 8, "k": 4, "v": 4, "o": 8}.items())
    }


@pytest.mark.parametrize("codec", [Exact(), SVD], ids=repr)
def test_in_a_basis_the_gradient_is_exact_whatever_the_codec(codec, x64):
    params, x = qkv_params(), normal(5, 2, 6, 8)
    bases = {"k": normal(6, 8, 3), "o": normal(7, 8, 2)}
    fun = functools.partial(qkv_loss, codec=codec)
    value, gradient = jax.jit(actjax.value_and_grad(fun, bases=bases))(params, x)
    want = exact_gradient(qkv_loss, params, x)
    np.testing.assert_allclose(value, qkv_loss(params, x), rtol=1e-13)
    for name, group in {"q": "k", "k": "k", "v": "k", "o": "o"}.items():
        assert_in_basis(gradient[name], group, bases[group], want[name])


@pytest.mark.parametrize("codec", [Exact(), SVD], ids=repr)
def test_inputs_without_a_basis_keep_their_codec(codec, x64):
    params, x, basis = qkv_params(), normal(5, 12, 8), normal(6, 8, 3)
    fun = functools.partial(qkv_loss, codec=codec)
    gradient = jax.jit(actjax.value_and_grad(fun, bases={"k": basis}))(params, x)[1]
    for name in "qkv":
        assert_in_basis(gradient[name], "k", basis, exact_gradient(qkv_loss, params, x)[name])
    want = jax.jit(jax.grad(fun))(params, x)["o"]
    assert is_low_rank(gradient["o"]) == (codec == SVD)
    assert_same({"o": gradient["o"]}, {"o": want})


def test_everything_else_is_exact_in_a_basis(x64):
    params, x, basis = mlp_params(), normal(5, 12, 8), normal(6, 8, 3)
    run = actjax.value_and_grad(mlp, (0, 1), bases={"0.in.w": basis})
    gradient, dx = jax.jit(functools.partial(run, codec=Exact()))(params, x)[1]
    want, want_dx = jax.jit(jax.grad(functools.partial(mlp, codec=Exact()), (0, 1)))(params, x)
    assert_in_basis(gradient["in"].pop("w"), "0.in.w", basis, want["in"].pop("w"))
    assert_same((gradient, dx), (want, want_dx))


def test_weights_without_a_tap_in_the_same_call_have_the_gradient_in_the_basis_multiplied_out(x64):
    x, params, other = normal(0, 12, 8), {"w": normal(1, 8, 5)}, normal(2, 8, 4)
    basis = normal(3, 8, 3)

    def fun(params, other, codec: Codec = Exact()):
        return total(*project(x, (params["w"], other), codec))

    got = jax.grad(with_bases(fun, {"w": basis}), 1)(params, other)
    want = exact_gradient(lambda other, codec: fun(params, other, codec), other)
    np.testing.assert_allclose(got, basis @ basis.T @ want, rtol=1e-10, atol=1e-10)


def test_stacked_bases_under_scan(x64):
    params, x, bases = stack(), normal(0, 12, 8), {"w": normal(3, 3, 8, 2)}

    def fun(params, codec=SVD):
        return total(run_stack(params, x, functools.partial(tanh_layer, codec=codec)))

    gradient = jax.jit(actjax.value_and_grad(fun, bases=bases))(params)[1]
    want = exact_gradient(fun, params)
    assert_in_basis(gradient["w"], "w", bases["w"], want["w"])
    np.testing.assert_allclose(gradient["b"], want["b"], rtol=1e-10, atol=1e-10)


REPEATED = {
    "a loop": lambda xs, w, codec: jax.lax.map(lambda x: project(x, w, codec), xs),
    "vmap": lambda xs, w, codec: jax.vmap(lambda x: project(x, w, codec))(xs),
    "twice in a call": lambda xs, w, codec: sum(project(xs, (w, w), codec)),
}


@pytest.mark.parametrize("call", REPEATED.values(), ids=REPEATED)
def test_in_a_basis_the_same_weight_may_meet_many_inputs(call, x64):
    xs, params, basis = normal(0, 4, 6, 8), {"w": normal(1, 8, 5)}, normal(2, 8, 3)
    fun = lambda params, codec=Exact(): total(call(xs, params["w"], codec))  # noqa: E731
    gradient = jax.jit(actjax.value_and_grad(fun, bases={"w": basis}))(params)[1]
    assert_in_basis(gradient["w"], "w", basis, exact_gradient(fun, params)["w"])


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_coordinates_in_8_bits_err_as_they_say(dtype, x64):
    x, w, basis = normal(0, 12, 8, dtype=dtype), normal(1, 8, 12), normal(2, 8, 3, dtype=dtype)

    def trace(params):
        # Its cotangent is the identity, so that the right factor is what is decoded, transposed.
        return jnp.trace(project(x, params["w"], Exact()))

    run = jax.jit(actjax.value_and_grad(trace, bases=Bases({"w": basis}, bits=8)))
    decoded = np.asarray(run({"w": w})[1]["w"].right).T
    x, basis = np.asarray(x, np.float64), np.asarray(basis, np.float64)
    largest = np.abs(x @ basis).max(1, keepdims=True)
    # Half a step; the scale and the decoded value are rounded once each; sums of eight terms.
    rounding = jnp.finfo(dtype).eps * largest
    rounding = rounding + 8 * jnp.finfo(accumulation_dtype(dtype)).eps * np.abs(x) @ np.abs(basis)
    error = np.abs(decoded - x @ basis)
    assert np.all(error <= largest / 254 + rounding)
    assert error.max() > 0


def test_a_basis_takes_the_dtype_of_the_weight():
    x, w, basis = normal(0, 12, 8), normal(1, 8, 5, dtype=jnp.bfloat16), normal(2, 8, 3)
    fun = lambda params: total(project(x, params["w"], Exact()))  # noqa: E731
    gradient = actjax.value_and_grad(fun, bases={"w": basis})({"w": w})[1]["w"]
    assert gradient.left.dtype == gradient.right.dtype == "bfloat16"


def test_no_bases_are_no_difference():
    params, x = qkv_params(), normal(5, 12, 8)
    fun = functools.partial(qkv_loss, codec=RP)
    want = actjax.value_and_grad(fun)(params, x)
    for bases in (None, {}, Bases({})):
        got = actjax.value_and_grad(fun, bases=bases)(params, x)
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_inputs_go_by_their_first_weight():
    assert input_groups(qkv_loss, qkv_params(), normal(5, 12, 8)) == {
        "q": "k",
        "k": "k",
        "v": "k",
        "o": "o",
    }


def test_inputs_of_a_decoder():
    tokens, targets = batch()
    shapes = jax.eval_shape(decoder)
    for storage in (Storage(), Storage(attention_in=SVD, mlp_out=RP)):
        loss = functools.partial(
            lambda model, tokens, storage: model.loss(tokens, targets, storage=storage, key=KEY),
            storage=storage,
        )
        first = {"attention_in": "layers.attention.k", "mlp_in": "layers.mlp.gate"}
        want = {path: first.get(site, path) for path, site in WEIGHTS.items()}
        assert input_groups(loss, shapes, tokens) == want


def test_weights_that_something_else_reads_are_in_no_group():
    def fun(params):
        ys = project(normal(0, 12, 8), (params["a"], params["b"]))
        return total(*ys, params["a"]) + total(params["c"])

    params = {name: normal(i, 8, 5) for i, name in enumerate("abc")}
    assert input_groups(fun, params) == {"b": "b"}


BAD_BASES = {
    "no such input": (
        {"v": (8, 3)},
        "`bases` has ['v'], but the inputs of linear operators are: k, o.",
    ),
    "two that are not there": (
        {"z": (8, 3), "k": (8, 3), "y": (8, 3)},
        "`bases` has ['y', 'z'], but the inputs of linear operators are: k, o.",
    ),
    "other features": (
        {"k": (7, 3)},
        "the basis of `k` must have shape (8, 3), for the weight `k` of (8, 4), got (7, 3).",
    ),
    "transposed": (
        {"o": (3, 8)},
        "the basis of `o` must have shape (8, 8), for the weight `o` of (8, 8), got (3, 8).",
    ),
    "stacked": (
        {"o": (2, 8, 3)},
        "the basis of `o` must have shape (8, 3), for the weight `o` of (8, 8), got (2, 8, 3).",
    ),
}


@pytest.mark.parametrize("name", BAD_BASES)
def test_bases_that_fit_no_input_are_refused(name):
    shapes, message = BAD_BASES[name]
    bases = {group: normal(i, *shape) for i, (group, shape) in enumerate(shapes.items())}
    for fun in (actjax.value_and_grad(qkv_loss, bases=bases), with_bases(qkv_loss, bases)):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            fun(qkv_params(), normal(5, 12, 8))


def test_bases_where_there_is_no_linear_operator_are_refused():
    with pytest.raises(ValueError, match=r"`bases` has \['w'\], but .* are: none\. A subspace"):
        actjax.value_and_grad(lambda p: total(p["w"]), bases={"w": normal(0, 8, 3)})({"w": XS[0]})


def test_the_basis_of_stacked_weights_is_stacked():
    fun = lambda p, x: total(run_stack(p, x, tanh_layer))  # noqa: E731
    message = (
        "the basis of `w` must have shape (3, 8, 2), for the weight `w` of (3, 8, 8), got (8, 2)."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        actjax.value_and_grad(fun, bases={"w": normal(3, 8, 2)})(stack(), normal(0, 12, 8))


@pytest.mark.parametrize("bits", [5, 32, None])
def test_bits_are_4_or_8_or_16(bits):
    message = f"`bits` of Bases must be one of (4, 8, 16), got {bits}."
    with pytest.raises(ValueError, match=re.escape(message)):
        Bases({}, bits=bits)


def test_a_weight_in_a_basis_may_be_read_by_one_operator_alone():
    fun = lambda p: total(project(XS[0], p["w"]), project(XS[1], p["w"]))  # noqa: E731
    with pytest.raises(ValueError, match="the weight `w` is read by 2 linear operators"):
        actjax.value_and_grad(fun, bases={"w": normal(0, 8, 3)})({"w": normal(1, 8, 5)})
    fun = lambda p: total(project(XS[0], p["w"]), p["w"])  # noqa: E731
    with pytest.raises(ValueError, match=r"the weight `w` has .* `sin` does too"):
        actjax.value_and_grad(fun, bases={"w": normal(0, 8, 3)})({"w": normal(1, 8, 5)})


# Errors.

ADVICE = "give the operator codec=Exact(), or differentiate with jax.value_and_grad."
FOREIGN = (
    "the weight `layer.w` has a factored gradient, so only actjax's linear operators may read it,"
    " but `{}` does too: " + ADVICE
)
TWICE = (
    "the weight `layer.w` is read by 2 linear operators, whose factors cannot be added up: "
    + ADVICE
)
OFTEN = (
    "the weight `layer.w` meets a factored codec {} times, in a loop that does not slice it or"
    " under a vmap that does not map it, and the factors cannot be added up: let the operator see"
    " all tokens at once, or " + ADVICE
)
XS = np.random.default_rng(0).standard_normal((4, 12, 8))
"""Four inputs. NumPy's, so that they take the precision of a test."""

# From a weight and a codec to a scalar, and what a factored codec is refused with.
SITUATIONS = {
    "two operators": (
        lambda w, c: total(project(XS[0], w, c), project(XS[1], w, c)),
        TWICE,
    ),
    "two operators, the second exact": (
        lambda w, c: total(project(XS[0], w, c), project(XS[1], w, Exact())),
        TWICE,
    ),
    "two operators, the first exact": (
        lambda w, c: total(project(XS[0], w, Exact()), project(XS[1], w, c)),
        TWICE,
    ),
    "two operators, one of them in a scan": (
        lambda w, c: total(project(XS[0], w, c), jax.lax.map(lambda x: project(x, w, c), XS)),
        TWICE,
    ),
    "two operators, in jitted functions": (
        lambda w, c: total(*(jax.jit(project, static_argnums=2)(x, w, c) for x in XS[:2])),
        TWICE,
    ),
    "twice in one operator": (lambda w, c: total(*project(XS[0], (w, w), c)), TWICE),
    "a sum": (
        lambda w, c: total(project(XS[0], w, c)) + w.sum(),
        FOREIGN.format("reduce_sum"),
    ),
    "a power": (
        lambda w, c: total(project(XS[0], w, c), w**2),
        FOREIGN.format("__POWER__"),
    ),
    "a product": (
        lambda w, c: total(project(XS[0], w, c), jnp.dot(XS[1], w)),
        FOREIGN.format("dot_general"),
    ),
    "a transpose": (
        lambda w, c: total(project(XS[0], w, c), w.T),
        FOREIGN.format("transpose"),
    ),
    "a slice": (
        lambda w, c: total(project(XS[0], w, c), w[:1]),
        FOREIGN.format("__SLICE__"),
    ),
    "another operator of actjax": (
        lambda w, c: total(project(XS[0], w, c), actjax.swiglu(w, 2 * w)),
        FOREIGN.format("__SWIGLU__"),
    ),
    "no gradient": (
        lambda w, c: total(project(XS[0], w, c), jax.lax.stop_gradient(w)),
        FOREIGN.format("stop_gradient"),
    ),
    "a scan that does not slice it": (
        lambda w, c: total(jax.lax.map(lambda x: project(x, w, c), XS)),
        OFTEN.format(4),
    ),
    "a carry": (
        lambda w, c: total(jax.lax.scan(lambda w, x: (w, project(x, w, c)), w, XS)[1]),
        OFTEN.format(4),
    ),
    "a loop": (
        lambda w, c: total(
            jax.lax.fori_loop(0, 3, lambda _, x: x + project(x, w, c)[:, :1], jnp.asarray(XS[0]))
        ),
        OFTEN.format(3),
    ),
    "a vmap that does not map it": (
        lambda w, c: total(jax.vmap(lambda x: project(x, w, c))(jnp.asarray(XS))),
        OFTEN.format(4),
    ),
}


def message_pattern(message: str) -> str:
    pattern = re.escape(message)
    names = {"POWER": "(integer_pow|square)", "SLICE": r"(slice|dynamic_slice)", "SWIGLU": r"\w+"}
    for name, names_of_primitive in names.items():
        pattern = pattern.replace(f"__{name}__", names_of_primitive)
    return f"^{pattern}$"


def situation(name):
    fun = SITUATIONS[name][0]
    return lambda params, codec: fun(params["layer"]["w"], codec)


@pytest.mark.parametrize("name", SITUATIONS)
def test_factors_that_cannot_be_added_up_are_an_error_that_names_the_weight(name):
    params = {"layer": {"w": normal(1, 8, 5)}}
    with pytest.raises(ValueError, match=message_pattern(SITUATIONS[name][1])):
        actjax.value_and_grad(situation(name))(params, RP)


@pytest.mark.parametrize("name", SITUATIONS)
def test_an_exact_codec_works_in_these_situations_as_in_jax(name, x64):
    params = {"layer": {"w": normal(1, 8, 5)}}
    fun = functools.partial(situation(name), codec=Exact())
    assert factored(compare(fun, params)) == set()


def test_the_path_says_which_argument_if_there_are_several():
    fun = lambda x, params: situation("a sum")(params, RP) + total(x)  # noqa: E731
    with pytest.raises(ValueError, match=r"^the weight `1\.layer\.w` has a factored gradient"):
        actjax.value_and_grad(fun, (0, 1))(normal(0, 3), {"layer": {"w": normal(1, 8, 5)}})


def test_a_cast_other_than_astype_is_an_error_that_names_the_weight():
    fun = lambda p: total(project(XS[0], jnp.asarray(p["layer"]["w"], jnp.bfloat16), RP))  # noqa: E731
    message = (
        "the weight `layer.w` has a factored gradient, so only `actjax.linear` and"
        " `actjax.qkv_projection` can read it, and only `.astype` cast it: use these, " + ADVICE
    )
    with pytest.raises(TypeError, match=re.escape(message)):
        actjax.value_and_grad(fun)({"layer": {"w": normal(1, 8, 5)}})


def test_a_loop_that_runs_once_is_no_loop(x64):
    params = {"w": normal(1, 8, 5)}
    for over in (jax.lax.map, lambda fun, xs: jax.vmap(fun)(xs)):
        fun = lambda p, over=over: total(over(lambda x: project(x, p["w"]), jnp.asarray(XS[:1])))  # noqa: E731
        assert factored(compare(fun, params)) == {"w"}


def test_an_output_is_no_tapped_weight():
    fun = lambda p: (total(project(XS[0], p["w"], Exact())), p)  # noqa: E731
    params = {"w": normal(1, 8, 5)}
    (_, aux), _ = actjax.value_and_grad(fun, has_aux=True)(params)
    np.testing.assert_array_equal(aux["w"], params["w"])


def test_a_weight_with_a_factored_gradient_comes_out_as_it_went_in():
    fun = lambda p: (total(project(XS[0], p["w"], RP)), p)  # noqa: E731
    params = {"w": normal(1, 8, 5)}
    (_, aux), gradient = actjax.value_and_grad(fun, has_aux=True)(params)
    assert isinstance(gradient["w"], LowRank)
    np.testing.assert_array_equal(aux["w"], params["w"])


# Where it must refuse, if it does not get it right.


def right_or_refused(fun, params, *args) -> None:
    refused = ""
    try:
        gradient = actjax.value_and_grad(fun)(params, *args)[1]
    except ValueError as error:
        refused = str(error)
    if refused:
        assert "the weight `" in refused
    else:
        assert_same(gradient, jax.grad(fun)(params, *args))


def casted(call):
    """A weight that meets one operator as it is, and another in float32."""
    cast = call(lambda w: w.astype("float32"))
    return lambda p, _: total(
        project(XS[0], p["a"]), project(XS[1].astype("float32"), cast(p["a"]))
    )


HARD = {
    "cond between operators of two weights": lambda p, pred: total(
        jax.lax.cond(pred, lambda: project(XS[0], p["a"]), lambda: project(XS[1], p["b"]))
    ),
    "cond between operators of two weights, one exact": lambda p, pred: total(
        jax.lax.cond(pred, lambda: project(XS[0], p["a"], Exact()), lambda: project(XS[1], p["b"]))
    ),
    "cond between codecs": lambda p, pred: total(
        jax.lax.cond(pred, lambda: project(XS[0], p["a"], Exact()), lambda: project(XS[1], p["a"]))
    ),
    "cond between ranks": lambda p, pred: total(
        jax.lax.cond(
            pred,
            lambda: project(XS[0], p["a"], RandomProjection(2)),
            lambda: project(XS[1], p["a"]),
        )
    ),
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
    for pred in (True, False):
        right_or_refused(HARD[name], params, pred)


# What is not there.


def equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """Yields all equations of a program, those in bodies included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for body in value if isinstance(value, tuple | list) else (value,):
                body = getattr(body, "jaxpr", body)
                if isinstance(body, core.Jaxpr):
                    yield from equations(body)


def shape_of(var: Any) -> tuple[int, ...]:
    return var.aval.shape


def made(fun, shape, *args) -> list[str]:
    """Returns which primitives make an array whose last axes are `shape`."""
    eqns = equations(jax.make_jaxpr(fun)(*args).jaxpr)
    shapes = [(eqn.primitive.name, shape_of(var)) for eqn in eqns for var in eqn.outvars]
    return [name for name, made in shapes if made[-2:] == shape and name != "name"]


LAYERS, FEATURES, OUTPUTS = 5, 11, 13


def square_layers(ws, x, codec, layers=LAYERS):
    """A stack of layers that never change the shape, with weights of shape [FEATURES, OUTPUTS]."""

    def layer(x, slices):
        w, key = slices
        return x + jnp.tanh(project(x, w, codec, key)).sum(-1, keepdims=True), None

    return total(jax.lax.scan(layer, x, (ws, jax.random.split(KEY, layers)))[0])


@pytest.mark.parametrize("codec", FACTORED.values(), ids=FACTORED)
def test_nothing_of_the_shape_of_the_weight_is_computed(codec):
    ws, x = normal(0, LAYERS, FEATURES, OUTPUTS), normal(1, 2, 7, FEATURES)
    fun, shape = functools.partial(square_layers, codec=codec), (FEATURES, OUTPUTS)
    assert made(actjax.value_and_grad(fun), shape, ws, x) == []
    dense = made(jax.value_and_grad(fun), shape, ws, x)
    assert dense.count("dot_general") == 1
    basis = normal(2, LAYERS, FEATURES, 3)
    assert made(actjax.value_and_grad(fun, bases={"": basis}), shape, ws, x) == []


def test_no_product_over_the_tokens_gives_a_gradient_of_the_weight():
    ws, x = normal(0, LAYERS, FEATURES, OUTPUTS), normal(1, 2, 7, FEATURES)

    def over_tokens(value_and_grad, codec):
        jaxpr = jax.make_jaxpr(value_and_grad(functools.partial(square_layers, codec=codec)))(ws, x)
        found = []
        for eqn in equations(jaxpr.jaxpr):
            if eqn.primitive.name == "dot_general":
                (contracted, _), _ = eqn.params["dimension_numbers"]
                if [shape_of(eqn.invars[0])[i] for i in contracted] == [2, 7]:
                    found.append(shape_of(eqn.outvars[0]))
        return found

    assert over_tokens(actjax.value_and_grad, RP) == [(3, OUTPUTS)]
    assert over_tokens(jax.value_and_grad, Exact()) == [(FEATURES, OUTPUTS)]


@pytest.mark.parametrize("codec", [RandomProjection(4), RandomizedSVD(4)], ids=repr)
@pytest.mark.parametrize("given", [False, True], ids=["own factors", "in a basis"])
def test_the_compiled_program_has_no_room_for_a_dense_gradient(codec, given):
    layers, features, outputs = 8, 128, 512
    ws = jax.ShapeDtypeStruct((layers, features, outputs), jnp.float32)
    x = jax.ShapeDtypeStruct((32, features), jnp.float32)
    basis = jnp.ones((layers, features, 4))
    fun = functools.partial(square_layers, codec=codec, layers=layers)

    def temporary(value_and_grad) -> int:
        def run(ws, x):
            value, gradient = value_and_grad(ws, x)
            # The gradient is used up, as by an optimizer, so that it is no output.
            return value, actjax.global_norm(gradient)

        compiled = jax.jit(run).lower(ws, x).compile()
        analysis: Any = compiled.memory_analysis()
        return analysis.temp_size_in_bytes

    mine = actjax.value_and_grad(fun, bases={"": basis} if given else None)
    dense_bytes = 4 * layers * features * outputs
    assert temporary(jax.value_and_grad(fun)) - temporary(mine) >= 0.9 * dense_bytes


# Micro-batches.


def batches(count=4, tokens=12, features=8):
    x = normal(10, count, tokens, features)
    return x, normal(11, count, tokens, features)


def regression(params, batch, codec: Codec = Exact()):
    """A mean over tokens, so that the mean over micro-batches is that of the large batch."""
    x, y = batch
    h = jnp.tanh(project(x, params["a"], codec, bias=params["bias"]))
    return jnp.mean(jnp.square(project(h, params["b"], codec) - y))


def regression_params(dtype=None):
    return {
        "a": normal(1, 8, 8, dtype=dtype),
        "b": normal(2, 8, 8, dtype=dtype),
        "bias": normal(3, 8, dtype=dtype),
    }


def joined(batches):
    return jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), batches)


def micro_batches(fun, params, stack):
    """Returns value and gradient of each micro-batch."""
    count = len(jax.tree.leaves(stack)[0])
    return [fun(params, jax.tree.map(lambda a, i=i: a[i], stack)) for i in range(count)]


@pytest.mark.parametrize("value_and_grad", BOTH, ids=["actjax", "jax"])
def test_micro_batches_have_the_gradient_of_the_large_batch(value_and_grad, x64):
    params, stack = regression_params(), batches()
    value, gradient = accumulate(value_and_grad(regression), params, stack)
    want_value, want = jax.value_and_grad(regression)(params, joined(stack))
    np.testing.assert_allclose(value, want_value, rtol=1e-13)
    assert_same(gradient, want)
    assert factored(gradient) == set()


def test_micro_batches_in_a_shared_basis_have_the_gradient_of_the_large_batch(x64):
    params, stack = regression_params(), batches()
    bases = {"a": normal(4, 8, 3), "b": normal(5, 8, 2)}
    run = actjax.value_and_grad(regression, bases=bases)
    value, gradient = accumulate(run, params, stack, max_rank=1)  # Of what has no basis.
    want_value, want = run(params, joined(stack))
    np.testing.assert_allclose(value, want_value, rtol=1e-13)
    assert_same(
        gradient,
        jax.tree.map(lambda g: g.dense() if is_low_rank(g) else g, want, is_leaf=is_low_rank),
    )
    for name, basis in bases.items():
        assert gradient[name].basis == name
        np.testing.assert_array_equal(gradient[name].left, basis)


@pytest.mark.parametrize("weights", [None, [0.1, 0.2, 0.3, 0.4]], ids=["equal", "given"])
def test_factors_of_their_own_are_put_side_by_side(weights, x64):
    params, stack = regression_params(), batches()
    run = actjax.value_and_grad(functools.partial(regression, codec=SVD))
    given = None if weights is None else jnp.asarray(weights)
    value, gradient = accumulate(run, params, stack, weights=given)
    parts, shares = micro_batches(run, params, stack), weights or [1 / 4] * 4
    dense = jax.tree.map(lambda g: g.dense() if is_low_rank(g) else g, parts, is_leaf=is_low_rank)
    want_value, want = jax.tree.map(
        lambda *all_of: sum(s * g for s, g in zip(shares, all_of, strict=True)), *dense
    )
    np.testing.assert_allclose(value, want_value, rtol=1e-13)
    assert_same(gradient, want)
    assert factored(gradient) == {"a", "b"}
    for name in ("a", "b"):
        assert gradient[name].rank == 4 * SVD.rank
        lefts = [g[name].left for _, g in parts]
        np.testing.assert_allclose(gradient[name].left, jnp.concatenate(lefts, 1), rtol=1e-10)


def test_max_rank_truncates_with_the_least_possible_error(x64):
    params, stack = regression_params(), batches()
    run = actjax.value_and_grad(functools.partial(regression, codec=SVD))
    whole, truncated, same = (
        accumulate(run, params, stack, max_rank=rank)[1] for rank in (None, 5, 12)
    )
    for name in ("a", "b"):
        assert (truncated[name].rank, same[name].rank) == (5, 12)
        np.testing.assert_array_equal(same[name].dense(), whole[name].dense())
        values = np.linalg.svd(whole[name].dense(), compute_uv=False)
        error = np.linalg.norm(whole[name].dense() - truncated[name].dense())
        np.testing.assert_allclose(error, np.linalg.norm(values[5:]), rtol=1e-10)
    np.testing.assert_array_equal(whole["bias"], truncated["bias"])


def test_stacked_factors_are_put_side_by_side_layer_by_layer(x64):
    params, xs = stack(), normal(0, 2, 12, 8)
    run = actjax.value_and_grad(lambda p, x: total(run_stack(p, x, tanh_layer)))
    _, gradient = accumulate(run, params, xs)
    assert gradient["w"].left.shape == (3, 8, 2 * 3)
    assert gradient["w"].right.shape == (3, 2 * 3, 8)
    (_, one), (_, two) = micro_batches(run, params, xs)
    assert_same(
        gradient,
        {"b": (one["b"] + two["b"]) / 2, "w": (one["w"].dense() + two["w"].dense()) / 2},
    )
    truncated = accumulate(run, params, xs, max_rank=2)[1]["w"]
    values = jnp.linalg.svd(gradient["w"].dense(), compute_uv=False)
    error = jnp.linalg.norm(truncated.dense() - gradient["w"].dense(), axis=(-2, -1))
    np.testing.assert_allclose(error, jnp.linalg.norm(values[:, 2:], axis=-1), rtol=1e-9)


def test_dense_gradients_and_those_in_a_basis_are_summed_in_float32():
    params, ones = {"w": jnp.ones((8, 1), jnp.bfloat16)}, jnp.ones((600, 1, 8), jnp.bfloat16)
    fun = lambda p, x: jnp.sum(project(x, p["w"], Exact()).astype(jnp.float32))  # noqa: E731
    weights = jnp.ones(600)
    for bases in (None, {"w": jnp.eye(8, 2)}):
        run = actjax.value_and_grad(fun, bases=bases)
        value, gradient = accumulate(run, params, ones, weights=weights)
        summed = gradient["w"].right if bases else gradient["w"]
        assert summed.dtype == "float32"
        # In bfloat16 the sum would stop at 256.
        np.testing.assert_array_equal(summed, 600)
        assert value == 600 * 8


def test_factors_of_their_own_keep_the_dtype_of_the_weight():
    params, xs = {"w": normal(1, 8, 5, dtype=jnp.bfloat16)}, normal(2, 2, 12, 8)
    run = actjax.value_and_grad(lambda p, x: total(project(x, p["w"])))
    assert accumulate(run, params, xs)[1]["w"].dtype == "bfloat16"


def test_weights_may_be_wider_than_the_gradient(x64):
    params, xs = {"w": normal(1, 8, 5, dtype="float32")}, normal(2, 2, 12, 8, dtype="float32")
    run = actjax.value_and_grad(lambda p, x: total(project(x, p["w"], Exact())))
    accumulate(run, params, xs, weights=jnp.asarray([0.5, 0.5], "float64"))


# What is stored.


def basis_row(name, codec, shape, runs=(), bits=16, rank=3) -> Residual:
    tokens, count = math.prod(shape[:-1]), math.prod(runs)
    stored = tokens * rank * 4 if bits == 16 else tokens * (rank + 4)
    shape = (*runs, *shape)
    return Residual(
        "linear", name, shape, "float32", 4 * math.prod(shape), count * stored, codec, ""
    )


@pytest.mark.parametrize(
    ("bits", "codec"), [(16, "Basis(rank=3)"), (8, "Basis(rank=3, bits=8)")], ids=str
)
def test_explain_shows_the_basis_and_its_bytes(bits, codec):
    params, x = qkv_params(), normal(5, 2, 6, 8)
    bases = Bases({"k": normal(6, 8, 3), "o": normal(7, 8, 3)}, bits=bits)
    explanation = explain(with_bases(functools.partial(qkv_loss, codec=SVD), bases), params, x)
    rows = {r for r in explanation.residuals if r.operator == "linear"}
    names = "attention_in", "attention_out"
    assert rows == {basis_row(name, codec, (2, 6, 8), bits=bits) for name in names}
    assert codec in str(explanation)


def test_explain_shows_bases_beside_codecs():
    explanation = explain(
        with_bases(functools.partial(qkv_loss, codec=SVD), {"o": normal(7, 8, 3)}),
        qkv_params(),
        normal(5, 2, 6, 8),
    )
    rows = {r.codec: r for r in explanation.residuals if r.operator == "linear"}
    assert set(rows) == {repr(SVD), "Basis(rank=3)"}
    assert rows[repr(SVD)].stored_bytes == SVD.stored_bytes((2, 6, 8), "float32")


def test_explain_stacks_the_layers_of_a_scan():
    fun = lambda params, x: total(run_stack(params, x, tanh_layer))  # noqa: E731
    explanation = explain(with_bases(fun, {"w": normal(3, 3, 8, 3)}), stack(), normal(0, 12, 8))
    (row,) = (r for r in explanation.residuals if r.operator == "linear")
    assert row == basis_row("input", "Basis(rank=3)", (12, 8), runs=(3,))
    # The backward pass does not read the basis.
    assert all(r.shape != (3, 8, 3) for r in explanation.residuals)


def test_explain_shows_the_bases_of_a_decoder():
    model, (tokens, targets) = jax.eval_shape(decoder), batch()

    def loss(model):
        return model.loss(tokens, targets, compute_dtype="float32")

    groups = dict.fromkeys(input_groups(loss, model).values())
    weights = by_path(model)
    bases = {path: jnp.ones((*weights[path].shape[:-1], 3)) for path in groups}
    rows = {r.name: r for r in explain(with_bases(loss, bases), model).residuals}
    for site, width in (
        ("attention_in", 24),
        ("mlp_in", 24),
        ("attention_out", 24),
        ("mlp_out", 44),
    ):
        want = basis_row(site, "Basis(rank=3)", (2, 11, width), runs=(3,))
        assert rows[site] == want


def test_with_bases_is_the_function_and_has_no_gradient_of_the_weight(x64):
    params, x = qkv_params(), normal(5, 12, 8)
    stored = with_bases(qkv_loss, {"k": normal(6, 8, 3)})
    value, gradient = jax.value_and_grad(stored)(params, x)
    want_value, want = jax.value_and_grad(qkv_loss)(params, x)
    np.testing.assert_allclose(value, want_value, rtol=1e-13)
    for name in "qkv":
        np.testing.assert_array_equal(gradient[name], 0)
    np.testing.assert_allclose(gradient["o"], want["o"], rtol=1e-10, atol=1e-12)
    assert stored.__name__ == "qkv_loss"


# What is called in another way than it should be.


def test_two_parameters_of_one_name_are_refused():
    params = {"a.b": normal(0, 8, 5), "a": {"b": normal(1, 8, 5)}}
    fun = lambda p: total(XS[0] @ p["a.b"], XS[0] @ p["a"]["b"])  # noqa: E731
    for call in (actjax.value_and_grad(fun), lambda p: actjax.input_groups(fun, p)):
        with pytest.raises(ValueError, match=r"two parameters go by the path `a\.b`: rename one"):
            call(params)


def test_arguments_are_counted_by_position():
    fun = lambda w: total(w)  # noqa: E731
    with pytest.raises(TypeError, match=r"`argnums` is 0, but .* called with 0 positional"):
        actjax.value_and_grad(fun)(w=XS[0])
    with pytest.raises(TypeError, match=r"`argnums` is \(0, 5\), but .* with 1 positional"):
        actjax.value_and_grad(fun, (0, 5))(XS[0])
    with pytest.raises(TypeError, match=r"`argnums` must be an integer, .* got 'w'"):
        actjax.value_and_grad(fun, "w")


@pytest.mark.parametrize("bases", [[1], {"w": None}, {"w": 1.0}], ids=str)
def test_bases_map_names_to_matrices(bases):
    with pytest.raises(TypeError, match=r"`bases` must map names of inputs to arrays"):
        actjax.value_and_grad(total, bases=bases)


@pytest.mark.parametrize(
    ("batches", "weights", "message"),
    [
        ({}, None, r"`batches` must share .* lengths are \[\]"),
        (jnp.ones(()), None, r"`batches` must share .* lengths are \[0\]"),
        (jnp.ones((0, 2)), None, r"`batches` must share .* lengths are \[0\]"),
        ((jnp.ones(2), jnp.ones(3)), None, r"`batches` must share .* lengths are \[2, 3\]"),
        (jnp.ones(3), jnp.ones(4), r"`weights` must be \[3\], .* got \[4\]"),
    ],
)
def test_micro_batches_and_their_weights_are_as_many(batches, weights, message):
    loss_and_grad = actjax.value_and_grad(lambda w, b: total(w))
    with pytest.raises(ValueError, match=message):
        actjax.accumulate(loss_and_grad, jnp.ones(2), batches, weights=weights)


def test_weights_of_micro_batches_may_be_a_list():
    loss_and_grad = actjax.value_and_grad(lambda w, b: b * jnp.sum(w))
    value, grad = actjax.accumulate(
        loss_and_grad, jnp.ones(2), jnp.asarray([1.0, 3.0]), weights=[0.25, 0.75]
    )
    assert value == 5
    np.testing.assert_allclose(grad, [2.5, 2.5])


def test_an_auxiliary_output_cannot_be_averaged():
    loss_and_grad = actjax.value_and_grad(lambda w, b: (jnp.sum(w), b), has_aux=True)
    with pytest.raises(ValueError, match=r"`loss_and_grad` must return a scalar and its gradient"):
        actjax.accumulate(loss_and_grad, jnp.ones(2), jnp.ones(3))
