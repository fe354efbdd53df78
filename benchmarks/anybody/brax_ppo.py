"""brax: PPO whose loss stores codes for its backward pass.

`ppo.train.train` makes the loss out of `ppo.losses.compute_ppo_loss`, so one line before it is all:

    losses.compute_ppo_loss = actjax.compress_residuals(
        losses.compute_ppo_loss, actjax.Quantized(4)
    )

It then runs within the `pmap` and the two scans of brax, with metrics as auxiliary data.
"""

import functools
from collections.abc import Callable
from typing import Any

import brax
import jax
import jax.numpy as jnp
from brax import envs
from brax.training import types
from brax.training.agents.ppo import losses, networks, train

import actjax
from benchmarks.anybody.measuring import report

OBSERVATIONS, ACTIONS, BATCH, UNROLL = 32, 8, 128, 20
Loss = Callable[..., tuple[jax.Array, Any]]


def make_data(
    network: networks.PPONetworks, params: losses.PPONetworkParams, key: jax.Array
) -> types.Transition:
    """Returns a batch of transitions, with actions that the policy drew."""
    keys = jax.random.split(key, 5)
    observations = jax.random.normal(keys[0], (BATCH, UNROLL + 1, OBSERVATIONS))
    logits = network.policy_network.apply((), params.policy, observations[:, :-1])
    actions = network.parametric_action_distribution
    raw = actions.sample_no_postprocessing(logits, keys[1])
    noise = 0.1 * jax.random.normal(keys[2], (BATCH, UNROLL))
    return types.Transition(
        observation=observations[:, :-1],
        action=actions.postprocess(raw),
        reward=jax.random.normal(keys[3], (BATCH, UNROLL)) + observations[:, 1:, 0],
        discount=(jax.random.uniform(keys[4], (BATCH, UNROLL)) < 0.95).astype(jnp.float32),
        next_observation=observations[:, 1:],
        extras={
            "state_extras": {"truncation": jnp.zeros((BATCH, UNROLL))},
            "policy_extras": {
                "raw_action": raw,
                "distribution_params": logits,
                "log_prob": actions.log_prob(logits, raw) + noise,
            },
        },
    )


def run_trainer(loss: Loss) -> float:
    """Returns the reward that brax's own `train` ends with, on its simplest environment."""
    if not hasattr(jax, "device_put_replicated"):  # brax 0.14.2 needs it, JAX 0.10 has dropped it.
        jax.device_put_replicated = lambda x, devices: jax.tree.map(
            lambda y: jnp.stack([y] * len(devices)), x
        )
    plain = losses.compute_ppo_loss
    losses.compute_ppo_loss = loss  # The line that changes.
    try:
        metrics = train.train(
            environment=envs.get_environment("fast"),
            num_timesteps=2**15,
            num_envs=64,
            batch_size=64,
            num_minibatches=8,
            episode_length=128,
            learning_rate=3e-4,
            normalize_observations=True,
            network_factory=networks.make_ppo_networks,
        )[2]
    finally:
        losses.compute_ppo_loss = plain
    return float(metrics["eval/episode_reward"])


def main() -> None:
    """Prints a line for PPO with brax's default networks."""
    network = networks.make_ppo_networks(
        OBSERVATIONS, ACTIONS, policy_hidden_layer_sizes=(128,) * 4
    )
    keys = jax.random.split(jax.random.key(0), 4)
    params = losses.PPONetworkParams(
        policy=network.policy_network.init(keys[0]), value=network.value_network.init(keys[1])
    )
    data = make_data(network, params, keys[2])
    rewards = {
        name: run_trainer(loss)
        for name, loss in {
            "plain": losses.compute_ppo_loss,
            "4 bits": actjax.compress_residuals(losses.compute_ppo_loss, actjax.Quantized(4)),
        }.items()
    }
    loss = functools.partial(losses.compute_ppo_loss, ppo_network=network)
    arguments = params, (), data, keys[3]
    report(
        f"brax {brax.__version__}, PPO",
        1,
        loss,
        lambda loss: lambda *args: jax.grad(loss, has_aux=True)(*args)[0],
        arguments,
        arguments,
        has_aux=True,
        more={"reward of train()": rewards},
    )


if __name__ == "__main__":
    main()
