"""Malformed checkpoints and adapters."""

import json
import pathlib
import shutil
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.malformed.case import (
    ANSWERS,
    FINETUNE,
    PERPLEXITY,
    PLAN,
    PRETRAIN,
    WRITING,
    Case,
    Flags,
    case_of,
)
from benchmarks.malformed.files import spoil
from benchmarks.malformed.mutate import Random, mutated, mutated_json, mutated_tree, pick

_READERS: tuple[tuple[str, Flags, str], ...] = (
    ("finetune", FINETUNE, "--checkpoint"),
    ("evaluate", PERPLEXITY, "--checkpoint"),
    ("evaluate", ANSWERS, "--checkpoint"),
    ("evaluate", WRITING, "--checkpoint"),
)
"""Commands that read the weights of a checkpoint."""
_DIMENSIONS: tuple[tuple[str, Flags, str], ...] = (
    ("pretrain", PRETRAIN, "--model"),
    ("plan", PLAN, "--checkpoint"),
)
"""Commands that read its dimensions alone."""


def weights(rng: Random, folder: pathlib.Path) -> Case:
    """A file of weights that is damaged, or of another model."""
    path = folder / "model" / "model.safetensors"
    what, certain = (spoil(rng, path) if rng.random() < 0.15 else None), True
    if what is None:
        what, certain = _changed_tensors(rng, path)
    program, flags, flag = pick(rng, _READERS)
    return case_of(f"weights: {what}", program, flags, (flag,), certain=certain)


def config(rng: Random, folder: pathlib.Path) -> Case:
    """A config.json that is damaged, or of another model."""
    path = folder / "model" / "config.json"
    what, certain = (spoil(rng, path) if rng.random() < 0.2 else None), True
    if what is None and rng.random() < 0.15:
        what = "of another model"
        shutil.copy(folder / "other" / "config.json", path)
        program, flags, flag = pick(rng, _READERS)
        return case_of(f"config.json: {what}", program, flags, (flag,), certain=True)
    if what is None:
        what, certain = "changed", False
        path.write_bytes(mutated_json(rng, path.read_bytes()))
    program, flags, flag = pick(rng, _READERS + _DIMENSIONS)
    return case_of(f"config.json: {what}", program, flags, (flag,), certain=certain)


def index(rng: Random, folder: pathlib.Path) -> Case:
    """An index of several files of weights that does not fit them."""
    model = folder / "model"
    header, _ = _read(model / "model.safetensors")
    file = "model-00001-of-00001.safetensors"
    (model / "model.safetensors").rename(model / file)
    tree = {"metadata": {}, "weight_map": {k: file for k in header if k != "__metadata__"}}
    names = list(tree["weight_map"])
    what, certain = pick(rng, ("no such file", "outside", "one missing", "one more", "none",
                               "changed", "changed bytes", "changed")), True  # fmt: skip
    if what == "no such file":
        tree["weight_map"][pick(rng, names)] = "model-00002-of-00002.safetensors"
    elif what == "outside":
        tree["weight_map"][pick(rng, names)] = f"../other/{file}"
    elif what == "one missing":
        del tree["weight_map"][pick(rng, names)]
    elif what == "one more":
        tree["weight_map"]["model.layers.9.mlp.up_proj.weight"] = file
    elif what == "none":
        (model / file).unlink()
    elif what == "changed":
        tree, certain = mutated_tree(rng, tree), False
    data = json.dumps(tree).encode()
    if what == "changed bytes":
        data, certain = mutated(rng, data), False
    (model / "model.safetensors.index.json").write_bytes(data)
    program, flags, flag = pick(rng, _READERS)
    return case_of(f"index: {what}", program, flags, (flag,), certain=certain)


def no_checkpoint(rng: Random, folder: pathlib.Path) -> Case:
    """A path that is no checkpoint."""
    (folder / "pickle").mkdir()
    shutil.copy(folder / "model" / "config.json", folder / "pickle")
    shutil.copy(folder / "model" / "tokenizer.json", folder / "pickle")
    (folder / "pickle" / "pytorch_model.bin").write_bytes(b"\x80\x02")
    given = ("none", "adapter", "run", "text.txt", "pairs", "pickle", "/dev/null", "records.jsonl",
             "model/config.json", "model/model.safetensors", "")  # fmt: skip
    program, flags, flag = pick(rng, _READERS)
    flags = flags | {flag: pick(rng, given)}
    return case_of(f"no checkpoint: {flags[flag]}", program, flags, (flag,), certain=True)


