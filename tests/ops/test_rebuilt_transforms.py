"""Tests of operators with a rebuilt input under transformations, in a scan, and in subspaces."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
from ops.block_cases import INPUTS, KEYS, block, block_params, scanned
from ops.helpers import KEY, assert_close, normal
from ops.operator_cases import (
    BATCH,
    DRAWN,
    EPS,
    LENGTH,
    NEAREST,
)

import actjax
from actjax import Exact, input_groups, norm_linear, with_bases

LAYERS = 2


def test_each_example_has_its_own_key_under_map_and_vmap():
    x, w = normal(0, 3, 8), normal(1, 8, 4)

    def gradient(key):
        fun = lambda w: jnp.sum(norm_linear(x, jnp.ones(8), w, codec=DRAWN, key=key))  # noqa: E731
        return jax.grad(fun)(w)

    @jax.jit
    def run(keys):
        alone = jnp.stack([gradient(keys[0]), gradient(keys[1])])
        return alone, jax.lax.map(gradient, keys), jax.vmap(gradient)(keys)

    alone, looped, mapped = run(jax.random.split(KEY, 2))
    assert_close((looped, mapped), (alone, alone), 1e-5, 1e-6)
    assert not np.allclose(alone[0], alone[1])


def test_scan_over_stacked_layers(x64):
    params, x = block_params(LAYERS), normal(50, BATCH, LENGTH, 8)

    @jax.jit
    def run(params, x):
        got = jax.grad(functools.partial(scanned, codec=NEAREST), (0, 1))(params, x)
        # Layer by layer, and backwards again.
        layers = [{name: p[i] for name, p in params.items()} for i in range(LAYERS)]
        y, pullbacks = x, []
        for layer in layers:
            y, pull = jax.vjp(lambda p, x: block(x, p, NEAREST, KEYS), layer, y)
            pullbacks.append(pull)
        dy, grads = jnp.cos(y), []
        for pull in reversed(pullbacks):
            grad, dy = pull(dy)
            grads.insert(0, grad)
        return got, (jax.tree.map(lambda *g: jnp.stack(g), *grads), dy)

    # Two layers in another order of operations. No number lies so near the middle of two levels.
    assert_close(*run(params, x), 1e-10, 1e-10)


# Subspaces.


def test_inputs_are_found_and_named_for_their_first_weight():
    x = normal(50, BATCH, LENGTH, 8)
    for codec in (Exact(), DRAWN):
        stacked = functools.partial(scanned, codec=codec)
        assert input_groups(stacked, block_params(LAYERS), x) == INPUTS
        single = lambda p, x, codec=codec: jnp.sum(block(x, p, codec, KEYS))  # noqa: E731
        assert input_groups(single, block_params(), x) == INPUTS


def test_in_a_basis_weights_have_the_gradient_at_the_decoded_input_in_it(x64):
    params, x = block_params(LAYERS), normal(50, BATCH, LENGTH, 8)
    widths = {"k": 8, "o": 8, "down": 12}
    bases = {name: normal(i, LAYERS, d, 3) for i, (name, d) in enumerate(widths.items())}
    fun = functools.partial(scanned, codec=NEAREST)

    @jax.jit
    def run(params, x, bases):
        named = {f"0.{name}": basis for name, basis in bases.items()}
        in_bases = actjax.value_and_grad(fun, (0, 1), bases=named)(params, x)
        value, (want, dx) = jax.value_and_grad(fun, (0, 1))(params, x)
        projected = {name: bases[group].mT @ want[name] for name, group in INPUTS.items()
                     if group in bases}  # fmt: skip
        return in_bases, (value, (want, dx)), projected

    (value, (gradient, dx)), (want_value, (want, want_dx)), projected = run(params, x, bases)
    same = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)
    same(value, want_value)
    same(dx, want_dx)
    for name, exact in want.items():
        if name not in projected:
            same(gradient[name], exact)
            continue
        group = INPUTS[name]
        assert f"0.{group}" in vars(gradient[name]).values()
        np.testing.assert_array_equal(gradient[name].left, bases[group])
        same(gradient[name].right, projected[name])


def test_a_weight_beside_one_in_a_basis_has_its_projected_gradient(x64):
    x, w, other, basis = (normal(i, *s) for i, s in enumerate(((6, 8), (8, 5), (8, 4), (8, 3))))

    def fun(params, other):
        ys = norm_linear(x, jnp.ones(8), (params["w"], other))
        return sum(jnp.sum(jnp.sin(y)) for y in ys)

    @jax.jit
    def run(w, other):
        found = [jax.grad(f, 1)({"w": w}, other) for f in (fun, with_bases(fun, {"w": basis}))]
        return found[1], basis @ basis.T @ found[0]

    assert_close(*run(w, other), 1e-10, 1e-10)


def test_a_factored_codec_gives_a_dense_gradient_at_the_decoded_input(x64):
    # The input of the linear operator is rebuilt and has no low rank: there is nothing to factor.
    x, w, codec = normal(0, 6, 8), normal(1, 8, 4), actjax.RandomizedSVD(3)

    @jax.jit
    def run(params):
        def fun(params):
            return jnp.sum(norm_linear(x, jnp.ones(8), params["w"], codec=codec, key=KEY))

        x_hat = codec.decode(codec.encode(x, jax.random.fold_in(KEY, 0)))
        return actjax.value_and_grad(fun)(params)[1]["w"], x_hat

    dw, x_hat = run({"w": w})
    want = oracles.rms_norm(x_hat, np.ones(8), EPS).T @ np.ones((6, 4))
    assert_close(dw, want, 1e-11, 1e-12)
