"""The folder of a run, compared with the digests of what was written there."""

import pathlib
from collections.abc import Callable

from rich.console import Console

from models import digests
from train.run.checkpoint import Checkpoints
from train.run.export import ADAPTER, MODEL, TOKENIZER, has_checkpoint
from train.run.progress import saying


def verify(folder: pathlib.Path, console: Console) -> int:
    """Prints for each part of a run whether it is what was written.

    Args:
      folder: folder of a run of `train.pretrain` or `train.finetune`.
      console: where to print.

    Returns:
      The number of parts.

    Raises:
      ValueError: the folder holds no run, or a part is damaged.
    """
    parts: dict[str, Callable[[], bool]] = {}
    if has_checkpoint(folder):
        checkpoints = Checkpoints(folder / "checkpoints", keep=1, read_only=True)
        for step in checkpoints.steps():
            parts[f"checkpoint of step {step}"] = lambda step=step: checkpoints.check(step)
    for name in (MODEL, ADAPTER, TOKENIZER):
        if (folder / name).is_dir():
            parts[name] = lambda name=name: _check_folder(folder / name)
    if (folder / "settings.json").is_file():
        parts["settings.json"] = lambda: digests.check(folder)
    if not parts:
        raise ValueError(f"'{folder}' holds no run: no checkpoints and no model.")
    damaged = []
    for name, check in parts.items():
        try:
            with saying(console, f"reading {name}", first=False):
                sealed = check()
            line = "as it was written" if sealed else "has no digests: an earlier version wrote it"
        except ValueError as error:
            line = str(error)
            damaged.append(name)
        console.print(f"{name}: {line}", markup=False, highlight=False, soft_wrap=True)
    if damaged:
        raise ValueError(f"'{folder}' is damaged: {', '.join(damaged)}.")
    return len(parts)


def _check_folder(folder: pathlib.Path) -> bool:
    """Raises a `ValueError` if a file is damaged; returns whether there are digests to tell it.

    Without a list of digests the files of weights still have those of their tensors.
    """
    if digests.check(folder):
        return True
    found = [digests.check_tensors(path) for path in sorted(folder.glob("*.safetensors"))]
    return bool(found) and all(found)
