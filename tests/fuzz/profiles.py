"""How many examples a test draws."""

from hypothesis import HealthCheck, Phase, settings

# No `explain`: it runs a failing example again many times, and each run starts a program.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)


def is_thorough() -> bool:
    """Returns whether the profile of a long search is loaded."""
    return settings().max_examples == 2000


def examples(count: int) -> settings:
    """Returns the settings of a test: always the same `count` examples, or those of "thorough"."""
    if is_thorough():
        return settings()
    return settings(
        max_examples=count, derandomize=True, database=None, deadline=None, phases=PHASES,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
