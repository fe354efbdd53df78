"""Pictures that say in their own file which results they show."""

import hashlib
import pathlib
from collections.abc import Sequence

from matplotlib.figure import Figure
from PIL import Image

_KEY = "Description"


def save(figure: Figure, path: pathlib.Path, results: Sequence[pathlib.Path], dpi: int) -> None:
    """Writes a figure as a PNG file that holds the digests of its results.

    Args:
      figure: what to write.
      path: the picture.
      results: raw results that it shows, in the folder of the picture.
      dpi: dots per inch.
    """
    figure.savefig(path, dpi=dpi, metadata={_KEY: _digests(results)})


def note(path: pathlib.Path) -> str:
    """Returns what is wrong with the age of a picture; nothing if its results are as they were."""
    with Image.open(path) as image:
        drawn = image.info.get(_KEY, "")
    if not drawn:
        return f"{path.name} does not say which results it shows."
    names = [part.split()[0] for part in drawn.split(", ")]
    return "" if drawn == _digests([path.parent / name for name in names]) else (
        f"{path.name} is older than its results, {' and '.join(names)}: draw it again."
    )  # fmt: skip


def _digests(results: Sequence[pathlib.Path]) -> str:
    """Returns names and digests; results that are not there have none."""
    found = []
    for path in results:
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "missing"
        found.append(f"{path.name} {digest[:16]}")
    return ", ".join(found)
