"""A training run from its first step to its last, for every program.

A program prepares a `Run`, which checks everything that can be wrong. `train` then takes steps,
logs, evaluates and saves until the last step or a signal. A saved run continues with equal bits.
"""

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from train.run import hosts
from train.run.adapt import SiteChooser, site_chooser
from train.run.calibration import calibrate
from train.run.checkpoint import Checkpoints
from train.run.export import remove_exports
from train.run.loss import Batch, whole_batch_shapes
from train.run.metrics import Recorder
from train.run.optimizer import learning_rate_schedule
from train.run.program import (
    BadRunError,
    LostProcessError,
    described,
)
from train.run.progress import Progress, saying
from train.run.recipe import Recipe, build_recipe
from train.run.sharding import (
    allow_simulated_devices,
    batch_sharding,
    compiler_options,
    formats_of,
    rows_of_process,
    with_sharding,
)
from train.run.signals import StopSignal
from train.run.step import TrainState, make_eval_step, make_refresh_step, make_train_step, model_of
from train.run.stopping import cannot_go_on, check_finite, check_step
from train.run.utilization import speed_text, step_flops
from train.settings.config import RunConfig
from train.settings.resolve import ResolvedConfig
from train.text.data import ValidationSet
from train.text.pairs import PairValidation


@dataclasses.dataclass
class Run:
    """A run that is ready to begin or to continue.

    Attributes:
      recipe: what each step does.
      mesh: the devices.
      train_step: the compiled step.
      state: the training state.
      batches: the training data, at the position that belongs to `state`.
      validation: the held-out data: batches, and a report of sums over them.
      checkpoints: where the run is saved.
      lock: keeps other runs out of the folder, if this process has the lock. `train` releases it.
      identity: what a checkpoint must agree with.
    """

    recipe: Recipe
    mesh: Mesh
    train_step: Callable[..., Any]
    state: TrainState
    batches: Any
    validation: ValidationSet | PairValidation
    checkpoints: Checkpoints
    lock: contextlib.ExitStack
    identity: dict[str, Any]

    @property
    def config(self) -> ResolvedConfig:
        """The settings."""
        return self.recipe.config


def prepare_and_train(
    prepare: Callable[[Console], Run],
    config: RunConfig,
    console: Console,
    finish: Callable[[Run, Console], None] | None = None,
) -> int:
    """Joins the other processes, if there are any, prepares a run and trains.

    Args:
      prepare: makes the run.
      config: the settings.
      console: where the first process prints.
      finish: called with the run after its last step is saved.

    Returns:
      The last step done: less than `steps` if a signal stopped the run.

    Raises:
      BadRunError: something is wrong with the settings, the text or the checkpoint.
      NonFiniteError: the loss or gradient of a step is not finite.
      MachineError: a file cannot be written, or memory is missing.
      LostProcessError: another process has ended.
    """
    allow_simulated_devices()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hosts.joined(config.distributed))
            if not hosts.is_main():
                console = Console(quiet=True)
            ready = prepare(console)
        except (ValueError, OSError) as error:
            raise BadRunError(described(error)) from error
        except MemoryError as error:
            raise BadRunError(
                "this machine has too little memory to prepare the run: make `--batch-size` or"
                f" `--seq-len` smaller ({error})."
            ) from error
        try:
            done = train(ready, console)
            if finish is not None and done == ready.config.steps:
                finish(ready, console)
        except (OSError, MemoryError) as error:
            raise cannot_go_on(ready, error) from error
        except jax.errors.JaxRuntimeError as error:
            if jax.process_count() == 1:
                raise
            raise LostProcessError(
                "another process of this run has ended, or cannot be reached"
                f" ({str(error).splitlines()[0][:200]}). Start all processes again with `--resume`:"
                f" the run in {ready.config.folder} continues from its last checkpoint."
            ) from error
        return done


def compile_step(recipe: Recipe, mesh: Mesh, shapes: TrainState, shardings: Any) -> Any:
    """Returns the compiled training step. Needs shapes only, no arrays."""
    state = jax.tree.map(with_sharding, shapes, shardings)
    batch = jax.tree.map(
        lambda x: with_sharding(x, batch_sharding(mesh)), whole_batch_shapes(recipe.config)
    )
    formats = formats_of(state)
    state = jax.tree.map(with_sharding, state, formats)
    step = jax.jit(make_train_step(recipe), donate_argnums=0, out_shardings=(formats, None))
    options = compiler_options(mesh)
    with jax.set_mesh(mesh):
        return step.lower(state, batch).compile(compiler_options=options)


