"""Malformed flags."""

import pathlib

from benchmarks.malformed.case import CORRECT, Case, Flags, case_of
from benchmarks.malformed.mutate import Random, pick
from models.lora import TARGETS
from train.evaluation.config import EvaluateConfig
from train.plan import PlanConfig
from train.settings import cli
from train.settings.config import FinetuneConfig, PretrainConfig
from train.settings.options import ADAPTERS, FLAG_METHODS, FULL_WEIGHTS

CONFIGS = {
    "pretrain": PretrainConfig,
    "finetune": FinetuneConfig,
    "evaluate": EvaluateConfig,
    "plan": PlanConfig,
}
FLAGS = {name: cli.flags_of(config) for name, config in CONFIGS.items()}
_NO_NUMBER = ("abc", "", "1,5", "0x", "--", "1 2", "\N{SNOWMAN}", "-", "None", "1e")
_ENDLESS = ("--steps",)
"""A run with a huge number of steps is what was asked for, and does not end."""

CONTRADICTIONS: tuple[tuple[str, Flags, tuple[str, ...]], ...] = (
    ("pretrain", {"--method": "pamm", "--points": "4", "--ratio": "0.1"}, ("--points", "--ratio")),
    ("pretrain", {"--method": "lean", "--bits": "4", "--average-bits": "3"}, ("--bits",)),
    ("pretrain", {"--method": "galore", "--optimizer": "fira"}, ("--optimizer", "--method")),
    ("pretrain", {"--method": "subspace", "--optimizer": "muon"}, ("--optimizer", "--method")),
    ("pretrain", {"--vocab-size": "300"}, ("--vocab-size",)),
    ("pretrain", {"--optimizer": "sgd", "--factored-second-moment": None}, ("--optimizer",)),
    ("pretrain", {"--optimizer": "adafactor", "--moment-dtype": "8bit"}, ("--moment-dtype",)),
    ("pretrain", {"--optimizer": "adamw", "--projection-rank": "4"}, ("--projection-rank",)),
    ("pretrain", {"--batch-size": "3", "--accumulate": "2"}, ("--accumulate",)),
    ("pretrain", {"--method": "lean", "--levels": "normal", "--bits": "8"}, ("--levels",)),
    ("pretrain", {"--method": "lean", "--bits": "16", "--group": "64"}, ("--group",)),
    ("pretrain", {"--method": "gact", "--adapt-every": "5", "--bits": "4"}, ("--adapt-every",)),
    ("pretrain", {"--method": "lora"}, ("--method",)),
    ("pretrain", {"--model-vocab-size": "5"}, ("--model-vocab-size",)),
    ("pretrain", {"--weight-dtype": "float32", "--weight-rounding": "stochastic"},
     ("--weight-rounding",)),
    ("finetune", {"--validation": "records.jsonl", "--held-out": "0.5"}, ("--held-out",)),
    ("finetune", {"--method": "hyc_lora", "--remat": None, "--level": "intra"}, ("--level",)),
    ("finetune", {"--method": "lean", "--lora-rank": "4"}, ("--lora-rank",)),
    ("finetune", {"--format": "chat", "--prompt-template": "{prompt}!"}, ("--prompt-template",)),
    ("finetune", {"--method": "lora", "--bits": "4"}, ("--bits",)),
    ("evaluate", {"--task": "gsm8k"}, ("--questions",)),
    ("evaluate", {"--chat-template": "text.txt"}, ("--chat-template",)),
    ("evaluate", {"--top-k": "3"}, ("--top-k",)),
    ("evaluate", {"--shots": "3"}, ("--shots",)),
    ("evaluate", {"--out": "answers.jsonl"}, ("--out",)),
    ("evaluate", {"--data-dir": "cache"}, ("--data-dir",)),
    ("plan", {"--model": "llama_9m"}, ("--model", "--checkpoint")),
    ("plan", {"--resume": None}, ("--resume",)),
    ("plan", {"--error": "0.1"}, ("--error",)),
    ("plan", {"--table": None}, ("--table",)),
    ("plan", {"--budget": "24"}, ("--budget",)),
    ("plan", {"--devices-table": None}, ("--devices-table",)),
    ("plan", {"--template": "{text}"}, ("--template",)),
)  # fmt: skip
"""Settings that contradict the first correct command of a program, and flags to be named."""


def unknown(rng: Random, folder: pathlib.Path) -> Case:
    """A flag that does not exist, or whose name is misspelt."""
    program, flags = _command(rng)
    known = {flag.name for flag in FLAGS[program]}
    while (name := _misspelt(rng, pick(rng, sorted(known)))) in known or name.startswith("--no-"):
        pass
    more = pick(rng, ((name,), (name, "1"), (f"{name}=1",)))
    return case_of("unknown flag", program, flags, (name,), more=more, certain=True)


def _misspelt(rng: Random, name: str) -> str:
    letters = list(name[2:])
    place = int(rng.integers(len(letters)))
    match pick(rng, ("swap", "drop", "double", "replace", "other")):
        case "swap":
            letters[place], letters[place - 1] = letters[place - 1], letters[place]
        case "drop":
            del letters[place]
        case "double":
            letters.insert(place, letters[place])
        case "replace":
            letters[place] = pick(rng, "abcxyz")
        case _:
            letters = [pick(rng, "abcxyz") for _ in range(6)]
    word = "".join(letters).strip("-")
    return f"--{word if word[:1].isalpha() else 'x' + word}"


