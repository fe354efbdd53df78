"""Rounding of bfloat16 weights: what is learnt, what is stored, what an update takes.

`python -m benchmarks.weight_rounding --checkpoint DIR --data FILE` fine-tunes a checkpoint and
trains a small model from scratch, with float32 weights and with bfloat16 weights of each rounding.
Weights, order of the data and codecs are the same in all runs. `kept` is the share of the fall of
the held-out loss with float32 weights that remains.

It also runs 10,000 updates like those of Adam on weights without a model, and compares the weights
that an evaluation would read with sums in float64; and it times an update of one large weight, with
the roundings in turn.
"""

import dataclasses
import functools
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from actjax import optim
from benchmarks import command, record
from benchmarks.runs import first_loss, last_loss, trained
from benchmarks.tables import print_table
from benchmarks.variants import check_names
from train.run.optimizer import make_optimizer
from train.settings.config import DataConfig, FinetuneConfig, OptimizerConfig, PretrainConfig
from train.settings.data import ExampleConfig

ROUNDINGS: dict[str, dict[str, Any]] = {
    "float32": {"weight_dtype": "float32"},
    "nearest": {"weight_dtype": "bfloat16", "weight_rounding": "nearest"},
    "stochastic": {"weight_dtype": "bfloat16", "weight_rounding": "stochastic"},
}
"""By name: the settings of a run."""
RUNS = {
    f"{task}, {name}": (task, name)
    for task, names in {
        "finetune exact": ROUNDINGS,
        "pretrain exact": ROUNDINGS,
        "finetune lean": ("float32", "stochastic"),
    }.items()
    for name in names
}


@dataclasses.dataclass(frozen=True)
class Config:
    """What to measure."""

    checkpoint: str
    """The checkpoint that is fine-tuned."""
    data: str
    """Records with `question` and `answer`."""
    only: tuple[str, ...] = tuple(RUNS)
    """Runs to make."""
    steps: int = 24
    """Steps of fine-tuning, of 4 x 256 tokens."""
    learning_rate: float = 2e-5
    """Learning rate of fine-tuning."""
    eval_batches: int = 8
    """Batches of an evaluation."""
    model: str = "llama_9m"
    """Model that is trained from scratch."""
    model_steps: int = 300
    """Its steps, of 8 x 256 tokens."""
    walk_steps: int = 10_000
    """Updates of the weights without a model."""
    rounds: int = 20
    """Timed updates of each kind, after one that is not counted."""
    add: bool = False
    """Keep the runs in `--results`, and make only those that are missing."""
    results: pathlib.Path = record.RESULTS / "weight_rounding.json"

    def __post_init__(self) -> None:
        check_names(self.only, tuple(RUNS))


def measure(config: Config) -> list[dict]:
    """Returns one row for each run, random walk and timed update."""
    rows = record.rows_to_keep(config.results, config.add)
    rows = [row for row in rows if row["kind"] == "run"]
    for name in config.only:
        if name not in {row["name"] for row in rows}:
            row = trained(_settings(config, *RUNS[name]))
            rows.append({"kind": "run", "name": name} | row)
            record.write(config, rows)
    return rows + _walks(config) + _times(config)


def _settings(config: Config, task: str, rounding: str) -> PretrainConfig | FinetuneConfig:
    program, method = task.split()
    steps = config.steps if program == "finetune" else config.model_steps
    shared: dict[str, Any] = {
        "method": method,
        "steps": steps,
        "eval_every": steps,
        "eval_batches": config.eval_batches,
        "log_every": 1,
        **ROUNDINGS[rounding],
    }
    if program == "finetune":
        return _finetuning(config, shared)
    return PretrainConfig(model=config.model, data=DataConfig(), **shared)


def _finetuning(config: Config, shared: dict[str, Any]) -> FinetuneConfig:
    return FinetuneConfig(
        checkpoint=config.checkpoint,
        data=ExampleConfig(
            config.data,
            prompt_template="Question: {question}\nAnswer:",
            completion_template=" {answer}",
        ),
        optimizer=OptimizerConfig(
            learning_rate=config.learning_rate, weight_decay=0.0, warmup_steps=20
        ),
        batch_size=4,
        compute_dtype="float32",
        **shared,
    )


WEIGHTS, SPREAD = 4096, 0.02
"""Number and standard deviation of the weights of a random walk."""


def _walks(config: Config) -> list[dict]:
    """Returns the distance between rounded weights and sums in float64."""
    rows = []
    for size in (1e-5, 1e-4, 1e-3):
        for drift in (0.0, 0.1, 1.0):
            found = random_walks(config.walk_steps, size, drift)
            rows.append({"kind": "walk", "size": size, "drift": drift, **found})
    return rows


