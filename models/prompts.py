"""Token ids as they enter a compiled program: checked, padded, and of few different lengths."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import actjax
from models.config import ModelConfig
from models.decoder import Decoder

Ids = Sequence[int]

_SMALLEST = 16
"""Fewest positions that a program is compiled for."""


def rounded_length(length: int, limit: int | None = None) -> int:
    """Returns the next of 16, 24, 32, 48, 64, 96, ..., or `limit` if that is less."""
    size = _SMALLEST
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size if limit is None else min(size, limit)


def padded(rows: Sequence[Ids], width: int, fill: int = 0) -> np.ndarray:
    """Returns rows of ids as one array padded on the right, [rows, width] int32."""
    array = np.full((len(rows), width), fill, np.int32)
    for row, ids in zip(array, rows, strict=True):
        row[: len(ids)] = ids
    return array


def check_ids(name: str, ids: Ids, config: ModelConfig) -> None:
    """Raises a ValueError if there are no ids, or one is not in the vocabulary."""
    if not len(ids):
        raise ValueError(f"`{name}` is empty: give at least one token, such as a start token.")
    for index in (min(ids), max(ids)):
        if not 0 <= index < config.vocab_size:
            raise ValueError(
                f"`{name}` has the id {index}, but the vocabulary of the model has the ids 0 to"
                f" {config.vocab_size - 1}: use the tokenizer of this model."
            )


def without_dropout(model: Decoder) -> Decoder:
    """Returns the model with the dropout of its adapters turned off."""

    def is_adapter(x: Any) -> bool:
        return isinstance(x, actjax.LoRA)

    return jax.tree.map(
        lambda x: dataclasses.replace(x, key=None, dropout=0.0) if is_adapter(x) else x,
        model,
        is_leaf=is_adapter,
    )
