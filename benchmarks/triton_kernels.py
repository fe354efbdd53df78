"""Kernels written in Triton and those of Pallas, as the assembler for an H100 reports them.

`python -m benchmarks.triton_kernels` compiles both, at the shapes of real models, and prints for
each choice of blocks: registers, spilled bytes, shared memory, and the instructions of a program.
Rows also have instructions for each number, and those among them that compare, select and shift.
No GPU is needed: `pip install -e '.[programs,triton,compile]'`. `benchmarks.gpu` measures times.
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

from benchmarks import command, record
from benchmarks.kernel_cases import KERNELS
from benchmarks.kernel_cases.case import Case
from benchmarks.kernels import dumped, ptx_of, resources
from benchmarks.tables import Cells, print_cells
from benchmarks.variants import check_names

_POINTERS = {
    "bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "uint8": "*u8", "uint16": "*u16",
    "int8": "*i8", "int32": "*i32",
}  # fmt: skip
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
        kernels = [entry for entry in KERNELS.values() if entry.kernel.triton]
        check_names(self.cases, tuple(x.name for entry in kernels for x in entry.cases), "--cases")


def measure(config: Config) -> list[dict[str, Any]]:
    """Returns a row for each case and program."""
    rows = []
    for name, (kernel, cases) in KERNELS.items():
        for case in cases:
            if case.name not in config.cases or kernel.triton is None:
                continue
            numbers = math.prod(jax.tree.leaves(case.shapes())[0].shape)
            common = {
                "kernel": name,
                "case": case.name,
                "bytes": case.least_bytes(kernel.reference),
                "numbers": numbers,
            }
            pallas = {"program": "pallas", "choice": "", **_pallas(kernel, case, numbers)}
            rows.append(common | pallas)
            call = _launch(kernel, case)
            rows += [common | _assembled(call, choice, numbers) for choice in call.choices]
    return rows


def _launch(kernel: Any, case: Case) -> Any:
    """Returns the launch for the shapes of a case, whose arguments are shapes too."""
    module, calls = importlib.import_module(kernel.triton), []

    def trace(*args: Any) -> list[jax.Array]:
        calls.append(module.launch(*args, **case.options))
        return list(calls[0].arguments)

    shapes = jax.eval_shape(trace, *case.shapes())
    return dataclasses.replace(calls[0], arguments=shapes)


def _assembled(call: Any, choice: Any, numbers: int) -> dict[str, Any]:
    """Returns the report of the assembler for a program in Triton, with blocks of a choice."""
    # Here, since the page of tables, which imports this module, needs no Triton.
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from actjax.kernels.triton_call import HOPPER

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
        threads = math.prod(call.grid(constants)) * choice.num_warps * 32
        stages = f", {choice.num_stages} stages" if choice.num_stages > 1 else ""
        return {
            "program": "triton",
            "choice": f"{choice.kwargs['TILE']} tokens, {choice.num_warps} warps{stages}",
            "shared": compiled.metadata.shared,
            **_instructions(cubin, threads, numbers),
        }


def _pallas(kernel: Any, case: Case, numbers: int) -> dict[str, Any]:
    run = functools.partial(kernel, implementation="pallas", **case.options)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        dumped(run, case.shapes(), "h100", folder)
        reported, cubin = resources(path, (9, 0)), path / "program.cubin"
        _run("ptxas", "-arch=sm_90a", str(ptx_of(path)), "-o", str(cubin))
        threads = reported["threads"] * reported["programs"]
        return {"shared": reported["shared"], **_instructions(cubin, threads, numbers)}


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
    """Returns the output of one of the tools that Triton brings."""
    from triton.backends import nvidia

    path = pathlib.Path(nvidia.__path__[0], "bin", tool)
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def table(rows: list[dict[str, Any]]) -> Cells:
    """Returns the table of the rows."""
    titles = {"program": "program", "choice": "blocks", "registers": "registers",
              "spilled": "spilled", "shared": "shared, bytes",
              "instructions": "instructions"}  # fmt: skip
    return [
        {"case": row["case"]}
        | {
            title: f"{x:,}" if isinstance(x := row[name], int) else x
            for name, title in titles.items()
        }
        for row in rows
    ]


def show(config: Config, rows: list[dict[str, Any]]) -> None:
    """Prints the rows."""
    print_cells("compiled for an H100", table(rows))


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
