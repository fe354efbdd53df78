"""Arguments of `scaled_segment_sum`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernel_cases.case import TOKENS, Case, normal


def _make(key: jax.Array, tokens: int, width: int, segments: int, dtype: Any) -> tuple[Any, ...]:
    keys = jax.random.split(key, 3)
    index = jax.random.randint(keys[0], (tokens,), 0, segments)
    index = index.astype(jnp.uint8 if segments <= 256 else jnp.uint16)
    return index, normal(keys[1], (tokens,), dtype), normal(keys[2], (tokens, width), dtype)


def _case(
    name: str,
    tokens: int,
    width: int,
    segments: int,
    dtype: Any = jnp.bfloat16,
    small: bool = False,
) -> Case:
    make = functools.partial(_make, tokens=tokens, width=width, segments=segments, dtype=dtype)
    return Case(name, make, {"segments": segments}, small)


CASES = (
    _case("five segments", 150, 48, 5, small=True),
    _case("ragged", 70, 33, 20, jnp.float32, True),
    _case("llama_60m, 16 segments", TOKENS, 512, 16),
    _case("llama_350m, 16 segments", TOKENS, 1024, 16),
    _case("llama_1b, 16 segments", TOKENS, 2048, 16),
    _case("llama_1b, 128 segments", TOKENS, 2048, 128),
    _case("llama_1b, 16 segments, float32", TOKENS, 2048, 16, jnp.float32),
    _case("llama_1b, 128 segments, float32", TOKENS, 2048, 128, jnp.float32),
    _case("llama_1b, 512 segments", TOKENS, 2048, 512),
    _case("llama_7b, 256 segments of 131,072", 131072, 4096, 256),
)
