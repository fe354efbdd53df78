"""Strategies of malformed files: texts, records, tokenizers, checkpoints, adapters and runs."""

import json
import pathlib
import shutil
import struct
from typing import Any

import numpy as np
from fuzz.changes import WRONG, Draw, damage, damaged_bytes, damaged_tree, one_of, spoil
from fuzz.inputs import ANSWERS, CHAT, FINETUNE, PERPLEXITY, PLAN, PRETRAIN, WRITING, Flags, words
from fuzz.programs import Case
from hypothesis import strategies as st

Command = tuple[str, Flags, str]
"""A program, its flags, and the flag that names the damaged file."""
_TEXTS: tuple[Command, ...] = (("pretrain", PRETRAIN, "--data"), ("evaluate", PERPLEXITY, "--data"))
_RECORDS: tuple[Command, ...] = (
    ("finetune", FINETUNE, "--data"),
    ("evaluate", ANSWERS, "--questions"),
    *((program, flags | {"--data": "texts.jsonl"}, "--data") for program, flags, _ in _TEXTS),
)
_WEIGHTS: tuple[Command, ...] = (
    ("finetune", FINETUNE, "--checkpoint"),
    *(("evaluate", flags, "--checkpoint") for flags in (PERPLEXITY, ANSWERS, WRITING)),
)
_DIMENSIONS: tuple[Command, ...] = (
    ("pretrain", PRETRAIN, "--model"),
    ("plan", PLAN, "--checkpoint"),
)


def _case(what: str, command: Command, certain: bool, **changed: str | None) -> Case:
    program, flags, flag = command
    flags = flags | {f"--{name}": value for name, value in changed.items()}
    return Case(what, program, words(flags), (flag,), certain)


def text(draw: Draw, folder: pathlib.Path) -> Case:
    """A text that cannot be read, or that is too short."""
    path, command = folder / "text.txt", one_of(draw, *_TEXTS)
    data = path.read_bytes()
    place = draw(st.integers(0, len(data) - 1))
    what, changed = one_of(draw, "damaged", "not UTF-8", "another kind", "no path", "short"), {}
    match what:
        case "damaged":
            what = damage(draw, path)
        case "not UTF-8":
            wrong = one_of(draw, b"\xff", b"\xc3(", b"\xed\xa0\x80", b"\x80")
            path.write_bytes(data[:place] + wrong)
        case "another kind":
            changed["data"] = one_of(draw, "text.jsonl", "text.parquet", "text.gz", "text.json")
            path.rename(folder / changed["data"])
        case "no path":
            tensors = "adapter/adapter_model.safetensors"
            changed["data"] = one_of(draw, "", "/dev/null", "none/such", tensors, "/proc/1/mem")
        case "short":
            path.write_bytes(one_of(draw, b"a", b"\0", b"\xc3\xa9", data[: 2 + place % 80]))
    return _case(f"text: {what}", command, what not in ("short", "changed"), **changed)


def records(draw: Draw, folder: pathlib.Path) -> Case:
    """Records for training, questions, or records of text that are broken."""
    command = one_of(draw, *_RECORDS)
    path = folder / str(command[1][command[2]])
    if one_of(draw, *range(4)) == 0:
        return _case(f"records: {spoil(draw, path)}", command, True)
    lines = path.read_bytes().splitlines()
    place = draw(st.integers(0, len(lines) - 1))
    record = json.loads(lines[place])
    field, depth = one_of(draw, *record), draw(st.integers(2_000, 200_000))
    # A number may stand for a text in a record, but not for the text of a document.
    wrong = (None, [], {}, ["a"], {"a": 1}, [["x"]], *((1, True) if "text" in record else ()))
    as_text = {
        "a broken line": lambda: lines[place][: draw(st.integers(1, len(lines[place]) - 1))],
        "no known field": lambda: {f"{k}_": v for k, v in record.items()},
        "no object": lambda: one_of(draw, [record], 3, "a", None, True, [[]]),
        "a wrong type": lambda: record | {field: one_of(draw, *wrong)},
        "nested too deeply": lambda: b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}",
        "half a surrogate pair": lambda: record | {field: f"{record[field]}\ud800"},
        # A number of more than 4,300 digits is none for Python.
        "a huge number": lambda: b'{"prompt": 1' + b"0" * (depth % 9_000) + b"}",
        "not UTF-8": lambda: b'{"prompt": "\xff"}',
        "a changed line": lambda: damaged_bytes(draw, lines[place]),
        "a changed record": lambda: damaged_tree(draw, record),
    }
    what = one_of(draw, *as_text)
    line = as_text[what]()
    lines[place] = line if isinstance(line, bytes) else json.dumps(line).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")
    certain = not what.startswith("a changed") and (what, field) != (
        "half a surrogate pair", "answer"
    )  # fmt: skip
    return _case(f"records: {what}", command, certain)


