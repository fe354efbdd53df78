"""Whole steps, timed in turn in one process.

Flags of XLA are options of the compiler here, so that programs with different flags are timed
within seconds of each other.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import jax

from actjax import kernels
from actjax.optim.states.host_states import HOST
from actjax.optim.stepping import in_place
from benchmarks.training_steps import compiled_memory, random_batch, training_step
from benchmarks.variants import VARIANTS
from models import ModelConfig, preset
from train.planning.devices import compile_for, find_device
from train.planning.estimate import compile_plan
from train.run.gpus import gpu_of_kind
from train.run.report import tree_bytes
from train.run.sharding import product_options, with_sharding
from train.run.utilization import step_flops
from train.settings.config import PretrainConfig
from train.settings.resolve import resolve

DEVICE = "h100"
"""The GPU that dry runs compile for."""
Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Setting:
    """A step: its name in the results and, if it differs, in `benchmarks.training_steps`."""

    name: str
    step: str = ""
    model: str = "llama_1b"
    batch_size: int = 8
    seq_len: int = 1024
    accumulate: int = 1
    ffn_size: int = 0
    """Width of the feed-forward layers; 0 for that of the preset."""
    unroll: int = 1
    """Layers in an iteration of `jax.lax.scan` over them."""
    in_place: bool = True
    """Whether kernels read and write stacks where they are."""
    implementation: kernels.Implementation | None = None
    """Implementation of the kernels, as for `actjax.kernels.use`."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the compiler by name, which are the flags of XLA, beside those that a run has."""

    def config(self) -> PretrainConfig:
        """Returns the settings of a run."""
        names = ("model", "batch_size", "seq_len", "accumulate")
        same: Any = {name: getattr(self, name) for name in names}
        return PretrainConfig(**same, weight_dtype="bfloat16", compute_dtype="bfloat16")

    def lowered(self, place: Any = None) -> dict[str, Any]:
        """Returns `init`, and the traced programs `step` and, for some methods, `refresh`.

        Args:
          place: returns shapes on a device to compile for; None for those of this machine.
        """
        built = training_step(self.step or self.name, self.config(), self.shape())
        state, batch = jax.eval_shape(built.init), jax.eval_shape(self.batch)
        init: Any = jax.jit(built.init)
        places: dict[str, Any] = {}
        if built.on_host is not None:
            shardings, init = built.on_host()
            state = jax.tree.map(with_sharding, state, shardings)
            places = {"out_shardings": (shardings, None)}
        if place is not None:
            state, batch = place(state), place(batch)
        with kernels.use(self.implementation), self._unrolled(), self._with_slices():
            return {"init": init} | {
                name: jax.jit(run, donate_argnums=0, **places).lower(state, batch)
                for name, run in (("refresh", built.refresh), ("step", built.step))
                if run is not None
            }

    def shape(self) -> ModelConfig:
        """Returns the dimensions of the model."""
        shape = preset(self.model)
        return dataclasses.replace(shape, ffn_size=self.ffn_size or shape.ffn_size)

    def compiled(self, program: Any) -> Any:
        """Compiles what `lowered` returns."""
        options = {**product_options(), **self.options}
        return program.compile(compiler_options=options)

    @contextlib.contextmanager
    def _unrolled(self) -> Iterator[None]:
        scan, layers = jax.lax.scan, preset(self.model).num_layers

        def unrolled(body: Any, init: Any, xs: Any = None, length: Any = None, **options: Any):
            if {x.shape[0] for x in jax.tree.leaves(xs)} == {layers}:
                options["unroll"] = self.unroll
            return scan(body, init, xs, length, **options)

        with mock.patch.object(jax.lax, "scan", unrolled if self.unroll > 1 else scan):
            yield

    @contextlib.contextmanager
    def _with_slices(self) -> Iterator[None]:
        applies = in_place.applies if self.in_place else lambda *_: False
        with mock.patch.object(in_place, "applies", applies):
            yield

    def batch(self) -> dict[str, jax.Array]:
        """Returns random tokens."""
        return random_batch(self.config(), preset(self.model).vocab_size)


