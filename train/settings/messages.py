"""Parts of error messages: the flag to change, and the nearest name."""

import contextlib
import difflib
from collections.abc import Collection, Iterable, Iterator


def near_hint(name: str, known: Iterable[str], cutoff: float = 0.4) -> str:
    """Returns " Did you mean X?" for the nearest known name; "" if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]}?" if near else ""


def check_known(what: str, name: str, known: Collection[str], cutoff: float = 0.4) -> None:
    """Raises a `ValueError` with the nearest known name unless a name is known."""
    if name not in known:
        hint = near_hint(name, known, cutoff)
        raise ValueError(f"unknown {what} {name!r}.{hint} There are: {', '.join(known)}.")


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
