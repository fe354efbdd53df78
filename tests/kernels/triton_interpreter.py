"""Kernels written in Triton, interpreted on a CPU and compared with their definitions in float64.

`TRITON_INTERPRET=1 PYTHONPATH=. python tests/kernels/triton_interpreter.py` needs jax-triton, with
the CUDA plugin of JAX, and PyTorch: `pip install -e '.[gpu,compile,reference]'`. It prints a line
of JSON for each small case of `benchmarks.kernel_cases`, and for the first of each kernel another
where all arrays are layers of stacks. `quantize` also gets tokens of extreme numbers, and Adam and
`elementwise` a chain of operations of all kinds. Names of kernels after it leave the others out.
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
import triton
import triton.language as tl
from triton.runtime import interpreter

from actjax.formats.code import QuantizedCode
from actjax.formats.four_bit import fraction_of_hash
from actjax.kernels import rotated_tiles, triton_call
from actjax.kernels.adam_4bit import triton_moments
from actjax.kernels.adam_4bit.triton import adam_4bit
from actjax.kernels.adam_8bit.triton import adam_8bit
from actjax.kernels.copies.triton import copies
from actjax.kernels.elementwise.triton import elementwise
from actjax.kernels.layers import Layer, Scaled, is_layer_of_stack, values_of
from actjax.kernels.tail import Elementwise, Tail
from actjax.residuals.graph.programs import inlined
from benchmarks.kernel_cases import KERNELS
from benchmarks.kernel_check import compared, definition, nearest

FILLED = 0x5A
"""The byte that results hold before: a byte that is not written shows."""
BLOCK = {"TILE": 16, "STEPS": 2}
LAYERS, LAYER = 3, 1
NAMES = (*KERNELS, "elementwise", "copies")
TAKE_TAILS = ("elementwise", "adam_8bit", "adam_4bit")
HAVE_EDGES = ("adam_8bit", "adam_4bit_maxima", "adam_4bit")


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
            results.append(tensor(np.full(x.shape, FILLED, np.uint8).astype(x.dtype)))
    block = {name: n for name, n in BLOCK.items() if name in call.kernel.arg_names}
    constants = {**block, **call.constants}
    call.kernel[call.grid(constants)](*arguments, *results, **constants)
    return [array(y, x) for y, x in zip(results, call.results, strict=True)]


def converted(input, source, target, mode, convert=interpreter._convert_float):
    """Rounds to the nearest bfloat16, as GPUs do; Triton's interpreter cuts bits off."""
    if (source, target) == (tl.float32, tl.bfloat16):
        return input.view(np.float32).astype(jnp.bfloat16).view(np.uint16)
    return convert(input, source, target, mode)


def added(self, lhs, rhs):
    """Adds numbers; Triton's interpreter adds the bits of those in bfloat16."""
    if lhs.dtype.scalar != tl.bfloat16:
        return self.binary_op(lhs, rhs, np.add)
    sums = (x.data.view(jnp.bfloat16) for x in (lhs, rhs))
    return interpreter.TensorHandle(np.add(*sums).view(np.uint16), tl.bfloat16)


def looked_up(code, lookup):
    """Does what `rotated_tiles.levels_of_bytes` does, which Triton's interpreter cannot run."""
    data = code.handle.data
    registers = {"$4": np.ascontiguousarray(data).view(np.uint32)}
    for line in lookup.strip("{ }").split(";"):
        name, _, operands = line.strip().partition(" ")
        if name.endswith(".b32") and not name.startswith("."):
            result, *read = (x.strip() for x in operands.split(","))
            read = [registers[x] if x in registers else np.uint32(int(x, 0)) for x in read]
            registers[result] = PTX[name[:-4]](*read)
    halves = [np.stack([registers[f"${2 * i}"], registers[f"${2 * i + 1}"]], -1) for i in range(2)]
    halves = [np.ascontiguousarray(x).view(np.float16).reshape(data.shape) for x in halves]
    kind = tl.block_type(tl.float16, list(data.shape))
    return tuple(tl.tensor(interpreter.TensorHandle(x, tl.float16), kind) for x in halves)


def permuted(low, high, selector):
    """Permutes bytes: those of a result are of the eight of two words."""
    words = np.broadcast_arrays(low, high, selector)
    both = words[0].astype(np.uint64) | words[1].astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(both)
    for i in map(np.uint64, range(4)):
        place = words[2].astype(np.uint64) >> 4 * i & 15
        assert np.all(place < 8)  # The others have the sign of a byte.
        result |= (both >> 8 * place & 255) << 8 * i
    return result.astype(np.uint32)