_TOKENIZERS = {
    "model/tokenizer.json": ("model/tokenizer.json", "model/tokenizer_config.json"),
    "pairs": ("pairs/vocab.json", "pairs/merges.txt", "pairs/tokenizer_config.json"),
    "pieces.model": ("pieces.model",),
}
"""By what `--tokenizer` names, its files."""


def tokenizer(draw: Draw, folder: pathlib.Path) -> Case:
    """A tokenizer that is damaged, or a path without one."""
    commands = (("pretrain", PRETRAIN), ("finetune", FINETUNE), ("evaluate", PERPLEXITY))
    command = *one_of(draw, *commands), "--tokenizer"
    if one_of(draw, *range(4)) == 0:
        path = one_of(draw, "missing", "adapter", "text.txt", "records.jsonl", "/dev/null", "new")
        return _case(f"tokenizer: {path}", command, True, tokenizer=path)
    path = one_of(draw, *_TOKENIZERS)
    file = folder / one_of(draw, *_TOKENIZERS[path])
    # Settings of a tokenizer are optional.
    return _case(f"{file.name}: {damage(draw, file)}", command, False, tokenizer=path)


_REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 999}
_PARTS: tuple[dict[str, Any], ...] = (
    {"normalizer": {"type": "Sequence", "normalizers": [_REPLACE] * 6}},
    {"normalizer": _REPLACE | {"pattern": {"Regex": ""}}},
    {"normalizer": _REPLACE | {"pattern": {"Regex": "(.*)*(.*)*x$"}}},
    {"normalizer": {"type": "Prepend", "prepend": "x" * 10**7}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAD/////"}},
    {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    {"pre_tokenizer": {"type": "Whitespace"}},
    {"decoder": {"type": "Strip", "content": "e", "start": 99, "stop": 99}},
    {"padding": {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None,
                 "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}},
    {"truncation": {"direction": "Left", "max_length": 1, "strategy": "LongestFirst", "stride": 0}},
    *({"model": {"type": kind, "vocab": {"<|endoftext|>": 0, "a": 1}, "unk_token": "?",
                 "continuing_subword_prefix": "", "max_input_chars_per_word": 9}}
      for kind in ("WordLevel", "WordPiece")),
    {"model": {"type": "Unigram", "unk_id": None, "vocab": [["<|endoftext|>", 0.0]]}},
)  # fmt: skip
"""Parts of a tokenizer.json, most of which no text survives."""


def part(draw: Draw, folder: pathlib.Path) -> Case:
    """A tokenizer with another part."""
    path, changed = folder / "model" / "tokenizer.json", one_of(draw, *_PARTS)
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    program, flags = one_of(draw, ("pretrain", PRETRAIN), ("finetune", FINETUNE))
    names = "--tokenizer", "--checkpoint", "--data"
    return Case(f"tokenizer with {next(iter(changed))}", program, words(flags), names)


def template(draw: Draw, folder: pathlib.Path) -> Case:
    """A chat template that is damaged, nested, slow or huge."""
    path, depth = folder / "model" / "chat_template.jinja", draw(st.integers(500, 50_000))
    loop = "{% for i in range(99999) %}"
    as_text = {
        "nested": lambda: "{{ " + "(" * depth + "1" + ")" * depth + " }}",
        "nested blocks": lambda: "{% if 1 %}" * depth,
        "slow": lambda: loop * 3 + "{% endfor %}" * 3,
        "slow to read": lambda: "{{ 9 ** (9 ** 9) }}",
        "huge": lambda: one_of(draw, "{{ 'x' * 10 ** 10 }}", "{{ 'x'.ljust(10 ** 10) }}"),
        "endless": lambda: "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "refusing": lambda: "{{ raise_exception('no') }}",
        "silent": lambda: "",
    }
    what = one_of(draw, *as_text, "damaged", "of a wrong type")
    if what == "damaged":
        damage(draw, path)
    elif what == "of a wrong type":
        path.unlink()
        settings = folder / "model" / "tokenizer_config.json"
        fields = json.loads(settings.read_text()) | {"chat_template": one_of(draw, *WRONG)}
        settings.write_text(json.dumps(fields))
    else:
        path.write_text(as_text[what]())
    names = "--chat-template", "--data", "--checkpoint"
    return Case(f"template: {what}", "finetune", words(CHAT), names, certain=what in as_text)


def weights(draw: Draw, folder: pathlib.Path) -> Case:
    """A file of weights that is damaged, or a path that is no checkpoint."""
    command = one_of(draw, *_WEIGHTS)
    match one_of(draw, *range(8)):
        case 0:
            path = one_of(draw, "none", "adapter", "text.txt", "pairs", "/dev/null", "")
            return _case(f"no checkpoint: {path}", command, True, checkpoint=path)
        case 1:
            what, certain = spoil(draw, folder / "model" / "model.safetensors"), True
        case _:
            what, certain = _damage_tensors(draw, folder / "model" / "model.safetensors")
    return _case(f"weights: {what}", command, certain)


def config(draw: Draw, folder: pathlib.Path) -> Case:
    """A config.json that is damaged, or of another model."""
    path = folder / "model" / "config.json"
    if one_of(draw, *range(5)) == 0:
        shutil.copy(folder / "other" / "config.json", path)
        return _case("config.json: of another model", one_of(draw, *_WEIGHTS), True)
    what = damage(draw, path)
    command = one_of(draw, *_WEIGHTS, *_DIMENSIONS)
    return _case(f"config.json: {what}", command, what != "changed")


def index(draw: Draw, folder: pathlib.Path) -> Case:
    """An index of several files of weights that does not fit them."""
    model, file = folder / "model", "model-00001-of-00001.safetensors"
    names = [name for name in _read(model / "model.safetensors")[0] if name != "__metadata__"]
    (model / "model.safetensors").rename(model / file)
    tree, name = dict.fromkeys(names, file), one_of(draw, *names)
    what = one_of(draw, "another file", "one missing", "one more", "none", "changed")
    if what == "another file":
        tree[name] = one_of(draw, "model-00002-of-00002.safetensors", f"../other/{file}")
    elif what == "one missing":
        del tree[name]
    elif what == "one more":
        tree["model.layers.9.mlp.up_proj.weight"] = file
    elif what == "none":
        (model / file).unlink()
    path = model / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": tree}))
    if what == "changed":
        what = damage(draw, path)
    # As in `transformers`, a tensor of a file need not be listed.
    certain = what not in ("changed", "one missing")
    return _case(f"index: {what}", one_of(draw, *_WEIGHTS), certain)


_NO_SETTINGS: dict[str, tuple[Any, ...]] = {
    "r": (0, -1, 1, 3, 1.5, "2", None, [2], 10**30),
    "lora_alpha": (0, -1, "16", None, [], 10**400, float("nan")),
    "target_modules": ([], ["q_proj"], ["qq_proj"], [1], {}, None, [None]),
}


def adapter(draw: Draw, folder: pathlib.Path) -> Case:
    """An adapter that is damaged, or of another model."""
    command = "evaluate", one_of(draw, PERPLEXITY, WRITING), "--adapter"
    settings, changed = folder / "adapter" / "adapter_config.json", {"adapter": "adapter"}
    what = one_of(draw, *_NO_SETTINGS, "settings", "weights", "another model", "no adapter")
    certain = True
    if what in _NO_SETTINGS:
        fields = json.loads(settings.read_text()) | {what: one_of(draw, *_NO_SETTINGS[what])}
        settings.write_text(json.dumps(fields))
    elif what == "settings":
        what = damage(draw, settings)
        certain = what != "changed"
    elif what == "weights":
        what, certain = _damage_tensors(draw, folder / "adapter" / "adapter_model.safetensors")
        certain = certain and what != "dtype"
    elif what == "another model":
        changed["checkpoint"] = "other"
    else:
        changed["adapter"] = one_of(draw, "none", "model", "text.txt", "pairs", "/dev/null", "")
    return _case(f"adapter: {what}", command, certain, **changed)


def _read(path: pathlib.Path) -> tuple[dict[str, Any], bytes]:
    """Returns the header of a file of tensors and the bytes after it."""
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def _damage_tensors(draw: Draw, path: pathlib.Path) -> tuple[str, bool]:
    """Changes a file of tensors. Returns what was changed, and whether it is no longer valid."""
    if one_of(draw, *range(4)) == 0:
        path.write_bytes(damaged_bytes(draw, path.read_bytes()))
        return "changed bytes", False
    header, body = _read(path)
    name = one_of(draw, *sorted(header.keys() - {"__metadata__"}))
    tensor, size, array = header[name], len(body), np.frombuffer(body, "<f4").copy()
    array[draw(st.integers(0, len(array) - 1))] = one_of(draw, np.nan, np.inf, -np.inf)
    start, end = tensor["data_offsets"]
    fields = {
        "shape": ([*tensor["shape"][::-1], 1], [-1], [], [0], [2**62, 4], [1.5], "a"),
        "dtype": ("I32", "U32", "I64", "F16", "BOOL", "F99", None, 3),
        "data_offsets": ([0, 0], [end, start], [start, end + 4], [-4, 0], [2**70, 1]),
    }
    extra = {"dtype": "F32", "shape": [1], "data_offsets": [size, size + 4]}
    others = {
        "a renamed tensor": lambda: (
            {f"{k}_" if k == name else k: header[k] for k in header},
            body,
        ),
        "a tensor more": lambda: (header | {"model.extra.weight": extra}, body + bytes(4)),
        "extra bytes": lambda: (header, body + bytes(draw(st.integers(1, 64)))),
        "cut": lambda: (header, body[: draw(st.integers(0, size - 1))]),
        "NaN": lambda: (header, array.tobytes()),
        "a changed header": lambda: (damaged_tree(draw, header), body),
        "another header size": lambda: (header, body),
    }
    what = one_of(draw, *fields, *others)
    if what in fields:
        tensor[what] = one_of(draw, *fields[what])
    else:
        header, body = others[what]()
    text = json.dumps(header).encode()
    length = len(text)
    if what == "another header size":
        length = one_of(draw, 0, 1, len(text) // 2, 2**40, 2**64 - 1)
    path.write_bytes(struct.pack("<Q", length) + text + body)
    return what, what != "a changed header"


_OTHER_SETTINGS: tuple[Flags, ...] = (
    {"--seed": "7"}, {"--batch-size": "4"}, {"--model": "other"}, {"--optimizer": "lion"},
    {"--tokenizer": "pieces.model"}, {"--weight-dtype": "bfloat16"},
    {"--method": "galore", "--rank": "2"},
)  # fmt: skip
"""Settings that the run of `PRETRAIN` cannot be resumed with."""


def existing(draw: Draw, folder: pathlib.Path) -> Case:
    """A run with a damaged file, without `--resume`, or resumed with other settings."""
    flags, what = PRETRAIN | {"--out": "run", "--resume": None}, "damaged"
    match one_of(draw, *range(4)):
        case 0:
            what, flags = "other settings", flags | one_of(draw, *_OTHER_SETTINGS)
        case 1:
            what = "no --resume"
            flags.pop("--resume")
        case _:
            flags["--steps"] = one_of(draw, "2", "3")
            files = (path for path in (folder / "run").rglob("*") if path.is_file())
            damage(draw, one_of(draw, *sorted(files)))
    return Case(f"run: {what}", "pretrain", words(flags), ("--out",), what != "damaged")


def place(draw: Draw, folder: pathlib.Path) -> Case:
    """A place where no folder of a run, or no file of answers, can be."""
    commands = (("pretrain", PRETRAIN), ("finetune", FINETUNE), ("evaluate", ANSWERS))
    out = one_of(draw, "text.txt", "text.txt/run", "/proc/run")
    return _case(f"place: {out}", (*one_of(draw, *commands), "--out"), True, out=out)


STRATEGIES = {
    "texts and records": (text, records, records),
    "tokenizers": (tokenizer, tokenizer, part, template),
    "checkpoints": (weights, weights, config, index),
    "adapters": (adapter,),
    "run folders": (existing, existing, place),
}
