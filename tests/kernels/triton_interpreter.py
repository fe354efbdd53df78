"""Kernels written in Triton, interpreted on a CPU and compared with their definitions in float64.

`TRITON_INTERPRET=1 PYTHONPATH=. python tests/kernels/triton_interpreter.py` needs jax-triton, with
the CUDA plugin of JAX, and PyTorch: `pip install -e '.[triton,compile,reference]'`. It prints a
line of JSON for each small case of `benchmarks.kernel_cases` and each choice of blocks.
"""

import importlib
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks.kernel_cases import KERNELS
from benchmarks.kernel_check import compared, definition

FILLED = 0x5A
"""The byte that results hold before: a byte that is not written shows."""


def rows(case):
    """Returns a row for each choice of blocks of a case; none if the program cannot take it."""
    kernel, args = KERNELS["quantize"].kernel, case.make(jax.random.key(0))
    if kernel.refusal("triton", args, dict(case.options)) is not None:
        return []
    call = importlib.import_module(kernel.triton).launch(*args, **case.options)
    exact = definition(kernel, case, args)
    agreements = []
    for choice in call.choices:
        results = run(call, choice.kwargs)
        pairs = zip([*[*exact.planes, None][:2], exact.scale], results, strict=True)
        used = [(np.reshape(x, y.shape), y) for x, y in pairs if x is not None]
        want, results = zip(*used, strict=True)
        named = {"kernel": kernel.name, "case": case.name, "choice": str(choice)}
        agreements.append({**named, **compared(list(results), list(want))})
    return agreements


def run(call, choice):
    """Returns the results of a launch, computed by Triton's interpreter."""
    plain = lambda dtype: np.float32 if dtype == jnp.bfloat16 else dtype  # noqa: E731
    results = [np.full(x.shape, FILLED, np.uint8).astype(plain(x.dtype)) for x in call.results]
    tensors = [tensor(np.asarray(x)) for x in (*call.arguments, *results)]
    constants = {**call.constants, **choice}
    call.kernel[call.grid(constants)](*tensors, **constants)
    written = tensors[len(call.arguments) :]
    return [
        x.to(torch.float32).numpy().astype(y.dtype) if y.dtype == jnp.bfloat16 else x.numpy()
        for x, y in zip(written, call.results, strict=True)
    ]


def tensor(x):
    if x.dtype == jnp.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


if __name__ == "__main__":
    lines = [row for case in KERNELS["quantize"].cases if case.small for row in rows(case)]
    print(*map(json.dumps, lines), sep="\n")
    sys.exit(not all(row["ok"] for row in lines))