def train(run: Run, console: Console) -> int:
    """Trains to the last step, or until a signal asks to stop. Saves the run in both cases.

    Before the first step there is nothing to save, and a signal ends the program. Releases the lock
    of the folder, on errors too.

    Returns:
      The last step done.

    Raises:
      BadRunError: a board of `--log-to` cannot be opened.
      NonFiniteError: the loss or gradient is not finite. Earlier checkpoints stay.
    """
    config, start = run.config, int(run.state.step)
    tokens = config.batch_size * config.seq_len

    def show(speed: float) -> str:
        return speed_text(speed, speed / tokens * step_flops(config), run.mesh.size)

    with run.lock:
        with (
            jax.set_mesh(run.mesh),
            _open_recorder(config, start) as recorder,
            Progress(console, start, config.steps, tokens, show) as progress,
        ):
            trainer = _Trainer(run, console, recorder, progress)
            if start == 0 and config.pretrained:
                with progress.paused():
                    trainer.evaluate(0)
            if 0 < start < config.steps:
                remove_exports(config.folder, console)
            agreement, stop = hosts.Agreement(), StopSignal()
            with stop:
                for step in range(start + 1, config.steps + 1):
                    if agreement.any(stop.requested):
                        break
                    with contextlib.ExitStack() as said:
                        if step == start + 1:
                            running = f"step {step} of {config.steps} is running"
                            said.enter_context(saying(console, running))
                        trainer.take(step)
                trainer.save()
        run.checkpoints.close()
        run.batches.close()
    done = int(run.state.step)
    stopped = f"stopped by {stop.name or 'a signal to another process'}, saved"
    ending = "done" if done == config.steps else stopped
    console.print(f"{ending} at step {done} of {config.steps}; everything is in {config.folder}")
    return done


def _open_recorder(config: ResolvedConfig, start: int) -> Recorder:
    try:
        return Recorder(
            config.folder,
            f"{config.title}, {config.method}",
            start,
            writes=hosts.is_main(),
            log_to=config.log_to,
        )
    except ValueError as error:
        raise BadRunError(str(error)) from error


