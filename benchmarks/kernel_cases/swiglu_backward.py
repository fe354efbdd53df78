"""Arguments of `swiglu_backward`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from actjax import Quantized
from benchmarks.kernel_cases.case import BALANCED, TOKENS, Case, code, normal


def _make(
    key: jax.Array, tokens: int, features: int, gate: Quantized, up: Quantized, dtype: Any
) -> tuple[Any, ...]:
    keys, shape = jax.random.split(key, 3), (tokens, features)
    return (
        code(keys[0], shape, gate, dtype),
        code(keys[1], shape, up, dtype),
        normal(keys[2], shape, dtype),
    )


def _case(
    name: str,
    tokens: int,
    features: int,
    gate: int,
    up: int,
    dtype: Any = jnp.bfloat16,
    small: bool = False,
    **changes: Any,
) -> Case:
    codecs = {"gate": Quantized(gate, **changes), "up": Quantized(up, **changes)}
    make = functools.partial(_make, tokens=tokens, features=features, dtype=dtype, **codecs)
    return Case(name, make, {"with_value": True}, small)


CASES = (
    _case("whole groups", 9, 256, 4, 4, small=True),
    _case("two widths, groups left over", 5, 341, 4, 2, jnp.float32, True, rounding="dither"),
    _case("balanced, rotated, 4 and 6 bits", 9, 320, 4, 6, small=True, **BALANCED),
    *(
        _case(f"{name}, 4 bits, normal levels, balanced, rotated", TOKENS, features, 4, 4,
              levels="normal", **BALANCED)
        for name, features in (("llama_1b", 5461), ("llama_7b", 11008), ("llama_60m", 1376))
    ),
    *(
        _case(f"llama_1b, {bits} bits, balanced, rotated", TOKENS, 5461, bits, bits, **BALANCED)
        for bits in (5, 6)
    ),
    _case("llama_60m, 4 bits", TOKENS, 1376, 4, 4),
    _case("llama_350m, 4 bits", TOKENS, 2736, 4, 4),
    _case("llama_1b, 4 bits", TOKENS, 5461, 4, 4),
    _case("llama_1b, 4 bits, dither", TOKENS, 5461, 4, 4, rounding="dither"),
    _case("llama_1b, 4 and 2 bits", TOKENS, 5461, 4, 2),
    _case("llama_1b, 2 bits, normal levels", TOKENS, 5461, 2, 2, levels="normal"),
    _case("llama_7b, 4 bits", TOKENS, 11008, 4, 4),
    _case("llama3_8b, 4 bits", TOKENS, 14336, 4, 4),
    _case("qwen3_0_6b, 4 bits", TOKENS, 3072, 4, 4),
)  # fmt: skip
