"""Tests of LoRA under transformations of JAX, in a scan, and in subspaces."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.helpers import KEY, assert_close, normal
from ops.operator_cases import NEAREST

import actjax
from actjax import LoRA, RandomProjection, linear

# Float64: sums of up to 40 terms of size 1 to 10, some 1e-16 each.
same = functools.partial(assert_close, rtol=1e-11, atol=1e-12)


def adapted(x, w, a, b, key):
    lora = LoRA(w, a, b, key, 0.5, 0.3)
    return jnp.tanh(linear(x, lora, codec=RandomProjection(3), key=key))


def gradient(fun, *arguments):
    return jax.grad(lambda *args: jnp.sum(jnp.sin(fun(*args))), (0, 2, 3))(*arguments)


def test_vmap_is_a_loop_and_checkpoint_drops_the_same_numbers_again():
    shapes = (6, 8), (8, 8), (8, 2), (2, 8)
    stack = [*(normal(i, 3, *shape) for i, shape in enumerate(shapes)), jax.random.split(KEY, 3)]

    @jax.jit
    def run(*stack):
        results = []
        for mapped in ((2, 3), (0, 1, 2, 3, 4)):
            axes = tuple(0 if i in mapped else None for i in range(5))
            lone = [x if i in mapped else x[0] for i, x in enumerate(stack)]
            one = lambda mapped_args, mapped=mapped, lone=lone: gradient(  # noqa: E731
                adapted, *(mapped_args.get(i, x) for i, x in enumerate(lone))
            )
            looped = jax.lax.map(one, {i: stack[i] for i in mapped})
            results.append((jax.vmap(functools.partial(gradient, adapted), axes)(*lone), looped))
        first = [x[0] for x in stack]
        results.append((gradient(jax.checkpoint(adapted), *first), [g[0] for g in looped]))
        # An adapter as a whole is mapped too.
        x, w, a, b, keys = stack
        whole = jax.vmap(linear)(x, LoRA(w, a, b, keys, 0.5, 0.3))
        each = [linear(x[i], LoRA(w[i], a[i], b[i], keys[i], 0.5, 0.3)) for i in range(3)]
        results.append(([whole], [jnp.stack(each)]))
        return results

    for got, want in run(*stack):
        # Float32 sums of up to 12 terms of size 1 to 10, compiled in another order.
        assert_close(list(got), list(want), 1e-5, 1e-5)


def test_scan_over_stacked_adapters(x64):
    x, w, a, b = (normal(i, 2, *s) for i, s in enumerate(((6, 8), (8, 8), (8, 2), (2, 8))))

    @jax.jit
    def run(x, w, a, b, keys):
        def step(x, lora):
            return jnp.tanh(linear(x, lora, codec=NEAREST)), None

        def of_adapters(a, b):
            stacked = LoRA(w, a, b, keys, 0.5, 0.3)
            return jnp.sum(jnp.sin(jax.lax.scan(step, x, stacked)[0]))

        def layer(i, x, a, b):
            return step(x, LoRA(w[i], a, b, keys[i], 0.5, 0.3))[0]

        # Layer by layer, and backwards again.
        y, first = jax.vjp(functools.partial(layer, 0), x, a[0], b[0])
        z, second = jax.vjp(functools.partial(layer, 1), y, a[1], b[1])
        dy, *last = second(jnp.cos(z))
        want = [jnp.stack(pair) for pair in zip(first(dy)[1:], last, strict=True)]
        return jax.grad(of_adapters, (0, 1))(a, b), tuple(want)

    same(*run(np.asarray(x)[0], w, a, b, jax.random.split(KEY)))


# Subspaces.


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_beside_a_weight_in_a_basis_an_adapter_has_the_projected_gradient(dropout, x64):
    x, w, other, a, b, dz, basis = (
        normal(i, *s)
        for i, s in enumerate(((6, 8), (8, 5), (8, 5), (8, 2), (2, 5), (6, 5), (8, 3)))
    )

    @jax.jit
    def run(params):
        def fun(params):
            lora = LoRA(w, params["a"], params["b"], KEY, 1.0, dropout)
            ys = linear(x, (params["other"], lora))
            return sum(jnp.sum(dz * y) for y in ys)

        bases = {"other": basis} if dropout else {"a": basis}
        if not dropout:  # Without it they share an input, which is named for its first weight.
            assert set(actjax.input_groups(fun, params).values()) == {"a", "b"}
        one = jnp.eye(8)
        mask = linear(x, LoRA(0 * one, one, one, KEY, 1.0, dropout)) / x
        return actjax.value_and_grad(fun, bases=bases)(params)[1], mask

    grads, mask = run({"other": other, "a": a, "b": b})
    x, b, dz, basis, mask, a = map(np.asarray, (x, b, dz, basis, mask, a))
    seen = x @ basis @ basis.T
    dense = {
        name: np.asarray(g.left) @ np.asarray(g.right) if isinstance(g, actjax.LowRank) else g
        for name, g in grads.items()
    }
    want = {"a": (mask * seen).T @ dz @ b.T, "b": (mask * x @ a).T @ dz, "other": seen.T @ dz}
    same(dense, want)
