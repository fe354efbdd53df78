"""Checkpoints of llama2.c (Karpathy, 2023), in and out: a header and float32 arrays in one file.

The legacy format has seven integers as its header; version 1 begins with a magic number and pads
its header to 256 bytes. Both rotate neighbouring features by RoPE, where this decoder, as Hugging
Face's checkpoints, rotates the two halves of a head: rows of q and k change places.
"""

import functools
import math
import pathlib
import struct
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from models.decoder import Decoder
from models.huggingface import Convert, Put, fill, parameter_of

_MAGIC = 0x616B3432
_HEADER = struct.Struct("<7i")
_HEADER_BYTES = 256
_NORM_EPS = 1e-5


class _Entry(NamedTuple):
    """An array in a file.

    Attributes:
      parameter: path in the `Decoder`; None for what is read over.
      shape: as in the file, layers first.
      heads: of the rows, where those of a head change places; 0 where none do.
    """

    parameter: str | None
    shape: tuple[int, ...]
    heads: int = 0


def read_config(path: pathlib.Path | str) -> ModelConfig:
    """Returns the dimensions of the model in a file.

    Raises:
      ValueError: no such file.
    """
    with pathlib.Path(path).open("rb") as file:
        return _read_header(pathlib.Path(path), file.read(_HEADER_BYTES))[1]


def load(
    path: pathlib.Path | str,
    *,
    dtype: str | None = None,
    convert: Convert | None = None,
    put: Put | None = None,
) -> Decoder:
    """Returns the model in a file of the legacy format, or of version 1.

    Args:
      path: the file.
      dtype: of the weights; float32 if None.
      convert: as for `models.huggingface.load`.
      put: likewise.

    Raises:
      FileNotFoundError: it is not there.
      ValueError: no such file, or one that is cut off.
    """
    path = pathlib.Path(path)
    data = path.read_bytes()
    version, config = _read_header(path, data)
    entries = _entries(config, version)
    numbers = sum(math.prod(entry.shape) for entry in entries)
    begin = _HEADER.size if version == 0 else _HEADER_BYTES
    if len(data) != begin + 4 * numbers:
        raise ValueError(
            f"{path} has {len(data):,} bytes, but its header makes it {begin + 4 * numbers:,}: it"
            " is cut off, or no checkpoint of llama2.c."
        )
    model = jax.eval_shape(functools.partial(Decoder, config), jax.random.key(0))
    for entry in entries:
        size = math.prod(entry.shape)
        array = np.frombuffer(data, "<f4", size, begin).reshape(entry.shape)
        begin += 4 * size
        if entry.parameter is not None:
            if entry.heads:
                array = _halves(array, entry.heads)
            if _is_matrix(entry):
                array = np.swapaxes(array, -1, -2)
            array = array if dtype is None else array.astype(jnp.dtype(dtype))
            arrays = iter(array) if entry.parameter.startswith("layers.") else array
            fill(model, entry.parameter, arrays, convert, put)
    return model


def save(model: Decoder, path: pathlib.Path | str) -> None:
    """Writes a model in the legacy format, in float32.

    Raises:
      FileExistsError: there is such a file.
      ValueError: a model that the format has no place for.
    """
    config = model.config
    plain = ModelConfig(
        config.vocab_size,
        config.hidden_size,
        config.ffn_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        max_seq_len=config.max_seq_len,
        norm_eps=_NORM_EPS,
        tie_embeddings=config.tie_embeddings,
        attention=config.attention,
        init_std=config.init_std,
    )
    if config != plain:
        raise ValueError(
            f"llama2.c's format holds a plain Llama 2 of norm_eps {_NORM_EPS} alone: {config}."
        )
    sign = 1 if config.tie_embeddings else -1
    with open(path, "xb") as file:
        file.write(
            _HEADER.pack(
                config.hidden_size,
                config.ffn_size,
                config.num_layers,
                config.num_heads,
                config.num_kv_heads,
                sign * config.vocab_size,
                config.max_seq_len,
            )
        )
        for entry in _entries(config, 0):
            if entry.parameter is None:
                file.write(bytes(4 * math.prod(entry.shape)))
                continue
            array = np.asarray(parameter_of(model, entry.parameter).get_value(), "<f4")
            if _is_matrix(entry):
                array = np.swapaxes(array, -1, -2)
            if entry.heads:
                array = _pairs(array, entry.heads)
            file.write(np.ascontiguousarray(array).tobytes())


