"""A profile of the device's time by kind of kernel, from the files that `jax.profiler` writes.

JAX 0.10 to 0.12 write `*.xplane.pb`, and read it without TensorFlow. On a GPU an event is a kernel,
and names the instruction of the compiled program that launched it; the text of that program says
which operations the instruction consists of, and which functions of Python they come from.
"""

import collections
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

PRODUCTS, ATTENTION, OPTIMIZER = "products", "attention", "optimizer"
COPIES, ELEMENT_WISE = "copies", "element-wise"
KINDS = frozenset((PRODUCTS, ATTENTION, OPTIMIZER, COPIES, ELEMENT_WISE))
"""Kinds that every step has. Each kernel of actjax is another kind, by its name."""

_PRODUCT = re.compile(r"gemm|nvjet|cutlass|xmma|cublas|(^|_)dot([._]|$)", re.IGNORECASE)
_ATTENTION = re.compile(r"fmha|flash|sdpa|dot_product_attention", re.IGNORECASE)
_WITHIN_ATTENTION = re.compile(r"actjax\.attention(?!_linear)")
_KERNEL = re.compile(r"\b_?(actjax_\w+?)(?:__\d+)?(?=[./]|$)")
_COPY = re.compile(r"memcpy|memset", re.IGNORECASE)
_OF_OPTIMIZER = re.compile(r"/optim/|/optax/|/train/run/optimizer\.py$")
_OF_MODEL = re.compile(r"/(models|ops|residuals|factored)/(\w+/)?\w+\.py$")
_MOVE = re.compile("broadcast|concatenate|copy.*|convert|dynamic-.*|pad|reshape|slice|transpose")
_POSITION = re.compile(
    "add|and|bitcast|clamp|compare|constant|get-.*|iota|m..imum|parameter|select|subtract|tuple"
)
"""Operations by which a copy may compute the position that it reads or writes."""
_CONTAINERS = frozenset(("while", "conditional", "call"))  # Their events contain others.


class Event(NamedTuple):
    """A kernel that ran, and the instruction that launched it, if known. Times in nanoseconds."""

    name: str
    instruction: str
    begin: float = 0
    duration: float = 0


class Instruction(NamedTuple):
    """An instruction of a compiled program."""

    opcodes: frozenset[str] = frozenset()
    """Its opcode, or those of the computation that it fuses."""
    target: str = ""
    """The library function that it calls, or nothing."""
    scope: str = ""
    """Names of the functions in which JAX traced it."""
    in_optimizer: bool = False


def read_events(folder: pathlib.Path) -> list[Event]:
    """Returns the kernels that ran on the first device, from a folder of `jax.profiler`.

    A GPU has a line for each stream, with all its kernels and copies. A CPU has a line for each
    thread, where events of XLA name an instruction.
    """
    (path,) = folder.rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(path))
    planes = {plane.name: plane for plane in profile.planes}
    gpus = sorted(name for name in planes if name.startswith("/device:GPU:"))
    lines = list(planes[gpus[0] if gpus else "/host:CPU"].lines)
    # Lines that a profiler derives from the streams would count twice.
    streams = [line for line in lines if line.name.startswith("Stream")]
    events = []
    for line in streams if gpus and streams else lines:
        for event in line.events:
            instruction = str(dict(event.stats).get("hlo_op", ""))
            if gpus or instruction:
                events.append(Event(event.name, instruction, event.start_ns, event.duration_ns))
    return events


