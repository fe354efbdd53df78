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
import jax.numpy as jnp

import actjax
from actjax.codecs import basis
from actjax.kernels.dispatch import Kernel
from benchmarks import command, record
from benchmarks.hlo import traffic
from benchmarks.kernel_cases import KERNELS
from benchmarks.kernel_cases.case import Case
from benchmarks.tables import print_table
from benchmarks.variants import check_names
from train.planning.devices import compile_for, find_gpu

_TOKENS, _WIDTH, _FFN, _RANK = 8192, 2048, 5461, 512


def _array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _adamw(
    grad: jax.Array, weight: jax.Array, mu: jax.Array, nu: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns a weight and its moments after a step of AdamW."""
    g = grad.astype(jnp.float32)
    mu, nu = 0.9 * mu + 0.1 * g, 0.999 * nu + 0.001 * g * g
    wide = weight.astype(jnp.float32)
    update = mu / 0.1 / (jnp.sqrt(nu / 0.001) + 1e-8) + 0.1 * wide
    return (wide - 1e-3 * update).astype(weight.dtype), mu, nu


def _pull_back(fun: Any, count: int) -> Any:
    """Returns the backward pass of a function of `count` arrays."""

    def run(*args: jax.Array) -> Any:
        return jax.vjp(fun, *args[:count])[1](args[count])

    return run


WITHOUT_KERNEL: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "SwiGLU": (actjax.swiglu, (_array(_TOKENS, _FFN),) * 2),
    "SwiGLU backward, exact": (_pull_back(actjax.swiglu, 2), (_array(_TOKENS, _FFN),) * 3),
    "RMSNorm": (actjax.rms_norm, (_array(_TOKENS, _WIDTH), _array(_WIDTH))),
    "RoPE": (
        actjax.rope,
        (_array(8, 1024, 32, 64), *(_array(1024, 32, dtype=jnp.float32),) * 2),
    ),
    "random projection of rank 512, its product too": (
        functools.partial(actjax.RandomProjection(_RANK).encode, key=jax.random.key(0)),
        (_array(_TOKENS, _WIDTH),),
    ),
    "coordinates in a basis, in 8 bits, their product too": (
        functools.partial(basis.encode, bits=8),
        (_array(_TOKENS, _WIDTH), _array(_WIDTH, _RANK)),
    ),
    "AdamW on float32 moments": (
        _adamw,
        tuple(_array(_WIDTH, _FFN, dtype=d) for d in (jnp.bfloat16,) * 2 + (jnp.float32,) * 2),
    ),
}
"""Functions without a kernel, at the shapes of `llama_1b`: XLA fuses most of them well."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The kernels to compile."""

    device: str = "h100"
    """GPU to compile for, as for `train.plan`."""
    bandwidth: float = 4.3e12
    """Bytes per second of the bound: what a copy reaches on an H200."""
    only: tuple[str, ...] = tuple(KERNELS)
    """Kernels to compile."""
    small: bool = False
    """Also the small cases of the tests."""
    one_each: bool = False
    """Only the first case of a real model for each kernel: a quick check."""
    against_xla: bool = True
    """Also compile the definitions, and functions without a kernel, by XLA alone."""
    results: pathlib.Path = record.RESULTS / "kernels.json"

    def __post_init__(self) -> None:
        check_names(self.only, tuple(KERNELS))
        find_gpu(self.device)


def measure(config: Config) -> list[dict[str, Any]]:
    """Returns one row for each kernel and case."""
    rows = []
    for name in config.only:
        kernel, cases = KERNELS[name]
        chosen = [case for case in cases if config.small or not case.small]
        for case in chosen[:1] if config.one_each else chosen:
            least = case.least_bytes(kernel.reference)
            row = {
                "kernel": name,
                "case": case.name,
                "bytes": least,
                "bound_us": least / config.bandwidth * 1e6,
                **_compiled(kernel, case, config),
            }
            rows.append(row)
    if config.against_xla:
        for name, (fun, shapes) in WITHOUT_KERNEL.items():
            least = _bytes((shapes, jax.eval_shape(fun, *shapes)))
            text, _ = _compile(fun, shapes, config.device)
            moved, kernels = traffic(text)
            bound = least / config.bandwidth * 1e6
            row = {"kernel": None, "case": name, "bytes": least, "bound_us": bound, "moved": None}
            rows.append(row | {"xla_moved": moved, "xla_kernels": kernels})
    return rows


def _compiled(kernel: Kernel, case: Case, config: Config) -> dict[str, Any]:
    """Returns the resources of a kernel, and the bytes that it and its definition move."""
    shapes = case.shapes()
    asked = functools.partial(kernel, implementation="pallas", **case.options)
    ours, row = _compile(asked, shapes, config.device)
    row["moved"], row["kernels"] = traffic(ours)
    if config.against_xla:
        reference = functools.partial(kernel.reference, **case.options)
        plain, _ = _compile(reference, shapes, config.device)
        row["xla_moved"], row["xla_kernels"] = traffic(plain)
    return row


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _compile(fun: Any, shapes: Any, device: str) -> tuple[str, dict[str, int]]:
    """Returns the scheduled program, and the resources of the actjax kernel in it, if any."""
    with tempfile.TemporaryDirectory() as folder:
        text = dumped(fun, shapes, device, folder)
        return text, resources(pathlib.Path(folder), find_gpu(device).capability)


def dumped(fun: Any, shapes: Any, device: str, folder: str) -> str:
    """Returns the scheduled program, and leaves what XLA dumps of it in a folder."""
    with compile_for(find_gpu(device)) as place:
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
    found: dict[str, int] = {}
    if (path := ptx_of(folder)) is not None:
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


def show(config: Config, rows: list[dict[str, Any]]) -> None:
    """Prints one line for each kernel and case."""
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
                f"{row['kernel'] or 'no kernel'}, {row['case']}",
                f"{row['bytes'] / 1e6:,.1f}",
                f"{row['bound_us']:,.1f}",
                *(str(row.get(name, "")) for name in resources_of),
                f"{row['moved'] / row['bytes']:.2f}" if row["moved"] else "",
                f"{row['xla_moved'] / row['bytes']:.2f}" if "xla_moved" in row else "",
                str(row.get("xla_kernels", "")),
            )
        )
    print_table(f"Kernels, compiled for {config.device}", headers, cells)


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