class Steps:
    """Compiled settings, with the states of those that have run."""

    def __init__(self, settings: Sequence[Setting], alone: bool = False) -> None:
        """Traces the settings in turn, and compiles all at once; `alone`: keeps one state only."""
        self.programs: list[dict[str, Any]] = [attempt(setting.lowered) for setting in settings]
        self._settings, self._states, self._alone = settings, {}, alone

        def compiled(programs: dict[str, Any], setting: Setting) -> dict[str, Any]:
            return {
                name: x if name in ("init", "failure") else setting.compiled(x)
                for name, x in programs.items()
            }

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            run = functools.partial(attempt, compiled)
            self.programs = list(pool.map(run, self.programs, settings))

    def run(self, i: int, calls: int) -> dict[str, Any]:
        """Takes steps of a setting, each after the other. Settings with equal states share one.

        Returns:
          `seconds` of a step, the last `loss`, bytes of the state `on_host`, and the `peak` of the
          device's memory in this process so far; `failure` if the setting does not compile.
        """
        programs, setting = self.programs[i], self._settings[i]
        if "failure" in programs:
            return programs
        batch, metrics = setting.batch(), {}
        # The state is donated: a step that fails must not leave it behind.
        key = setting.step or setting.name, setting.model, setting.ffn_size
        state = self._states.pop(key, None)
        self._states = {} if self._alone else self._states
        if state is None:
            state = programs["init"]()
            if "refresh" in programs:
                state, _ = programs["refresh"](state, batch)
        jax.block_until_ready((state, batch))
        begin = time.perf_counter()
        for _ in range(calls):
            state, metrics = programs["step"](state, batch)
        jax.block_until_ready((state, metrics))
        seconds = (time.perf_counter() - begin) / calls
        self._states[key] = state
        on_host = [x for x in jax.tree.leaves(state) if x.sharding.memory_kind == HOST]
        return {
            "seconds": seconds,
            "loss": str(metrics["loss"]),  # JSON has no NaN.
            "on_host": tree_bytes(on_host),
            "peak": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        }

    def state_after(self, i: int, calls: int) -> Any:
        """Returns the state of a setting after some steps from its first one."""
        state = self.programs[i]["init"]()
        for _ in range(calls):
            state, _ = self.programs[i]["step"](state, self._settings[i].batch())
        return state


def time_steps(
    settings: Sequence[Setting], rounds: int = 4, calls: int = 3, alone: bool = False
) -> Rows:
    """Times settings in turn, so that a drift of the device affects all of them equally.

    With `alone` all rounds of a setting run before the next, as states do not fit together. The
    first round is not timed.

    Returns:
      A row for each setting, with what `Steps.run` returns, where `seconds` has an entry for each
      round; their `median`, `tokens_per_second`, `tflop_per_second` and `share_of_peak` (of the
      model's operations, `train.run.utilization`), and the `planned_peak` of the compiler.
    """
    rows: Rows = [{**dataclasses.asdict(setting), "seconds": []} for setting in settings]
    steps = Steps(settings, alone)
    order = [(turn, i) for turn in range(1 + rounds) for i in range(len(settings))]
    for turn, i in sorted(order, key=lambda pair: pair[1]) if alone else order:
        if "failure" not in rows[i]:
            result = attempt(steps.run, i, calls if turn else 1)
            times = [result.pop("seconds")] if turn and "seconds" in result else []
            rows[i] |= {**result, "seconds": rows[i]["seconds"] + times}
    for row, setting, programs in zip(rows, settings, steps.programs, strict=True):
        if "failure" not in row:
            row["median"] = statistics.median(row["seconds"])
            row["tokens_per_second"] = setting.batch_size * setting.seq_len / row["median"]
            rate = step_flops(resolve(setting.config(), setting.shape())) / row["median"]
            gpu = gpu_of_kind(jax.devices()[0].device_kind)
            row["tflop_per_second"] = rate / 1e12
            row["share_of_peak"] = None if gpu is None else rate / gpu.flops
            row["planned_peak"] = compiled_memory(programs["step"])["peak"]
    return rows


def compiled_for_gpu(setting: Setting) -> Any:
    """Returns the step of a setting, compiled for a GPU that is not there."""
    with compile_for(find_device(DEVICE)) as place:
        return setting.compiled(setting.lowered(place)["step"])


def compile_only(settings: Sequence[Setting]) -> Rows:
    """Compiles steps for a GPU that is not there; returns the compiler's peaks as `checked`."""
    rows = []
    for setting in settings:
        variant, on_host = VARIANTS.get(setting.step or setting.name), 0
        if variant is not None and variant.optimizer.offload_states:
            plan = compile_plan(variant.configure(setting.config()), DEVICE)
            peak, on_host = plan.peak, plan.on_host
        else:
            peak = compiled_memory(compiled_for_gpu(setting))["peak"]
        host = f", {on_host / 2**30:.2f} on the host" if on_host else ""
        rows.append({"checked": f"{setting.name} {peak / 2**30:.2f} GiB{host}"})
    return rows


def attempt(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Returns what a function returns, or its error in one line under `failure`."""
    try:
        return function(*args)
    except Exception as error:
        return {"failure": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
