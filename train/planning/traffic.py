"""Bytes and operations of the kernels of a compiled step, read from its program.

XLA decides which operations share a kernel when it compiles. A kernel reads its operands and writes
its results once; those of loops run once for each iteration. Slices count as what they read, and an
update in place as what it writes, so a stack of layers that a kernel takes one layer of counts as
this layer. Operands that a kernel reads several times count once: kernels that transpose, or reduce
in several passes, move more.

Products count two operations per multiply-add, and those of causal attention half of them.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2,
    "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8,
}  # fmt: skip
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b(" + "|".join(_BYTES) + r")\[([\d,]*)\]")
_LAYOUT = re.compile(r"\b(" + "|".join(_BYTES) + r")\[([\d,]+)\]\{(\d+)")
_ALIGNMENT = 16
"""Bytes that the fast products read at once."""
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_FREE = {
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "opt-barrier",
    "partition-id", "replica-id", "copy-done", "async-done", "fusion-done",
}  # fmt: skip
_COPIES = _FREE | {
    "copy",
    "dynamic-slice",
    "dynamic-update-slice",
    "broadcast",
    "transpose",
    "slice",
}
_PRODUCT = re.compile(r'custom_call_target="__cublas|"kind":"__triton_(nested_)?gemm')
_EXCHANGES = re.compile(r"all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute")
_HOST = "S(5)"
_ALLOCATES = 'custom_call_target="AllocateBuffer"'
_ALIASES = re.compile(r"output_to_operand_aliasing=\{(.*?)\}(?:, metadata|, backend|$)")
_UNREAD = re.compile(r"actjax_(quantize|(rms_norm|rope|swiglu)_encode|copies)/")
"""Kernels that do not read the arrays that they write into."""

PRODUCTS, ATTENTION, COPIES = "products", "attention", "copies"
WRITTEN = "actjax_"
"""Begins the names of the kernels that actjax has written."""


_LANGUAGES = {
    "triton_kernel_call": "Triton",
    "triton_kernel_call_ffi": "Triton",  # From jax-triton 0.4 on.
    "tpu_custom_call": "Mosaic",
}


class Kernel(NamedTuple):
    """A kernel of a program.

    Attributes:
      moved: bytes that it reads and writes in a step, in all its runs.
      runs: how often it runs in a step.
      operator: "products", "attention", "copies" (slices of stacks, and what only copies them), the
        name of a kernel of actjax ("actjax_quantize") or of the operator that it is part of
        ("rms_norm"), or else "other".
      phase: "forward", "backward" or "update".
      name: its name in the program.
      shape: shape of its result.
      flops: operations of its products in a step.
      is_aligned: whether rows of its operands and results begin at multiples of 16 bytes. Known for
        products; true for the others.
    """

    moved: float
    runs: int
    operator: str
    phase: str
    name: str
    shape: str
    flops: float = 0.0
    is_aligned: bool = True


class _Instruction(NamedTuple):
    name: str
    shape: str
    operation: str
    operands: tuple[str, ...]
    line: str
    is_root: bool


_Body = dict[str, _Instruction]


def kernels_of(program: str) -> list[Kernel]:
    """Returns the kernels of a program for a GPU, in the order in which they run.

    Exchanges between devices, and copies between device and host, are left out.

    Args:
      program: text of an optimized HLO module, as `compiled.as_text()` returns it.
    """
    bodies, entry = _computations(program)
    return list(_kernels(bodies, entry, 1, 1))


def kernels_written_in(program: str) -> list[str]:
    """Returns the languages of the kernels of actjax in a program for a GPU or a TPU.

    Args:
      program: text of an optimized HLO module.
    """
    found = (
        language
        for target, language in _LANGUAGES.items()
        if re.search(rf'custom_call_target="{re.escape(target)}".*{WRITTEN}', program)
    )
    return [*dict.fromkeys(found)]


def _computations(program: str) -> tuple[dict[str, _Body], str]:
    """Returns the computations of a module by name, and the name of the first one that runs."""
    bodies: dict[str, _Body] = {}
    entry = name = ""
    for line in program.splitlines():
        if begin := _COMPUTATION.match(line):
            name = begin[2]
            bodies[name] = {}
            entry = name if begin[1] else entry
        elif name and (match := _INSTRUCTION.match(line)):
            root, result, shape, operation, arguments = match.groups()
            operands = tuple(re.findall(r"%([\w.\-]+)", _within_brackets(arguments)))
            # From JAX 0.12 on, some fusions run beside others: the start is the whole of it.
            operation = "fusion" if operation == "fusion-start" else operation
            made = _Instruction(result, shape, operation, operands, line, bool(root))
            bodies[name][result] = made
    return bodies, entry


def _within_brackets(text: str) -> str:
    """Returns a text up to the bracket that closes it."""
    depth = 1
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[:i]
    return text


def _kernels(bodies: dict[str, _Body], name: str, times: int, trips: int) -> Iterator[Kernel]:
    """Yields the kernels of a computation.

    Args:
      bodies: all computations.
      name: the computation.
      times: how often it runs.
      trips: iterations of the loop that it is the body of; 1 outside of loops.
    """
    body = bodies[name]
    for made in body.values():
        if made.operation in _FREE or _EXCHANGES.search(made.operation) or _HOST in made.shape:
            continue
        if _ALLOCATES in made.line:
            continue
        if made.operation == "while":
            called = _called(made, "body")
            found = _TRIPS.search(made.line)
            count = int(found[1]) if found else 1
            yield from _kernels(bodies, called[0], times * count, count)
        elif made.operation == "conditional":
            # Branches that differ in what they move are not known to run: the largest counts.
            choices = [
                list(_kernels(bodies, branch, times, trips))
                for branch in _called(made, "branch_computations", "true_computation", "false_comp")
            ]
            yield from max(choices, key=lambda ks: sum(k.moved for k in ks), default=[])
        elif made.operation == "call":
            yield from _kernels(bodies, _called(made, "to_apply")[0], times, trips)
        else:
            around, called = _without_slices(bodies, body, made)
            operator = _operator(bodies, called)
            is_product = operator == PRODUCTS
            flops = _flops(bodies, around, called) if is_product else _attention_flops(called)
            yield Kernel(
                times * _moved(bodies, body, made, trips),
                times,
                operator,
                _phase(called),
                made.name,
                made.shape,
                times * flops,
                not is_product or _is_aligned(around, called),
            )


def _without_slices(
    bodies: dict[str, _Body], body: _Body, made: _Instruction
) -> tuple[_Body, _Instruction]:
    """Returns what a kernel is, and the computation that it stands in.

    From JAX 0.11 on, XLA fuses a call of a library with the slices of stacks that it reads and
    writes, so that nothing is copied: then this is the call within the fusion.
    """
    for name in _called(made, "calls") if made.operation == "fusion" else []:
        for one in bodies[name].values():
            if one.operation == "custom-call":
                return bodies[name], one
    return body, made


def _flops(bodies: dict[str, _Body], body: _Body, made: _Instruction) -> float:
    """Returns the operations of the products of a kernel in one run."""
    inner = bodies[fused[0]] if (fused := _called(made, "calls")) else body
    dots = [one for one in inner.values() if one.operation == "dot"] if fused else [made]
    total = 0.0
    for dot in dots:
        left = _sizes(inner[dot.operands[0]].shape)
        contracted = re.search(r'lhs_contracting_dim\w*"?[=:][{\[]([\d,"]*)', dot.line)
        axes = re.findall(r"\d+", contracted[1]) if contracted else []
        summed = math.prod(left[int(axis)] for axis in axes)
        total += 2 * math.prod(_sizes(dot.shape)) * summed
    # Triton products may be nested: a fusion of fusions.
    nested = [one for one in inner.values() if one.operation == "fusion"] if fused else []
    return total + sum(_flops(bodies, inner, one) for one in nested)


def _attention_flops(made: _Instruction) -> float:
    """Returns the operations of cuDNN's attention in one run: two products, or five backward."""
    scores = re.search(r'"intermediate_tensor_shape".*?"dimensions": ?\[([^\]]*)', made.line)
    if scores is None or "__cudnn" not in made.line:
        return 0.0
    head_size = _sizes(made.shape)[-1]
    products = 5 if "Backward" in made.line else 2
    causal = 0.5 if '"mask_type": "CAUSAL"' in made.line.replace('":"', '": "') else 1
    size = math.prod(int(n) for n in re.findall(r"\d+", scores[1]))
    return causal * products * 2 * size * head_size


