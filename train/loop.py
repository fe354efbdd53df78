"""A training run from its first step to its last, whatever is trained on.

A program prepares a `Run`: all that can be wrong is found there. `train` then takes steps, logs,
evaluates and saves, until the last step or a signal; what is saved goes on with the same bits.
"""

import dataclasses
import functools
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from models import ModelConfig
from train import adapt
from train.calibration import calibrate
from train.checkpoint import Checkpoints
from train.config import RunConfig
from train.data import ValidationSet
from train.metrics import Recorder, perplexity
from train.optimizer import learning_rate_schedule
from train.progress import Progress
from train.report import explain_step, print_opening, step_memory
from train.settings import changed_settings, write_settings
from train.sharding import batch_sharding, state_shardings
from train.step import (
    Batch,
    Recipe,
    TrainState,
    batch_shapes,
    init_state,
    make_eval_step,
    make_recipe,
    make_refresh_step,
    make_train_step,
    model_of,
)


@dataclasses.dataclass
class Run:
    """A run that is ready to begin or to go on.

    Attributes:
      config: its settings.
      recipe: what each step does.
      mesh: the devices.
      train_step: the compiled step.
      state: the training state.
      batches: the training data, at the position that belongs to `state`.
      validation: the held-out data.
      checkpoints: where it is saved.
      identity: what a checkpoint must agree with.
    """

    config: RunConfig
    recipe: Recipe
    mesh: Mesh
    train_step: Callable[..., Any]
    state: TrainState
    batches: Any
    validation: ValidationSet
    checkpoints: Checkpoints
    identity: dict[str, Any]


class BadRunError(ValueError):
    """A run cannot begin: bad settings, text or checkpoint."""

    exit_code = 2


class NonFiniteError(ArithmeticError):
    """The loss or the gradient of a step is NaN or infinite."""

    exit_code = 1


def make_console() -> Console:
    """Returns one as wide as the terminal, or wide enough for the tables where nobody watches."""
    return Console(width=None if sys.stdout.isatty() else 140)


def run_program(program: Callable[[], Any]) -> None:
    """Runs a program. Exits with 2 if it cannot begin, with 1 on a NaN, and says why in a line."""
    try:
        program()
    except (BadRunError, NonFiniteError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        # At once: threads that still read a damaged checkpoint would bury the message.
        os._exit(error.exit_code)


def prepare_and_train(
    prepare: Callable[[], "Run"], console: Console, finish: Callable[["Run"], None] | None = None
) -> int:
    """Prepares a run and trains.

    Args:
      prepare: makes the run.
      console: where to print.
      finish: called with the run when its last step is done and saved.

    Returns:
      The step it came to: less than `config.steps` if a signal stopped it.

    Raises:
      BadRunError: something is wrong with the settings, the text or the checkpoint.
      NonFiniteError: the loss or gradient of a step is not finite.
    """
    with StopSignal() as stop:
        try:
            ready = prepare()
        except (ValueError, OSError) as error:
            raise BadRunError(str(error)) from error
        done = train(ready, console, stop)
        if finish is not None and done == ready.config.steps:
            finish(ready)
        return done


def _compile(recipe: Recipe, mesh: Mesh, shapes: TrainState, shardings: Any) -> Any:
    """Returns the compiled training step, before any array exists."""
    config = recipe.config
    whole = batch_shapes(dataclasses.replace(config, accumulate=1))
    state = jax.tree.map(_with_sharding, shapes, shardings)
    batch = {name: _with_sharding(x, batch_sharding(mesh)) for name, x in whole.items()}
    step = jax.jit(make_train_step(recipe), donate_argnums=0, out_shardings=(shardings, None))
    with jax.set_mesh(mesh):
        return step.lower(state, batch).compile()


def _with_sharding(x: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def train(run: Run, console: Console, stop: "StopSignal") -> int:
    """Trains to the last step, or until a signal asks to stop; either way the run is saved.

    Returns:
      The step it came to.

    Raises:
      NonFiniteError: the loss or gradient is not finite. What was saved stays.
    """
    config, state = run.config, run.state
    start = int(state.step)
    # Compiled when the first refresh step comes, if one does.
    refresh_step = jax.jit(
        make_refresh_step(run.recipe),
        donate_argnums=0,
        out_shardings=(jax.tree.map(lambda x: x.sharding, state), None),
    )
    evaluate = functools.partial(_evaluate, jax.jit(make_eval_step(run.recipe)), run)
    learning_rate = learning_rate_schedule(config.optimizer, config.steps)
    title = f"{config.title}, {config.method}"
    tokens = config.batch_size * config.seq_len
    with (
        jax.set_mesh(run.mesh),
        Recorder(config.folder, title, start) as recorder,
        Progress(console, start, config.steps, tokens) as progress,
    ):
        if start == 0 and config.begins_trained:
            with progress.paused():
                report = evaluate(state)
                _check_finite(0, report, run)
                recorder.record(0, **report)
                progress.say(0, report)
        metrics: dict[str, jax.Array] = {}
        for step in range(start + 1, config.steps + 1):
            if stop.requested:
                break
            last, batch = metrics, _put(run, next(run.batches))
            if adapt.is_due(run.recipe, step - 1):
                with progress.paused():
                    _choose_bits(run, batch, console)
            if _is_calibration_due(run, step - 1):
                state = _calibrate_again(run, batch)
            due = run.recipe.due_layers(step - 1)
            if due is None:
                state, metrics = run.train_step(state, batch)
            else:
                state, metrics = refresh_step(state, batch, due)
            # The step before has ended by now: looking at it keeps the device busy.
            _check_finite(step - 1, last, run)
            run.state = state
            if step % config.log_every == 0 or step == config.steps:
                _check_finite(step, metrics, run)
                values = {name: float(value) for name, value in metrics.items()}
                values["learning_rate"] = float(jnp.asarray(learning_rate(step - 1)))
                speed = progress.log(step, values["loss"])
                recorder.record(step, **values, tokens_per_second=speed)
            with progress.paused():
                if step % config.eval_every == 0 or step == config.steps:
                    report = evaluate(state)
                    _check_finite(step, report, run)
                    recorder.record(step, **report)
                    recorder.draw()
                    progress.say(step, report)
                if step % config.save_every == 0:
                    _check_finite(step, metrics, run)
                    _save(run)
        _check_finite(int(state.step), metrics, run)
        _save(run)
    run.checkpoints.close()
    run.batches.close()
    done = int(state.step)
    ending = "done" if done == config.steps else f"stopped by {stop.name}, saved"
    console.print(f"{ending} at step {done} of {config.steps}; everything is in {config.folder}")
    return done


def _choose_bits(run: Run, batch: Batch, console: Console) -> None:
    """Chooses the bits of each site, and compiles the step again if they are others."""
    choice = adapt.choose_bits(run.recipe, run.state.model, batch, int(run.state.step))
    console.print(f"step {int(run.state.step)}: {choice.describe()}")
    if choice.bits == run.recipe.bits:
        return
    run.recipe = make_recipe(run.config, run.recipe.model_config, choice.bits)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), run.state)
    shardings = jax.tree.map(lambda x: x.sharding, run.state)
    run.train_step = _compile(run.recipe, run.mesh, shapes, shardings)


