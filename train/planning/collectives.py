"""Bytes that devices exchange in a step, read from the compiled program."""

import math
import re
from collections.abc import Iterator

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

_OPERATION = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_SHAPE = re.compile(r"([a-z]+)(\d*)(?:e\d\w*)?\[([\d,]*)\]")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLED = re.compile(r"(?:body|calls|true_computation|false_computation)=(%[\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


def bytes_by_kind(program: str) -> dict[str, int]:
    """Returns the bytes that a device exchanges in a step, by kind; zeros included.

    They are what a device holds after an all-gather, what it gives to a reduce-scatter, and the
    size of the array for the others. Each branch of a condition counts.

    Args:
      program: text of an optimized HLO module.
    """
    bodies, name, entry = {}, "", ""
    for line in program.splitlines():
        if line and not line.startswith((" ", "}")):
            name = line.removeprefix("ENTRY ").split(" ")[0]
            entry = name if line.startswith("ENTRY ") else entry
            bodies[name] = []
        elif name:
            bodies[name].append(line)
    total: dict[str, int] = dict.fromkeys(KINDS, 0)
    for kind, size in _collectives(bodies, entry, 1):
        total[kind] += size
    return total


def _collectives(bodies: dict[str, list[str]], name: str, times: int) -> Iterator[tuple[str, int]]:
    """Yields the kinds of collective operations, and the bytes of all their executions."""
    for line in bodies[name]:
        if operation := _OPERATION.search(line):
            shapes, kind, started = operation.groups()
            yield kind, times * _bytes_of(kind, shapes, line, started=bool(started))
        trips = _TRIPS.search(line)
        called = _CALLED.findall(line)
        if branches := _BRANCHES.search(line):
            called += re.findall(r"%[\w.\-]+", branches[1])
        for body in called:
            yield from _collectives(bodies, body, times * (int(trips[1]) if trips else 1))


def _bytes_of(kind: str, shapes: str, line: str, *, started: bool) -> int:
    # A `pred` has no number of bits in its name, and takes a byte.
    sizes = [
        max(1, int(bits or 8) // 8) * math.prod(int(n) for n in dims.split(",") if n)
        for _, bits, dims in _SHAPE.findall(shapes)
    ]
    if started and kind in ("all-gather", "reduce-scatter", "all-to-all", "collective-permute"):
        # Operands, then results of the same number; some kinds end in a context of a few bytes.
        count = len(sizes) // 2
        operands, results = sum(sizes[:count]), sum(sizes[count : 2 * count])
        return max(operands, results)
    return sum(sizes) * (_group_size(line) if kind == "reduce-scatter" else 1)


def _group_size(line: str) -> int:
    """Returns the number of devices that take part in each group of a collective operation."""
    if groups := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
        return int(groups[2])
    if groups := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return groups[1].count(",") + 1
    if groups := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", groups[1]))
        axes = re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", groups[2])
        return math.prod(int(part or sizes[axis]) for axis, _, part in axes)
    raise ValueError(f"the groups of a collective operation are in an unknown form: {line.strip()}")
