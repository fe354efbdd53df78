"""Transforms that look at several arrays at once are refused where an update is by layers."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from actjax import optim
from actjax.optim.stepping import across

SHAPES = {"layers": {"q": (4, 32, 32), "down": (4, 32, 64), "scale": (4, 32)}, "head": (32, 16)}
PARAMS = jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16), SHAPES,
    is_leaf=lambda x: isinstance(x, tuple),
)  # fmt: skip
GENUINE = across.partial_eval.dce_jaxpr
ADAM, SGD = optax.scale_by_adam(), optax.sgd(1.0)
CLIP = optax.clip_by_global_norm(1.0)


def by_part(params, part="layers"):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "clipped" if part in jax.tree_util.keystr(path) else "plain", params
    )


def is_matrix(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


TOGETHER = {
    "global norm": optax.chain(CLIP, SGD),
    "global norm of actjax": optax.chain(optim.clip_by_global_norm(1.0), SGD),
    "global norm of a part": optax.multi_transform(
        {"clipped": optax.chain(CLIP, SGD), "plain": SGD}, by_part
    ),
    "global norm, rounded": optim.stochastic_rounding(optax.chain(CLIP, SGD)),
    "global norm in a subspace": optim.subspace(optax.chain(CLIP, ADAM), 4),
    "finite": optax.apply_if_finite(SGD, 3),
    "norm of the update": optax.chain(optax.normalize_by_update_norm(), SGD),
    # Its learning rate is in the state, and follows from all gradients of the step before.
    "D-adaptation": optax.contrib.dadapt_adamw(),
    "Prodigy": optax.contrib.prodigy(),
}
APART = {
    "adamw, masked": optax.adamw(1e-3, mask=is_matrix),
    "adafactor": optax.adafactor(1e-3),
    "lamb": optax.lamb(1e-3),
    "muon": optax.contrib.muon(1e-3),
    "schedule free": optax.contrib.schedule_free_adamw(1e-3),
    "several steps": optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    "hyperparameters": optax.inject_hyperparams(optax.adamw)(1e-3),
    "clipped by array": optax.chain(optax.adaptive_grad_clip(0.1), optax.zero_nans(), SGD),
    "8 bits": optim.eight_bit(ADAM),
    "4 bits, factored": optim.scale_by_factored_adam_4bit(),
    "subspace": optim.subspace(ADAM, 4),
    "rounded": optim.stochastic_rounding(optax.adamw(1e-3)),
}


def state_of(tx, params=PARAMS):
    return jax.eval_shape(functools.partial(optim.init, tx), params)


@pytest.mark.parametrize("tx", TOGETHER.values(), ids=list(TOGETHER))
def test_a_transform_that_looks_at_several_arrays_is_refused(tx):
    message = r"its update of `[\w.]+` depends on the gradient of `[\w.]+`.*`clip` of actjax"
    with pytest.raises(ValueError, match=message):
        state_of(tx)


@pytest.mark.parametrize("tx", APART.values(), ids=list(APART))
def test_one_that_looks_at_each_array_apart_is_taken(tx, monkeypatch):
    looked = []
    monkeypatch.setattr(across.partial_eval, "dce_jaxpr", spied(looked))
    state_of(tx)
    # Each array was looked at: a transform that cannot be traced would be taken as well.
    assert set(looked) == set(range(4))


def spied(looked):
    """Returns `dce_jaxpr`, which notes the outputs that are asked for."""

    def dce_jaxpr(program, outputs, *args, **options):
        looked.append(outputs[:4].index(True))
        return GENUINE(program, outputs, *args, **options)

    return dce_jaxpr


def test_a_stack_of_layers_alone_is_several_arrays():
    alone = {"layers": {"w": jax.ShapeDtypeStruct((4, 8, 8), jnp.float32)}}
    with pytest.raises(ValueError, match="looks at several arrays at once"):
        state_of(TOGETHER["global norm"], alone)
    state_of(APART["lamb"], alone)


def test_a_parameter_may_be_a_number():
    params = {"layers": {"w": jnp.ones((2, 8, 8))}, "temperature": 1.0}
    state = optim.init(optax.adam(1e-3), params)
    assert jax.tree.leaves(state.rest)
    with pytest.raises(ValueError, match="depends on the gradient of"):
        optim.init(TOGETHER["global norm"], params)


def test_in_backward_refuses_it_too():
    update = optim.in_backward(
        lambda params, x: x, lambda block, x, inputs, key: x @ block["w"],
        lambda params, x, inputs: jnp.sum(x), TOGETHER["finite"],
    )  # fmt: skip
    params = {"layers": {"w": jax.ShapeDtypeStruct((2, 8, 8), jnp.float32)}}
    with pytest.raises(ValueError, match="looks at several arrays at once"):
        jax.eval_shape(update.init, params)


def test_clip_of_apply_moves_weights_as_the_chain_of_optax_does():
    params = {"layers": {"w": jnp.ones((4, 8, 8))}, "head": jnp.ones((8, 4))}
    grads = jax.tree.map(lambda x: np.random.default_rng(0).normal(size=x.shape), params)

    @jax.jit
    def both(params, grads):
        chain = optax.chain(CLIP, SGD)
        updates, _ = chain.update(grads, chain.init(params))
        state = optim.init(SGD, params)
        return optax.apply_updates(params, updates), optim.apply(
            SGD, grads, state, params, clip=1.0
        )[0]

    want, got = both(params, grads)
    norm = math.sqrt(sum(float(np.sum(np.square(g))) for g in jax.tree.leaves(grads)))
    moved = np.asarray(params["head"]) - np.asarray(want["head"])
    np.testing.assert_allclose(moved, grads["head"] / norm, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