class _Trainer:
    """Takes the steps of a run, and logs, evaluates and saves when they are due."""

    def __init__(self, run: Run, console: Console, recorder: Recorder, progress: Progress) -> None:
        self._run, self._console = run, console
        self._recorder, self._progress = recorder, progress
        self._metrics: dict[str, jax.Array] = {}
        self._skipped = 0
        self._first = int(run.state.step) + 1
        self._held_out: dict[str, float] = {}
        self._logged: list[float] = []
        self._chooser = site_chooser(run.recipe)
        self._learning_rate = learning_rate_schedule(run.config.optimizer, run.config.steps)
        self._eval_step = jax.jit(make_eval_step(run.recipe))
        # Compiled at the first refresh step, if there is one.
        self._refresh_step = jax.jit(
            make_refresh_step(run.recipe),
            donate_argnums=0,
            out_shardings=(formats_of(run.state), None),
        )

    def take(self, step: int) -> None:
        """Takes a step, and does what is due after it."""
        run, last = self._run, self._metrics
        batch = put_rows(next(run.batches), run.mesh, run.config.batch_size)
        self._adapt(step - 1, batch)
        is_refresh = run.recipe.refreshes(step - 1, self._skipped_in_a_row())
        if is_refresh:  # The first one is compiled.
            with self._saying(step, "computing the subspaces"):
                state, self._metrics = self._refresh_step(run.state, batch)
        else:
            state, self._metrics = run.train_step(run.state, batch)
        if run.mesh.size > 1 and run.mesh.devices.flat[0].platform == "cpu":
            # Two programs at once can wait for each other's simulated devices on fewer cores.
            state = jax.block_until_ready(state)
        # The previous step has ended by now, so that looking at it keeps the device busy.
        check_step(run, step - 1, last)
        if self._progress.is_due(step - 1):
            self._progress.log(step - 1, float(last["loss"]))
        run.state = state
        config = run.config
        is_last = step == config.steps
        if is_last or step % config.log_every == 0 or step == 1:
            self._log(step)
        elif step == self._first:
            self._progress.log(step, float(self._metrics["loss"]))
        evaluates = is_last or step % config.eval_every == 0
        if evaluates or step % config.save_every == 0:
            jax.block_until_ready(self._metrics)  # The time of the step is no pause.
            with self._progress.paused():
                if evaluates:
                    self.evaluate(step)
                    self._recorder.draw()
                if step % config.save_every == 0:
                    self.save()

    def evaluate(self, step: int) -> None:
        """Records and prints loss, perplexity and bits per byte on the held-out data."""
        run = self._run
        # All processes have all of the held-out batches.
        put = functools.partial(hosts.place, sharding=batch_sharding(run.mesh))
        batches = (jax.tree.map(put, batch) for batch in run.validation.batches)
        totals: collections.Counter[str] = collections.Counter()
        with self._saying(step, "evaluating"):
            for batch in batches:
                sums = self._eval_step(run.state.model, batch, run.state.context)
                totals.update({name: float(value) for name, value in sums.items()})
        report = run.validation.report(totals)
        check_finite(run, step, report)
        self._recorder.record(step, **report)
        self._progress.say(step, report)
        if "validation_loss" in report:
            self._held_out = {"held_out": report["validation_loss"]}

    def _mean_loss(self) -> dict[str, float]:
        """Returns the mean of the losses that were logged since the last call, or the last loss."""
        losses, self._logged = self._logged, []
        last = float(self._metrics.get("loss", math.nan))
        if not losses and math.isfinite(last):
            losses = [last]
        return {"training": sum(losses) / len(losses)} if losses else {}

    def save(self) -> None:
        """Saves the run, if its last step is finite."""
        run = self._run
        check_step(run, int(run.state.step), self._metrics)
        losses = {**self._held_out, **self._mean_loss()}
        position, bits = run.batches.get_state(), dict(run.recipe.bits)
        progress = {"position": position, "bits": bits, "losses": losses}
        state = dataclasses.replace(run.state, frozen=None)
        with self._saying(int(state.step), "saving"):
            run.checkpoints.save(int(state.step), state, progress, run.identity)

    def _saying(self, step: int, what: str) -> contextlib.AbstractContextManager[None]:
        """Context of work that takes long now and then, and says so then."""
        return saying(self._console, f"step {step}: {what}", first=False)

    def _skipped_in_a_row(self) -> int:
        """Returns how many of the latest steps were skipped, where a refresh depends on it."""
        scale = self._run.state.loss_scale
        return 0 if scale is None or self._run.recipe.subspace is None else int(scale.in_a_row)

    def _adapt(self, step: int, batch: Batch) -> None:
        """Chooses bits and measures scales of channels when that is due after a step."""
        run = self._run
        if self._chooser is not None and self._chooser.is_due(step):
            with self._progress.paused(), self._saying(step, "choosing bits"):
                self._choose_bits(self._chooser, batch)
        every = run.config.adapter.recalibrate_every if run.config.adapter else 0
        if every and step > 0 and step % every == 0:
            recipe, state = run.recipe, run.state
            model = model_of(recipe, state)  # With the current adapters.
            with self._saying(step, "measuring channels"):
                measured = calibrate(recipe.storage, model, [batch], run.config.compute_dtype)
            shardings = jax.tree.map(lambda x: x.sharding, state.calibration)
            run.state = dataclasses.replace(state, calibration=moved(measured, shardings))

    def _choose_bits(self, chooser: SiteChooser, batch: Batch) -> None:
        """Chooses the bits of each site, and compiles the step again if any of them changed."""
        run, step = self._run, int(self._run.state.step)
        chosen = chooser.choose_and_compare(run.state.model, batch, step)
        self._console.print(f"step {step}: {chosen.describe()}")
        if chosen.bits == run.recipe.bits:
            return
        run.recipe = build_recipe(run.config, chosen.bits)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), run.state)
        shardings = jax.tree.map(lambda x: x.sharding, run.state)
        run.train_step = compile_step(run.recipe, run.mesh, shapes, shardings)

    def _log(self, step: int) -> None:
        check_step(self._run, step, self._metrics)
        values = {name: float(value) for name, value in self._metrics.items()}
        if math.isfinite(values["loss"]):  # That of a skipped step may not be.
            self._logged.append(values["loss"])
        skipped = int(values.get("skipped", 0))
        updates = max(0, step - 1 - skipped)
        values["learning_rate"] = float(jnp.asarray(self._learning_rate(updates)))
        speed = self._progress.log(step, values["loss"])
        if skipped > self._skipped:
            scale = f"the loss scale is {values['loss_scale']:g}"
            self._console.print(f"step {step}: {skipped} steps were skipped so far, {scale}")
            self._skipped = skipped
        # A skipped step may be infinite.
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        config = self._run.config
        tokens = config.batch_size * config.seq_len
        rates = {"tokens_per_second": speed}
        rates["tflop_per_second"] = speed / tokens * step_flops(config) / 1e12
        self._recorder.record(step, **finite, **rates)


def put_rows(batch: dict[str, np.ndarray], mesh: Mesh, batch_size: int) -> Batch:
    """Returns a batch on all devices, from the rows that each process has read."""
    (_, parts), sharding = rows_of_process(mesh, batch_size), batch_sharding(mesh)
    return {name: hosts.place(x, sharding, parts) for name, x in batch.items()}


def moved(tree: Any, shardings: Any) -> Any:
    """Returns arrays with other shardings, also over the devices of several processes."""
    return jax.jit(lambda x: x, out_shardings=shardings)(tree)
