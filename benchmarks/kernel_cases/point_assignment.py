"""Arguments of `point_assignment`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernel_cases.case import TOKENS, Case, normal


def _make(key: jax.Array, tokens: int, features: int, points: int, dtype: Any) -> tuple[Any, ...]:
    x = normal(key, (tokens, features), dtype)
    return x, jax.random.permutation(jax.random.fold_in(key, 1), x)[:points]


def _case(
    name: str,
    tokens: int,
    features: int,
    points: int,
    dtype: Any = jnp.bfloat16,
    tolerance: float = float("inf"),
    small: bool = False,
) -> Case:
    make = functools.partial(_make, tokens=tokens, features=features, points=points, dtype=dtype)
    return Case(name, make, {"tolerance": tolerance}, small)


CASES = (
    _case("five points", 40, 96, 5, small=True),
    _case("ragged, a tolerance", 33, 40, 3, jnp.float32, 0.9, True),
    _case("llama_60m, 16 points", TOKENS, 512, 16),
    _case("llama_350m, 16 points", TOKENS, 1024, 16),
    _case("llama_1b, 16 points", TOKENS, 2048, 16),
    _case("llama_1b, 128 points", TOKENS, 2048, 128),
    _case("llama_1b, 16 points, a tolerance", TOKENS, 2048, 16, tolerance=0.5),
    _case("llama_1b, 16 points, float32", TOKENS, 2048, 16, jnp.float32),
    _case("llama_1b, 128 points, float32", TOKENS, 2048, 128, jnp.float32),
    _case("llama_1b, 512 points", TOKENS, 2048, 512),
    _case("llama_7b, 256 points of 131,072", 131072, 4096, 256),
)