PTX = {"and": np.bitwise_and, "or": np.bitwise_or, "shr": np.right_shift, "prmt": permuted}
"""Instructions of NVIDIA's assembly, by name."""


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


def chain(first, w, m, rate, key, flag):
    """Element-wise operations of all kinds, as they stand behind a kernel."""
    g = first * rate + 0.1 * w.astype(jnp.float32)
    y = jnp.sign(g) * jnp.sqrt(jnp.abs(g)) + jnp.maximum(m, 0.2) + jnp.minimum(m, g) ** 2
    y = y - jnp.exp(-jnp.abs(g)) + jax.nn.sigmoid(m) + jnp.exp2(g) + jnp.log(jnp.square(g) + 1)
    y = jnp.where(jnp.isfinite(y), y, 0) + 1 / (jnp.square(g) + 1.0) + jnp.clip(g, -0.5, 0.5)
    y = y + jax.lax.rsqrt(jnp.abs(m) + 1) + jnp.floor(m) - jnp.ceil(g) + jax.lax.integer_pow(m, -3)
    row, column = (jax.lax.broadcasted_iota(jnp.uint32, first.shape, i) for i in range(2))
    noise = row * jnp.uint32(0x9E3779B1) ^ (column + key)
    noise = (noise >> jnp.uint32(3)) ^ (noise << jnp.uint32(5)) | jnp.uint32(1)
    bits = jax.lax.bitcast_convert_type(y, jnp.uint32) + (noise & jnp.uint32(0xFFFF))
    z = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    d, n = first.shape
    cut = jax.lax.slice(z, (0, 0), (d - 2, n - 20))
    cut = jax.lax.pad(cut, jnp.float32(0), ((0, 2, 0), (0, 20, 0)))
    small = w * w + jnp.exp2(w) - jnp.maximum(w, w * 2)
    integer = bits.astype(jnp.int32) >> 2
    integer = jnp.where((integer < 0) & ~(integer == 3), -integer, integer)
    new = jnp.where(flag, cut.astype(w.dtype), small)
    return new, m + y, integer, jnp.where(jnp.isfinite(cut), cut, 1)


def tail_of(key, shape, *, has_first):
    """Returns a `Tail` of `chain`, on numbers some of which are not finite."""
    keys = jax.random.split(key, 3)
    first, m = (jax.random.normal(k, shape) for k in keys[:2])
    m = m.at[0, :3].set(jnp.asarray([jnp.nan, jnp.inf, -jnp.inf]))
    w = jax.random.normal(keys[2], shape).astype(jnp.bfloat16)
    scalars = jnp.float32([0.3]), jnp.uint32([5, 77]), jnp.asarray([True])
    shapes = [first, w, m, *(x[0] for x in scalars)]
    jaxpr = inlined(jax.make_jaxpr(chain)(*shapes)).jaxpr
    matrices = (w, m) if has_first else (first, w, m)
    program = Elementwise(
        tuple(jaxpr.eqns), tuple(jaxpr.invars), tuple(jaxpr.outvars), has_first, len(matrices),
        (0, 1, 0), (len(matrices) - 2, len(matrices) - 1, None), (4,),
    )  # fmt: skip
    return Tail(matrices, scalars, program)


def sizes(tail, first):
    """Returns the largest magnitude that each number passes through, whose roundings it has."""
    program = tail.program
    results = [eqn.outvars[0].aval for eqn in program.eqns]
    is_number = [x.dtype == jnp.float32 and x.shape == program.shape for x in results]
    numbers = [eqn.outvars[0] for eqn, x in zip(program.eqns, is_number, strict=True) if x]
    program = dataclasses.replace(
        program, outputs=tuple(numbers), replaced=(None,) * len(numbers), strides=()
    )
    outputs, _ = dataclasses.replace(tail, program=program).on_arrays(first)
    return np.max([np.where(np.isfinite(x), np.abs(x), 0) for x in outputs], axis=0)


