"""A neural ODE of diffrax that fits spirals, with two adjoints: `pip install diffrax`."""

import functools

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.anybody.case import Case

_TIMES = np.linspace(0, 3, 24, dtype=np.float32)


class _Field(eqx.Module):
    """The vector field of the neural ODE in diffrax's documentation."""

    scale: jax.Array
    mlp: eqx.nn.MLP

    def __init__(self, width: int, key: jax.Array) -> None:
        self.scale = jnp.ones(())
        self.mlp = eqx.nn.MLP(2, 2, width, 2, jnp.tanh, key=key)

    def __call__(self, t, y, args):
        return self.scale * self.mlp(y)


def _batch(seed: int) -> dict:
    rng, rows = np.random.default_rng(seed), 128
    radius, angle = rng.uniform(0.5, 2, (rows, 1)), rng.uniform(0, 2 * np.pi, (rows, 1))
    radius, angle = radius * np.exp(-0.3 * _TIMES), angle + 2 * _TIMES
    path = np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1)
    return {"path": path.astype(np.float32)}


def _case(name: str, adjoint: diffrax.AbstractAdjoint) -> Case:
    params, static = eqx.partition(_Field(64, jax.random.key(0)), eqx.is_inexact_array)

    def loss(params, batch, adjoint=adjoint):
        field = eqx.combine(params, static)

        def solve(start):
            return diffrax.diffeqsolve(
                diffrax.ODETerm(field),
                diffrax.Tsit5(),
                t0=0.0,
                t1=3.0,
                dt0=0.1,
                y0=start,
                stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-5),
                saveat=diffrax.SaveAt(ts=jnp.asarray(_TIMES)),
                adjoint=adjoint,
                max_steps=64,
            ).ys

        found = jax.vmap(solve)(batch["path"][:, 0])
        return jnp.mean((found - batch["path"]) ** 2)

    remat = functools.partial(loss, adjoint=diffrax.RecursiveCheckpointAdjoint(checkpoints=4))
    batches = [_batch(seed) for seed in range(4)]
    return Case(name, loss, params, batches, remat, "RecursiveCheckpointAdjoint(checkpoints=4)")


def make() -> Case:
    return _case("diffrax neural ODE", diffrax.RecursiveCheckpointAdjoint())


def make_backsolve() -> Case:
    return _case("diffrax neural ODE, BacksolveAdjoint", diffrax.BacksolveAdjoint())
