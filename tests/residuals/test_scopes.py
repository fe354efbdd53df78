"""Name scopes of stored arrays, by which a rule tells layers apart."""

import jax
import jax.numpy as jnp
import numpy as np
from cheap_codecs import CoarseRandom
from flax import linen
from residuals.residual_helpers import asked, normal

from actjax import Exact, Quantized, compress_residuals, explain


@jax.jit
def tanh_layer(x, w):
    return jnp.tanh(x @ w)


def model(x, w, stack):
    with jax.named_scope("net"):
        for i in range(2):
            with jax.named_scope(f"h{i}"):
                x = tanh_layer(x, w)
        with jax.named_scope("blocks"):

            def block(x, w):
                with jax.named_scope("mlp"):
                    return tanh_layer(x, w), None

            return jax.lax.scan(block, x, stack)[0]


ARGS = normal(0, 4, 8), normal(1, 8, 8), normal(2, 3, 8, 8)


def test_scopes_reach_through_calls_and_loops():
    # In a loop its carry is stored too, in the scope of the loop.
    scopes = {c.scope for c in asked(model, *ARGS)}
    assert scopes == {"net/h0", "net/h1", "net/blocks", "net/blocks/mlp"}


def test_a_rule_codes_one_of_two_equal_layers():
    fun = compress_residuals(model, lambda c: Quantized(4) if c.scope == "net/h0" else None)
    rows = [r for r in explain(fun, *ARGS).residuals if r.codec]
    assert [r.name.startswith("net/h0/") for r in rows] == [True]


def test_keys_by_label_give_each_layer_its_own():
    codec = CoarseRandom()
    labels = [c.label for c in asked(model, *ARGS) if c.scope in ("net/h0", "net/h1")]
    assert len(set(labels)) == 2

    @jax.jit
    def gradient(seeds):
        keys = {label: jax.random.key(s) for label, s in zip(labels, seeds, strict=True)}
        fun = compress_residuals(model, lambda c: codec if c.label in keys else None, key=keys)
        return jax.grad(lambda x: fun(x, *ARGS[1:]).sum())(ARGS[0])

    same, other = gradient((0, 1)), gradient((0, 2))
    np.testing.assert_array_equal(gradient((0, 1)), same)
    assert np.abs(same - other).max() > 0


def test_modules_of_linen_are_scopes():
    class Mlp(linen.Module):
        @linen.compact
        def __call__(self, x):
            for i in range(2):
                x = linen.tanh(linen.Dense(8, name=f"dense_{i}")(x))
            return x

    module, x = Mlp(), ARGS[0]
    params = jax.eval_shape(module.init, jax.random.key(0), x)
    names = [
        r.name for r in explain(compress_residuals(module.apply, Exact()), params, x).residuals
    ]
    assert any(name.startswith("Mlp/") for name in names)
