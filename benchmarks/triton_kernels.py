"""Kernels as the assembler for GPUs reports them.

`python -m benchmarks.triton_kernels` compiles them at the shapes of real models, and prints for
each GPU: registers, spilled bytes, shared memory, the instructions of a program for each number,
those among them that compare, select and shift, and the share of the bandwidth of an H100 that they
would allow if nothing waited. Instructions in a loop count as often as it runs, and those that a
branch jumps over not at all: they are for numbers that never occur.
No GPU is needed: `pip install -e '.[programs,compile]'`. `benchmarks.gpu` measures times.
"""

import collections
import dataclasses
import functools
import importlib
import math
import pathlib
import re
import subprocess
import tempfile
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from actjax import _gpu
from benchmarks import command, record
from benchmarks.kernel_cases import KERNELS
from benchmarks.kernel_cases.case import Case
from benchmarks.tables import Cells, print_cells
from benchmarks.variants import check_names

_POINTERS = {
    "bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "uint8": "*u8", "uint16": "*u16",
    "uint32": "*u32", "int8": "*i8", "int32": "*i32",
}  # fmt: skip
_SELECTING = ("FSETP", "ISETP", "SEL", "FSEL", "FMNMX", "IMNMX", "LOP3", "SHF", "PRMT", "VIADD")
"""Instructions that compare, select and shift: a core computes them at half the rate of FFMA."""
_BANDWIDTH = 2.81e12
"""Bytes per second of an update in place of a large array on an H100 (`gpu.json`)."""
_ISSUED = 0.73 * 132 * 4 * 32 * 1.755e9
"""Instructions of threads per second: 73% of what the cores of an H100 can issue, a fit. With
it the nine cases of `gpu.json` whose programs have one path get 0.88 to 1.15 of their measured
share of the bandwidth."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The cases to compile."""

    cases: tuple[str, ...] = (
        "llama_1b block input, 4 bits, normal levels, balanced, rotated",
        "llama_1b gate, 4 bits, normal levels, balanced, rotated",
        "llama_7b gate, 4 bits, normal levels, balanced, rotated",
        "llama3_8b gate, 4 bits, normal levels, balanced, rotated",
        "smollm2_135m block input, 4 bits, normal levels, balanced, rotated",
        "llama_1b, 4 bits, normal levels, balanced, rotated",
        "llama_7b, 4 bits, normal levels, balanced, rotated",
        "llama3_8b, 4 bits, normal levels, balanced, rotated",
        "llama_1b query, 5 bits, balanced, rotated",
        "llama_7b query, 5 bits, balanced, rotated",
        "llama_1b, exact",
        "llama_1b gate",
        "llama_7b gate",
        "llama3_8b gate",
        "llama_1b gate, factored",
    )
    """Names of cases of `benchmarks.kernel_cases`."""
    kernels: tuple[str, ...] = ()
    """Names of kernels; empty for all."""
    capabilities: tuple[str, ...] = ("8.0", "8.9", "9.0")
    """Compute capabilities of the GPUs to compile for."""
    results: pathlib.Path = record.RESULTS / "triton_kernels.json"

    def __post_init__(self) -> None:
        cases = tuple(case.name for entry in KERNELS.values() for case in entry.cases)
        check_names(self.cases, cases, "--cases")
        check_names(self.kernels, tuple(KERNELS), "--kernels")


def measure(config: Config) -> list[dict[str, Any]]:
    """Returns a row for each case and program."""
    rows = []
    for name, (kernel, cases) in KERNELS.items():
        for case in cases:
            if case.name not in config.cases or name not in (config.kernels or KERNELS):
                continue
            tokens, features = case.make.keywords["tokens"], case.make.keywords["features"]
            common = {
                "kernel": name,
                "case": case.name,
                "bytes": case.least_bytes(kernel.reference),
                "numbers": tokens * features,
            }
            made = []
            for capability in config.capabilities:
                launches = _launches(kernel, case, capability)
                assembled = [_assembled(x, capability, common["numbers"]) for x in launches]
                made.append(_together(assembled))
            rows += [common | row | {"share": _share(common, row)} for row in made]
    return rows


def _share(case: dict[str, Any], row: dict[str, Any]) -> float:
    """Returns the share of the bandwidth of an H100 that a program is predicted to reach."""
    busy = row["by_number"] * case["numbers"] / _ISSUED
    return min(1.0, case["bytes"] / _BANDWIDTH / busy)


def _launches(kernel: Any, case: Case, capability: str) -> list[tuple[Any, list[Any]]]:
    """Returns the launches on a GPU for the shapes of a case, and the shapes that each gets."""
    # Here, since it needs Triton.
    from actjax.kernels.triton_call import Call

    module, launches = importlib.import_module(kernel.triton), []

    def run(call: Call) -> list[jax.Array]:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in call.arrays()]
        launches.append((call, shapes))
        return [jnp.zeros(x.shape, x.dtype) for x in call.results]

    device = tuple(map(int, capability.split(".")))
    with (
        mock.patch.object(Call, "run", run),
        mock.patch.object(_gpu, "compute_capability", return_value=device),
    ):
        program = getattr(module, kernel.reference.__name__)
        jax.eval_shape(functools.partial(program, **case.options), *case.shapes())
    return launches