def _is_calibration_due(run: Run, step: int) -> bool:
    every = run.recipe.recalibrate_every
    return every > 0 and step > 0 and step % every == 0


def _calibrate_again(run: Run, batch: Batch) -> TrainState:
    """Measures the scales of channels on a batch, with the adapters as they are now."""
    recipe, state = run.recipe, run.state
    model = model_of(recipe, state)
    calibration = calibrate(recipe.storage, model, [batch], run.config.compute_dtype)
    shardings = jax.tree.map(lambda x: x.sharding, state.calibration)
    run.state = dataclasses.replace(state, calibration=jax.device_put(calibration, shardings))
    return run.state


def _evaluate(eval_step, run: Run, state: TrainState) -> dict[str, float]:
    """Returns loss, perplexity and bits per byte on the held-out text."""
    put, batches = functools.partial(_put, run), run.validation.batches
    nats = sum(float(eval_step(state.model, put(batch), state.context)) for batch in batches)
    loss = nats / run.validation.num_tokens
    return {
        "validation_loss": loss,
        "perplexity": perplexity(loss),
        "bits_per_byte": nats / math.log(2) / run.validation.num_bytes,
    }


def _put(run: Run, batch: dict[str, np.ndarray]) -> Batch:
    return jax.device_put(batch, batch_sharding(run.mesh))


def _check_finite(step: int, metrics: Mapping[str, float | jax.Array], run: Run) -> None:
    values = {name: float(value) for name, value in metrics.items()}
    if all(math.isfinite(value) for value in values.values()):
        return
    run.checkpoints.close()
    latest = run.checkpoints.latest_step()
    where = "there is none yet" if latest is None else f"it is that of step {latest}"
    shown = ", ".join(f"{name} {value}" for name, value in values.items())
    hint = "Lower `--learning-rate`, or look at the text around that step."
    if step <= 1:
        hint = "No step was taken before: look at the weights it began with, and at the text."
    raise NonFiniteError(
        f"step {step} is not finite ({shown}): stopped. The last good checkpoint in"
        f" {run.config.folder} was kept: {where}. {hint}"
    )


def _save(run: Run) -> None:
    progress = {"position": run.batches.get_state(), "bits": dict(run.recipe.bits)}
    state = dataclasses.replace(run.state, frozen=None)
    run.checkpoints.save(int(state.step), state, progress, run.identity)


