"""Kernels written in Triton, interpreted on a CPU and compared with their definitions in float64.

`TRITON_INTERPRET=1 PYTHONPATH=. python tests/kernels/triton_interpreter.py` needs jax-triton, with
the CUDA plugin of JAX, and PyTorch: `pip install -e '.[gpu,compile,reference]'`. It prints a line
of JSON for each small case of `benchmarks.kernel_cases`, and for the first of each kernel another
where all arrays are layers of stacks. `quantize` also gets tokens of extreme numbers.
"""

import dataclasses
import functools
import importlib
import json
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from actjax.formats.code import QuantizedCode
from actjax.kernels import triton_call
from actjax.kernels.layers import Layer, is_layer_of_stack
from benchmarks.kernel_cases import KERNELS
from benchmarks.kernel_check import compared, definition

FILLED = 0x5A
"""The byte that results hold before: a byte that is not written shows."""
BLOCK = {"TILE": 16, "STEPS": 2}
LAYERS, LAYER = 3, 1


def interpreted(call):
    """Does what `Call.run` does, by Triton's interpreter."""
    arguments = []
    for name, x in zip(call.kernel.arg_names, call.arrays(), strict=False):
        x = np.asarray(x)
        # It multiplies 16-bit floats wrongly.
        arguments.append(tensor(x.astype(np.float32) if name == "matrix" else x))
    results = []
    for i, x in enumerate(call.results):
        if isinstance(x, Layer):
            results.append(arguments[i - len(call.results)])
        else:
            plain = np.float32 if x.dtype == jnp.bfloat16 else x.dtype
            results.append(tensor(np.full(x.shape, FILLED, np.uint8).astype(plain)))
    block = {name: n for name, n in BLOCK.items() if name in call.kernel.arg_names}
    constants = {**block, **call.constants}
    call.kernel[call.grid(constants)](*arguments, *results, **constants)
    return [array(y, x) for y, x in zip(results, call.results, strict=True)]


def converted(input, source, target, mode, convert=interpreter._convert_float):
    """Rounds to the nearest bfloat16, as GPUs do; Triton's interpreter cuts bits off."""
    if (source, target) == (tl.float32, tl.bfloat16):
        return input.view(np.float32).astype(jnp.bfloat16).view(np.uint16)
    return convert(input, source, target, mode)


def tensor(x):
    """Returns a copy as a tensor of PyTorch."""
    if x.dtype == jnp.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def array(x, like):
    """Returns a tensor as a result."""
    is_small = x.dtype == torch.bfloat16
    x = x.view(torch.int16).numpy().view(jnp.bfloat16) if is_small else x.numpy()
    if isinstance(like, Layer):
        return Layer(jnp.asarray(x), like.index)
    return jnp.asarray(x).astype(like.dtype)


def stacked(tree):
    """Returns arrays as a layer of stacks whose other layers hold other bytes."""

    def layer(x):
        stack = np.full((LAYERS, *x.shape), FILLED, np.uint8).astype(x.dtype)
        stack[LAYER] = np.asarray(x)
        return Layer(jnp.asarray(stack), jnp.int32(LAYER))

    return jax.tree.map(layer, tree)


def extreme(key, make):
    """Returns arguments of `quantize` with tokens that are huge, tiny, or zero."""
    (inputs,) = make(key)
    sizes = jnp.asarray([1, 1e30, 1e-30, 0, 1e15, 1e-15])[: len(inputs.x)]
    rest = jnp.ones(len(inputs.x) - len(sizes))
    x = inputs.x * jnp.concatenate([sizes, rest])[:, None]
    none = {"mean": None, "spread": None}
    return (dataclasses.replace(inputs, x=x.astype(inputs.x.dtype), **none),)


def row(name, case, *, in_stacks):
    """Returns how a case agrees with its definition; None if the program cannot take it."""
    kernel, args = KERNELS[name].kernel, case.make(jax.random.key(0))
    if kernel.refusal("triton", args, dict(case.options)) is not None:
        return None
    program = getattr(importlib.import_module(kernel.triton), kernel.reference.__name__)
    exact = definition(kernel, case, args)
    options = dict(case.options)
    if in_stacks and kernel.reads_layers:
        args = stacked(args)
    elif in_stacks:
        like = jax.eval_shape(lambda *args: kernel.reference(*args, **case.options), *args)
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
        is_code = lambda x: isinstance(x, QuantizedCode)  # noqa: E731
        options["into"] = jax.tree.map(
            lambda x: stacked(x) if is_code(x) else None, zeros, is_leaf=is_code
        )
    results = program(*args, **options)
    leaves = jax.tree.leaves(results, is_leaf=is_layer_of_stack)
    others = [np.delete(np.asarray(x.stack), LAYER, 0) for x in leaves if isinstance(x, Layer)]
    values = [x.value() if isinstance(x, Layer) else x for x in leaves]
    agreement = compared(values, jax.tree.leaves(exact))
    agreement["ok"] &= all(np.all(x == x.dtype.type(FILLED)) for x in others)
    stacks = len(others) if kernel.writes_layers == "results" else math.inf
    agreement["ok"] &= not in_stacks or stacks > 0
    return {"kernel": name, "case": case.name, "in stacks": in_stacks, **agreement}


if __name__ == "__main__":
    triton_call.Call.run = interpreted
    interpreter._convert_float = converted
    lines = []
    for name, (kernel, cases) in KERNELS.items():
        if kernel.triton is None or name not in (sys.argv[1:] or KERNELS):
            continue
        rows = [row(name, case, in_stacks=False) for case in cases if case.small]
        small = [case for case, r in zip((c for c in cases if c.small), rows, strict=True) if r]
        rows += [row(name, small[0], in_stacks=True)]
        if name == "quantize":
            made = [functools.partial(extreme, make=case.make) for case in small]
            cases = [dataclasses.replace(c, make=m) for c, m in zip(small, made, strict=True)]
            rows += [row(name, case, in_stacks=False) for case in cases]
        lines += filter(None, rows)
    print(*map(json.dumps, lines), sep="\n")
    sys.exit(not all(line["ok"] for line in lines))
