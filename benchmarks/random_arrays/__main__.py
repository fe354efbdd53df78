"""Random arrays through every codec, compared with what its docstring says.

`python -m benchmarks.random_arrays --count 10000 --seed 0` encodes, decodes and differentiates
arrays of odd, long and empty shapes, of three dtypes, with finite, huge, tiny and not finite
contents. Shapes and dtypes must come back, the code must have the stated bytes, and the same key
must give the same bits. Finite numbers stay finite except where a codec documents an overflow, and
NaN and infinities are seen. Compilation takes most of the time, so a program takes many arrays:
about ten minutes on two cores. It exits with 1 if there is a fault; `--first 12 --count 1` repeats
a program.
"""

import collections
import dataclasses
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import command, record
from benchmarks.random_arrays import contents
from benchmarks.random_arrays.codecs import DTYPES, LEAST_QUANTIZED, SHAPES, Entry, entries
from benchmarks.random_arrays.judge import Result, faults_of, largest_of
from benchmarks.tables import print_table

_OUTPUTS = 2
REFUSED = "refused"
"""In place of a fault: the codec does not take the shape, and says so."""


@dataclasses.dataclass(frozen=True)
class Config:
    """How many arrays to draw."""

    count: int = 10_000
    """Number of arrays."""
    seed: int = 0
    """Seed of the arrays."""
    together: int = 44
    """Arrays of a compiled program: of each content, two."""
    quantized: int = LEAST_QUANTIZED
    """Number of `Quantized`, each with other options."""
    first: int = 0
    """Number of the first program: each depends on the seed and its own number alone."""
    results: pathlib.Path = record.RESULTS / "random_arrays.json"
    """File of the raw results."""

    def __post_init__(self) -> None:
        least_of = {"count": 1, "seed": 0, "together": 1, "first": 0, "quantized": LEAST_QUANTIZED}
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise ValueError(f"`--{name}` must be at least {least}, got {getattr(self, name)}.")


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program and its arrays.

    Attributes:
      number: its number.
      entry: the codec.
      shape: shape of each array.
      dtype: dtype of each array.
      seed: seed of all arrays.
    """

    number: int
    entry: Entry
    shape: tuple[int, ...]
    dtype: str
    seed: int


def programs(config: Config, known: list[Entry]) -> Iterator[Program]:
    """Yields the programs: all codecs in turn, each time with other shapes and dtypes."""
    last = config.first + -(-config.count // config.together)
    for number in range(config.first, last):
        rng = np.random.default_rng([config.seed, number])
        turn, place = divmod(number, len(known))
        # Every codec meets other shapes in each turn.
        shape = SHAPES[(place + 4 * turn) % len(SHAPES)]
        dtype = DTYPES[int(rng.integers(len(DTYPES)))]
        yield Program(number, known[place], shape, dtype, config.seed)


def measure(config: Config, known: list[Entry] | None = None) -> list[dict[str, Any]]:
    """Returns a row for each kind of codec and content, with the faults.

    Args:
      config: what to draw.
      known: the codecs; by default all.
    """
    # All runs of a seed have the same codecs, whatever the first program is.
    rng = np.random.default_rng(config.seed)
    known = entries(rng, config.quantized) if known is None else known
    left = config.count
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for program in programs(config, known):
        for content, fault in run(program, min(left, config.together)):
            kind = program.entry.kind
            new = {"kind": kind, "content": content, "arrays": 0, "refused": 0, "faults": []}
            row = rows.setdefault((kind, content), new)
            row["arrays"] += 1
            row["refused"] += fault is REFUSED
            if fault and fault is not REFUSED:
                row["faults"].append(_described(program, fault))
        left -= config.together
    return [rows[key] for key in sorted(rows)]


def _described(program: Program, fault: str) -> dict[str, Any]:
    return {
        "program": program.number,
        "seed": program.seed,
        "codec": program.entry.name,
        "shape": list(program.shape),
        "dtype": program.dtype,
        "fault": fault,
    }


def run(program: Program, count: int) -> Iterator[tuple[str, str]]:
    """Yields the content of each array of a program, and what is wrong with it: "" for nothing."""
    shape, dtype = program.shape, program.dtype
    largest = largest_of(program.entry, shape, dtype)
    every = list(contents.CONTENTS)
    names = [every[(program.number + i) % len(every)] for i in range(count)]
    seeds = [[program.seed, program.number, i] for i in range(count)]
    xs = np.stack([
        contents.draw(name, np.random.default_rng(seed), shape, dtype, largest)
        for name, seed in zip(names, seeds, strict=True)
    ])  # fmt: skip
    rng = np.random.default_rng([program.seed, program.number])
    sample = rng.normal(size=shape).astype(jnp.dtype(dtype))
    dz = rng.uniform(-1, 1, (*shape[:-1], _OUTPUTS)).astype(jnp.dtype(dtype))
    try:
        found, whole = _results(program.entry, sample, xs, dz, program.number)
    except ValueError as error:
        # A codec may refuse a shape, by name, but not one that is no smaller than usual.
        named = "shape" in str(error) or str(shape) in str(error)
        is_small = 0 in shape or 1 in shape or len(shape) == 1
        fault = REFUSED if named and is_small else f"refuses the shape: {error}"
        yield from ((name, fault) for name in names)
        return
    for i, name in enumerate(names):
        result = Result(xs[i], found["decoded"][i], found["grad"][i], dz)
        faults = [*whole, *faults_of(program.entry, program.entry.codec, name, result)]
        yield name, f"array {i}: {'; '.join(faults)}" if faults else ""


def _results(
    entry: Entry, sample: np.ndarray, xs: np.ndarray, dz: np.ndarray, seed: int
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns what comes back of each array, and the faults of all of them together."""
    sizes = {}

    def one(x: jax.Array, key: jax.Array, sample: jax.Array, dz: jax.Array) -> dict[str, Any]:
        codec = entry.made(x.shape, sample)
        code = codec.encode(x, key if codec.needs_key else None)
        leaves = jax.tree.leaves(code)
        sizes["held"] = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        sizes["stated"] = codec.stored_bytes(x.shape, x.dtype)
        # As bits: NaN is not equal to itself.
        bits = [jnp.ravel(jax.lax.bitcast_convert_type(leaf, _bits_of(leaf))) for leaf in leaves]
        return {"decoded": codec.decode(code), "grad": codec.weight_grad(code, dz), "code": bits}

    # One after the other: stacks of matrices are factored by other routines.
    compiled = jax.jit(
        lambda xs, keys, sample, dz: jax.lax.map(
            lambda pair: one(pair[0], pair[1], sample, dz), (xs, keys)
        )
    )
    keys = jax.random.split(jax.random.key(seed), len(xs))
    first, again = (jax.tree.map(np.asarray, compiled(xs, keys, sample, dz)) for _ in range(2))
    faults = []
    if sizes["held"] != sizes["stated"]:
        faults.append(f"holds {sizes['held']} bytes, and states {sizes['stated']}")
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True)
    if not all(one.tobytes() == other.tobytes() for one, other in pairs):
        faults.append("gives other bits for the same key")
    return first, faults


