"""Checkpoints by orbax: arrays, position in the data and what the run is, written as one."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from train.settings import flat


class Checkpoints:
    """The checkpoints in a run's folder.

    Orbax writes into a temporary folder and renames it, so a killed run leaves the last complete
    checkpoint as it was.
    """

    def __init__(self, directory: pathlib.Path, keep: int):
        """Opens the folder, which is made if need be.

        Args:
          directory: where the checkpoints are.
          keep: how many of the last are kept.
        """
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True)
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def latest_step(self) -> int | None:
        """Returns the step of the last complete checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, data: dict[str, Any], identity: dict[str, Any]) -> None:
        """Saves a checkpoint; returns when the arrays may be changed again.

        Args:
          step: steps done.
          state: a pytree of arrays.
          data: position in the training data, and what else is plain JSON.
          identity: what the run is, as `identity_of` gives it.
        """
        if step == self.latest_step():
            return
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(_leaves(state)),
                data=ocp.args.JsonSave(data),
                identity=ocp.args.JsonSave(identity),
            ),
        )

    def restore(self, step: int, like: Any, identity: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Returns the state of a checkpoint, and what was saved as `data`.

        Args:
          step: which checkpoint.
          like: the state as `jax.ShapeDtypeStruct`s with shardings.
          identity: what this run is.

        Raises:
          ValueError: the checkpoint is that of another run, and the message names what differs; or
            it is damaged.
        """
        saved = self._read(step, identity=ocp.args.JsonRestore())["identity"]
        _check_identity(saved, identity, self._manager.directory)
        state, data = ocp.args.StandardRestore(_leaves(like)), ocp.args.JsonRestore()
        restored = self._read(step, state=state, data=data)
        leaves = [restored["state"][name] for name in _leaves(like)]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), restored["data"]

    def _read(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # Whatever the layers below orbax raise on a torn file.
            folder = self._manager.directory / str(step)
            others = [n for n in self._manager.all_steps() if n != step]
            raise ValueError(
                f"the checkpoint in {folder} cannot be read: it is damaged"
                f" ({type(error).__name__}). Remove that folder to go on from"
                f" {f'step {max(others)}' if others else 'the start'}."
            ) from error

    def close(self) -> None:
        """Waits until what was saved is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()


def identity_of(**parts: Any) -> dict[str, Any]:
    """Returns what a run is as plain JSON: dataclasses become dictionaries, the rest text."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.asdict(value)
        return value

    return json.loads(json.dumps({k: plain(v) for k, v in parts.items()}, default=str))


def _leaves(state: Any) -> dict[str, Any]:
    """Returns the arrays of a pytree by path: independent of the classes that hold them."""
    paths = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}


def _check_identity(saved: dict[str, Any], now: dict[str, Any], directory: Any) -> None:
    saved, now = flat(saved), flat(now)
    # A setting that is newer than the checkpoint was off when that was made.
    off = {k: False if value is True else value for k, value in now.items()}
    saved = {**{k: value for k, value in off.items() if not value}, **saved}
    differing = [k for k in {**saved, **now} if saved.get(k) != now.get(k)]
    if differing:
        lines = [f"  {k}: {saved.get(k)!r} there, {now.get(k)!r} now" for k in differing]
        raise ValueError(
            f"the checkpoint in {directory} is that of another run:\n"
            + "\n".join(lines)
            + "\nPass the settings it was made with, or another `--out`."
        )