def tail_row(name, *, in_stacks):
    """Returns how a kernel with a tail agrees with XLA."""
    shape = (9, 320)
    tail = tail_of(jax.random.key(1), shape, has_first=name != "elementwise")
    placed = dataclasses.replace(tail, matrices=stacked(tail.matrices)) if in_stacks else tail
    update = None
    if name == "elementwise":
        want = tail.on_arrays(None)
        ((outputs, sums),) = elementwise(tail=placed)
    else:
        (_, cases) = KERNELS[name]
        case = dataclasses.replace(
            cases[0],
            make=functools.partial(
                cases[0].make.func, **{**cases[0].make.keywords, "tokens": 9, "features": 320}
            ),
        )
        grad, *args = case.make(jax.random.key(0))
        args = [Scaled(grad, jnp.float32(0.3)), *args]
        update, *_ = KERNELS[name].kernel.reference(*values_of(args), **case.options)
        want = tail.on_arrays(update)
        if in_stacks:
            args = [Scaled(stacked(grad), args[0].factor), *map(stacked, args[1:])]
        program = {"adam_4bit": adam_4bit, "adam_8bit": adam_8bit}[name]
        (outputs, sums), *_ = program(*args, **case.options, tail=placed)
    values = [x.value() if isinstance(x, Layer) else x for x in outputs]
    worst, differing, passed = 0.0, 0.0, sizes(tail, update)
    pairs = zip([*values, *map(jnp.sum, sums)], [*want[0], *map(jnp.sum, want[1])], strict=True)
    for got, exact in pairs:
        is_small = exact.dtype == jnp.bfloat16
        got, exact = np.float64(got.reshape(exact.shape)), np.float64(exact)
        are_nan = np.isnan(got) & np.isnan(exact)
        if is_small:
            differing = max(differing, np.mean((got != exact) & ~are_nan))
            continue
        if not np.array_equal(np.isnan(got), np.isnan(exact)):
            worst = math.inf
        with np.errstate(invalid="ignore"):
            size = np.maximum(np.abs(exact), passed if exact.ndim else 0)
            error = np.abs(got - exact) / (size + 1e-2)
        worst = max(worst, np.max(np.where(np.isfinite(exact), error, 0.0)))
    # Some twenty functions, each with an error of a few roundings, of which a power makes three.
    return {
        "kernel": name, "case": "with a tail", "in stacks": in_stacks, "error": float(worst),
        "differing": float(differing), "ok": bool(worst <= 64 * 3 * 2.0**-24),
    }  # fmt: skip


def copies_row():
    """Returns how copies into stacks agree with their sources."""
    arrays = [jax.random.normal(jax.random.key(i), (n,)) for i, n in enumerate((7, 2000, 64) * 4)]
    places = stacked([jnp.zeros_like(x) for x in arrays])
    places[2] = None
    written = copies(arrays, into=places)
    values = [x.value() if isinstance(x, Layer) else x for x in written]
    same = all(map(np.array_equal, values, arrays))
    same = {"error": 0.0, "differing": float(not same), "ok": isinstance(written[0], Layer)}
    return {"kernel": "copies", "case": "twelve arrays", "in stacks": True, **same}


@triton.jit
def hashed(x, out):
    """Writes the numbers that moments in 4 bits are rounded with."""
    place = tl.arange(0, 64)
    tl.store(out + place, triton_moments.fraction_of_hash(tl.load(x + place)))


def hash_row():
    """Returns how the random bits of numbers agree with those of the definition."""
    x, out = np.float32(np.random.default_rng(0).normal(size=64)), torch.zeros(64)
    hashed[(1,)](tensor(x), out)
    differing = float(np.mean(out.numpy() != np.asarray(fraction_of_hash(x))))
    common = {"in stacks": False, "error": 0.0, "differing": differing, "ok": differing == 0}
    return {"kernel": "adam_4bit", "case": "random bits", **common}


def edge_row(name):
    """Returns whether NaN, inf and second moments that vanish are as in the definition."""
    kernel, cases = KERNELS[name]
    case = next(case for case in cases if case.name.endswith("left over"))
    grad, mu, nu, *others = nearest(case.make(jax.random.key(0)))
    grad = grad.at[3, 5].set(-jnp.nan).at[4, 200].set(jnp.inf)
    if name == "adam_8bit":
        # The smallest level of a positive number, beside a large one.
        grad = grad.at[5].set(1e-12)
        nu = dataclasses.replace(nu, codes=nu.codes.at[5].set(0).at[5, 0].set(255))
        mu = dataclasses.replace(mu, scales=mu.scales.at[0, 1].set(jnp.nan))
        # The last block has numbers that do not exist.
        nu = dataclasses.replace(nu, scales=nu.scales.at[2, 0].set(jnp.nan).at[1, 1].set(jnp.inf))
    else:
        mu = dataclasses.replace(mu, columns=mu.columns.at[0, 9].set(jnp.nan))
        nu = dataclasses.replace(nu, rows=nu.rows.at[2].set(jnp.nan))
    args = grad, mu, nu, *others
    program = getattr(importlib.import_module(kernel.triton), kernel.reference.__name__)
    results = program(*args, **case.options), definition(kernel, case, args)
    pairs = zip(*map(jax.tree.leaves, results), strict=True)
    floats = [map(np.asarray, pair) for pair in pairs if pair[0].dtype == jnp.float32]
    kinds = [[(np.isnan(x), x == np.inf, x == -np.inf) for x in pair] for pair in floats]
    same = all(map(np.array_equal, *zip(*kinds, strict=True)))
    if name == "adam_8bit":
        codes, exact = (np.asarray(moments[2].codes[5]) for moments in results)
        same &= np.array_equal(codes, exact) and exact[1] == 1
    common = {"in stacks": False, "error": 0.0, "differing": float(not same), "ok": bool(same)}
    return {"kernel": name, "case": "edges", **common}


