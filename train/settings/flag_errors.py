"""Contexts whose errors name a flag."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator

from train.settings.codecs import CODECS


@contextlib.contextmanager
def naming_flag(flag: str) -> Iterator[None]:
    """Context whose errors name a flag.

    Readers of files do not know which flag gave the file.

    Args:
      flag: such as "--checkpoint".

    Raises:
      ValueError: a `ValueError` or `OSError` whose message does not name the flag.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        if f"`{flag}" in str(error):
            raise
        raise ValueError(f"`{flag}`: {error}") from error


@contextlib.contextmanager
def naming_flag_of_option() -> Iterator[None]:
    """Context whose errors name the flag that gave a field of a codec, where they begin with it.

    Raises:
      ValueError: a `ValueError` within.
    """
    try:
        yield
    except ValueError as error:
        first = re.match(r"`(\w+)`", str(error))
        codecs = CODECS.values()
        fields = {field.name for codec in codecs for field in dataclasses.fields(codec)}
        if first is None or first[1] not in fields:
            raise
        flag = "--rank" if first[1] == "rank" else "--codec"
        raise ValueError(f"`{flag}`: {error}") from error
