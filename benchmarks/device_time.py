"""Time of a call on a device, without the time of launching it."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

_CALLS = 20
"""Calls in flight at once: a busy device does not wait for the next launch."""


def interleaved(
    programs: Mapping[str, Callable[[], Any]], rounds: int = 7
) -> dict[str, list[float]]:
    """Times programs in turn, so that a drift of the device affects all of them equally.

    Args:
      programs: by name, functions without arguments that return arrays.
      rounds: number of timed rounds, after one round that is not counted.

    Returns:
      By name, the seconds of a call in each round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(1 + rounds):
        for name, run in programs.items():
            jax.block_until_ready(run())
            begin = time.perf_counter()
            for _ in range(_CALLS):
                result = run()
            jax.block_until_ready(result)
            seconds[name].append((time.perf_counter() - begin) / _CALLS)
    return {name: times[1:] for name, times in seconds.items()}


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Returns the median of each program."""
    return {name: statistics.median(times) for name, times in seconds.items()}