def _bits_of(leaf: jax.Array) -> Any:
    return {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[leaf.dtype.itemsize]


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the numbers of arrays by codec and by content, and the faults."""
    for name in ("kind", "content"):
        counts: dict[str, collections.Counter[str]] = {}
        for row in rows:
            one = counts.setdefault(row[name], collections.Counter())
            found = {"arrays": row["arrays"], "refused": row["refused"]}
            one.update({**found, "faults": len(row["faults"])})
        columns = ("arrays", "refused", "faults")
        cells = [(key, *(f"{one[c]:,}" for c in columns)) for key, one in sorted(counts.items())]
        total = sum(counts.values(), collections.Counter())
        cells.append(("all", *(f"{total[c]:,}" for c in columns)))
        print_table(f"arrays by {name}", (name, *columns), cells)
    for row in rows:
        for one in row["faults"][:3]:
            print(f"program {one['program']}, {one['codec']}, {one['dtype']}{one['shape']},"
                  f" {row['content']}, {one['fault']}")  # fmt: skip


def main() -> None:
    """Draws arrays, runs the codecs, and exits with 1 if there is a fault."""
    config = command.settings(Config, __doc__)
    rows = measure(config)
    record.write(config, rows)
    show(rows)
    sys.exit(any(row["faults"] for row in rows))


if __name__ == "__main__":
    main()
