"""Malformed texts and records."""

import json
import pathlib

from benchmarks.malformed.case import ANSWERS, FINETUNE, PERPLEXITY, PRETRAIN, Case, case_of
from benchmarks.malformed.mutate import Random, mutated, mutated_tree, pick


def spoil(rng: Random, path: pathlib.Path) -> str:
    """Replaces a file by an empty one, or by one that cannot be read.

    Returns:
      What it is.
    """
    match pick(rng, range(6)):
        case 0:
            path.unlink()
            return "missing"
        case 1:
            path.unlink()
            path.mkdir()
            return "a folder"
        case 2:
            path.chmod(0)
            return "unreadable"
        case 3:
            path.unlink()
            path.symlink_to("nowhere")
            return "a broken link"
        case 4:
            path.write_bytes(b"")
            return "empty"
    path.write_bytes(pick(rng, (b"\n", b" \n\t\n", b"\xef\xbb\xbf")))
    return "blank"


def text(rng: Random, folder: pathlib.Path) -> Case:
    """A text that cannot be read, or that is too short."""
    path = folder / "text.txt"
    what = (spoil if rng.random() < 0.4 else _changed_text)(rng, path)
    certain = what not in ("changed", "renamed", "NUL bytes", "one letter", "one line")
    program, flags = pick(rng, (("pretrain", dict(PRETRAIN)), ("evaluate", dict(PERPLEXITY))))
    if program == "pretrain" and rng.random() < 0.3:
        flags.pop("--tokenizer")
        flags["--vocab-size"] = "300"
    for name in ("text.jsonl", "text.parquet", "text.gz", "text.json"):
        if (folder / name).exists():
            flags["--data"] = name
    if rng.random() < 0.1:
        what, certain = "no path", True
        flags["--data"] = pick(rng, ("", "/dev/null", "none/such", ".", "/proc/1/mem"))
        certain = flags["--data"] != "."
    return case_of(f"text: {what}", program, flags, ("--data",), certain=certain)


def _changed_text(rng: Random, path: pathlib.Path) -> str:
    data = path.read_bytes()
    match pick(rng, range(8)):
        case 0:
            place = int(rng.integers(len(data)))
            path.write_bytes(
                data[:place] + pick(rng, (b"\xff", b"\xc3(", b"\xed\xa0\x80", b"\x80"))
            )
            return "not UTF-8"
        case 1:
            path.write_bytes(data.replace(b" ", b"\0", int(rng.integers(1, 99))))
            return "NUL bytes"
        case 2:
            path.write_bytes(pick(rng, (b"a", b"\0", b"\xc3\xa9")))
            return "one letter"
        case 3:
            path.write_bytes(data[: int(rng.integers(2, 80))])
            return "one line"
        case 4:
            path.rename(path.with_suffix(pick(rng, (".jsonl", ".parquet", ".gz", ".json"))))
            return "of another kind"
    path.write_bytes(mutated(rng, data))
    return "changed"


def records(rng: Random, folder: pathlib.Path) -> Case:
    """Records for training or questions that are broken."""
    program, flags, flag = pick(
        rng, (("finetune", FINETUNE, "--data"), ("evaluate", ANSWERS, "--questions"))
    )
    path = folder / str(flags[flag])
    what = spoil(rng, path) if rng.random() < 0.3 else None
    certain = what is not None
    if what is None:
        what, certain = _changed_records(rng, path, flag)
    return case_of(f"records: {what}", program, flags, (flag,), certain=certain)


def jsonl_text(rng: Random, folder: pathlib.Path) -> Case:
    """Text of a .jsonl file that is broken."""
    program, flags = pick(rng, (("pretrain", dict(PRETRAIN)), ("evaluate", dict(PERPLEXITY))))
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i} and more. " * 9}) + "\n" for i in range(20)))
    flags["--data"] = path.name
    what, certain = _changed_records(rng, path, "--text-field")
    return case_of(f"jsonl: {what}", program, flags, ("--data",), certain=certain)


def _changed_records(rng: Random, path: pathlib.Path, flag: str) -> tuple[str, bool]:
    """Changes a line of a file. Returns what was changed, and whether it is no longer valid."""
    lines = path.read_bytes().splitlines()
    place = int(rng.integers(len(lines)))
    record = json.loads(lines[place])
    field = pick(rng, list(record))
    what, certain = pick(rng, list(_OF_A_LINE)), True
    if what == "a deep value":
        record[field] = [["x"]]
        lines[place] = json.dumps(record).encode()
    elif what == "a broken line":
        lines[place] = lines[place][: int(rng.integers(1, len(lines[place])))]
    elif what == "no known field":
        lines[place] = json.dumps({f"{k}_": v for k, v in record.items()}).encode()
    elif what == "no object":
        lines[place] = json.dumps(pick(rng, ([record], 3, "a", None, True, [[]]))).encode()
    elif what == "a wrong type":
        # A number may stand for a text in a record, but not for the text of a document.
        values = (None, [], {}, ["a"], {"a": 1}, *((1, True) if "text" in flag else ()))
        record[field] = pick(rng, values)
        lines[place] = json.dumps(record).encode()
    elif what == "nested too deeply":
        depth = int(rng.integers(2_000, 200_000))
        lines[place] = b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}"
    elif what == "half a surrogate pair":
        record[field], certain = str(record[field]) + "\ud800", field != "answer"
        lines[place] = json.dumps(record).encode()
    elif what == "a huge number":
        # A number of more than 4,300 digits is none for Python.
        lines[place] = b'{"prompt": 1' + b"0" * int(rng.integers(10, 9_000)) + b"}"
    elif what == "not UTF-8":
        lines[place] = b'{"prompt": "\xff"}'
    elif what == "a changed line":
        lines[place], certain = mutated(rng, lines[place]), False
    elif what == "a changed record":
        lines[place], certain = json.dumps(mutated_tree(rng, record)).encode(), False
    data = b"\n".join(lines) + b"\n"
    if what == "a cut file":
        data, certain = data[: int(rng.integers(1, len(data)))], False
    path.write_bytes(data)
    return what, certain


_OF_A_LINE = (
    *("a broken line", "no known field", "no object", "a wrong type", "a deep value"),
    *("nested too deeply", "half a surrogate pair", "a huge number", "not UTF-8"),
    *("a changed line", "a changed line", "a changed record", "a changed record", "a cut file"),
)


DRAWS = (text, text, records, records, jsonl_text)
