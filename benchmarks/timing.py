"""Times of programs that take turns."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def interleaved(
    programs: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 1, calls: int = 1
) -> dict[str, list[float]]:
    """Times programs in turn, so that a drift of the machine affects all of them equally.

    Args:
      programs: by name, functions without arguments that return arrays.
      rounds: number of timed rounds.
      warmup: number of rounds before them that are not counted.
      calls: calls in flight at once, so that a GPU does not wait for the next launch.

    Returns:
      By name, the seconds of a call in each round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(warmup + rounds):
        for name, run in programs.items():
            begin = time.perf_counter()
            for _ in range(calls):
                result = run()
            jax.block_until_ready(result)
            seconds[name].append((time.perf_counter() - begin) / calls)
    return {name: times[warmup:] for name, times in seconds.items()}


class Advancing:
    """A state that programs advance. They may donate it."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def by(self, program: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
        """Returns a call of a program, from the state and arguments to a state and a result."""

        def run() -> Any:
            self.state, result = program(self.state, *arguments)
            return self.state, result

        return run
