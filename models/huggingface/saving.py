"""Writing a decoder as a folder that `transformers` reads."""

import json
import math
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from models import digests
from models.config import ModelConfig
from models.decoder import Decoder
from models.folders import atomic_folder
from models.huggingface.config import fields_of
from models.huggingface.files import INDEX, PICKLES, SINGLE
from models.huggingface.table import Row, table
from models.padding import published_shape, without_padding
from models.parameters import fetch, parameter_of

_SHARD_BYTES = 5_000_000_000


def save(
    model: Decoder,
    folder: pathlib.Path | str,
    *,
    like: pathlib.Path | str | None = None,
    max_shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Writes a model as a folder that `transformers` reads.

    The folder appears once everything in it is written. Files of weights have digests (see
    `models.digests`). If several processes share the arrays, all
    of them call this function together: they fetch one tensor after the other, and the first
    process writes.

    Args:
      model: a decoder of plain arrays.
      folder: the folder to create.
      like: folder of the checkpoint that the model comes from: its `config.json`, tokenizer and
        all other files except weights are copied.
      max_shard_bytes: largest size of a file of weights. Several files get an index.

    Raises:
      FileExistsError: the folder exists and is not empty.
      TypeError: a parameter is not an array: merge adapters first.
      ValueError: a number in the padding of a weight is not zero.
    """
    folder = pathlib.Path(folder)
    if jax.process_index():
        for shard in _shards(model, max_shard_bytes):
            for row, layer in shard.values():
                _tensor(model, row, layer)
        return
    with atomic_folder(folder) as scratch:
        config = _copy_beside(model, scratch, None if like is None else pathlib.Path(like))
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _write_tensors(model, scratch, max_shard_bytes)


def _copy_beside(model: Decoder, scratch: pathlib.Path, like: pathlib.Path | None) -> Any:
    """Copies the files of a checkpoint other than its weights, and returns its configuration."""
    dtype = str(model.embedding.get_value().dtype)
    if like is None:
        return fields_of(model.config, dtype)
    for path in sorted(like.iterdir()):
        weights = path.suffix in (".safetensors", ".gguf", *PICKLES)
        weights = weights or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name not in ("config.json", digests.FILE):
            shutil.copyfile(path, scratch / path.name)
    config = json.loads((like / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)  # These weights are not quantized.
    name = "dtype" if "dtype" in config else "torch_dtype"
    return {**config, name: dtype, "tie_word_embeddings": model.config.tie_embeddings}


def _write_tensors(model: Decoder, scratch: pathlib.Path, max_shard_bytes: int) -> None:
    shards = list(_shards(model, max_shard_bytes))
    weight_map, total = {}, 0
    for number, shard in enumerate(shards, 1):
        several = f"model-{number:05}-of-{len(shards):05}.safetensors"
        file = SINGLE if len(shards) == 1 else several
        tensors = {name: _tensor(model, row, layer) for name, (row, layer) in shard.items()}
        total += sum(x.nbytes for x in tensors.values())
        digests.save_tensors(tensors, scratch / file)
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (scratch / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(model: Decoder, max_bytes: int) -> Iterator[Mapping[str, tuple[Row, int]]]:
    """Yields the tensors of each file: by name, their row and layer."""
    shard: dict[str, tuple[Row, int]] = {}
    size = 0
    for row, layer in _in_order(model.config):
        value = parameter_of(model, row.parameter).get_value()
        if not hasattr(value, "dtype") or not hasattr(value, "nbytes"):
            raise TypeError(
                f"`{row.parameter}` must be an array to be saved, got {value!r}: merge adapters and"
                " decode quantized weights first."
            )
        shape = published_shape(row.parameter, value.shape, model.config)
        nbytes = math.prod(shape[1:] if row.stacked else shape) * value.dtype.itemsize
        if shard and size + nbytes > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[row.tensor.format(layer)] = row, layer
        size += nbytes
    yield shard


def _in_order(config: ModelConfig) -> Iterator[tuple[Row, int]]:
    """Yields the row and layer of every tensor: the embeddings, layer after layer, the rest."""
    rows = table(config)
    first = next(i for i, row in enumerate(rows) if row.stacked)
    last = len(rows) - next(i for i, row in enumerate(reversed(rows)) if row.stacked)
    yield from ((row, 0) for row in rows[:first])
    for layer in range(config.num_layers):
        yield from ((row, layer) for row in rows[first:last])
    yield from ((row, 0) for row in rows[last:])


def _tensor(model: Decoder, row: Row, layer: int) -> np.ndarray:
    value = parameter_of(model, row.parameter).get_value()
    array = fetch(value[layer] if row.stacked else value)
    array = without_padding(row.parameter, array, model.config)
    return np.ascontiguousarray(array.T if row.transposed else array)