def _is_aligned(body: _Body, made: _Instruction) -> bool:
    """Returns whether rows of the operands and of the result of a product are aligned."""
    shapes = [made.shape, *(body[name].shape for name in made.operands if name in body)]
    rows = [
        (kind, dims.split(",")[int(minor)])
        for shape in shapes
        for kind, dims, minor in _LAYOUT.findall(shape)
    ]
    return all(_BYTES[kind] * int(length) % _ALIGNMENT == 0 for kind, length in rows)


def _sizes(shape: str) -> list[int]:
    """Returns the dimensions of the first array of a shape."""
    found = _ARRAY.search(shape)
    return [int(n) for n in found[2].split(",") if n] if found else []


def _called(made: _Instruction, *names: str) -> list[str]:
    """Returns the computations that an instruction calls under the given names."""
    called = re.findall(rf"(?:{'|'.join(names)})\w*=(\{{[^}}]*\}}|%[\w.\-]+)", made.line)
    return [name for text in called for name in re.findall(r"%([\w.\-]+)", text)]


def _moved(bodies: dict[str, _Body], body: _Body, made: _Instruction, trips: int) -> float:
    """Returns the bytes that a kernel reads and writes in one run."""
    around, called = _without_slices(bodies, body, made)
    if _ALIASES.search(called.line):
        body, made = around, called
    operands = [body[name] for name in made.operands if name in body]
    fused = _called(made, "calls") if made.operation == "fusion" else []
    if fused:
        inner = bodies[fused[0]]
        return _read(inner) + _written(inner)
    if made.operation == "dynamic-update-slice":
        return 2 * _size(operands[1].shape)
    if made.operation in ("dynamic-slice", "slice", "gather"):
        return 2 * _size(made.shape)
    if made.operation == "custom-call":
        return _moved_by_call(body, made, operands, trips)
    return sum(_size(x.shape) for x in (made, *operands))


