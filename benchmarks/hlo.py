"""Memory traffic of a compiled program, read from its text."""

import math
import re

_BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2,
    "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8,
}  # fmt: skip
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b(" + "|".join(_BYTES) + r")\[([\d,]*)\]")
_FREE = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "iota")


def traffic(text: str) -> tuple[int, int]:
    """Returns the bytes that the kernels of a program read and write, and the number of kernels.

    Each kernel counts as reading all of its operands once and writing its results once: repeated
    and partial reads are not known here. The body of a loop counts once for each iteration.
    """
    bodies, entry = _computations(text)
    return _of(entry, bodies)


def _computations(text: str) -> tuple[dict[str, list[re.Match[str]]], str]:
    bodies: dict[str, list[re.Match[str]]] = {}
    entry = name = ""
    for line in text.splitlines():
        begin = _COMPUTATION.match(line)
        if begin:
            name = begin[2]
            bodies[name] = []
            entry = name if begin[1] else entry
        elif name and (instruction := _INSTRUCTION.match(line)):
            bodies[name].append(instruction)
    return bodies, entry


def _of(name: str, bodies: dict[str, list[re.Match[str]]]) -> tuple[int, int]:
    sizes = {match[1]: _size(match[2]) for match in bodies[name]}
    moved, kernels = 0, 0
    for match in bodies[name]:
        operation, arguments = match[3], match[4]
        if operation in _FREE:
            continue
        if operation == "while":
            body = re.search(r"body=%?([\w.\-]+)", arguments)
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', arguments)
            assert body is not None
            inner = _of(body[1], bodies)
            count = int(trips[1]) if trips else 1
            moved, kernels = moved + count * inner[0], kernels + count * inner[1]
            continue
        operands = re.findall(r"%([\w.\-]+)", arguments.split("), ")[0])
        moved += sizes[match[1]] + sum(sizes.get(operand, 0) for operand in operands)
        kernels += 1
    return moved, kernels


def _size(shape: str) -> int:
    return sum(
        math.ceil(_BYTES[kind] * math.prod(int(n) for n in dims.split(",") if n))
        for kind, dims in _ARRAY.findall(shape)
    )
