"""Checks of tables of error messages."""

from collections.abc import Callable, Iterable

import jax


def assert_messages(
    kind: type[Exception], rows: Iterable[tuple[Callable[[], object], str]]
) -> None:
    """Checks that each call raises `kind` with a part of its message.

    The calls are traced, so nothing compiles. All rows that differ are shown.
    """
    differences = []
    for call, message in rows:
        try:
            jax.eval_shape(call)
        except kind as error:
            text = str(error)
        else:
            text = "no error"
        if message not in text:
            differences.append((message, text))
    assert differences == []