def _together(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the row of a kernel that has several programs."""
    largest = {name: max(row[name] for row in rows) for name in ("shared", "registers", "spilled")}
    added = {name: sum(row[name] for row in rows) for name in ("by_number", "selecting_by_number")}
    block = "; ".join(row["block"] for row in rows)
    return {**rows[0], "block": block, **largest, **added}


def _assembled(launch: tuple[Any, list[Any]], capability: str, numbers: int) -> dict[str, Any]:
    """Returns the report of the assembler for a program in Triton."""
    # Here, since the page of tables, which imports this module, needs no Triton.
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    call, arguments = launch
    constants, options = call.compiled_for(tuple(map(int, capability.split("."))))
    # Programs loop over some tiles of tokens, or over the groups of a row.
    steps = next((constants[x] for x in ("STEPS", "GROUPS", "PARTS") if x in constants), 1)
    arrays = [*arguments, *call.results]
    names = call.kernel.arg_names
    pointers = {name: _POINTERS[str(x.dtype)] for name, x in zip(names, arrays, strict=False)}
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        compiled = triton.compile(
            ASTSource(
                fn=call.kernel,
                signature={**pointers, **dict.fromkeys(constants, "constexpr")},
                constexprs=constants,
                # As jax-triton has it: arrays begin at a multiple of 16 bytes.
                attrs={(i,): [["tt.divisibility", 16]] for i in range(len(arrays))},
            ),
            target=GPUTarget("cuda", int(capability.replace(".", "")), 32),
            options=options,
        )
        cubin = pathlib.Path(folder, "program.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        threads = math.prod(call.grid(constants)) * options["num_warps"] * 32
        return {
            "program": "triton",
            "capability": capability,
            "block": f"{steps} x {constants.get('TILE', 1)} tokens, {options['num_warps']} warps",
            "shared": compiled.metadata.shared,
            **_instructions(cubin, threads, numbers, steps),
        }


def _instructions(
    cubin: pathlib.Path, threads: int, numbers: int, steps: int = 1
) -> dict[str, Any]:
    """Returns registers, spills, and the instructions that run for each number.

    Args:
      cubin: the program.
      threads: threads of a launch.
      numbers: numbers of a launch.
      steps: times that a loop of the program runs.
    """
    usage = _run("cuobjdump", "-res-usage", cubin)
    count = _executed(_run("cuobjdump", "-sass", cubin), steps)
    selecting = sum(count[name] for name in _SELECTING)
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),  # type: ignore[index]
        "spilled": int(re.search(r"STACK:(\d+)", usage)[1]),  # type: ignore[index]
        "by_number": count.total() * threads / numbers,
        "selecting_by_number": selecting * threads / numbers,
    }


def _executed(listing: str, steps: int) -> collections.Counter[str]:
    """Returns how often each instruction runs in a thread, from the listing of a program."""
    line = re.compile(
        r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P[T\d]+ )?\s*([A-Z][A-Z0-9_]+)([^;]*);", re.M
    )
    found = [(int(at, 16), name, rest) for at, name, rest in line.findall(listing)]
    jumps = [
        (at, int(target[1], 16))
        for at, name, rest in found
        if name == "BRA" and (target := re.search(r"0x([0-9a-f]+)", rest))
    ]
    # The last jump, of an instruction to itself, ends the program.
    loops = [(to, at) for at, to in jumps if to < at]
    rare = [
        (at, to)
        for at, to in jumps
        if to > at and any(first <= at and to <= last for first, last in loops)
    ]
    count: collections.Counter[str] = collections.Counter()
    for at, name, _ in found:
        if name != "NOP" and not any(first < at < last for first, last in rare):
            count[name] += steps ** sum(first <= at <= last for first, last in loops)
    return count


def _run(tool: str, *arguments: str | pathlib.Path) -> str:
    """Returns the output of one of the tools that Triton brings."""
    from triton.backends import nvidia

    path = pathlib.Path(nvidia.__path__[0], "bin", tool)
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def table(rows: list[dict[str, Any]]) -> Cells:
    """Returns the table of the rows."""
    return [
        {
            "kernel": row["kernel"],
            "case": row["case"],
            "program": row["program"],
            "GPU": row["capability"],
            "blocks": row.get("block", ""),
            **{name: f"{row[name]:,}" for name in ("registers", "spilled", "shared")},
            "instructions a number": f"{row['by_number']:.1f}",
            "share of bandwidth": f"{row['share']:.2f}" if row["capability"] == "9.0" else "",
            "select": f"{row['selecting_by_number']:.1f}",
        }
        for row in rows
    ]


def show(config: Config, rows: list[dict[str, Any]]) -> None:
    """Prints the rows."""
    print_cells("Kernels as assembled", table(rows))


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
