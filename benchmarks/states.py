"""Time of an optimizer's update by the form of its state, all of them interleaved in one run.

`python -m benchmarks.states` updates the matrices of one layer of `llama_1b` in place, with weights
and gradients in bfloat16, weight decay and a learning rate. Each round runs every optimizer once,
so that a drift of the machine affects all of them equally. The bound of a time is what the update
must read and write at the rate of an update of a large array in place in the same run. On a GPU,
whose updates take less than their launch, a time is that of several updates, each after the other.
"""

import dataclasses
import functools
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from actjax import optim
from benchmarks import command, record
from benchmarks.kernel_cases.case import normal
from benchmarks.tables import print_cells
from benchmarks.timing import Advancing, interleaved
from models import preset

_BASELINE = "AdamW, float32"
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    _BASELINE: lambda: _on_float32(optax.scale_by_adam()),
    "AdamW, 8 bits, one pass": lambda: optim.scale_by_adam_8bit(),
    "AdamW, 8 bits, eight_bit": lambda: _on_float32(optim.eight_bit(optax.scale_by_adam())),
    "AdamW, 4 bits, one pass": lambda: optim.scale_by_adam_4bit(),
    "AdamW, 4 bits, four_bit": lambda: _on_float32(optim.four_bit(optax.scale_by_adam())),
    "factored, float32": lambda: optim.scale_by_factored_adam(),
    "factored, 8 bits": lambda: optim.eight_bit(optim.scale_by_factored_adam()),
    "factored, 4 bits": lambda: optim.four_bit(optim.scale_by_factored_adam()),
}
"""By name, the transform from gradients to updates without a learning rate."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the benchmark."""

    model: str = "llama_1b"
    """Model whose layer is updated."""
    rounds: int = 20
    """Timed updates of each optimizer, after two updates that are not counted."""
    results: pathlib.Path = record.RESULTS / "states.json"


def layer_of(model: str) -> dict[str, tuple[int, int]]:
    """Returns the shapes of the matrices of one layer."""
    config = preset(model)
    width, heads, ffn = config.hidden_size, config.head_size, config.stored_ffn_size
    queries, keys = config.num_heads * heads, config.num_kv_heads * heads
    attention = {"q": (width, queries), "k": (width, keys), "v": (width, keys)}
    return attention | {
        "o": (queries, width), "gate": (width, ffn), "up": (width, ffn), "down": (ffn, width)
    }  # fmt: skip


def measure(config: Config) -> list[dict[str, Any]]:
    """Returns one row for each optimizer."""
    # Updates in flight at once: on a GPU an update takes less than its launch.
    calls = 20 if jax.default_backend() == "gpu" else 1
    grads = _random(jax.random.key(0), config.model, 1e-3)
    rows, updates = [], {"copy": Advancing(jnp.zeros(2**26, jnp.float32)).by(_negated)}
    for name in OPTIMIZERS:
        params = _random(jax.random.key(1), config.model, 0.02)
        program, state = _start(name, params, grads)
        state_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
        # A gradient is read; a weight and its state are read and written.
        weights = sum(x.nbytes for x in jax.tree.leaves(grads))
        rows.append(
            {
                "optimizer": name,
                "state_bytes": state_bytes,
                "bytes": 3 * weights + 2 * state_bytes,
                "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
            }
        )
        updates[name] = Advancing((params, state)).by(program, grads)
    seconds = interleaved(updates, config.rounds, warmup=2, calls=calls)
    rate = 2 * 2**28 / statistics.median(seconds["copy"])
    return [
        row | {"seconds": seconds[row["optimizer"]], "bound": row["bytes"] / rate} for row in rows
    ]


# In place: a CPU takes longer to provide fresh memory than to write to it.
_negated = jax.jit(lambda x: (-x, None), donate_argnums=0)


def _start(name: str, params: Any, grads: Any) -> tuple[Any, Any]:
    """Returns the compiled update of an optimizer, and its state."""
    tx = optax.chain(OPTIMIZERS[name](), optax.add_decayed_weights(0.1), optax.scale(-1e-3))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(params_and_state: Any, grads: Any) -> Any:
        params, state = params_and_state
        return optim.apply(tx, grads, state, params), None

    state = jax.jit(functools.partial(optim.init, tx))(params)
    return step.lower((params, state), grads).compile(), state


def _on_float32(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns a transform of optax with the moments of float32 weights and gradients.

    Those of actjax keep moments in float32 themselves.
    """

    def init(params: Any) -> Any:
        return tx.init(_wide(params))

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return tx.update(_wide(updates), state, params)

    return optax.GradientTransformation(init, update)


def _wide(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


@functools.partial(jax.jit, static_argnums=1)
def _random(key: jax.Array, model: str, scale: float) -> dict[str, jax.Array]:
    """Returns normally distributed arrays of the shapes of a layer, in bfloat16."""
    shapes = layer_of(model)
    keys = jax.random.split(key, len(shapes))
    return {
        name: (scale * normal(k, shape, jnp.float32)).astype(jnp.bfloat16)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def show(config: Config, rows: list[dict[str, Any]]) -> None:
    """Prints one line for each optimizer."""
    times = {row["optimizer"]: statistics.median(row["seconds"]) for row in rows}
    cells = [
        {
            "optimizer": row["optimizer"],
            "state MB": f"{row['state_bytes'] / 1e6:,.0f}",
            "temporary MB": f"{row['temporary_bytes'] / 1e6:,.0f}",
            "median ms": f"{1e3 * times[row['optimizer']]:,.3g}",
            "least ms": f"{1e3 * min(row['seconds']):,.3g}",
            "bound ms": f"{1e3 * row['bound']:,.3g}",
            "/ float32": f"{times[row['optimizer']] / times[_BASELINE]:.2f}",
        }
        for row in rows
    ]
    print_cells(f"Update of one layer of {config.model}", cells)


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
