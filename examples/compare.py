"""What the examples share: one model trained in several ways, and what each way takes.

`exact` is plain JAX, `jax.checkpoint` runs each block again in the backward pass, and the others
store residuals in a smaller form. All ways start from the same weights and read the same batches.
"""

import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx

import actjax
from benchmarks import record
from benchmarks.tables import print_table
from train.planning.devices import HERE, compile_for, find_device

Batch = dict[str, Any]
Loss = Callable[..., jax.Array]
"""From a model and a batch to a scalar. It takes `remat=True` to run each block again in the
backward pass and, if its layers are stacked, `unroll=True` to run them in a Python loop."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Flags of every example."""

    steps: int = 300
    """Number of training steps."""
    batch_size: int = 64
    """Number of examples in a batch."""
    learning_rate: float = 1e-3
    """Learning rate of AdamW, the largest of a cosine schedule with 10% warmup."""
    seeds: int = 1
    """Number of runs; each has other weights and another order of the data."""
    rounds: int = 20
    """Number of timed steps of each method."""
    methods: tuple[str, ...] = ()
    """Names of the methods to run, such as `exact` and `4 bits`; all by default."""
    unrolled: bool = False
    """Also compile the layers in a Python loop, which takes a minute or more."""
    device: str = "h100"
    """GPU to also compile for, without having one: h100, h200, a100_80, ...; `here` for none."""
    results: Annotated[pathlib.Path | None, tyro.conf.arg(name="json")] = None
    """File to write the results to."""

    def __post_init__(self) -> None:
        find_device(self.device)
        for name in ("steps", "batch_size", "seeds", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")

    def wants(self, method: str) -> bool:
        """Returns whether to run a method."""
        return not self.methods or method in self.methods


@dataclasses.dataclass(frozen=True)
class Example:
    """A model and its data.

    Attributes:
      title: title of the table.
      init: from a seed to the model.
      loss: the loss of plain JAX.
      batches: from a seed to an endless iterator of batches.
      evaluate: from a model to figures of held-out data, by name; `loss` is one of them.
      scanned: whether `loss` takes `unroll`.
    """

    title: str
    init: Callable[[int], nnx.Module]
    loss: Loss
    batches: Callable[[int], Iterator[Batch]]
    evaluate: Callable[[Any], dict[str, jax.Array]]
    scanned: bool = True


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What training changes, and the rest of the model.

    Attributes:
      weights: the trained weights.
      rest: all other variables of the model: statistics of a batch norm, frozen weights.
      optimizer: state of the optimizer.
      graph: structure of the model. Static.
    """

    weights: Any
    rest: Any
    optimizer: Any
    graph: Any = dataclasses.field(metadata={"static": True})

    @property
    def model(self) -> Any:
        """The model, in new variables."""
        return nnx.merge(self.graph, self.weights, self.rest, copy=True)


class Method:
    """One way to train: what a row of the table is about."""

    def __init__(self, loss: Loss, optimizer: Any, trained: Any = nnx.Param) -> None:
        """Prepares a method.

        Args:
          loss: from a model and a batch to a scalar.
          optimizer: an optax transform.
          trained: filter of the variables that are trained.
        """
        self.loss, self.optimizer, self.trained = loss, optimizer, trained
        self.step = jax.jit(self._step, donate_argnums=0)

    def init(self, model: nnx.Module) -> State:
        """Returns the state before the first step."""
        graph, weights, rest = self.split(model)
        return State(weights, rest, self.optimizer.init(weights), graph)

    def split(self, model: nnx.Module) -> Any:
        """Returns structure, trained weights and the rest, copied because steps are donated."""
        return jax.tree.map(jnp.copy, nnx.split(model, self.trained, ...))

    def value(self, weights: Any, state: State, batch: Batch) -> tuple[jax.Array, Any]:
        """Returns the loss with other weights, and what the model has written of its variables."""
        model = dataclasses.replace(state, weights=weights).model
        value = self.loss(model, batch)
        return value, nnx.split(model, self.trained, ...)[2]

    def gradient(self, state: State, batch: Batch) -> Any:
        """Returns loss, written variables and gradient: the program whose memory is measured."""
        return jax.value_and_grad(self.value, has_aux=True)(state.weights, state, batch)

    def explain(self, state: State, batch: Batch) -> actjax.Explanation:
        """Returns what the backward pass stores."""
        return actjax.explain(lambda weights: self.value(weights, state, batch)[0], state.weights)

    def _step(self, state: State, batch: Batch) -> tuple[State, jax.Array]:
        (value, rest), gradient = self.gradient(state, batch)
        updates, optimizer = self.optimizer.update(gradient, state.optimizer, state.weights)
        weights = optax.apply_updates(state.weights, updates)
        return State(weights, rest, optimizer, state.graph), value


def adamw(
    settings: Settings, transform: Callable[..., Any] = optax.adamw, steps: int | None = None
) -> Any:
    """Returns AdamW, or another transform of a learning rate, with warmup and a cosine schedule."""
    steps = settings.steps if steps is None else steps
    warmup, end = steps // 10, max(steps, steps // 10 + 1)
    schedule = optax.warmup_cosine_decay_schedule(0.0, settings.learning_rate, warmup, end)
    return transform(schedule)


def losses(settings: Settings, loss: Loss, model: nnx.Module, batch: Batch) -> dict[str, Loss]:
    """Returns the loss of each way that every example compares."""
    found: dict[str, Callable[[], Loss]] = {
        "exact": lambda: loss,
        "jax.checkpoint": lambda: functools.partial(loss, remat=True),
        "4 bits": lambda: actjax.compress_residuals(loss, actjax.Quantized(4)),
        "2 bits": lambda: actjax.compress_residuals(loss, actjax.Quantized(2)),
        "error 0.05": lambda: actjax.compress(loss, error=0.05, verbose=False).measure(
            model, batch
        ),
    }
    return {name: make() for name, make in found.items() if settings.wants(name)}


def _call(block: Any, x: jax.Array) -> jax.Array:
    return block(x)


def run_blocks(
    blocks: Any,
    x: jax.Array,
    *,
    call: Callable[[Any, jax.Array], jax.Array] = _call,
    remat: bool = False,
    unroll: bool = False,
) -> jax.Array:
    """Runs stacked blocks one after the other.

    Args:
      blocks: a module whose variables have a leading axis of blocks.
      x: input of the first block.
      call: runs one block.
      remat: whether the backward pass runs each block again.
      unroll: whether to use a Python loop instead of a scan.
    """
    run = nnx.remat(call) if remat else call
    if not unroll:
        return nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(blocks, x)
    graph, stacked = nnx.split(blocks)
    written = []
    for i in range(len(jax.tree.leaves(stacked)[0])):
        block = nnx.merge(graph, jax.tree.map(lambda y, i=i: y[i], stacked), copy=True)
        x = run(block, x)
        written.append(nnx.state(block))
    nnx.update(blocks, jax.tree.map(lambda *y: jnp.stack(y), *written))
    return x


def compare(
    settings: Settings, example: Example, others: dict[str, Method] | None = None
) -> list[dict[str, Any]]:
    """Returns one row for each way that every example compares, and for other methods by name."""
    model, batch = example.init(0), next(example.batches(0))
    optimizer = adamw(settings)
    forms = {"scan" if example.scanned else "unrolled": example.loss}
    if example.scanned and settings.unrolled:
        forms["unrolled"] = functools.partial(example.loss, unroll=True)
    ways: dict[str, dict[str, Method]] = {}
    for form, loss in forms.items():
        for name, way in losses(settings, loss, model, batch).items():
            ways.setdefault(name, {})[form] = Method(way, optimizer)
    first = next(iter(forms))
    for name, method in (others or {}).items():
        if settings.wants(name):
            ways[name] = {first: method}
    if not ways:
        raise ValueError(f"`methods` names none of this example: {settings.methods}.")
    return measure(settings, example, ways)


def measure(
    settings: Settings, example: Example, ways: dict[str, dict[str, Method]]
) -> list[dict[str, Any]]:
    """Trains and measures methods.

    Args:
      settings: flags.
      example: model and data.
      ways: by name, and by the form of the layers ("scan", "unrolled"), methods. Memory is
        measured in each form; the first form is trained.

    Returns:
      One row for each name: kept bytes, temporaries of the gradient by form, figures of held-out
      data by seed, and the median time of a step.
    """
    rows = [_memory(settings, example, name, forms) for name, forms in ways.items()]
    trained = {name: next(iter(forms.values())) for name, forms in ways.items()}
    evaluate = jax.jit(lambda state: example.evaluate(state.model))
    states = {}
    for row, (name, method) in zip(rows, trained.items(), strict=True):
        figures = []
        for seed in range(settings.seeds):
            state, batches = method.init(example.init(seed)), example.batches(seed)
            for _ in range(settings.steps):
                state, _ = method.step(state, next(batches))
            figures.append({k: float(v) for k, v in evaluate(state).items()})
        states[name] = state
        row["held_out"] = {k: [one[k] for one in figures] for k in figures[0]}
        print(f"{name}: held-out {_means(row)}", flush=True)
    times = _step_times(settings, example, trained, states)
    return [row | {"step_ms": times[row["method"]]} for row in rows]


def _memory(
    settings: Settings, example: Example, name: str, forms: dict[str, Method]
) -> dict[str, Any]:
    model, batch = example.init(0), next(example.batches(0))
    row: dict[str, Any] = {"method": name}
    for form, method in forms.items():
        state = method.init(model)
        shapes = jax.eval_shape(lambda *x: x, state, batch)
        kept = method.explain(state, batch).stored_bytes
        row.setdefault("kept", {})[form] = kept
        for device in dict.fromkeys((HERE, settings.device)):
            try:
                size = _temporaries(device, method, shapes)
            except ValueError as error:  # The compiler for the device is not installed.
                print(f"not compiled for {device}: {error}")
                continue
            row.setdefault("temporaries", {}).setdefault(device, {})[form] = size
    print(f"{name}: compiled", flush=True)
    return row


def _temporaries(device: str, method: Method, shapes: Any) -> int:
    with compile_for(find_device(device)) as place:
        # Another function each time: JAX would take the trace for another device from its cache.
        program = jax.jit(lambda *x: method.gradient(*x)).lower(*map(place, shapes)).compile()
    return program.memory_analysis().temp_size_in_bytes


def _step_times(
    settings: Settings,
    example: Example,
    methods: dict[str, Method],
    states: dict[str, State],
) -> dict[str, float]:
    """Returns median times of a step, in ms. Methods take turns, so that all see the same load."""
    batch, times = next(example.batches(0)), {name: [] for name in methods}
    for _ in range(settings.rounds):
        for name, method in methods.items():
            start = time.perf_counter()
            states[name], value = method.step(states[name], batch)
            jax.block_until_ready((states[name], value))
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(own) for name, own in times.items()}


def _means(row: dict[str, Any]) -> str:
    return ", ".join(f"{k} {statistics.mean(v):.4f}" for k, v in row["held_out"].items())


def show(settings: Settings, title: str, rows: list[dict[str, Any]]) -> None:
    """Prints the rows."""
    devices = {settings.device: settings.device} | {HERE: "CPU"}
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        f"held-out {name}": lambda row, name=name: _mean_and_range(row["held_out"][name])
        for name in rows[0]["held_out"]
    }
    first = next(iter(rows[0]["kept"]))
    columns["kept, MiB"] = lambda row: _mib(row["kept"].get(first))
    for device, sizes in rows[0]["temporaries"].items():
        for form in sizes:
            columns[f"{devices[device]}, {form}, MiB"] = lambda row, device=device, form=form: _mib(
                row["temporaries"][device].get(form)
            )
    columns["step, ms"] = lambda row: f"{row['step_ms']:.1f}"
    cells = [(row["method"], *(text(row) for text in columns.values())) for row in rows]
    seeds = f"{settings.seeds} seeds" if settings.seeds > 1 else "1 seed"
    headers = ("method", *columns)
    print_table(f"{title}: {settings.steps} steps, {seeds}", headers, cells)


def _mean_and_range(values: list[float]) -> str:
    mean = f"{statistics.mean(values):.4f}"
    return f"{mean} ({min(values):.3f}-{max(values):.3f})" if len(values) > 1 else mean


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:,.2f}"


def run(
    settings_type: type,
    description: str | None,
    make: Callable[[Any], tuple[Example, list[dict[str, Any]]]],
) -> None:
    """Runs an example as a command.

    Args:
      settings_type: its flags.
      description: first lines of `--help`.
      make: from flags to the example and its rows.
    """
    settings = tyro.cli(settings_type, description=description)
    example, rows = make(settings)
    if settings.results is not None:
        record.write(settings, rows)
    show(settings, example.title, rows)