def _moved_by_call(
    body: _Body, made: _Instruction, operands: list[_Instruction], trips: int
) -> float:
    """Returns the bytes of a kernel whose operands may be stacks of which it reads one layer."""
    read = [_size_of_layer(_source(body, x).shape, trips) for x in operands]
    written = [_size(f"{kind}[{dims}]") for kind, dims in _ARRAY.findall(made.shape)]
    aliases = _ALIASES.search(made.line)
    for result, operand in re.findall(r"\{(\d*)\}: \((\d+), ", aliases[1] if aliases else ""):
        written[int(result or 0)] = read[int(operand)]
        if _UNREAD.search(_path(made)):
            read[int(operand)] = 0
    return sum(read) + sum(written)


def _source(body: _Body, made: _Instruction) -> _Instruction:
    """Returns the array that an operand is another shape of."""
    while made.operation == "bitcast" and made.operands[0] in body:
        made = body[made.operands[0]]
    return made


def _read(inner: _Body) -> float:
    """Returns the bytes of its parameters that a fused computation reads.

    Each operation reads of its operands the share that is read of its result, and a slice less.
    """
    shares = {name: 1.0 for name, made in inner.items() if made.is_root}
    total = 0.0
    for made in reversed(inner.values()):
        share = shares.get(made.name, 0.0)
        if made.operation == "parameter":
            total += share * _size(made.shape)
        for number, name in enumerate(made.operands):
            if name not in inner:
                continue
            part = share
            if made.operation in ("dynamic-slice", "slice", "gather") and number == 0:
                part *= _size(made.shape) / max(1, _size(inner[name].shape))
            elif number == 0 and _is_in_place(inner, made):
                part = 0.0
            shares[name] = min(1.0, shares.get(name, 0.0) + part)
    return total


def _written(inner: _Body) -> float:
    """Returns the bytes that a fused computation writes."""
    root = next(made for made in inner.values() if made.is_root)
    results = [inner[name] for name in root.operands] if root.operation == "tuple" else [root]
    return sum(_size_in_place(inner, result) for result in results)


def _size_in_place(inner: _Body, result: _Instruction) -> float:
    while result.operation == "bitcast":
        result = inner[result.operands[0]]
    if _is_in_place(inner, result):
        return _size(inner[result.operands[1]].shape)
    return _size(result.shape)


def _is_in_place(inner: _Body, made: _Instruction) -> bool:
    """Returns whether an instruction changes a part of an array that the kernel gets."""
    if made.operation != "dynamic-update-slice":
        return False
    return _source(inner, inner[made.operands[0]]).operation == "parameter"


def _size(shape: str) -> float:
    return sum(
        math.ceil(_BYTES[kind] * math.prod(int(n) for n in dims.split(",") if n))
        for kind, dims in _ARRAY.findall(shape)
    )


def _size_of_layer(shape: str, trips: int) -> float:
    """Returns the bytes of arrays, of which stacks of as many entries as a loop count as one."""
    total = 0.0
    for kind, dims in _ARRAY.findall(shape):
        sizes = [int(n) for n in dims.split(",") if n]
        share = trips if trips > 1 and len(sizes) > 2 and sizes[0] == trips else 1
        total += math.ceil(_BYTES[kind] * math.prod(sizes)) / share
    return total


def _operator(bodies: dict[str, _Body], made: _Instruction) -> str:
    line = made.line
    if _PRODUCT.search(line) or made.operation == "dot":
        return PRODUCTS
    if "__cudnn" in line:
        return ATTENTION
    path = _path(made)
    if kernel := re.search(rf"({WRITTEN}\w+)/(pallas|triton_kernel)_call", path):
        return kernel[1]
    inner = bodies[fused[0]] if (fused := _called(made, "calls")) else {made.name: made}
    if all(one.operation in _COPIES or _is_index(one) for one in inner.values()):
        return COPIES
    names = re.findall(r"actjax\.(\w+)", path)
    return names[-1] if names else "other"


def _is_index(made: _Instruction) -> bool:
    """Returns whether an instruction computes a scalar, such as the place of a slice."""
    return re.match(r"\w+\[\]", made.shape) is not None


def _phase(made: _Instruction) -> str:
    path = _path(made)
    if "transpose(" in path:
        return "backward"
    return "forward" if "jvp(" in path else "update"


def _path(made: _Instruction) -> str:
    path = re.search(r'op_name="([^"]*)"', made.line)
    return path[1] if path else ""
