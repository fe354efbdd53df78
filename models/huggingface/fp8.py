"""Weights in FP8 with a scale for each block, as DeepSeek-V3 and Qwen 3 have them."""

import json
import math
import pathlib
import struct

import jax.numpy as jnp
import numpy as np


def read_e4m3(path: pathlib.Path, name: str) -> np.ndarray:
    """Returns a tensor of dtype `float8_e4m3fn` from a file of safetensors.

    The package `safetensors` does not give such a tensor to NumPy. A file begins with the length of
    a JSON object, 8 bytes, which has the place of each tensor in the bytes after it.

    Args:
      path: a file whose header has been checked.
      name: the tensor.
    """
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        entry = json.loads(file.read(length))[name]
        file.seek(8 + length + entry["data_offsets"][0])
        data = file.read(math.prod(entry["shape"]))
    return np.frombuffer(data, jnp.float8_e4m3fn).reshape(entry["shape"])


def decode_blocks(array: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Returns the numbers of a weight in FP8, each times the scale of its block, in float32.

    Args:
      array: [n, d] in FP8.
      scales: [ceil(n / rows), ceil(d / columns)].
      block: rows and columns of a block.

    Raises:
      ValueError: scales of another shape.
    """
    expected = tuple(-(-size // part) for size, part in zip(array.shape, block, strict=False))
    if array.ndim != 2 or scales.shape != expected:
        raise ValueError(
            f"has the shape {list(scales.shape)}, but a weight {list(array.shape)} in blocks of"
            f" {list(block)} requires {list(expected)}."
        )
    for axis, part in enumerate(block):
        scales = np.repeat(scales.astype(np.float32), part, axis)
    return array.astype(np.float32) * scales[: array.shape[0], : array.shape[1]]
