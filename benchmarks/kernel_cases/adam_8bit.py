"""Arguments of `adam_8bit`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from actjax.formats.blockwise import blockwise_zeros
from benchmarks.kernel_cases.case import Case, normal


def _make(key: jax.Array, tokens: int, features: int, dtype: Any) -> tuple[Any, ...]:
    keys, shape = jax.random.split(key, 3), (tokens, features)
    mu = blockwise_zeros(shape, jnp.float32, unsigned=False)
    nu = blockwise_zeros(shape, jnp.float32, unsigned=True)
    return (
        normal(keys[0], shape, dtype),
        mu.encode(normal(keys[1], shape, jnp.float32)),
        nu.encode(normal(keys[2], shape, jnp.float32) ** 2),
        jnp.asarray([0.19, 0.002], jnp.float32),
    )


def _case(
    name: str, rows: int, features: int, dtype: Any = jnp.bfloat16, small: bool = False
) -> Case:
    options = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "eps_root": 0.0}
    return Case(
        name, functools.partial(_make, tokens=rows, features=features, dtype=dtype), options, small
    )


CASES = (
    _case("whole blocks", 6, 512, small=True),
    _case("a block left over", 6, 300, jnp.float32, True),
    _case("llama_60m query", 512, 512),
    _case("llama_350m gate", 1024, 2736),
    _case("llama_1b query", 2048, 2048),
    _case("llama_1b gate", 2048, 5461),
    _case("llama_1b down", 5461, 2048),
    _case("llama_7b gate", 4096, 11008),
    _case("llama_1b embedding, float32 gradient", 32000, 2048, jnp.float32),
)
