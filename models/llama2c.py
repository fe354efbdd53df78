"""Checkpoints of llama2.c (Karpathy, 2023), read and written: a header and float32 arrays.

The header of the legacy format is seven integers. Version 1 begins with a magic number and pads its
header to 256 bytes. In both, RoPE rotates neighbouring features. This decoder and Hugging Face
rotate the two halves of a head, so rows of q and k are permuted.
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
from models.parameters import Convert, Put, fill, parameter_of

_MAGIC = 0x616B3432
_HEADER = struct.Struct("<7i")
_HEADER_BYTES = 256
_NORM_EPS = 1e-5


class _Entry(NamedTuple):
    """An array in a file.

    Attributes:
      parameter: path in the `Decoder`; None for an array that is skipped.
      shape: shape in the file, layers first.
      heads: number of heads whose rows are permuted; 0 if no rows are.
    """

    parameter: str | None
    shape: tuple[int, ...]
    heads: int = 0


def read_config(path: pathlib.Path | str) -> ModelConfig:
    """Returns the dimensions of the model in a file.

    Raises:
      ValueError: not a checkpoint of llama2.c.
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
      dtype: dtype of the weights; float32 if None.
      convert: as for `models.huggingface.load`.
      put: as for `models.huggingface.load`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: not a checkpoint of llama2.c, or a truncated file.
    """
    path = pathlib.Path(path)
    data = path.read_bytes()
    version, config = _read_header(path, data)
    entries = _entries(config, version)
    numbers = sum(math.prod(entry.shape) for entry in entries)
    begin = _HEADER.size if version == 0 else _HEADER_BYTES
    if len(data) != begin + 4 * numbers:
        raise ValueError(
            f"{path} has {len(data):,} bytes, but its header requires {begin + 4 * numbers:,}:"
            " it is truncated, or not a checkpoint of llama2.c."
        )
    model = jax.eval_shape(functools.partial(Decoder, config), jax.random.key(0))
    for entry in entries:
        size = math.prod(entry.shape)
        array = np.frombuffer(data, "<f4", size, begin).reshape(entry.shape)
        begin += 4 * size
        if entry.parameter is not None:
            if not np.isfinite(array).all():
                raise ValueError(
                    f"{path}: `{entry.parameter}` has infinities or NaN: its training diverged, or"
                    " the file is damaged."
                )
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
      FileExistsError: the file exists.
      ValueError: a model that the format cannot describe.
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
            f"the format of llama2.c describes only a Llama 2 with norm_eps={_NORM_EPS}, got"
            f" {config}."
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
            raise ValueError(f"{path} has version {version} of llama2.c: supported are 0 and 1.")
    if len(data) < begin + _HEADER.size:
        raise ValueError(f"{path} has {len(data)} bytes: not a checkpoint of llama2.c.")
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
        raise ValueError(f"{path} is not a checkpoint of llama2.c: {error}") from error
    return version, config


def _entries(config: ModelConfig, version: int) -> list[_Entry]:
    """Returns the arrays of a file, in order."""
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
    # Cosines and sines of RoPE, which llama2.c no longer reads.
    tables = [_Entry(None, (config.max_seq_len, size // 2))] * 2
    return [embedding, attention_norm, *attention, mlp_norm, *mlp, norm, *tables, *output]


def _is_matrix(entry: _Entry) -> bool:
    """Returns whether an array is a linear weight, [out, in], to be transposed."""
    return "norm" not in str(entry.parameter) and entry.parameter != "embedding"


def _halves(array: np.ndarray, heads: int) -> np.ndarray:
    """Permutes rows, [L, heads * D, d], from neighbouring pairs to two halves."""
    apart = array.reshape(len(array), heads, -1, 2, array.shape[-1])
    return apart.swapaxes(2, 3).reshape(array.shape)


def _pairs(array: np.ndarray, heads: int) -> np.ndarray:
    """Inverse of `_halves`."""
    apart = array.reshape(len(array), heads, 2, -1, array.shape[-1])
    return apart.swapaxes(2, 3).reshape(array.shape)