def adapter(rng: Random, folder: pathlib.Path) -> Case:
    """An adapter that is damaged, or of another model."""
    settings = folder / "adapter" / "adapter_config.json"
    tensors = folder / "adapter" / "adapter_model.safetensors"
    program, flags = pick(rng, (("evaluate", PERPLEXITY), ("evaluate", WRITING)))
    flags, certain = flags | {"--adapter": "adapter"}, True
    what = pick(rng, ("rank", "alpha", "targets", "file", "settings", "settings", "weights",
                      "weights", "weights", "another model", "no adapter"))  # fmt: skip
    fields = json.loads(settings.read_text())
    if what == "rank":
        fields["r"] = pick(rng, (0, -1, 1, 3, 2.0, 1.5, "2", None, [2], 10**30))
        certain = fields["r"] != 2.0
        settings.write_text(json.dumps(fields))
    elif what == "alpha":
        fields["lora_alpha"] = pick(rng, (0, -1, "16", None, [], 10**400, float("nan")))
        settings.write_text(json.dumps(fields))
    elif what == "targets":
        fields["target_modules"] = pick(
            rng, ("all-linear", [], ["q_proj"], ["qq_proj"], [1], {}, None, ["q_proj"] * 2, [None])
        )
        settings.write_text(json.dumps(fields))
    elif what == "file":
        what = spoil(rng, pick(rng, (settings, tensors)))
    elif what == "settings":
        settings.write_bytes(mutated_json(rng, settings.read_bytes()))
        certain = False
    elif what == "weights":
        what, certain = _changed_tensors(rng, tensors)
        certain = certain and what != "another dtype"
    elif what == "another model":
        flags["--checkpoint"] = "other"
    else:
        flags["--adapter"] = pick(rng, ("none", "model", "text.txt", "pairs", "/dev/null", ""))
    return case_of(f"adapter: {what}", program, flags, ("--adapter",), certain=certain)


def _read(path: pathlib.Path) -> tuple[dict[str, Any], bytes]:
    """Returns the header of a file of tensors and the bytes after it."""
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def _write(path: pathlib.Path, header: Any, body: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def _changed_tensors(rng: Random, path: pathlib.Path) -> tuple[str, bool]:
    """Changes a file of tensors. Returns what was changed, and whether it is no longer valid."""
    header, body = _read(path)
    name = pick(rng, sorted(header.keys() - {"__metadata__"}))
    one = header[name]
    start, end = one["data_offsets"]
    what, certain = pick(rng, _OF_TENSORS), True
    if what == "another shape":
        one["shape"] = pick(rng, ([*one["shape"][::-1], 1], [-1], [], [0], [2**62, 4], [1.5], "a"))
    elif what == "another dtype":
        one["dtype"] = pick(rng, ("I32", "U32", "I64", "F16", "BOOL", "F99", None, 3))
    elif what == "other places":
        one["data_offsets"] = pick(
            rng, ([0, 0], [end, start], [start, end + 4], [-4, 0], [2**70, 1])
        )
    elif what == "a missing tensor":
        # Its bytes go too, for a file without holes.
        del header[name]
        body = body[:start] + body[end:]
        for other in header.values():
            if "data_offsets" in other and other["data_offsets"][0] >= end:
                other["data_offsets"] = [i - end + start for i in other["data_offsets"]]
    elif what == "a renamed tensor":
        header[f"{name}_"] = header.pop(name)
    elif what == "a tensor more":
        header["model.more.weight"] = {"dtype": "F32", "shape": [1],
                                       "data_offsets": [len(body), len(body) + 4]}  # fmt: skip
        body += bytes(4)
    elif what == "extra bytes":
        body += bytes(int(rng.integers(1, 64)))
    elif what == "cut":
        body = body[: int(rng.integers(len(body)))]
    elif what in ("NaN", "infinity"):
        array = np.frombuffer(body, "<f4").copy()
        array[int(rng.integers(len(array)))] = np.nan if what == "NaN" else -np.inf
        body = array.tobytes()
    elif what == "a changed header":
        header, certain = mutated_tree(rng, header), False
    _write(path, header, body)
    if what == "changed bytes":
        path.write_bytes(mutated(rng, path.read_bytes()))
        certain = False
    elif what == "another header size":
        data = path.read_bytes()
        size = pick(rng, (0, 1, len(data), 2**40, 2**64 - 1, int(rng.integers(len(data)))))
        path.write_bytes(struct.pack("<Q", size) + data[8:])
    return what, certain


_OF_TENSORS = (
    *("another shape", "another dtype", "other places", "a missing tensor", "a renamed tensor"),
    *("a tensor more", "extra bytes", "cut", "NaN", "infinity", "a changed header"),
    *("a changed header", "changed bytes", "changed bytes", "another header size"),
)

DRAWS: tuple[Callable[[Random, pathlib.Path], Case], ...] = (
    *(weights, weights, config, config, index, no_checkpoint),
)
