"""Optimistix: `minimise` and `least_squares` with a loss whose backward pass stores codes.

One line changes, the function that is handed to the solver:

    loss = actjax.compress_residuals(loss, actjax.Quantized(4))
    solution = optimistix.minimise(loss, solver, params, args=batch)

Solvers that take the gradient in reverse mode run: LBFGS and `OptaxMinimiser` with
`autodiff_mode="bwd"`. The second program differentiates through a solve: a network makes the
targets of a least-squares problem, and its loss, solve included, is what stores codes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import optimistix

import actjax
from benchmarks.anybody.measuring import report

LAYERS, WIDTH, ROWS, STEPS = 4, 64, 2048, 30
Params = dict[str, jax.Array]


def network(params: Params, x: jax.Array) -> jax.Array:
    """Returns what a residual MLP makes of rows."""

    def layer(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return x + jax.nn.gelu(x @ w[0]) @ w[1], None

    return jax.lax.scan(layer, x, (params["up"], params["down"]))[0]


def loss(params: Params, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns the mean square error of the network."""
    x, y = batch
    return jnp.mean((network(params, x)[:, 0] - y) ** 2)


def solved_loss(
    params: Params,
    batch: tuple[jax.Array, jax.Array],
    adjoint: optimistix.AbstractAdjoint = optimistix.ImplicitAdjoint(),
) -> jax.Array:
    """Returns the error of the curve that fits the network's features best."""
    x, y = batch
    features = network(params, x)[:, :3]

    def residual(curve: jax.Array, features: jax.Array) -> jax.Array:
        return curve[0] + jnp.tanh(features @ curve[1:]) - y

    solver = optimistix.LevenbergMarquardt(rtol=1e-4, atol=1e-4)
    start = jnp.array([0.0, 0.1, 0.2, 0.3])
    solution = optimistix.least_squares(
        residual, solver, start, args=features, adjoint=adjoint, max_steps=64, throw=False
    )
    return jnp.mean(residual(solution.value, features) ** 2)


def train(loss: Any, params: Params, batch: Any, solver: Any) -> optimistix.Solution:
    """Returns the result of a few steps of a solver."""
    return optimistix.minimise(
        loss,
        solver,
        params,
        args=batch,
        options={"autodiff_mode": "bwd"},
        max_steps=STEPS,
        throw=False,
    )


def main() -> None:
    """Prints a line for each of the two uses."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "up": jax.random.normal(keys[0], (LAYERS, WIDTH, 4 * WIDTH)) * WIDTH**-0.5,
        "down": jax.random.normal(keys[1], (LAYERS, 4 * WIDTH, WIDTH)) * 0.5 * WIDTH**-0.5,
    }
    x = jax.random.normal(keys[2], (ROWS, WIDTH))
    batch = x, jnp.sin(x[:, 0]) + 0.1 * jax.random.normal(keys[3], (ROWS,))
    solvers = {
        "LBFGS": optimistix.LBFGS(rtol=1e-5, atol=1e-5),
        "adam": optimistix.OptaxMinimiser(optax.adam(1e-3), rtol=1e-5, atol=1e-5),
    }
    losses = {}
    for name, solver in solvers.items():
        for way, fun in {
            "plain": loss,
            "4 bits": actjax.compress_residuals(loss, actjax.Quantized(4)),
        }.items():
            solution = train(fun, params, batch, solver)
            losses[f"{name}, {way}"] = float(loss(solution.value, batch))
    version = f"optimistix {optimistix.__version__}"
    report(
        f"{version}, minimise",
        1,
        loss,
        jax.grad,
        (params, batch),
        (params, batch),
        step=lambda loss: jax.jit(
            lambda params, batch: train(loss, params, batch, solvers["adam"]).value
        ).lower(params, batch),
        more={"losses": losses},
    )
    for adjoint in (optimistix.ImplicitAdjoint(), optimistix.RecursiveCheckpointAdjoint()):

        def fun(params: Params, batch: Any, adjoint: Any = adjoint) -> jax.Array:
            return solved_loss(params, batch, adjoint)

        name = type(adjoint).__name__
        report(f"{version}, {name}", 1, fun, jax.grad, (params, batch), (params, batch))


if __name__ == "__main__":
    main()
