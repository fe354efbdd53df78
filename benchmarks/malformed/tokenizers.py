"""Malformed tokenizers."""

import os
import pathlib
import shutil
from collections.abc import Callable

from benchmarks.malformed.case import FINETUNE, PERPLEXITY, PRETRAIN, Case, Flags, case_of
from benchmarks.malformed.files import spoil
from benchmarks.malformed.mutate import Random, mutated, mutated_json, pick

TOKENIZERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tokenizer.json": ("model/tokenizer.json", ("model/tokenizer.json",)),
    "its settings": ("model/tokenizer.json", ("model/tokenizer_config.json",)),
    "pairs": ("pairs", ("pairs/vocab.json", "pairs/merges.txt", "pairs/tokenizer_config.json")),
    "sentencepiece": ("pieces.model", ("pieces.model",)),
}
"""By kind, the path to give and the files of it."""


def tokenizer(rng: Random, folder: pathlib.Path) -> Case:
    """A tokenizer that is damaged, or of another kind."""
    kind, (given, files) = pick(rng, TOKENIZERS.items())
    path = folder / pick(rng, files)
    what = spoil(rng, path) if rng.random() < 0.25 else None
    if what is None:
        data, what = path.read_bytes(), "changed"
        if rng.random() < 0.15:
            others = [folder / name for _, names in TOKENIZERS.values() for name in names]
            data = pick(rng, [other for other in others if other != path]).read_bytes()
            what = "of another kind"
        elif path.suffix == ".json":
            data = mutated_json(rng, data)
        else:
            data = mutated(rng, data)
        path.write_bytes(data)
    program, flags = _with_tokenizer(rng, given)
    # Settings of a tokenizer are optional, and of pairs all files are in one folder.
    names = ("--tokenizer",) if "--tokenizer" in flags else ("--checkpoint", "--tokenizer")
    return case_of(f"{kind}: {what}", program, flags, names)


def _with_tokenizer(rng: Random, given: str) -> tuple[str, Flags]:
    program, flags = pick(rng, (("pretrain", PRETRAIN), ("finetune", FINETUNE),
                                ("evaluate", PERPLEXITY)))  # fmt: skip
    flags = dict(flags)
    if given.startswith("model/") and program != "pretrain" and rng.random() < 0.5:
        return program, flags  # That of the checkpoint.
    return program, flags | {"--tokenizer": given}


def no_tokenizer(rng: Random, folder: pathlib.Path) -> Case:
    """A path without a tokenizer."""
    changes: dict[str, Callable[[], object]] = {
        "missing": lambda: None,
        "pairs": lambda: (folder / "pairs" / "merges.txt").unlink(),
        "adapter": lambda: None,
        "text.txt": lambda: None,
        "records.jsonl": lambda: None,
        "/dev/null": lambda: None,
        "model": lambda: shutil.copy(folder / "text.txt", folder / "model" / "tokenizer.json"),
        "hidden": lambda: os.mkdir(folder / "hidden"),
    }
    given = pick(rng, changes)
    changes[given]()
    program, flags = pick(rng, (("pretrain", PRETRAIN), ("finetune", FINETUNE),
                                ("evaluate", PERPLEXITY)))  # fmt: skip
    flags = flags | {"--tokenizer": given}
    return case_of("no tokenizer", program, flags, ("--tokenizer",), certain=True)


DRAWS = (tokenizer, tokenizer, tokenizer, no_tokenizer)
