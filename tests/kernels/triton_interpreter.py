"""Kernels written in Triton, interpreted on a CPU and compared with their definitions in float64.

`TRITON_INTERPRET=1 PYTHONPATH=. python tests/kernels/triton_interpreter.py` needs jax-triton, with
the CUDA plugin of JAX, and PyTorch: `pip install -e '.[triton,compile,reference]'`. It prints a
line of JSON for each small case of `benchmarks.kernel_cases` and each choice of blocks. The
interpreter multiplies matrices of bfloat16 wrongly, so tokens of 16 bits are passed to
`point_assignment` in float32.
"""

import importlib
import json
import math
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from triton.runtime import interpreter

from actjax.kernels.point_assignment.reference import normalized
from benchmarks.kernel_cases import KERNELS
from benchmarks.kernel_check import compared, definition

FILLED = 0x5A
"""The byte that results hold before: a byte that is not written shows."""


def launch(name, *args, **options):
    return importlib.import_module(KERNELS[name].kernel.triton).launch(*args, **options)


def rows(name, case):
    """Returns a row for each choice of blocks of a case; none if the program cannot take it."""
    kernel, args = KERNELS[name].kernel, case.make(jax.random.key(0))
    if name == "point_assignment":
        args = tuple(x.astype(jnp.float32) for x in args)
    if kernel.refusal("triton", args, dict(case.options)) is not None:
        return []
    call, exact = launch(name, *args, **case.options), definition(kernel, case, args)
    agreements = []
    for choice in call.choices:
        results = run(call, choice.kwargs)
        if name == "quantize":
            wanted = zip([*[*exact.planes, None][:2], exact.scale], results, strict=True)
            used = [(np.reshape(x, y.shape), y) for x, y in wanted if x is not None]
            want, results = zip(*used, strict=True)
        else:
            index, alpha, kept = results
            exponents = np.asarray(normalized(args[1], args[1].dtype)[1])
            want, results = exact, [index, np.ldexp(alpha, -exponents[index]), kept != 0]
        agreement = compared(list(results), list(want))
        agreements.append({"kernel": name, "case": case.name, "choice": str(choice), **agreement})
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


def not_finite(tolerance):
    """Returns a row for a token with a NaN: it has a point, and a coefficient that shows it.

    Its scores are all NaN. The interpreter reduces with NumPy, which leaves NaN out; here it calls
    the functions of Triton that combine two numbers, as a GPU does.
    """
    rng = np.random.default_rng(0)
    x, points = (rng.normal(size=(n, 64)).astype(np.float32) for n in (7, 5))
    x[2, 3] = np.nan
    args, finite = (jnp.asarray(x), jnp.asarray(points)), np.arange(7) != 2
    call, reduce = launch("point_assignment", *args, tolerance=tolerance), interpreter.ReduceOps
    with mock.patch.object(reduce, "apply_impl", reduce.generic_reduce):
        index, alpha, kept = run(call, call.choices[0].kwargs)
    want = KERNELS["point_assignment"].kernel(*args, tolerance=tolerance)[0]
    ok = np.array_equal(index[finite], np.asarray(want)[finite]) and 0 <= index[2] < 5
    name = f"a token with a NaN, tolerance {tolerance}"
    ok = bool(ok and np.isnan(alpha[2]) and kept[2])
    return {"kernel": "point_assignment", "case": name, "index": int(index[2]), "ok": ok}


if __name__ == "__main__":
    lines = [not_finite(math.inf), not_finite(0.9)]
    for name in ("quantize", "point_assignment"):
        lines += [row for case in KERNELS[name].cases if case.small for row in rows(name, case)]
    print(*map(json.dumps, lines), sep="\n")
    sys.exit(not all(row["ok"] for row in lines))
