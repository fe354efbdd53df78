"""Malformed meshes and folders of runs."""

import json
import pathlib
import shutil

from benchmarks.malformed.case import ANSWERS, FINETUNE, PLAN, PRETRAIN, Case, case_of
from benchmarks.malformed.files import spoil
from benchmarks.malformed.mutate import Random, mutated, mutated_json, pick

DEVICES = 2
"""Devices that a program sees."""
_OTHER_SETTINGS: tuple[dict[str, str | None], ...] = (
    {"--seed": "7"},
    {"--batch-size": "4"},
    {"--seq-len": "8"},
    {"--model": "other"},
    {"--tokenizer": "pieces.model"},
    {"--data": "model/tokenizer.json"},
    {"--weight-dtype": "bfloat16"},
    {"--optimizer": "lion"},
    {"--moment-dtype": "8bit"},
    {"--method": "galore", "--rank": "2"},
    {"--model-vocab-size": "512"},
    {"--readers": "2"},
    {"--steps": "1"},
)
"""Settings that `case.PRETRAIN` cannot be resumed with."""


def mesh(rng: Random, folder: pathlib.Path) -> Case:
    """A mesh that cannot be read, does not divide, or has too many devices."""
    axes = ("data", "fsdp", "tensor", "seq")
    malformed = (
        *("fsdp", "fsdp=", "=2", "fsdp=0", "fsdp=-1", "fsdp=1.5", "fsdp=two", "8", "fsdp==2"),
        *(
            "fsdp=2,fsdp=2",
            "fdsp=2",
            "FSDP=2",
            "fsdp:2",
            "fsdp=2;data=1",
            "fsdp=2=1",
            "fsdp=\u00b2",
        ),
        *(f"fsdp={10**30}", "\N{SNOWMAN}", "fsdp=0x2", "fsdp=+1", "fsdp=1e0"),
    )
    program, flags = pick(rng, (("pretrain", PRETRAIN), ("finetune", FINETUNE), ("plan", PLAN)))
    match pick(rng, ("malformed", "many", "undivided", "random")):
        case "malformed":
            text, certain = pick(rng, malformed), True
        case "many":
            text, certain = f"{pick(rng, axes)}={int(rng.integers(DEVICES + 1, 99))}", True
        case "undivided":
            text, certain = pick(rng, ("tensor=2", "fsdp=2")), True
            flags = flags | {"--batch-size": "3"}
        case _:
            sizes = ",".join(f"{pick(rng, axes)}={int(rng.integers(0, 4))}" for _ in range(2))
            text, certain = sizes + pick(rng, ("", ",", "x", " ")), False
    return case_of(f"mesh {text}", program, flags | {"--mesh": text}, ("--mesh",), certain=certain)


def place(rng: Random, folder: pathlib.Path) -> Case:
    """A place where no folder of a run can be."""
    program, flags = pick(rng, (("pretrain", PRETRAIN), ("finetune", FINETUNE)))
    what = pick(rng, ("a file", "under a file", "read-only", "read-only parent", "a broken link",
                      "a file within", "a folder for a file", "no name"))  # fmt: skip
    out, certain = "there", True
    path = folder / out
    if what == "a file":
        path.write_text("mine\n")
    elif what == "under a file":
        out = "text.txt/run"
    elif what == "read-only":
        path.mkdir(mode=0o555)
    elif what == "read-only parent":
        path.mkdir(mode=0o555)
        out = "there/run"
    elif what == "a broken link":
        # The folder that it leads to can be made.
        path.symlink_to("nowhere/at/all")
        certain = False
    elif what == "a file within":
        path.mkdir()
        (path / pick(rng, ("checkpoints", "tensorboard"))).write_text("mine\n")
    elif what == "a folder for a file":
        name = pick(rng, ("lock", "metrics.jsonl", "settings.json", "loss.png"))
        (path / name).mkdir(parents=True)
    else:
        out = "/proc/run"
    flags = flags | {"--out": out}
    return case_of(f"place: {what}", program, flags, ("--out",), certain=certain)


def existing(rng: Random, folder: pathlib.Path) -> Case:
    """A folder of a run, without `--resume` or with other settings."""
    flags, what = PRETRAIN | {"--out": "run", "--resume": None}, "other settings"
    locked = None
    if rng.random() < 0.6:
        flags |= pick(rng, _OTHER_SETTINGS)
    elif rng.random() < 0.5:
        flags.pop("--resume")
        what = "no --resume"
    else:
        what, locked = "locked", "run"
    names = ("--steps",) if flags["--steps"] == "1" else ("--out",)
    what = f"existing: {what}"
    return case_of(what, "pretrain", flags, names, certain=True, locked=locked)


def damaged(rng: Random, folder: pathlib.Path) -> Case:
    """A run with a damaged file."""
    run, program, flags = pick(
        rng, (("run", "pretrain", PRETRAIN), ("tuned", "finetune", FINETUNE))
    )
    flags = flags | {"--out": run, "--resume": None, "--steps": pick(rng, ("2", "3"))}
    files = sorted(p for p in (folder / run).rglob("*") if p.is_file() and p.suffix != ".png")
    path = pick(rng, files)
    name = path.relative_to(folder / run)
    what = spoil(rng, path) if rng.random() < 0.3 else None
    if what is None and rng.random() < 0.1:
        path = pick(rng, sorted(p for p in (folder / run / "checkpoints").rglob("*") if p.is_dir()))
        name, what = path.relative_to(folder / run), "missing"
        shutil.rmtree(path)
    if what is None:
        data, what = path.read_bytes(), "changed"
        is_json = data[:1] in (b"{", b"[") and path.name != "metrics.jsonl"
        try:
            path.write_bytes((mutated_json if is_json else mutated)(rng, data))
        except json.JSONDecodeError:
            path.write_bytes(mutated(rng, data))
    return case_of(f"damaged: {name.parts[0]} {what}", program, flags, ("--out",))


def answers(rng: Random, folder: pathlib.Path) -> Case:
    """A place where the answers of an evaluation cannot be written."""
    out = pick(rng, ("text.txt", "model", "text.txt/answers.jsonl", "/proc/answers.jsonl", "link",
                     "closed/answers.jsonl", ""))  # fmt: skip
    (folder / "closed").mkdir(mode=0o555)
    (folder / "link").symlink_to("closed/answers.jsonl")
    return case_of("answers", "evaluate", ANSWERS | {"--out": out}, ("--out",), certain=True)


MESHES = (mesh,)
RUNS = (place, existing, damaged, damaged, answers)
