"""Kernels written in Triton, interpreted on a CPU and compared with their definitions in float64.

`TRITON_INTERPRET=1 python -m benchmarks.triton_interpreter` needs jax-triton, with the CUDA plugin
of JAX, and PyTorch: `pip install -e '.[triton,compile,reference]'`. It prints a line of JSON for
each small case of `benchmarks.kernel_cases` and each choice of blocks. The interpreter multiplies
matrices of bfloat16 wrongly, so tokens of 16 bits are passed to `point_assignment` in float32.
"""

import importlib
import json
import math
import os
import sys
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from triton.runtime import interpreter

from actjax.kernels.point_assignment.reference import normalized
from benchmarks.kernel_cases import KERNELS
from benchmarks.kernel_cases.case import Case
from benchmarks.kernel_check import compared, definition

FILLED = 0x5A
"""The byte that results hold before: a byte that is not written shows."""


def rows(name: str, case: Case) -> list[dict[str, Any]]:
    """Returns a row for each choice of blocks of a case; none if the program cannot take it."""
    kernel, args = KERNELS[name].kernel, case.make(jax.random.key(0))
    if name == "point_assignment":
        args = tuple(x.astype(jnp.float32) for x in args)
    if kernel.refusal("triton", args, dict(case.options)) is not None:
        return []
    assert kernel.triton is not None
    call = importlib.import_module(kernel.triton).launch(*args, **case.options)
    exact = definition(kernel, case, args)
    found = []
    for choice in call.choices:
        results = run(call, choice.kwargs)
        if name == "quantize":
            planes = [*exact.planes, None][:2]
            pairs = zip(
                [*planes, exact.scale],
                results,
                strict=True,
            )
            used = [(np.reshape(x, y.shape), y) for x, y in pairs if x is not None]
            want, results = [x for x, _ in used], [y for _, y in used]
        else:
            index, alpha, kept = results
            exponents = np.asarray(normalized(args[1], args[1].dtype)[1])
            scaled = np.ldexp(alpha, -exponents[index])
            results, want = [index, scaled, kept != 0], list(exact)
        found.append(
            {"kernel": name, "case": case.name, "choice": str(choice), **compared(results, want)}
        )
    return found


def run(call: Any, choice: dict[str, Any]) -> list[np.ndarray]:
    """Returns the results of a launch, computed by Triton's interpreter."""
    results = [np.full(x.shape, FILLED, np.uint8).astype(_plain(x.dtype)) for x in call.results]
    tensors = [_tensor(np.asarray(x)) for x in call.arguments] + [_tensor(x) for x in results]
    constants = {**call.constants, **choice}
    call.kernel[call.grid(constants)](*tensors, **constants)
    written = tensors[len(call.arguments) :]
    return [_array(x, y.dtype) for x, y in zip(written, call.results, strict=True)]


def not_finite(tolerance: float) -> dict[str, Any]:
    """Returns a row for a token with a NaN: it has a point, and a coefficient that shows it.

    Its scores are all NaN. The interpreter reduces with NumPy, which leaves NaN out; here it calls
    the functions of Triton that combine two numbers, as a GPU does.
    """
    rng = np.random.default_rng(0)
    x, points = (rng.normal(size=(n, 64)).astype(np.float32) for n in (7, 5))
    x[2, 3] = np.nan
    args = jnp.asarray(x), jnp.asarray(points)
    call = importlib.import_module("actjax.kernels.point_assignment.triton").launch(
        *args, tolerance=tolerance
    )
    slow = mock.patch.object(
        interpreter.ReduceOps, "apply_impl", interpreter.ReduceOps.generic_reduce
    )
    with slow:
        index, alpha, kept = run(call, call.choices[0].kwargs)
    want = KERNELS["point_assignment"].kernel(*args, tolerance=tolerance)[0]
    finite = np.arange(7) != 2
    ok = np.array_equal(index[finite], np.asarray(want)[finite]) and 0 <= index[2] < 5
    ok = bool(ok and np.isnan(alpha[2]) and kept[2])
    name = f"a token with a NaN, tolerance {tolerance}"
    return {"kernel": "point_assignment", "case": name, "index": int(index[2]), "ok": ok}


def _plain(dtype: Any) -> Any:
    return np.float32 if dtype == jnp.bfloat16 else dtype


def _tensor(x: np.ndarray) -> torch.Tensor:
    if x.dtype == jnp.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def _array(x: torch.Tensor, dtype: Any) -> np.ndarray:
    return x.to(torch.float32).numpy().astype(dtype) if dtype == jnp.bfloat16 else x.numpy()


def main() -> None:
    """Prints the rows. Exits with 1 if one is wrong."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("set TRITON_INTERPRET=1 in the environment: Triton reads it when it is imported")
    wrong = 0
    for tolerance in (math.inf, 0.9):
        row = not_finite(tolerance)
        print(json.dumps(row), flush=True)
        wrong += not row["ok"]
    for name in ("quantize", "point_assignment"):
        for case in KERNELS[name].cases:
            for row in rows(name, case) if case.small else []:
                print(json.dumps(row), flush=True)
                wrong += not row["ok"]
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
