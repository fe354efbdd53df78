"""Writing a folder completely or not at all."""

import contextlib
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator


def check_free(folder: pathlib.Path) -> None:
    """Raises a `FileExistsError` if a folder to be written exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"'{folder}' exists and is not empty: name another folder.")


@contextlib.contextmanager
def written_whole(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary folder to write into, and renames it to `folder` at the end.

    After an error nothing is left.

    Raises:
      FileExistsError: `folder` exists and is not empty.
    """
    check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = pathlib.Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        yield scratch
        scratch.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        os.rename(scratch, folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
