"""Updates of several weights one after the other: the same results, in order."""

import jax
import jax.numpy as jnp
import numpy as np

from actjax.optim.in_sequence import in_sequence


def update(grads, state, rate):
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads.values()))  # Reads all gradients.
    new = {name: 0.9 * state[name] + g / norm for name, g in grads.items()}
    return {name: rate * x for name, x in new.items()}, new, norm


def by_weight(outputs):
    updates, new, _ = outputs
    return [[updates[name], new[name]] for name in updates]


ARGS = (
    {name: jnp.arange(6.0) + i for i, name in enumerate("abc")},
    {name: jnp.ones(6) for name in "abc"},
    jnp.float32(0.1),
)


def test_results_are_those_of_the_function():
    want = update(*ARGS)
    got = jax.jit(lambda *args: in_sequence(update, args, by_weight))(*ARGS)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_each_gradient_waits_for_the_weight_before():
    text = str(jax.make_jaxpr(lambda *args: in_sequence(update, args, by_weight))(*ARGS))
    # Of three weights, the second and the third wait.
    assert text.count("optimization_barrier") == 2


def test_effects_are_kept():
    seen = []

    def with_effect(grads, state, rate):
        jax.debug.callback(seen.append, rate)
        return update(grads, state, rate)

    jax.block_until_ready(jax.jit(lambda *args: in_sequence(with_effect, args, by_weight))(*ARGS))
    jax.effects_barrier()
    assert [float(x) for x in seen] == [np.float32(0.1)]