def _read_header(path: pathlib.Path, data: bytes) -> tuple[int, ModelConfig]:
    """Returns the version, 0 for the legacy format, and the dimensions."""
    version, begin = 0, 0
    if len(data) >= _HEADER_BYTES and struct.unpack_from("<I", data)[0] == _MAGIC:
        version, begin = struct.unpack_from("<i", data, 4)[0], 8
        if version != 1:
            raise ValueError(f"{path} is of version {version} of llama2.c: 0 and 1 are supported.")
    if len(data) < begin + _HEADER.size:
        raise ValueError(f"{path} has {len(data)} bytes: no checkpoint of llama2.c.")
    d, f, layers, heads, kv_heads, vocabulary, length = _HEADER.unpack_from(data, begin)
    tied = vocabulary > 0
    if version == 1:
        tied = bool(data[begin + _HEADER.size])
    try:
        config = ModelConfig(
            abs(vocabulary),
            d,
            f,
            layers,
            heads,
            kv_heads,
            max_seq_len=length,
            norm_eps=_NORM_EPS,
            tie_embeddings=tied,
        )
    except ValueError as error:
        raise ValueError(f"{path} is no checkpoint of llama2.c: {error}") from error
    return version, config


def _entries(config: ModelConfig, version: int) -> list[_Entry]:
    """Returns the arrays of a file in their order."""
    d, f, count = config.hidden_size, config.ffn_size, config.num_layers
    queries, keys = config.num_heads, config.num_kv_heads
    size = config.head_size
    embedding = _Entry("embedding", (config.vocab_size, d))
    attention_norm = _Entry("layers.attention_norm", (count, d))
    mlp_norm, norm = _Entry("layers.mlp_norm", (count, d)), _Entry("norm", (d,))
    attention = [
        _Entry("layers.attention.q", (count, queries * size, d), queries),
        _Entry("layers.attention.k", (count, keys * size, d), keys),
        _Entry("layers.attention.v", (count, keys * size, d)),
        _Entry("layers.attention.o", (count, d, queries * size)),
    ]
    mlp = [
        _Entry("layers.mlp.gate", (count, f, d)),
        _Entry("layers.mlp.down", (count, d, f)),
        _Entry("layers.mlp.up", (count, f, d)),
    ]
    output = [] if config.tie_embeddings else [_Entry("output", (config.vocab_size, d))]
    if version == 1:
        return [attention_norm, mlp_norm, norm, embedding, *attention, *mlp, *output]
    # Cosines and sines of RoPE, which nobody reads any more.
    tables = [_Entry(None, (config.max_seq_len, size // 2))] * 2
    return [embedding, attention_norm, *attention, mlp_norm, *mlp, norm, *tables, *output]


def _is_matrix(entry: _Entry) -> bool:
    """Returns whether an array is [out, in], to be transposed; the embedding is none."""
    return "norm" not in str(entry.parameter) and entry.parameter != "embedding"


def _halves(array: np.ndarray, heads: int) -> np.ndarray:
    """Returns rows [L, heads * D, d] of neighbouring pairs as those of two halves."""
    apart = array.reshape(len(array), heads, -1, 2, array.shape[-1])
    return apart.swapaxes(2, 3).reshape(array.shape)


def _pairs(array: np.ndarray, heads: int) -> np.ndarray:
    """Inverse of `_halves`."""
    apart = array.reshape(len(array), heads, 2, -1, array.shape[-1])
    return apart.swapaxes(2, 3).reshape(array.shape)