def row(name, case, *, in_stacks):
    """Returns how a case agrees with its definition."""
    kernel, args = KERNELS[name].kernel, nearest(case.make(jax.random.key(0)))
    joined = case.joined or (lambda results: results)
    program = getattr(importlib.import_module(kernel.triton), kernel.reference.__name__)
    exact = definition(kernel, case, args)
    options = dict(case.options)
    if in_stacks and kernel.reads_layers:
        args = stacked(args)
    elif in_stacks:
        # Whichever arrays of a code go into stacks, all are written.
        like = jax.eval_shape(lambda *args: kernel.reference(*args, **case.options), *args)
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), like)
        is_code = lambda x: isinstance(x, QuantizedCode)  # noqa: E731
        options["into"] = jax.tree.map(
            lambda x: stacked(x) if is_code(x) else None, zeros, is_leaf=is_code
        )
        if in_stacks == "planes":
            options["into"] = jax.tree.map(
                lambda x: dataclasses.replace(x, scale=None, offset=x.offset and None),
                options["into"],
                is_leaf=is_code,
            )
    results = program(*args, **options)
    leaves = jax.tree.leaves(results, is_leaf=is_layer_of_stack)
    others = [np.delete(np.asarray(x.stack), LAYER, 0) for x in leaves if isinstance(x, Layer)]
    values = [x.value() if isinstance(x, Layer) else x for x in leaves]
    agreement = compared(*(jax.tree.leaves(joined(x)) for x in (tuple(values), exact)))
    if name.endswith("backward") and not in_stacks:
        # Gradients are those at the numbers that `decode` returns, which are rounded as `x` is.
        rounded = jax.tree.leaves(jax.jit(functools.partial(kernel.reference, **options))(*args))
        pairs = [(x, y) for x, y in zip(values, rounded, strict=True) if x.dtype == jnp.bfloat16]
        # Sums in another order move a few numbers across the middle of two others.
        agreement["ok"] &= all(np.mean(x != y) < 0.01 for x, y in pairs)
    agreement["ok"] &= all(np.all(x == x.dtype.type(FILLED)) for x in others)
    stacks = len(others) if kernel.writes_layers == "results" else math.inf
    agreement["ok"] &= not in_stacks or stacks > 0
    return {"kernel": name, "case": case.name, "in stacks": in_stacks, **agreement}


def rows_of(name):
    """Returns the rows of a kernel."""
    kernel, cases = KERNELS[name]
    cases = [case for case in cases if case.small]
    rows = [row(name, case, in_stacks=False) for case in cases]
    rows += [row(name, cases[0], in_stacks=True)]
    if kernel.writes_layers == "results":
        rows += [row(name, cases[0], in_stacks="planes")]
    if name == "quantize":
        for case in cases:
            made = functools.partial(extreme, make=case.make)
            rows += [row(name, dataclasses.replace(case, make=made), in_stacks=False)]
    if name in HAVE_EDGES:
        rows += [edge_row(name)]
    return rows


if __name__ == "__main__":
    triton_call.Call.run = interpreted
    interpreter._convert_float = converted
    interpreter.InterpreterBuilder.create_fadd = added
    rotated_tiles.levels_of_bytes = looked_up
    lines = []
    for name in sys.argv[1:] or NAMES:
        lines += rows_of(name) if name in KERNELS else []
        lines += [tail_row(name, in_stacks=x) for x in (False, True) if name in TAKE_TAILS]
        lines += [copies_row()] if name == "copies" else []
        lines += [hash_row()] if name == "adam_4bit" else []
    print(*map(json.dumps, lines), sep="\n")
    sys.exit(not all(line["ok"] for line in lines))
