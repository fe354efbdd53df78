"""Reading files of strangers: only plain ones, and none larger than what they can hold."""

import pathlib

MOST = 2**30
"""Bytes of the largest tokenizer, description or template that is read: the largest known have a
thirtieth of it."""


def check_plain(path: pathlib.Path, most: int | None = MOST) -> None:
    """Raises a `ValueError` for a pipe or a device, which may never end, and for a huge file.

    Args:
      path: the file.
      most: bytes of the largest that is taken; None for any.

    Raises:
      OSError: there is no such file.
    """
    size = path.stat().st_size
    if not path.is_file():
        raise ValueError(f"{path} is not a file.")
    if most is not None and size > most:
        raise ValueError(f"{path} has {size:,} bytes, and at most {most:,} are read.")


def read_text(path: pathlib.Path) -> str:
    """Returns the text of a file in UTF-8.

    Raises:
      OSError: it cannot be read.
      ValueError: it is no plain file, huge, or not UTF-8.
    """
    check_plain(path)
    return path.read_text(encoding="utf-8")
