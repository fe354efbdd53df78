"""Tests of `actjax.value_and_grad` in transformations of JAX, modules of Flax and a decoder."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap_codecs import Projected
from factored.gradient_helpers import (
    BOTH,
    KEY,
    RP,
    SVD,
    WEIGHTS,
    assert_same,
    by_path,
    compare,
    factored,
    normal,
    project,
    run_jitted,
    run_stack,
    stack,
    tanh_layer,
    total,
)
from flax import linen, nnx
from tiny import batch, decoder

import actjax
from models import Storage


def test_scan_stacks_the_factors_of_its_layers(x64):
    params, x = stack(), normal(0, 12, 8)
    layer = functools.partial(tanh_layer, codec=SVD)
    gradient = compare(lambda p: total(run_stack(p, x, layer)), params)
    assert gradient["w"].left.shape == (3, 8, 3)
    assert gradient["w"].right.shape == (3, 3, 8)


def test_scans_in_scans(x64):
    x, keys = normal(0, 12, 8), jax.random.split(KEY, (2, 3))

    def fun(params):
        def outer(x, slices):
            inner = lambda x, s: (tanh_layer(s[0], s[1], x), None)  # noqa: E731
            return jax.lax.scan(inner, x, slices)[0], None

        return total(jax.lax.scan(outer, x, (params, keys))[0])

    params = {"w": normal(1, 2, 3, 8, 8), "b": normal(2, 2, 3, 8)}
    assert compare(fun, params)["w"].left.shape == (2, 3, 8, 3)


def test_checkpoint_around_a_layer(x64):
    x, policies = normal(0, 12, 8), (None, jax.checkpoint_policies.dots_saveable)
    layers = [jax.checkpoint(tanh_layer, policy=policy) for policy in policies]

    def fun(params):
        stacked = [
            run_stack(p, x, layer) for p, layer in zip(params["stacks"], layers, strict=True)
        ]
        return total(*stacked, layers[0](params["alone"], KEY, x))

    params = {"stacks": [stack(), stack()], "alone": {"w": normal(1, 8, 8), "b": normal(2, 8)}}
    assert factored(compare(fun, params)) == {"stacks.0.w", "stacks.1.w", "alone.w"}


def test_vmap_over_examples_and_over_weights(x64):
    xs, keys = normal(0, 3, 12, 8), jax.random.split(KEY, 3)

    def fun(params):
        of_each = jax.vmap(tanh_layer)(params["examples"], keys, xs)
        return total(
            *of_each, *jax.vmap(tanh_layer, (0, None, None))(params["weights"], KEY, xs[0])
        )

    gradient = compare(fun, {"examples": stack(), "weights": stack()})
    assert factored(gradient) == {"examples.w", "weights.w"}
    assert gradient["examples"]["w"].left.shape == (3, 8, 3)


def test_vmap_of_a_scan_has_the_program_of_jax():
    params = jax.tree.map(lambda a: np.stack([a, -a]), jax.tree.map(np.asarray, stack()))
    x = normal(0, 12, 8)
    fun = lambda p: total(jax.vmap(lambda p: run_stack(p, x, tanh_layer))(p))  # noqa: E731
    programs = [str(jax.make_jaxpr(f(fun))(params)) for f in BOTH]
    assert programs[0] == programs[1]


def test_vmap_of_the_gradient(x64):
    def fun(params, x):
        return total(tanh_layer(params, KEY, x))

    for params, axes in ((stack(), (0, 0)), ({"w": normal(1, 8, 8), "b": normal(2, 8)}, (None, 0))):
        xs = normal(0, 3, 12, 8)
        got, want = run_jitted([jax.vmap(f(fun), axes) for f in BOTH], params, xs)
        assert got[1]["w"].left.shape == (3, 8, 3)
        assert_same(got[1], want[1])


def test_cond_between_operators_of_a_weight_and_cond_that_may_skip_it(x64):
    x, other = normal(0, 12, 8), normal(1, 12, 8)

    def branches(w):
        read, skip = lambda: project(x, w), lambda: jnp.zeros((12, 5))
        return {
            "both": (read, lambda: project(other, w)),
            "first": (read, skip),
            "second": (skip, read),
        }

    def fun(params, preds):
        conds = [
            jax.lax.cond(pred, *branches(w)[kind])
            for pred, ws in zip(preds, params, strict=True)
            for kind, w in ws.items()
        ]
        return total(*conds)

    params = [{kind: normal(2, 8, 5) for kind in ("both", "first", "second")} for _ in range(2)]
    gradient = compare(fun, params, np.asarray([True, False]))
    assert len(factored(gradient)) == 6
    for pred, of_pred in zip((True, False), gradient, strict=True):
        assert np.any(of_pred["first"].right != 0) == pred
        assert np.any(of_pred["second"].right != 0) != pred


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


def test_operators_beside_and_inside_custom_rules(x64):
    x, params = normal(0, 12, 8), {name: normal(1, 8, 5) for name in CUSTOM}
    fun = lambda p: total(*(call(x, p[name]) for name, call in CUSTOM.items()))  # noqa: E731
    assert factored(compare(fun, params)) == set(CUSTOM)


def test_a_custom_rule_that_reads_the_weight_as_an_array_is_refused():
    @jax.custom_vjp
    def custom(x, w):
        return project(x, w, RP)

    custom.defvjp(lambda x, w: (custom(x, w), (x, w)), lambda r, dy: (dy @ r[1].T, 2 * r[0].T @ dy))
    x, params = normal(0, 12, 8), {"w": normal(1, 8, 5)}
    with pytest.raises(TypeError, match="the weight `w` has a factored gradient, so only"):
        actjax.value_and_grad(lambda p: total(custom(x, p["w"])))(params)


# Modules of Flax.


class NnxLayer(nnx.Module):
    def __init__(self, seed: int, read=lambda param: param[...]):
        self.w = nnx.Param(normal(seed, 8, 8))
        self.b = nnx.Param(normal(seed + 1, 8))
        self.read = read

    def __call__(self, x, key):
        return jnp.tanh(project(x, self.read(self.w), SVD, key, bias=self.b[...]))


READS = (lambda param: param[...], lambda param: param.get_value(), lambda param: param)


def test_inside_nnx_modules(x64):
    x, layers = normal(0, 12, 8), nnx.List([NnxLayer(1 + 2 * i, r) for i, r in enumerate(READS)])
    graph, state = nnx.split(layers)

    def of_state(state):
        y = x
        for layer, key in zip(nnx.merge(graph, state), jax.random.split(KEY, 3), strict=True):
            y = layer(y, key)
        return total(y)

    assert factored(compare(of_state, state)) == {"0.w", "1.w", "2.w"}
    assert factored(compare(lambda layer: total(layer(x, KEY)), layers[0])) == {"w"}


def test_inside_transformations_of_nnx(x64):
    x, keys = normal(0, 12, 8), jax.random.split(KEY, 3)
    graph, state = nnx.split(NnxLayer(1))
    stacked = jax.tree.map(lambda a: normal(2, 3, *a.shape), state)

    def fun(states):
        body = nnx.remat(lambda x, layer, key: layer(x, key))
        over_layers = nnx.scan(body, in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
        each = nnx.vmap(lambda layer, key: layer(x, key))
        first, second = (nnx.merge(graph, state) for state in states)
        return total(over_layers(x, first, keys), each(second, keys))

    gradient = by_path(compare(fun, [stacked, stacked]))
    assert [gradient[f"{i}.w"].left.shape for i in range(2)] == [(3, 8, 3)] * 2


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
    params = jax.jit(LinenLayers().init)(rngs, x)
    apply: Any = LinenLayers().apply
    gradient = compare(lambda params: total(apply(params, x, rngs=rngs)), params)
    assert factored(gradient) == {f"params.{name}.w" for name in ("plain", "remat", "scanned")}
    assert gradient["params"]["scanned"]["w"].left.shape == (3, 8, 3)


# A whole model.


def test_every_weight_of_a_decoder_can_have_a_factored_gradient():
    # Their values are those of the layers above.
    storage, (tokens, targets) = Storage(Projected(5), RP, SVD, Projected(6)), batch()

    def loss(model, key):
        return model.loss(tokens, targets, storage=storage, key=key)

    model = jax.eval_shape(decoder)
    _, gradient = jax.eval_shape(actjax.value_and_grad(loss), model, KEY)
    assert factored(gradient) == set(WEIGHTS)
    leaves, weights = by_path(gradient), by_path(model)
    for path, site in WEIGHTS.items():
        g = leaves[path]
        assert g.shape == weights[path].shape
        assert g.left.shape == (*g.shape[:-1], getattr(storage, site).rank)
