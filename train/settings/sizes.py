"""Sizes of memory, as flags give them."""

import re

AUTO = "auto"
"""Stands for the memory that the device has free."""
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for unit, base in (("iB", 1024), ("B", 1000), ("", 1024))
}


def parse_budget(text: str) -> int:
    """Returns a number of bytes from text such as 24GiB. Without a unit, at least a MiB of bytes.

    Raises:
      ValueError: text that is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    # A bare 24 does not mean 24 bytes.
    smallest = 0 if match is not None and match[2] else 2**20 - 1
    if match is None or match[2] not in _UNITS or float(match[1]) <= smallest:
        raise ValueError(
            f"`--budget` must be a size such as 24GiB or 16GB, or {AUTO}, got {text!r}."
        )
    return int(float(match[1]) * _UNITS[match[2]])
