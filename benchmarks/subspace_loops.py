"""A subspace in every kind of optax loop, and moments in 4 bits: losses of one small problem.

`python -m benchmarks.subspace_loops` trains a small tanh layer for 600 steps with Adam of rank 4,
refreshed every 50 steps, in a chain, in wrappers of optax, in `nnx.Optimizer`, by hand and with
`actjax.optim.apply`, beside `optax.contrib.galore`. Without refreshes, the loss would stay where
the first basis leaves it: the row "never refreshed". Adam and Lion of full rank follow, with
moments in float32 and in 4 bits. It takes a minute on two cores.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from actjax import optim
from benchmarks import command, record
from benchmarks.tables import print_table


@dataclasses.dataclass(frozen=True)
class Config:
    """What to run."""

    steps: int = 600
    """Steps of each loop."""
    rank: int = 4
    """Rank of the subspace."""
    gap: int = 50
    """Steps between two refreshes."""
    learning_rate: float = 3e-3
    """Learning rate of Adam."""
    seed: int = 0
    """Seed of the problem."""
    results: pathlib.Path = record.RESULTS / "subspace_loops.json"
    """File of the raw results."""


_four_bit = functools.partial(optim.four_bit, min_size=1)
FORMS: dict[str, Callable[[Any], Any]] = {
    "float32": lambda tx: tx,
    "4 bits": _four_bit,
}
"""Forms of the moments of full-rank optimizers, by name."""

Problem = tuple[jax.Array, jax.Array, jax.Array]
"""Inputs [64, 32], targets [64, 24], and first weights [32, 24]."""


def problem(config: Config) -> Problem:
    """Returns a layer to learn, whose weights have rank 8."""
    rng = np.random.default_rng(config.seed)
    x, w = rng.normal(size=(64, 32)), rng.normal(size=(32, 8)) @ rng.normal(size=(8, 24)) / 6
    first = 0.1 * rng.normal(size=(32, 24))
    return tuple(jnp.asarray(a, jnp.float32) for a in (x, np.tanh(x @ w), first))  # pyright: ignore


def loss(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the mean squared error of `tanh(x w)`."""
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2)


def optax_loop(tx: optax.GradientTransformation, config: Config, data: Problem) -> float:
    """Returns the last loss of the loop of optax's documentation."""
    x, y, w = data
    params: Any = {"w": w}
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        grads = jax.grad(lambda p: loss(p["w"], x, y))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(config.steps):
        params, state = step(params, state)
    return float(loss(params["w"], x, y))


def by_hand(
    tx: optim.SubspaceTransformation, config: Config, data: Problem, refresh: bool = True
) -> float:
    """Returns the last loss of a loop that calls `tx.refresh` itself, or never."""
    x, y, w = data
    params: Any = {"w": w}
    state = tx.subspace.init_from(params, jax.random.key(0))
    gradient = jax.jit(jax.grad(lambda p: loss(p["w"], x, y)))
    renew, update = jax.jit(tx.refresh), jax.jit(tx.update)
    for i in range(config.steps):
        grads = gradient(params)
        if refresh and i % config.gap == 0:
            state = renew(grads, state, params)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return float(loss(params["w"], x, y))


def with_apply(tx: optim.SubspaceTransformation, config: Config, data: Problem) -> float:
    """Returns the last loss of a loop with `actjax.optim.apply`."""
    x, y, w = data
    params: Any = {"w": w}
    state = optim.init(tx, params)

    @functools.partial(jax.jit, static_argnames="refresh")
    def step(params: Any, state: Any, refresh: bool) -> Any:
        grads = jax.grad(lambda p: loss(p["w"], x, y))(params)
        return optim.apply(tx, grads, state, params, refresh=refresh)

    for i in range(config.steps):
        params, state = step(params, state, refresh=i % config.gap == 0)
    return float(loss(params["w"], x, y))


def with_nnx(tx: optax.GradientTransformation, config: Config, data: Problem) -> float:
    """Returns the last loss of a loop with `nnx.Optimizer`."""
    x, y, w = data
    model = nnx.Linear(*w.shape, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel[...] = w
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> None:
        optimizer.update(model, nnx.grad(lambda m: loss(m.kernel[...], x, y))(model))

    for _ in range(config.steps):
        step(model, optimizer)
    return float(loss(model.kernel[...], x, y))


def measure(config: Config) -> list[dict]:
    """Returns the last loss of each loop."""
    data, rate = problem(config), optax.scale(-config.learning_rate)
    make = functools.partial(
        optim.subspace, optax.scale_by_adam(), config.rank, gap=config.gap, scale=1.0
    )
    # Of 32 x 24, GaLore in optax projects the larger side: the input.
    tx, both = make(), make(outer=rate)
    chain = optax.chain(tx, rate)
    plain = functools.partial(optax_loop, config=config, data=data)
    loops: dict[str, Callable[[], float]] = {
        "optax.contrib.galore": lambda: plain(
            optax.contrib.galore(
                config.learning_rate, rank=config.rank, update_proj_gap=config.gap, scale=1.0
            )
        ),
        "never refreshed": lambda: by_hand(both, config, data, refresh=False),
        "refreshed by hand": lambda: by_hand(both, config, data),
        "actjax.optim.apply": lambda: with_apply(both, config, data),
        "optax.chain": lambda: plain(chain),
        "optax.masked": lambda: plain(optax.masked(chain, {"w": True})),
        "optax.multi_transform": lambda: plain(
            optax.multi_transform({"subspace": chain}, {"w": "subspace"})
        ),
        "optax.MultiSteps(1)": lambda: plain(optax.MultiSteps(chain, 1).gradient_transformation()),
        "optax.inject_hyperparams": lambda: plain(
            optax.inject_hyperparams(lambda rate: optax.chain(tx, optax.scale(-rate)))(
                rate=config.learning_rate
            )
        ),
        "nnx.Optimizer": lambda: with_nnx(chain, config, data),
        "clipped by the norm before": lambda: plain(
            optax.chain(optax.clip_by_global_norm(1.0), chain)
        ),
        "both sides (Definition 3.4)": lambda: plain(optax.chain(make(side="both"), rate)),
        "Fira": lambda: plain(optax.chain(make(remainder=optim.ScaledRemainder()), rate)),
    } | {
        f"{name}, {form}": functools.partial(plain, store(tx))
        for name, tx in (
            ("optax.adam", optax.adam(config.learning_rate)),
            ("optax.lion", optax.lion(config.learning_rate)),
        )
        for form, store in FORMS.items()
    }
    return [{"loop": name, "loss": run()} for name, run in loops.items()]


def show(config: Config, rows: list[dict]) -> None:
    """Prints the losses."""
    title = f"{config.steps} steps of Adam, rank {config.rank}, refreshed every {config.gap} steps"
    print_table(title, ("loop", "loss"), [(row["loop"], f"{row['loss']:.4f}") for row in rows])


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
