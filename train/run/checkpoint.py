"""Checkpoints by orbax: arrays, position in the data and identity of the run, written together."""

import contextlib
import functools
import logging
import math
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict

from models import digests
from models.json_files import read_object
from train.run import hosts
from train.settings.options import ANY_FULL_RANK, RENAMED

_FORMER = {**RENAMED, "one of full rank": ANY_FULL_RANK}
"""Values of `optimizer.method` in the identity of older checkpoints, and their present form."""
_BEFORE = {"optimizer.weight_rounding": "nearest"}
"""Settings that are newer than some checkpoints, and their values there, if not "off"."""

_FORMAT = 3
"""Version of a checkpoint. 1 has the norms of in-backward updates beside their optimizer's state,
in `optimizer`, and this state in `optimizer.optimizer`; 2 has no digests."""

_OTHER_VERSION = " Finish the run with that version, or begin a new one with another `--out`."
_HINTS = {
    "model.vocab_size": "The vocabulary of a preset is that of the tokenizer unless"
    " `--model-vocab-size` is given.",
    "row_order": "The checkpoint was written by a version that read the text in another order, so"
    " its position has no meaning here." + _OTHER_VERSION,
    "optimizer.norm_estimate": "The checkpoint was written by a version that estimated the norm of"
    " the gradient in another way." + _OTHER_VERSION,
    "stored_ffn_size": "The checkpoint was written by a version that stored feed-forward weights"
    " without padding, or with another; `--export` writes its model." + _OTHER_VERSION,
}
"""Remarks on parts of the identity, for where they differ."""
_HASHED = {
    "data": "the tokens of `--data`",
    "tokenizer": "the vocabulary and the rules of the tokenizer",
    "checkpoint": "the files of `--checkpoint`",
}
"""Parts of the identity that are hashes, which tell people nothing."""
# Orbax logs warnings about its internals, the tracebacks of errors that it also raises, and that a
# file with the times of a checkpoint, which is not needed, is damaged.
logging.getLogger("absl").addFilter(
    lambda record: (
        "orbax" not in record.pathname
        or (
            record.exc_info is None
            and record.levelno >= logging.ERROR
            and "Metadata file" not in record.getMessage()
        )
    )
)
_ERRNO = re.compile(r"os_error_code='(\d+)'")
"""The number of an error of the system, in an error of tensorstore."""
_FILE = re.compile(r'local file "([^"]*)"')


