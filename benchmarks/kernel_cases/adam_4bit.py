"""Arguments of the two programs of `adam_4bit`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from actjax.formats.four_bit import rank_one_zeros, signed_zeros
from benchmarks.kernel_cases.case import Case, normal


def _maxima_arguments(
    key: jax.Array, tokens: int, features: int, dtype: Any, group: int
) -> tuple[Any, ...]:
    keys, shape = jax.random.split(key, 3), (tokens, features)
    first, second = (normal(key, shape, jnp.float32) for key in keys[1:])
    mu, nu = (make(shape, jnp.float32, group) for make in (signed_zeros, rank_one_zeros))
    return normal(keys[0], shape, dtype), mu.encode(first), nu.encode(second**2)


def _arguments(
    key: jax.Array, tokens: int, features: int, dtype: Any, group: int
) -> tuple[Any, ...]:
    keys = jax.random.split(key, 5)
    # Scales of any size: values above them take the highest level.
    rows, columns = (tokens, 1), (1, features)
    scales = (
        0.1 + normal(key, shape, jnp.float32) ** 2
        for key, shape in zip(keys[1:], (rows, columns) * 2, strict=True)
    )
    corrections = jnp.asarray([0.19, 0.002], jnp.float32)
    return *_maxima_arguments(keys[0], tokens, features, dtype, group), *scales, corrections


def _cases(make: Any, options: dict[str, float]) -> tuple[Case, ...]:
    def case(
        name: str, rows: int, features: int, dtype: Any = jnp.bfloat16, group: int = 128,
        small: bool = False,
    ) -> Case:  # fmt: skip
        arguments = {"tokens": rows, "features": features, "dtype": dtype, "group": group}
        return Case(name, functools.partial(make, **arguments), options, small)

    return (
        case("whole groups", 6, 512, small=True),
        case("a group left over", 21, 300, jnp.float32, 64, small=True),
        case("llama_60m query", 512, 512),
        case("llama_350m gate", 1024, 2736),
        case("llama_1b query", 2048, 2048),
        case("llama_1b gate", 2048, 5461),
        case("llama_1b down", 5461, 2048),
        case("llama_7b gate", 4096, 11008),
        case("llama_1b embedding, float32 gradient", 32000, 2048, jnp.float32),
    )


MAXIMA_CASES = _cases(_maxima_arguments, {"b1": 0.9, "b2": 0.999})
CASES = _cases(_arguments, {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "eps_root": 0.0})
