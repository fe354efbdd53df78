"""Why a run stops before its last step: numbers that are not finite, and faults of the machine."""

import math
from collections.abc import Mapping
from typing import Protocol

import jax

from train.run.checkpoint import Checkpoints
from train.run.loss_scale import is_exhausted
from train.run.program import MachineError, NonFiniteError, advice, reason
from train.settings.resolve import ResolvedConfig


class Run(Protocol):
    """The parts of `train.run.loop.Run` that tell why it stops."""

    @property
    def config(self) -> ResolvedConfig:
        """The settings."""
        ...

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints."""
        ...


def cannot_go_on(run: Run, error: OSError | MemoryError) -> MachineError:
    """Returns the error of a run whose machine failed."""
    what = "this machine has too little memory"
    if isinstance(error, OSError):
        what = reason(error) + (f" in {run.config.folder}" if error.filename is None else "")
    return MachineError(
        f"{what}: the run stopped. {_last_checkpoint(run)} To go on, {advice(error)} and pass"
        " `--resume`."
    )


def _last_checkpoint(run: Run) -> str:
    """Returns a sentence on the last checkpoint of a run."""
    latest = run.checkpoints.latest_step()
    where = "there is none yet" if latest is None else f"it is that of step {latest}"
    return f"The last good checkpoint in {run.config.folder} was kept: {where}."


def check_step(run: Run, step: int, metrics: Mapping[str, float | jax.Array]) -> None:
    """Raises a `NonFiniteError` if a step is NaN or infinite, or too many steps were skipped.

    A step that was skipped (`train.run.loss_scale`) may be infinite: it changed no weight.
    """
    values = {name: float(value) for name, value in metrics.items()}
    if not values.get("skipped_in_a_row"):
        check_finite(run, step, values)
    elif is_exhausted(values):
        hint = (
            "If the loss is not finite, activations overflow: pass `--compute-dtype bfloat16` or"
            " `--compute-dtype float32`."
        )
        raise _stopped(run, f"step {step} was skipped, as were others before it", values, hint)


def check_finite(run: Run, step: int, metrics: Mapping[str, float | jax.Array]) -> None:
    """Raises a `NonFiniteError` if a metric of a step is NaN or infinite."""
    values = {name: float(value) for name, value in metrics.items()}
    if all(math.isfinite(value) for value in values.values()):
        return
    hint = "Lower `--learning-rate`, or look at the text around that step."
    if step <= 1:
        hint = "No step was taken before: look at the initial weights and at the text."
        if run.config.compute_dtype != "float32":
            hint += (
                f" If the activations overflow with `--compute-dtype {run.config.compute_dtype}`,"
                " pass `--compute-dtype float32`."
            )
    raise _stopped(run, f"step {step} is not finite", values, hint)


def _stopped(run: Run, problem: str, values: Mapping[str, float], hint: str) -> NonFiniteError:
    """Returns the error that stops a run, and closes its checkpoints."""
    run.checkpoints.close()
    shown = ", ".join(f"{name} {value}" for name, value in values.items())
    return NonFiniteError(f"{problem} ({shown}): stopped. {_last_checkpoint(run)} {hint}")
