"""The plans that `train.plan --budget` chooses among, in stages of decreasing quality."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from models import ModelConfig
from train.settings.config import PretrainConfig
from train.settings.options import used_options

Variant = tuple[str, dict[str, Any]]
"""A method, and the settings that the plan gives it."""

METHODS = ("exact", "remat", "gact", "lean", "lean_remat", "lean_subspace")
"""Methods that plans use."""
OPTIONS = ("codec", "average_bits", "rank", "offload")
"""Fields of the options that plans set; they also set `moment_dtype` and `in_backward`."""
_SHARES = (4, 8, 16, 32)


def stages(
    train: PretrainConfig, model: ModelConfig, methods: Iterable[str] = METHODS
) -> Iterator[tuple[str, list[PretrainConfig]]]:
    """Yields the title and the plans of each stage, the best quality first.

    Args:
      train: settings that all plans share.
      model: dimensions of the model.
      methods: methods to use.
    """
    in_backward = train.compute_dtype != "float16"  # Its steps may be skipped.
    levels = [
        ("full-rank, four bits or more", _full_rank((16, 8, 4))),
        ("full-rank, fewer bits", _full_rank((3, 2))),
        *(
            (f"in a subspace of rank d/{n}, four bits or more", _subspace(model, n, (8, 4)))
            for n in _SHARES
        ),
        *((f"in a subspace of rank d/{n}, two bits", _subspace(model, n, (2,))) for n in _SHARES),
    ]
    for title, choices in levels:
        configs = [
            _with(train, name, **changes)
            for name, changes in choices
            if name in methods and (in_backward or not changes.get("in_backward"))
        ]
        if configs:
            yield title, list(dict.fromkeys(configs))


def _full_rank(bits: Iterable[int]) -> Iterator[Variant]:
    """Yields every storage choice with every way to update the weights."""
    storage: list[Variant] = []
    for n in bits:
        if n == 16:
            storage += [("exact", {}), ("lean", {"codec": ("Exact()",)}), ("remat", {})]
            storage += [("remat", {"offload": True})]
            continue
        code = {"codec": (f"Quantized({n})",)}
        mlp = {"codec": ("Exact()", f"gate=Quantized({n})", f"up=Quantized({n})")}
        storage += [("lean", mlp), ("lean", code), ("gact", code), ("lean_remat", code)]
        storage += [("lean", {**code, "offload": True}), ("lean_remat", {**code, "offload": True})]
    for name, changes in storage:
        if name.startswith("lean"):
            after = {**changes, "in_backward": False}
            yield name, {**after, "moment_dtype": "float32"}
            yield name, {**after, "moment_dtype": "8bit"}
            yield name, changes
        else:
            yield name, changes
            yield name, {**changes, "moment_dtype": "8bit"}
            yield name, {**changes, "moment_dtype": "8bit", "in_backward": True}


def _subspace(model: ModelConfig, share: int, bits: Iterable[int]) -> Iterator[Variant]:
    for n in bits:
        changes = {"codec": (f"Quantized({n})",), "rank": max(1, model.hidden_size // share)}
        yield "lean_subspace", changes
        yield "lean_subspace", {**changes, "offload": True}


def _with(train: PretrainConfig, method: str, **changes: Any) -> PretrainConfig:
    of_optimizer = {k: changes.pop(k) for k in ("moment_dtype",) if k in changes}
    of_run = {k: changes.pop(k) for k in ("in_backward",) if k in changes}
    return dataclasses.replace(
        train,
        method=method,
        options=dataclasses.replace(used_options(method, train.options), **changes),
        optimizer=dataclasses.replace(train.optimizer, **of_optimizer),
        **of_run,
    )