def random_walks(steps: int, size: float, drift: float) -> dict[str, Any]:
    """Returns the root mean square error of weights after random updates, by rounding.

    Args:
      steps: number of updates.
      size: standard deviation of an update, as a share of that of the weights. The updates of
        Adam do not depend on the weight.
      drift: share of the update that has the same sign in all steps.

    Returns:
      `moved`, the root mean square distance of the exact weights from their start, as a share of
      their standard deviation, and `errors`, those of the weights, as a share of the distance.
    """
    rng = np.random.default_rng(0)
    start = np.asarray(rng.normal(size=WEIGHTS) * SPREAD, "float32").astype("bfloat16")
    sign = rng.choice([-1.0, 1.0], WEIGHTS)
    transforms: dict[str, Any] = {
        "stochastic": optim.stochastic_rounding(optax.identity()),
    }

    def body(carry: Any, i: jax.Array) -> Any:
        exact, plain, rounded = carry
        normal = jax.random.normal(jax.random.fold_in(jax.random.key(1), i), (WEIGHTS,))
        u = (SPREAD * size * ((1 - drift) * normal + drift * sign)).astype(jnp.float32)
        rounded = {
            name: tx.rounding.apply(u, *rounded[name])[1::-1] for name, tx in transforms.items()
        }
        return (exact + u, jax.tree.map(lambda w: optax.apply_updates(w, u), plain), rounded), None

    with jax.enable_x64(True):
        weights = jnp.asarray(start)
        plain = {"float32": weights.astype(jnp.float32), "nearest": weights}
        rounded = {name: (tx.init(weights), weights) for name, tx in transforms.items()}
        carry = weights.astype(jnp.float64), plain, rounded
        scan = jax.jit(lambda carry: jax.lax.scan(body, carry, jnp.arange(steps))[0])
        exact, plain, rounded = jax.device_get(scan(carry))
    ends = plain | {name: weights for name, (_, weights) in rounded.items()}
    moved = _rms(exact - start.astype(np.float64))
    errors = {name: _rms(np.asarray(w, np.float64) - exact) / moved for name, w in ends.items()}
    return {"moved": moved / SPREAD, "errors": errors}


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def _times(config: Config) -> list[dict]:
    """Returns the seconds of an AdamW update of one weight [2048, 2048] with each rounding."""
    rng, shape = np.random.default_rng(0), (1, 2048, 2048)
    numbers = rng.normal(size=shape) * SPREAD
    programs, states, grads, seconds = {}, {}, {}, {name: [] for name in ROUNDINGS}
    for name, settings in ROUNDINGS.items():
        adam = OptimizerConfig(moment_dtype="float32")
        tx = make_optimizer(adam, 100, None, settings.get("weight_rounding", "nearest"))
        params = {"layers": jnp.asarray(numbers, settings["weight_dtype"])}
        states[name] = params, jax.jit(functools.partial(optim.init, tx))(params)
        grads[name] = jnp.copy(params["layers"])

        def step(params: Any, state: Any, grad: jax.Array, tx: Any = tx) -> Any:
            return optim.apply(tx, {"layers": grad}, state, params)

        programs[name] = jax.jit(step, donate_argnums=(0, 1))
    for _ in range(1 + config.rounds):
        for name, program in programs.items():
            begin = time.perf_counter()
            states[name] = jax.block_until_ready(program(*states[name], grads[name]))
            seconds[name].append(time.perf_counter() - begin)
    return [{"kind": "time", "name": name, "seconds": seconds[name][1:]} for name in ROUNDINGS]


def show(config: Config, rows: list[dict]) -> None:
    """Prints three tables."""
    runs = {row["name"]: row for row in rows if row["kind"] == "run"}
    cells = []
    for name, row in runs.items():
        last = last_loss(row)
        base = runs.get(f"{name.split(maxsplit=1)[0]} exact, float32", row)
        fall = first_loss(base) - last_loss(base)
        # Pretraining has no evaluation before the first step.
        kept = f"{(first_loss(row) - last) / fall:.1%}" if fall else ""
        sizes = [f"{row[part] / 2**20:.1f}" for part in ("weights", "optimizer")]
        above = f"{last - last_loss(base):+.4f}"
        cells.append((name, f"{last:.4f}", above, kept, *sizes))
    headers = ("run", "held-out loss", "above float32", "kept", "weights, MiB", "optimizer, MiB")
    print_table("held-out loss after the last step", headers, cells)
    walks = [row for row in rows if row["kind"] == "walk"]
    names = list(walks[0]["errors"])
    print_table(
        f"error after {config.walk_steps:,} updates, as a share of the distance moved",
        ("size", "drift", "moved", *names),
        [
            (
                *(f"{row[name]:.2g}" for name in ("size", "drift", "moved")),
                *(f"{row['errors'][name]:.2g}" for name in names),
            )
            for row in walks
        ],
    )
    print_table(
        "an AdamW update of 4 M weights",
        ("rounding", "ms"),
        [
            (row["name"], f"{statistics.median(row['seconds']) * 1e3:.1f}")
            for row in rows
            if row["kind"] == "time"
        ],
    )


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