class _Kept(ocp.checkpoint_managers.PreservationPolicy):
    """Keeps the latest checkpoints, and those of the least losses.

    A run that goes wrong with finite losses would otherwise remove every checkpoint from before.
    """

    def __init__(self, count: int, losses: dict[int, dict[str, float]]) -> None:
        """Args:
        count: number of latest checkpoints to keep.
        losses: by step and name; less is better. `Checkpoints` adds to them.
        """
        self._count, self._losses = count, losses

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Returns for each checkpoint, the oldest first, whether it stays."""
        del context
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = set(steps[-self._count :])
        for name in {name for step in steps for name in self._losses.get(step, {})}:
            known = {step: self._losses.get(step, {}).get(name, math.inf) for step in steps}
            kept.add(min(known, key=lambda step: (known[step], -step)))
        return [step in kept for step in steps]


class Checkpoints:
    """The checkpoints in the folder of a run.

    Orbax writes into a temporary folder and renames it, so a killed run leaves the last complete
    checkpoint unchanged. Before, each file gets a digest, which is checked before it is read. Each
    array has a folder, so that a damaged file tells the array.
    """

    def __init__(self, directory: pathlib.Path, keep: int, *, read_only: bool = False):
        """Opens the folder, and makes it if it is missing.

        Args:
          directory: folder of the checkpoints.
          keep: number of latest checkpoints to keep. Those of the least losses stay too.
          read_only: whether the folder is only read.
        """
        self._saving: tuple[int, digests.Ahead] | None = None
        self._losses: dict[int, dict[str, float]] = {}
        sys.unraisablehook = _only_news
        options = ocp.CheckpointManagerOptions(
            preservation_policy=None if read_only else _Kept(keep, self._losses),
            create=not read_only,
            read_only=read_only,
            async_options=ocp.AsyncOptions(post_finalization_callback=self._seal),
        )
        handlers = {
            # Compressed, the arrays would be written no sooner, from copies.
            "state": ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False),
            "data": ocp.JsonCheckpointHandler(),
            "identity": ocp.JsonCheckpointHandler(),
        }
        self._manager = ocp.CheckpointManager(
            directory.absolute(), options=options, item_handlers=handlers
        )
        for step in self.steps():
            with contextlib.suppress(OSError, ValueError):  # Damage is found where it is read.
                data = read_object(self._folder(step) / "data" / "metadata")
                self._losses[step] = dict(data.get("losses", {}))

    def latest_step(self) -> int | None:
        """Returns the step of the last complete checkpoint, or None."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Returns the steps of all complete checkpoints."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, data: dict[str, Any], identity: dict[str, Any]) -> None:
        """Saves a checkpoint, and returns when the arrays may be changed again.

        Args:
          step: steps done.
          state: a pytree of arrays.
          data: position in the training data and other plain JSON. `losses` has numbers by name,
            by which the best checkpoints are kept.
          identity: identity of the run, plain JSON.

        Raises:
          OSError: this checkpoint or the one before cannot be written.
        """
        if step == self.latest_step():
            return
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave(_leaves(state)),
            data=ocp.args.JsonSave(data),
            identity=ocp.args.JsonSave({**identity, "format": _FORMAT}),
        )
        self._wait()  # As `save` of the manager does.
        with _as_os_error(self._manager.directory):
            self._losses[step] = data.get("losses", {})
            if hosts.is_main():
                self._saving = step, digests.Ahead(functools.partial(self._written, step))
            self._manager.save(step, args=items)
            if jax.default_backend() == "cpu":
                # Orbax writes from the arrays, and a step beside it would work on copies of them.
                self._wait()

    def _wait(self, wait: Callable[[], None] | None = None) -> None:
        """Waits until all checkpoints are on disk.

        Raises:
          OSError: the last one cannot be written.
        """
        try:
            with _as_os_error(self._manager.directory):
                (wait or self._manager.wait_until_finished)()
        finally:
            if self._saving is not None:  # After an error, nobody else stops it.
                self._saving[1].stop()

    def _seal(self) -> None:
        """Writes the digests of a checkpoint whose arrays are on disk, in its temporary folder."""
        if self._saving is not None:
            step, ahead = self._saving
            ahead.stop()
            digests.write(self._unfinished(step), self._written(step), ahead=ahead)

    def _unfinished(self, step: int) -> pathlib.Path:
        """Returns the temporary folder in which a checkpoint is written."""
        return self._folder(step).with_name(f"{step}{ocp.utils.TMP_DIR_SUFFIX}")

    def _written(self, step: int) -> Iterator[pathlib.Path]:
        """Yields the files of a checkpoint that is being written, complete ones and others."""
        # Orbax writes the files beside the items later.
        files = self._unfinished(step).glob("*/**/*")
        return (path for path in files if path.is_file())

    def check(self, step: int) -> bool:
        """Raises a `ValueError` if a file of a checkpoint is damaged, which it names.

        All processes call it together; each reads a share of the files.

        Returns:
          Whether the checkpoint has digests. Earlier versions wrote none.
        """
        self._wait()
        with hosts.failing_together():
            part = jax.process_index(), jax.process_count()
            try:
                wrong = digests.differing(self._folder(step), part)
            except ValueError as error:
                raise self._damaged(step, str(error)) from error
            if wrong:
                item, *names = pathlib.PurePath(wrong[0]).parts
                holds = f", the array {names[0]}" if item == "state" and len(names) > 1 else ""
                raise self._damaged(step, f"{wrong[0]}{holds}, is not what was written")
            if wrong is None and self._format(step) == _FORMAT:
                raise self._damaged(step, f"its {digests.FILE} is missing")
        return wrong is not None

    def _format(self, step: int) -> Any:
        """Returns the version of a checkpoint; None if it cannot be read."""
        try:
            return read_object(self._folder(step) / "identity" / "metadata").get("format", 1)
        except (OSError, ValueError):
            return None

    def restore(self, step: int, like: Any, identity: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Returns the state of a checkpoint and its `data`.

        Args:
          step: the checkpoint.
          like: the state as `jax.ShapeDtypeStruct`s with shardings.
          identity: identity of this run.

        Raises:
          ValueError: the checkpoint is damaged, or belongs to another run; then the message names
            what differs.
        """
        self.check(step)
        saved = self._read(step, identity=ocp.args.JsonRestore())["identity"]
        if not isinstance(saved, dict):
            raise self._damaged(step, "its identity is no object")
        written = saved.pop("format", 1)
        if written not in (1, 2, _FORMAT):
            raise ValueError(
                f"the checkpoint in {self._manager.directory} has format {written!r}, which a newer"
                " version of this program wrote: use that version, or another `--out`."
            )
        _check_identity(saved, identity, self._manager.directory)
        leaves = _leaves(like) if written > 1 else _with_former_names(_leaves(like))
        places = ocp.checkpoint_utils.construct_restore_args(leaves)
        state, data = ocp.args.PyTreeRestore(leaves, places), ocp.args.JsonRestore()
        restored = self._read(step, state=state, data=data)
        leaves = [restored["state"][name] for name in leaves]
        return jax.tree.unflatten(jax.tree.structure(like), leaves), restored["data"]

    def read_latest(self, prefix: str) -> tuple[int, dict[str, Any], dict[str, np.ndarray]]:
        """Returns the last step, its identity, and some arrays of its state, by path.

        Args:
          prefix: beginning of the paths of the arrays; the paths that are returned lack it.

        Raises:
          ValueError: the checkpoint is damaged.
        """
        step = self.latest_step()
        if step is None:
            raise ValueError(f"{self._manager.directory} holds no complete checkpoint.")
        self.check(step)
        identity = self._read(step, identity=ocp.args.JsonRestore())["identity"]
        reader, path = ocp.PyTreeCheckpointer(), self._manager.directory / str(step) / "state"
        try:
            known: Any = reader.metadata(path).item_metadata
            like = {
                name: jax.ShapeDtypeStruct(x.shape, x.dtype)
                for name, x in known.tree.items()
                if name.startswith(prefix)
            }
            on_host = dict.fromkeys(like, ocp.RestoreArgs(restore_type=np.ndarray))
            options = {"item": like, "restore_args": on_host, "partial_restore": True}
            arrays = reader.restore(path, args=ocp.args.PyTreeRestore(**options))
        except Exception as error:  # The layers below orbax raise various errors on a torn file.
            raise self._damaged(step, type(error).__name__) from error
        return step, identity, {name.removeprefix(prefix): x for name, x in arrays.items()}

    def _read(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # The layers below orbax raise various errors on a torn file.
            raise self._damaged(step, type(error).__name__) from error

    def _folder(self, step: int) -> pathlib.Path:
        return pathlib.Path(self._manager.directory / str(step))

    def _damaged(self, step: int, reason: str) -> ValueError:
        folder = self._folder(step)
        others = (n for n in reversed(self.steps()) if n != step and self._is_sound(n))
        sound = next(others, None)
        return ValueError(
            f"the checkpoint in {folder} cannot be read: it is damaged ({reason}). Remove that"
            f" folder to resume from {'the start' if sound is None else f'step {sound}'}."
        )

    def _is_sound(self, step: int) -> bool:
        try:
            return not digests.differing(self._folder(step))
        except ValueError:
            return False

    def close(self) -> None:
        """Waits until all checkpoints are on disk.

        Raises:
          OSError: the last one cannot be written.
        """
        self._wait(self._manager.close)


@contextlib.contextmanager
def _as_os_error(folder: Any) -> Iterator[None]:
    """Context in which an error of tensorstore that comes from the system is an `OSError`."""
    try:
        yield
    except Exception as error:
        code, file = _ERRNO.search(str(error)), _FILE.search(str(error))
        if isinstance(error, OSError) or code is None:
            raise
        number = int(code[1])
        raise OSError(number, os.strerror(number), file[1] if file else str(folder)) from error


def _only_news(unraisable: "sys.UnraisableHookArgs") -> None:
    """Prints an error that nobody can catch, unless a thread goes on after one that was raised."""
    if "Event loop is closed" not in str(unraisable.exc_value):
        sys.__unraisablehook__(unraisable)


def _leaves(state: Any) -> dict[str, Any]:
    """Returns the arrays of a pytree by path, independent of the classes that hold them."""
    paths = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}


def _with_former_names(leaves: dict[str, Any]) -> dict[str, Any]:
    """Returns arrays by their paths in format 1, in the same order."""
    if not any(name.startswith("norms.") for name in leaves):
        return leaves

    def former(name: str) -> str:
        if name.startswith("norms."):
            return f"optimizer.{name.removeprefix('norms.')}"
        return f"optimizer.{name}" if name.startswith("optimizer.") else name

    return {former(name): leaf for name, leaf in leaves.items()}


def _check_identity(saved: dict[str, Any], now: dict[str, Any], directory: Any) -> None:
    saved, now = dict(saved), dict(now)
    then, base = saved.pop("base", {}), now.pop("base", {})
    if then and (changed := digests.changed(then, base)):  # Earlier versions have none.
        raise ValueError(
            f"the run in {directory} began with other weights than those of `--checkpoint`:"
            f" {changed}. Pass the checkpoint that it began with."
        )
    saved, now = flatten_dict(saved, sep="."), flatten_dict(now, sep=".")
    method = saved.get("optimizer.method")
    if method in _FORMER:
        saved["optimizer.method"] = _FORMER[method]
    # A setting that is newer than the checkpoint was off when the checkpoint was made.
    off = {k: False if value is True else value for k, value in now.items()}
    before = {k: value for k, value in _BEFORE.items() if k in now}
    saved = {**{k: value for k, value in off.items() if not value}, **before, **saved}
    differing = [k for k in {**saved, **now} if saved.get(k) != now.get(k)]
    if "optimizer.in_backward" in differing:  # Then one of the two has no estimate.
        differing = [k for k in differing if k != "optimizer.norm_estimate"]
    if differing:
        lines = [
            f"{_HASHED[k]} are not those of the run"
            if k in _HASHED
            else f"{k}: {saved.get(k)!r} there, {now.get(k)!r} now"
            for k in differing
        ]
        hints = [_HINTS[k] for k in differing if k in _HINTS]
        if not any(_OTHER_VERSION in hint for hint in hints):  # No setting changes these.
            hints.append("Pass the settings it was made with, or another `--out`.")
        raise ValueError(
            f"the checkpoint in {directory} belongs to another run: {'; '.join(lines)}."
            f" {' '.join(hints)}"
        )
