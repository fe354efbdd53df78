"""Kernels written in Triton beside those of Pallas, as the assembler for an H100 reports them.

`python -m benchmarks.triton_kernels` compiles both, at the shapes of real models, and prints for
each choice of blocks: registers, spilled bytes, shared memory, the instructions of a program by
unit, each divided by the numbers of a thread, and the time that these instructions take to be
issued beside the time of the bytes. No GPU is needed:
`pip install -e '.[programs,triton,compile]'`. `benchmarks.gpu` measures times.
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

import jax
import triton
from triton import knobs
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from actjax.kernels.triton_call import HOPPER, Call
from benchmarks import command, record
from benchmarks.kernel_cases import KERNELS
from benchmarks.kernel_cases.case import Case
from benchmarks.kernels import dumped, ptx_of, resources
from benchmarks.tables import print_table

_POINTERS = {
    "bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "uint8": "*u8", "uint16": "*u16",
    "int8": "*i8", "int32": "*i32",
}  # fmt: skip
_CORES, _CLOCK, _ISSUED = 132, 1.755e9, 4
"""Cores of an H100, cycles per second, and warps whose instructions a core issues in a cycle."""
_SELECTING = ("FSETP", "ISETP", "SEL", "FSEL", "FMNMX", "IMNMX", "LOP3", "SHF", "PRMT", "VIADD")
"""Instructions that compare, select and shift: a core computes them at half the rate of FFMA."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The cases to compile."""

    cases: tuple[str, ...] = (
        "llama_1b block input, 4 bits, normal levels, balanced, rotated",
        "llama_1b gate, 4 bits, normal levels, balanced, rotated",
    )
    """Names of cases of `benchmarks.kernel_cases`."""
    results: pathlib.Path = record.RESULTS / "triton_kernels.json"

    def __post_init__(self) -> None:
        known = {
            case.name for entry in KERNELS.values() if entry.kernel.triton for case in entry.cases
        }
        if not self.cases:
            raise ValueError("`--cases` names no case.")
        if unknown := [name for name in self.cases if name not in known]:
            raise ValueError(
                f"`--cases` has {unknown[0]!r}, but no kernel in Triton has such a case."
            )


def measure(config: Config) -> list[dict[str, Any]]:
    """Returns a row for each case and program."""
    rows = []
    for name, (kernel, cases) in KERNELS.items():
        for case in cases:
            if case.name not in config.cases or kernel.triton is None:
                continue
            numbers = math.prod(_first(case).shape)
            common = {
                "kernel": name,
                "case": case.name,
                "bytes": case.least_bytes(kernel.reference),
                "numbers": numbers,
            }
            rows.append(
                common | {"program": "pallas", "choice": ""} | _pallas(kernel, case, numbers)
            )
            call = launch_of(kernel, case)
            for choice in call.choices:
                found = assembled(call, choice, numbers)
                rows.append(common | {"program": "triton", "choice": _short(choice)} | found)
    return rows


def launch_of(kernel: Any, case: Case) -> Call:
    """Returns the launch for the shapes of a case, whose arguments are shapes too."""
    module, found = importlib.import_module(kernel.triton), []

    def trace(*args: Any) -> list[jax.Array]:
        call = module.launch(*args, **case.options)
        found.append(call)
        return list(call.arguments)

    shapes = jax.eval_shape(trace, *case.shapes())
    return dataclasses.replace(found[0], arguments=shapes)


def assembled(call: Call, choice: triton.Config, numbers: int) -> dict[str, Any]:
    """Returns what the assembler says of a program in Triton, with blocks of a choice.

    Args:
      call: a launch, with shapes as arguments.
      choice: one of its choices.
      numbers: how many numbers all programs together read.
    """
    arrays = [*call.arguments, *call.results]
    constants = {**call.constants, **choice.kwargs}
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
            target=GPUTarget("cuda", HOPPER, 32),
            options={"num_warps": choice.num_warps, "num_stages": choice.num_stages},
        )
        cubin = pathlib.Path(folder, "program.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        programs = math.prod(call.grid(constants))
        return {
            "shared": compiled.metadata.shared,
            **_instructions(cubin, programs * choice.num_warps * 32, numbers),
        }


def _pallas(kernel: Any, case: Case, numbers: int) -> dict[str, Any]:
    fun = functools.partial(kernel, implementation="pallas", **case.options)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        dumped(fun, case.shapes(), "h100", name)
        found = resources(folder, (9, 0))
        cubin = folder / "program.cubin"
        assemble = [_tool("ptxas"), "-arch=sm_90a", str(ptx_of(folder)), "-o", str(cubin)]
        subprocess.run(assemble, check=True, capture_output=True)
        threads = found["threads"] * found["programs"]
        return {"shared": found["shared"], **_instructions(cubin, threads, numbers)}


def _instructions(cubin: pathlib.Path, threads: int, numbers: int) -> dict[str, Any]:
    """Returns registers, spills, and instructions for each number, each counted once."""
    usage = _run("cuobjdump", "-res-usage", cubin)
    line = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]+ )?\s*([A-Z][A-Z0-9_]+)", re.M)
    count = collections.Counter(line.findall(_run("nvdisasm", cubin)))
    selecting = sum(count[name] for name in _SELECTING)
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),  # type: ignore[index]
        "spilled": int(re.search(r"STACK:(\d+)", usage)[1]),  # type: ignore[index]
        "instructions": count.total(),
        "by_number": count.total() * threads / numbers,
        "selecting_by_number": selecting * threads / numbers,
    }


def _run(tool: str, *arguments: str | pathlib.Path) -> str:
    done = subprocess.run([_tool(tool), *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def _tool(name: str) -> pathlib.Path:
    return pathlib.Path(nvidia.__path__[0], "bin", name)


def _short(choice: triton.Config) -> str:
    stages = f", {choice.num_stages} stages" if choice.num_stages > 1 else ""
    return f"{choice.kwargs['TILE']} tokens, {choice.num_warps} warps{stages}"


def show(config: Config, rows: list[dict[str, Any]]) -> None:
    """Prints the rows."""
    print_table(
        "compiled for an H100",
        ("case", "program", "blocks", "registers", "spilled", "shared", "instructions a number",
         "of them select", "issued in, µs", "bytes at 2.81 TB/s, µs"),
        (
            (
                row["case"], row["program"], row["choice"], str(row["registers"]),
                str(row["spilled"]), f"{row['shared']:,}",
                f"{row['by_number']:.1f}" if _is_straight(row) else "",
                f"{row['selecting_by_number']:.1f}" if _is_straight(row) else "",
                f"{_issue_time(row) * 1e6:.1f}" if _is_straight(row) else "",
                f"{row['bytes'] / 2.81e12 * 1e6:.1f}",
            )
            for row in rows
        ),
    )  # fmt: skip


def _issue_time(row: dict[str, Any]) -> float:
    """Returns the seconds in which the cores of an H100 issue the instructions of a row."""
    return row["by_number"] * row["numbers"] / 32 / (_CORES * _ISSUED * _CLOCK)


def _is_straight(row: dict[str, Any]) -> bool:
    """Returns whether each instruction runs at most once: no loop, no branch for a last group."""
    case = next(c for entry in KERNELS.values() for c in entry.cases if c.name == row["case"])
    return row["kernel"] == "quantize" and _first(case).shape[-1] % 128 == 0


def _first(case: Case) -> Any:
    """Returns the shape and dtype of the activation of a case."""
    return jax.tree.leaves(case.shapes())[0]


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
