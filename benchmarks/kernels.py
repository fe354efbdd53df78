"""Resources of each kernel on a GPU, as reported by the compiler. No GPU is needed.

`python -m benchmarks.kernels --device h100` prints registers, spills and shared memory of every
kernel at the shapes of real models, the time that its bytes take at the bandwidth of the memory,
and the bytes that XLA moves for the same result of plain JAX. It needs JAX's CUDA plugin and ptxas:
`pip install -e '.[compile]'`. `benchmarks.gpu` measures times.
"""

import dataclasses
import functools
import importlib.util
import pathlib
import re
import shutil
import subprocess
import tempfile
from typing import Any

import jax

from actjax.kernels.dispatch import Kernel
from benchmarks import command, record
from benchmarks.kernel_cases import KERNELS
from benchmarks.kernel_cases.case import Case
from benchmarks.tables import Cells, cell, print_cells
from train.planning.devices import compile_for
from train.planning.traffic import kernels_of
from train.run.gpus import GPUS
from train.settings.messages import check_known

_BANDWIDTH = 4.3e12
"""Bytes per second of the bound: those of a copy on an H200."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The kernels to compile."""

    device: str = "h100"
    """GPU to compile for, as for `train.plan`."""
    small: bool = False
    """Also the small cases of the tests."""
    against_xla: bool = True
    """Also compile the definitions by XLA alone."""
    results: pathlib.Path = record.RESULTS / "kernels.json"

    def __post_init__(self) -> None:
        check_known("GPU", self.device, GPUS, cutoff=0.3)


def measure(config: Config) -> list[dict[str, Any]]:
    """Returns one row for each kernel and case."""
    rows = []
    for name, (kernel, cases) in KERNELS.items():
        for case in cases:
            if kernel.pallas is None or (case.small and not config.small):
                continue
            least = case.least_bytes(kernel.reference)
            row = {"kernel": name, "case": case.name, "bytes": least}
            row["bound_us"] = least / _BANDWIDTH * 1e6
            rows.append(row | _compiled(kernel, case, config))
    return rows


def _compiled(kernel: Kernel, case: Case, config: Config) -> dict[str, Any]:
    """Returns the resources of a kernel, and the bytes that it and its definition move."""
    shapes = case.shapes()
    pallas = functools.partial(kernel, implementation="pallas", **case.options)
    with tempfile.TemporaryDirectory() as folder:
        program = dumped(pallas, shapes, config.device, folder)
        row = resources(pathlib.Path(folder), GPUS[config.device].capability)
        row["moved"], row["kernels"] = _traffic(program)
        if config.against_xla:
            reference = functools.partial(kernel.reference, **case.options)
            program = dumped(reference, shapes, config.device, folder)
            row["xla_moved"], row["xla_kernels"] = _traffic(program)
    return row


def _traffic(program: str) -> tuple[int, int]:
    """Returns the bytes that the kernels of a program move, and how many of them run."""
    kernels = kernels_of(program)
    return round(sum(x.moved for x in kernels)), sum(x.runs for x in kernels)


def dumped(fun: Any, shapes: Any, device: str, folder: str) -> str:
    """Returns the scheduled program, and leaves XLA's dump of it in a folder."""
    with compile_for(GPUS[device]) as place:
        lowered = jax.jit(lambda *args: fun(*args)).lower(*place(shapes))
        # Newer versions of XLA dump the PTX of emitters only on request.
        options = {
            "xla_dump_to": folder,
            "xla_dump_hlo_as_text": True,
            "xla_dump_emitter_re": "ptx",
        }
        return lowered.compile(compiler_options=options).as_text() or ""


def resources(folder: pathlib.Path, capability: tuple[int, int]) -> dict[str, int]:
    """Returns registers, spilled bytes and shared memory of the actjax kernel in a dump of XLA."""
    accelerated = "a" if capability[0] >= 9 else ""
    target = f"-arch=sm_{capability[0]}{capability[1]}{accelerated}"
    measured: dict[str, int] = {}
    if (path := ptx_of(folder)) is not None:
        line = [_ptxas(), "-v", target, str(path), "-o", "/dev/null"]
        done = subprocess.run(line, capture_output=True, text=True, check=True)
        says = done.stderr + done.stdout
        measured = {
            "registers": _number(r"Used (\d+) registers", says),
            "spilled": sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", says)),
        }
    for path in folder.glob("*thunk_sequence.txt"):
        for line in path.read_text().splitlines():
            if " actjax_" in line:
                measured["shared"] = _number(r"shared_memory: (\d+) bytes", line)
                measured["threads"] = _number(r"threads: \[(\d+)", line)
                rows, columns = (_number(rf"grid: \[{x}(\d+)", line) for x in ("", r"\d+, "))
                measured["programs"] = rows * columns
    return measured


def ptx_of(folder: pathlib.Path) -> pathlib.Path | None:
    """Returns the file with the actjax kernel in a dump of XLA; None if there is none."""
    paths = (path for path in folder.glob("*.ptx") if ".entry actjax_" in path.read_text())
    return next(paths, None)


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0


@functools.cache
def _ptxas() -> str:
    """Returns the path of NVIDIA's assembler."""
    spec = importlib.util.find_spec("nvidia")
    for place in spec.submodule_search_locations or () if spec else ():
        for path in sorted(pathlib.Path(place).glob("*/bin/ptxas")):
            return str(path)
    path = shutil.which("ptxas")
    if path is None:
        raise ValueError("ptxas is missing: pip install -e '.[compile]'.")
    return path


def table(rows: list[dict[str, Any]]) -> Cells:
    """Returns one line for each kernel and case."""
    return [
        {
            "kernel": row["kernel"] or "none",
            "case": row["case"],
            "MB": f"{row['bytes'] / 1e6:,.1f}",
            "bound, us": f"{row['bound_us']:,.1f}",
            **{name: str(row.get(name, "")) for name in ("registers", "spilled", "shared")},
            "moved / least": f"{row['moved'] / row['bytes']:.2f}" if row["moved"] else "",
            "XLA's / least": cell(row.get("xla_moved"), ".2f", row["bytes"]),
        }
        for row in rows
    ]


def show(config: Config, rows: list[dict[str, Any]]) -> None:
    """Prints the table."""
    print_cells(f"Kernels, compiled for {config.device}", table(rows))


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