def instructions(text: str) -> dict[str, Instruction]:
    """Returns the instructions of a compiled program by name, from its text."""
    of_optimizer = _optimizer_frames(text)
    lines, computation = [], ""
    opcodes, frames = collections.defaultdict(set), collections.defaultdict(list)
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            computation = header[1]
        # Types are in front of the opcode, and have no word before a parenthesis.
        elif match := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = .*? ([a-z][\w\-]*)\(", line):
            lines.append((match[1], match[2], line))
            opcodes[computation].add(match[2])
            frames[computation] += [x for x in [_attribute("stack_frame_id", line)] if x]
    result = {}
    for name, opcode, line in lines:
        frame, fused = _attribute("stack_frame_id", line), _attribute("calls", line)
        # A fusion without a frame belongs where most of its operations do.
        sources = [frame] if frame else frames[fused]
        result[name] = Instruction(
            frozenset(opcodes[fused] if opcode == "fusion" else (opcode,)),
            _attribute("custom_call_target", line),
            _attribute("op_name", line),
            2 * sum(frame in of_optimizer for frame in sources) > len(sources),
        )
    return result


def _attribute(name: str, line: str) -> str:
    match = re.search(rf'\b{name}=(?:"([^"]*)"|%?([\w.\-]+))', line)
    return (match[1] or match[2] or "") if match else ""


def _optimizer_frames(text: str) -> set[str]:
    """Returns the numbers of the stack frames that belong to the optimizer.

    The innermost function of the optimizer or the model decides: where the optimizer runs in the
    backward pass, it calls the layers.
    """
    head = text.split("\n\n%", 1)[0]
    names = dict(re.findall(r'^(\d+) "(.*)"$', head.partition("FunctionNames")[0], re.MULTILINE))
    places = dict(re.findall(r"^(\d+) \{file_name_id=(\d+)", head, re.MULTILINE))
    frame = re.compile(r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)\}$", re.MULTILINE)
    result: set[str] = set()
    for number, place, parent in frame.findall(head):  # A caller is in front of what it calls.
        name = names.get(places.get(place, ""), "")
        # Parents are counted from 1, where 1 means that there is none.
        is_inherited = str(int(parent) - 1) in result and not _OF_MODEL.search(name)
        if is_inherited or _OF_OPTIMIZER.search(name):
            result.add(number)
    return result


def category(event: Event, program: dict[str, Instruction]) -> str | None:
    """Returns the kind of a kernel of a program; None for an event that contains others."""
    opcodes, target, scope, in_optimizer = program.get(event.instruction, Instruction())
    names = f"{event.name} {event.instruction} {target}"
    if opcodes & _CONTAINERS:
        return None
    if kernel := _KERNEL.search(event.name) or (target and _KERNEL.search(scope)):
        return kernel[1]
    is_product = "dot" in opcodes or _PRODUCT.search(names)
    if _ATTENTION.search(names) or (is_product and _WITHIN_ATTENTION.search(scope)):
        return ATTENTION
    if is_product:
        return PRODUCTS
    moves = [x for x in opcodes if _MOVE.fullmatch(x)]
    others = [x for x in opcodes if not (_MOVE.fullmatch(x) or _POSITION.fullmatch(x))]
    # In front of the optimizer: it runs where the stacks of all layers are read and written.
    if _COPY.search(event.name) or (moves and not others):
        return COPIES
    return OPTIMIZER if in_optimizer else ELEMENT_WISE


def summary(events: Sequence[Event], text: str, steps: int) -> dict[str, Any]:
    """Returns the time of a step by kind of kernel.

    Returns:
      `kinds`: for each kind, the largest first, `ms` in a step, `share` of all kernels and
      `launches` in a step; `idle_ms` in a step, in which no kernel ran between the first and the
      last; `kernels`: name, kind, scope and `ms` of the 20 that take most.
    """
    program = instructions(text)
    kinds, kernels = collections.defaultdict(list), collections.defaultdict(float)
    idle, end = 0.0, 0.0
    for event in sorted(events, key=lambda event: event.begin):
        if (kind := category(event, program)) is None:
            continue
        scope = program.get(event.instruction, Instruction()).scope
        milliseconds = event.duration / steps / 1e6
        kinds[kind].append(milliseconds)
        kernels[event.name, kind, scope] += milliseconds
        idle += max(event.begin - end, 0) if end else 0
        end = max(end, event.begin + event.duration)
    total = sum(map(sum, kinds.values())) or 1.0
    largest = sorted(kernels, key=lambda entry: -kernels[entry])[:20]
    return {
        "kinds": {
            kind: {"ms": sum(x), "share": sum(x) / total, "launches": len(x) / steps}
            for kind, x in sorted(kinds.items(), key=lambda item: -sum(item[1]))
        },
        "idle_ms": idle / steps / 1e6,
        "kernels": [(*entry, kernels[entry]) for entry in largest],
    }
