"""Arguments of `dequantize`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from actjax import Quantized
from benchmarks.kernel_cases.case import BALANCED, TOKENS, Case, balanced_cases, code


def _make(key: jax.Array, tokens: int, features: int, codec: Quantized, dtype: Any) -> tuple[Any]:
    return (code(key, (tokens, features), codec, dtype),)


def _case(
    name: str,
    tokens: int,
    features: int,
    bits: int,
    dtype: Any = jnp.bfloat16,
    small: bool = False,
    **changes: Any,
) -> Case:
    codec = Quantized(bits, **changes)
    make = functools.partial(_make, tokens=tokens, features=features, codec=codec, dtype=dtype)
    return Case(name, make, small=small)


CASES = (
    _case("whole groups", 9, 256, 4, small=True),
    _case("groups left over, dither", 5, 341, 2, jnp.float32, small=True, rounding="dither"),
    _case("3 bits, normal levels", 4, 192, 3, small=True, levels="normal", group=64),
    _case("balanced, rotated, normal levels", 9, 576, 4, small=True, levels="normal", **BALANCED),
    _case("balanced, rotated, 5 bits", 6, 213, 5, jnp.float32, True, **BALANCED),
    *balanced_cases(_case),
    *(
        _case(
            f"llama_1b block input, {bits} bits, {rounding}", TOKENS, 2048, bits, rounding=rounding
        )
        for bits in (1, 2, 4, 8)
        for rounding in ("nearest", "dither")
    ),
    _case("llama_1b block input, 2 bits, normal levels", TOKENS, 2048, 2, levels="normal"),
    _case("llama_1b gate, 4 bits", TOKENS, 5461, 4),
    _case("llama_7b gate, 4 bits", TOKENS, 11008, 4),
)  # fmt: skip
