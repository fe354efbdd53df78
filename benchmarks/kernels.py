"""What each kernel takes of a GPU, by the compiler alone: no GPU is needed.

`python -m benchmarks.kernels --device h100`: registers, spills and shared memory of every kernel
at the shapes of real models, the time that its bytes take at the bandwidth of the memory, and what
XLA moves for the same result by plain JAX. Needs JAX's CUDA plugin and ptxas: `pip install -e
'.[compile]'`. How long they take in fact is `benchmarks.gpu`'s to measure.
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

from actjax.kernels.cases import Case
from actjax.kernels.dispatch import Kernel
from actjax.kernels.registry import KERNELS
from benchmarks import command, record
from benchmarks.hlo import traffic
from benchmarks.report import print_table
from benchmarks.variants import check_names
from train.devices import compile_for, description_of, gpu


@dataclasses.dataclass(frozen=True)
class Config:
    """What to compile."""

    device: str = "h100"
    """GPU to compile for; as for `train.plan`."""
    bandwidth: float = 4.3e12
    """Bytes a second that the bound is stated at: what a copy reaches on an H200."""
    only: tuple[str, ...] = tuple(KERNELS)
    """Kernels."""
    small: bool = False
    """Also the small cases of the tests."""
    results: pathlib.Path = record.RESULTS / "kernels.json"

    def __post_init__(self) -> None:
        check_names(self.only, tuple(KERNELS))
        gpu(self.device)


def measure(config: Config) -> list[dict[str, Any]]:
    """Returns one row a kernel and case."""
    rows = []
    for name in config.only:
        kernel, cases = KERNELS[name]
        for case in cases:
            if case.small and not config.small:
                continue
            least = case.least_bytes(kernel.reference)
            row = {
                "kernel": name,
                "case": case.name,
                "bytes": least,
                "bound_us": least / config.bandwidth * 1e6,
                **_compiled(kernel, case, config.device),
            }
            rows.append(row)
    return rows


def _compiled(kernel: Kernel, case: Case, device: str) -> dict[str, Any]:
    """Returns resources of the program of a kernel, and what it and its definition move."""
    ours, dumped = _compile(functools.partial(kernel, **case.options), case, device)
    plain, _ = _compile(functools.partial(kernel.reference, **case.options), case, device)
    moved, kernels = traffic(ours)
    plain_moved, plain_kernels = traffic(plain)
    return {
        **dumped,
        "moved": moved,
        "kernels": kernels,
        "xla_moved": plain_moved,
        "xla_kernels": plain_kernels,
    }


def _compile(fun: Any, case: Case, device: str) -> tuple[str, dict[str, int]]:
    """Returns the scheduled program, and the resources of the kernel of ours within, if any."""
    with (
        tempfile.TemporaryDirectory() as folder,
        compile_for(description_of(device)) as place,
    ):
        lowered = jax.jit(lambda *args: fun(*args)).lower(*place(case.shapes()))
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        text = lowered.compile(compiler_options=options).as_text()
        return text, resources(pathlib.Path(folder), gpu(device).capability)


def resources(folder: pathlib.Path, capability: tuple[int, int]) -> dict[str, int]:
    """Returns registers, spilled bytes and shared memory of the kernel of ours in a dump of XLA."""
    accelerated = "a" if capability[0] >= 9 else ""
    target = f"-arch=sm_{capability[0]}{capability[1]}{accelerated}"
    found: dict[str, int] = {}
    for path in folder.glob("*.ptx"):
        if ".entry actjax_" not in path.read_text():
            continue
        done = subprocess.run(
            [_ptxas(), "-v", target, str(path), "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        )
        says = done.stderr + done.stdout
        found = {
            "registers": _number(r"Used (\d+) registers", says),
            "spilled": sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", says)),
        }
    for path in folder.glob("*thunk_sequence.txt"):
        for line in path.read_text().splitlines():
            if " actjax_" in line:
                found["shared"] = _number(r"shared_memory: (\d+) bytes", line)
                found["threads"] = _number(r"threads: \[(\d+)", line)
                found["programs"] = _number(r"grid: \[(\d+)", line) * _number(
                    r"grid: \[\d+, (\d+)", line
                )
    return found


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


def show(config: Config, rows: list[dict[str, Any]]) -> None:
    """Prints a line a kernel and case."""
    resources_of = ("registers", "spilled", "shared", "threads")
    headers = (
        "kernel, case",
        "MB",
        f"bound us at {config.bandwidth / 1e12:g} TB/s",
        *resources_of,
        "moved / least",
        "XLA's / least",
        "XLA's kernels",
    )
    cells = []
    for row in rows:
        cells.append(
            (
                f"{row['kernel']}, {row['case']}",
                f"{row['bytes'] / 1e6:,.1f}",
                f"{row['bound_us']:,.1f}",
                *(str(row.get(name, "-")) for name in resources_of),
                f"{row['moved'] / row['bytes']:.2f}",
                f"{row['xla_moved'] / row['bytes']:.2f}",
                str(row["xla_kernels"]),
            )
        )
    print_table(f"Kernels, compiled for {config.device}", headers, cells)


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
