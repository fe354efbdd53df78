"""Strategies of malformed command lines."""

import pathlib

from fuzz.changes import Draw, one_of
from fuzz.inputs import COMMANDS, FINETUNE, PLAN, PRETRAIN, Flags, words
from fuzz.programs import Case
from hypothesis import strategies as st

from models.lora import TARGETS
from train.evaluation.config import EvaluateConfig
from train.plan import PlanConfig
from train.settings.config import FinetuneConfig, PretrainConfig
from train.settings.flags import flags_of
from train.settings.options import ADAPTERS, FLAG_METHODS, FULL_WEIGHTS

FLAGS = {
    program: [flag for flag in flags_of(config) if not flag.is_rare]
    for program, config in (
        ("pretrain", PretrainConfig),
        ("finetune", FinetuneConfig),
        ("evaluate", EvaluateConfig),
        ("plan", PlanConfig),
    )
}
_NO_NUMBER = ("abc", "", "1,5", "0x", "--", "1 2", "\N{SNOWMAN}", "-", "None", "1e")
_OUT_OF_RANGE = ("-1", "-7", "nan", "-inf", str(-(10**30)))
_UNCLEAR = ("0", "0.5", "1e999", "inf", "1e30", str(2**31), str(2**63), str(10**30))
_LISTS = ("--targets", "--sites")


def unknown(draw: Draw, folder: pathlib.Path) -> Case:
    """A flag whose name is misspelled, a word that belongs to no flag, or no `--checkpoint`."""
    program, flags = _command(draw)
    if "--checkpoint" in flags and program != "plan" and one_of(draw, *range(8)) == 0:
        flags.pop("--checkpoint")
        return Case("no checkpoint", program, words(flags), ("--checkpoint",), certain=True)
    known = {flag.name for flag in FLAGS[program]}
    name = one_of(draw, *sorted(known))
    place = draw(st.integers(3, len(name) - 1))
    # A letter less, or one more.
    name = name[:place] + (name[place + 1 :] if draw(st.booleans()) else "x" + name[place:])
    if name in known or name.startswith("--no-"):
        name = "--xyz"
    added = one_of(draw, (name,), (name, "1"), (f"{name}=1",), ("--seed", "1", name[2:]))
    return Case("unknown", program, (*words(flags), *added), (name, name[2:]), certain=True)


def bad_value(draw: Draw, folder: pathlib.Path) -> Case:
    """A value of another type, out of range, or that its flag does not offer."""
    program, flags = _command(draw)
    named = ("--method", "--model", "--device", "--data", *_LISTS)
    flag = one_of(draw, *(f for f in FLAGS[program]
                          if f.kind in (int, float) or f.choices or f.name in named))  # fmt: skip
    if flag.kind in (int, float):
        # A huge number of steps is what was asked for, and does not end.
        unclear = () if flag.name == "--steps" else _UNCLEAR
        value = one_of(draw, *_NO_NUMBER, *_OUT_OF_RANGE, *unclear)
        certain, added = value not in unclear, (f"{flag.name}={value}",)
    else:
        right = one_of(draw, *(flag.choices or (*FULL_WEIGHTS, *TARGETS)))
        value = one_of(draw, right + "x", right.upper() + "_", "", "None")
        value += "_" if value in flag.choices else ""
        certain, added = True, (flag.name, value)
    certain = certain and not (value == "None" and flag.default is None)
    flags.pop(flag.name, None)
    what = f"{flag.name} {value}"
    return Case(what, program, (*words(flags), *added), (flag.name,), certain)


def no_value(draw: Draw, folder: pathlib.Path) -> Case:
    """A flag without its value, or a switch with one."""
    program, flags = _command(draw)
    flag = one_of(draw, *FLAGS[program])
    flags = {name: value for name, value in flags.items() if name != flag.name}
    argv = (*words(flags), f"{flag.name}=maybe" if flag.kind is bool else flag.name)
    names = (flag.name, "--method") if flag.name in _LISTS else (flag.name,)
    # A list may be empty.
    return Case(f"{flag.name} alone", program, argv, names, flag.name not in _LISTS)


def unused(draw: Draw, folder: pathlib.Path) -> Case:
    """A flag that the method does not use."""
    program = one_of(draw, "pretrain", "finetune", "plan")
    flags_by_name = {flag.name: flag for flag in FLAGS[program]}
    known = FULL_WEIGHTS if program != "finetune" else (*ADAPTERS, *FULL_WEIGHTS)
    pairs = [
        (flag, method)
        for field, methods in FLAG_METHODS.items()
        if (flag := flags_by_name.get("--" + field.replace("_", "-"))) is not None
        for method in known
        if method not in methods
    ]
    flag, method = one_of(draw, *pairs)
    value = {int: "3", float: "0.3", bool: None}.get(flag.kind, "q")
    if flag.choices:
        value = next(choice for choice in flag.choices if choice != str(flag.default))
    flags = {k: v for k, v in COMMANDS[program][0].items() if k != "--lora-rank"}
    name = flag.name
    if flag.kind is bool and flag.default is True:
        name = "--no-" + flag.name.removeprefix("--")
    argv = words(flags | {"--method": method, name: value})
    return Case(f"unused {name}", program, argv, (flag.name, name), certain=True)


_NO_MESH = (
    *("fsdp", "fsdp=", "=2", "fsdp=0", "fsdp=-1", "fsdp=1.5", "fsdp=two", "8", "fsdp==2", "fdsp=2"),
    *("fsdp=2,fsdp=2", "FSDP=2", "fsdp:2", "fsdp=2;data=1", "fsdp=2=1", "fsdp=\u00b2", "fsdp=0x2"),
    *(f"fsdp={10**30}", "\N{SNOWMAN}", "fsdp=+1", "fsdp=1e0", "fsdp=99", "data=5", "seq=6"),
)


def mesh(draw: Draw, folder: pathlib.Path) -> Case:
    """A mesh that cannot be read, does not divide, or has too many devices."""
    program, flags = one_of(draw, ("pretrain", PRETRAIN), ("finetune", FINETUNE), ("plan", PLAN))
    text, certain = one_of(draw, *_NO_MESH), True
    match one_of(draw, "malformed", "undivided", "random"):
        case "undivided":
            text, flags = "fsdp=2", flags | {"--batch-size": "3"}
        case "random":
            axis = st.sampled_from(("data", "fsdp", "tensor", "seq"))
            sizes = draw(st.lists(st.tuples(axis, st.integers(0, 4)), min_size=1, max_size=3))
            text, certain = ",".join(f"{name}={n}" for name, n in sizes), False
    names = ("--mesh", "--batch-size", "--seq-len")
    return Case(f"mesh {text}", program, words(flags | {"--mesh": text}), names, certain)


def _command(draw: Draw) -> tuple[str, Flags]:
    program = one_of(draw, *COMMANDS)
    return program, dict(one_of(draw, *COMMANDS[program]))


STRATEGIES = (unknown, bad_value, bad_value, no_value, unused)