def bad_value(rng: Random, folder: pathlib.Path) -> Case:
    """A value of another type, or out of range."""
    program, flags = _command(rng)
    flag = pick(rng, [flag for flag in FLAGS[program] if flag.kind in (int, float)])
    certain, value = True, pick(rng, _NO_NUMBER)
    if rng.random() < 0.6:
        values = ["-1", "-7", "nan", "-inf", str(-(10**30))]
        unclear = ["0", "0.5", "1e999", "inf", "1e30", str(2**31), str(2**63), str(10**30)]
        value = pick(rng, values + (unclear if flag.name not in _ENDLESS else []))
        certain = value in values
    certain = certain and not _is_default(flag, value)
    flags = _for_flag(rng, program, flags, flag.name)
    flags.pop(flag.name, None)
    what = f"{flag.name} {value}"
    more = (f"{flag.name}={value}",)
    return case_of(what, program, flags, (flag.name,), more=more, certain=certain)


def bad_choice(rng: Random, folder: pathlib.Path) -> Case:
    """A value that its flag does not offer."""
    program, flags = _command(rng)
    chosen = [flag for flag in FLAGS[program] if flag.choices]
    named = ("--method", "--model", "--device", "--targets", "--sites", "--data")
    chosen += [flag for flag in FLAGS[program] if flag.name in named]
    flag = pick(rng, chosen)
    right = pick(rng, flag.choices or (*FULL_WEIGHTS, *TARGETS))
    value = pick(rng, (_misspelt(rng, f"--{right}x")[2:], right.upper() + "_", "", "None"))
    if value in flag.choices:
        value += "_"
    flags = _for_flag(rng, program, flags, flag.name)
    flags.pop(flag.name, None)
    what = f"{flag.name} {value}"
    more, certain = (flag.name, value), not _is_default(flag, value)
    return case_of(what, program, flags, (flag.name,), more=more, certain=certain)


def no_value(rng: Random, folder: pathlib.Path) -> Case:
    """A flag without its value, or a switch with one."""
    program, flags = _command(rng)
    flag = pick(rng, FLAGS[program])
    flags = {name: value for name, value in flags.items() if name != flag.name}
    more = (f"{flag.name}=maybe",) if flag.kind is bool else (flag.name,)
    if flag.name in ("--targets", "--sites"):  # A list may be empty.
        return case_of("empty list", program, flags, (flag.name, "--method"), more=more)
    return case_of("no value", program, flags, (flag.name,), more=more, certain=True)


def unused(rng: Random, folder: pathlib.Path) -> Case:
    """A flag that the method does not use."""
    program = pick(rng, ("pretrain", "finetune", "plan"))
    kinds = {flag.name: flag for flag in FLAGS[program]}
    known = FULL_WEIGHTS if program != "finetune" else (*ADAPTERS, *FULL_WEIGHTS)
    field, methods = pick(rng, FLAG_METHODS.items())
    flag = kinds.get("--" + field.replace("_", "-"))
    others = [method for method in known if method not in methods]
    if flag is None or not others:
        return unused(rng, folder)
    values = {int: "3", float: "0.3", bool: None}
    value = next((c for c in flag.choices if c != str(flag.default)), None)
    value = value if flag.choices else values.get(flag.kind, "q")
    flags = {name: v for name, v in CORRECT[program][0].items() if name != "--lora-rank"}
    flags |= {"--method": pick(rng, others), flag.name: value}
    if flag.kind is bool and flag.default is True:
        flags.pop(flag.name)
        return case_of("unused", program, flags, (flag.name, f"--no-{field}"),
                       more=(f"--no-{field.replace('_', '-')}",), certain=True)  # fmt: skip
    return case_of(f"unused {flag.name}", program, flags, (flag.name,), certain=True)


def contradiction(rng: Random, folder: pathlib.Path) -> Case:
    """Flags that exclude each other."""
    program, given, names = pick(rng, CONTRADICTIONS)
    flags = {k: v for k, v in CORRECT[program][0].items() if k != "--lora-rank"} | given
    return case_of("contradiction", program, flags, names, certain=True)


def stray(rng: Random, folder: pathlib.Path) -> Case:
    """A word that belongs to no flag, or a missing flag that is required."""
    program, flags = _command(rng)
    if program in ("finetune", "evaluate") and rng.random() < 0.5:
        flags.pop("--checkpoint")
        return case_of("no checkpoint", program, flags, ("--checkpoint",), certain=True)
    word = pick(rng, ("stray", "model", "1", "\N{SNOWMAN}"))
    flags = {"--batch-size": flags.pop("--batch-size", "1"), **flags}
    return case_of("stray word", program, flags, (word,), more=("--seed", "1", word), certain=True)


def _is_default(flag: cli.Flag, value: str) -> bool:
    """Returns whether a value is the way to write that an optional one is not given."""
    return value == "None" and flag.default is None


def _command(rng: Random) -> tuple[str, Flags]:
    program = pick(rng, CORRECT)
    return program, dict(pick(rng, CORRECT[program]))


def _for_flag(rng: Random, program: str, flags: Flags, name: str) -> Flags:
    """Returns flags with a method that uses a flag."""
    flags, field = dict(flags), name[2:].replace("-", "_")
    methods = FLAG_METHODS.get(field)
    if methods is not None and "--method" in flags:
        known = FULL_WEIGHTS if program != "finetune" else (*ADAPTERS, *FULL_WEIGHTS)
        flags["--method"] = pick(rng, [m for m in methods if m in known] or [flags["--method"]])
        if flags["--method"] == "low_rank":
            flags["--rank"] = "2"  # The default is above the width of the model.
        if flags["--method"] not in ADAPTERS:
            flags.pop("--lora-rank", None)
    return flags


DRAWS = (unknown, bad_value, bad_value, bad_choice, no_value, unused, contradiction, stray)
