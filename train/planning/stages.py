"""The plans that `train.plan --budget` chooses among, in stages of decreasing quality."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from models import ModelConfig
from train.settings.config import PretrainConfig
from train.settings.options import used_options

Choice = tuple[str, dict[str, Any]]
"""A method, and the settings that the plan gives it."""

METHODS = ("exact", "remat", "quantized", "gact", "compressed_remat", "lean", "lean_remat",
           "lean_subspace")  # fmt: skip
"""Methods that plans use."""
_LEAN = {"quantized": "lean", "compressed_remat": "lean_remat"}
"""Methods that store the same and update the weights in the backward pass, with 8-bit states."""
OPTIONS = ("bits", "average_bits", "rank", "sites", "offload")
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
        configs = [_with(train, name, **changes) for name, changes in choices if name in methods]
        if configs:
            yield title, list(dict.fromkeys(configs))


def _full_rank(bits: Iterable[int]) -> Iterator[Choice]:
    """Yields every storage choice with every way to update the weights."""
    storage: list[Choice] = []
    for n in bits:
        if n == 16:
            storage += [("exact", {}), ("quantized", {"bits": 16}), ("remat", {})]
            storage += [("remat", {"offload": True})]
            continue
        storage += [("quantized", {"bits": n, "sites": ("gate", "up")}), ("quantized", {"bits": n})]
        storage += [("gact", {"bits": n}), ("compressed_remat", {"bits": n})]
        storage += [("quantized", {"bits": n, "offload": True})]
        storage += [("compressed_remat", {"bits": n, "offload": True})]
    for name, changes in storage:
        yield name, changes
        yield name, {**changes, "moment_dtype": "8bit"}
        if name in _LEAN:
            yield _LEAN[name], changes
        else:
            yield name, {**changes, "moment_dtype": "8bit", "in_backward": True}


def _subspace(model: ModelConfig, share: int, bits: Iterable[int]) -> Iterator[Choice]:
    for n in bits:
        changes = {"bits": n, "rank": max(1, model.hidden_size // share)}
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