def begin(
    config: RunConfig,
    recipe: Recipe,
    mesh: Mesh,
    batches: Any,
    validation: ValidationSet,
    identity: dict[str, Any],
    *,
    first_state: Callable[[Any], TrainState],
    frozen: Callable[[Any], Any],
    console: Console,
    text: str,
) -> Run:
    """Returns a run at its first step, or at its last checkpoint; prints what it is.

    Args:
      config: the settings.
      recipe: what each step does.
      mesh: the devices.
      batches: the training data, at its beginning.
      validation: the held-out data.
      identity: what a checkpoint must agree with.
      first_state: from shardings to the state before the first step.
      frozen: from shardings to `TrainState.frozen`, which no checkpoint holds.
      console: where to print.
      text: a line about the data.

    Raises:
      ValueError: settings that fit neither one another nor the checkpoint.
    """
    shapes = jax.eval_shape(functools.partial(init_state, recipe))
    explanation = explain_step(recipe, shapes)
    checkpoints = _open_checkpoints(config)
    shardings = state_shardings(shapes, mesh)
    state, bits = _restored(checkpoints, batches, shapes, shardings, identity)
    if bits:
        recipe = make_recipe(config, recipe.model_config, bits)
        explanation = explain_step(recipe, shapes)
    train_step = _compile(recipe, mesh, shapes, shardings)
    memory = step_memory(recipe, shapes, explanation)
    temporaries = train_step.memory_analysis().temp_size_in_bytes * mesh.size
    print_opening(console, recipe, shapes, explanation, memory.with_workspace(temporaries))
    console.print(text)
    if state is None:
        state = first_state(shardings)
    else:
        state = dataclasses.replace(state, frozen=frozen(shardings.frozen))
        console.print(f"going on from step {int(state.step)} in {config.folder}")
        if changed := changed_settings(config.folder, config):
            console.print(f"[yellow]with other settings than before[/yellow]: {'; '.join(changed)}")
    write_settings(config.folder, config)
    return Run(config, recipe, mesh, train_step, state, batches, validation, checkpoints, identity)


def _restored(
    checkpoints: Checkpoints, batches: Any, shapes: Any, shardings: Any, identity: dict[str, Any]
) -> tuple[TrainState | None, dict[str, int]]:
    """Returns the state of the last checkpoint, None if there is none, and bits that were chosen.

    The data is moved to the position that belongs to it.
    """
    step = checkpoints.latest_step()
    if step is None:
        return None, {}
    saved, places = (dataclasses.replace(x, frozen=None) for x in (shapes, shardings))
    like = jax.tree.map(_with_sharding, saved, places)
    state, progress = checkpoints.restore(step, like, identity)
    batches.set_state(progress["position"])
    return state, progress["bits"]


def _open_checkpoints(config: RunConfig) -> Checkpoints:
    try:
        config.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"`--out` {config.folder} cannot be made a folder: {error}.") from error
    checkpoints = Checkpoints(config.folder / "checkpoints", config.keep)
    latest = checkpoints.latest_step()
    if latest is not None and not config.resume:
        raise ValueError(
            f"`--out` {config.folder} holds a run at step {latest}: pass `--resume` to go on with"
            " it, or another `--out` to leave it alone."
        )
    if latest is not None and latest > config.steps:
        raise ValueError(
            f"`--steps` {config.steps} is below the {latest} steps that the run in `--out`"
            f" {config.folder} has done: pass at least {latest}."
        )
    return checkpoints


def check_sizes(config: RunConfig, model_config: ModelConfig, mesh: Mesh) -> None:
    """Raises a `ValueError` unless sequences fit the model, and batches the devices."""
    if config.seq_len > model_config.max_seq_len:
        raise ValueError(
            f"`--seq-len` {config.seq_len} is above the {model_config.max_seq_len} positions of"
            f" {config.title}."
        )
    rows = config.batch_size // config.accumulate
    if rows % mesh.size:
        raise ValueError(
            f"{rows} sequences of a micro-batch (`--batch-size` {config.batch_size} /"
            f" `--accumulate` {config.accumulate}) do not divide over the {mesh.size} devices of"
            f" `--mesh` {config.mesh}."
        )


class StopSignal:
    """Notes SIGTERM and SIGINT instead of dying of them. A second one kills as usual.

    Attributes:
      requested: whether one came.
      name: its name.
    """

    def __init__(self) -> None:
        self.requested, self.name = False, ""

    def __enter__(self) -> "StopSignal":
        self._before = {s: signal.signal(s, self._note) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _note(self, number: int, _: object) -> None:
        self.requested, self.name = True, signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __exit__(self, *_: object) -> None:
        self._restore()
