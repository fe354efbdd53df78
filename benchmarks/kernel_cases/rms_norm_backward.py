"""Arguments of `rms_norm_backward`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from actjax import Quantized
from benchmarks.kernel_cases.case import BALANCED, TOKENS, Case, code, normal


def _make(
    key: jax.Array, tokens: int, features: int, codec: Quantized | None, dtype: Any
) -> tuple[Any, ...]:
    keys, shape = jax.random.split(key, 3), (tokens, features)
    return (
        normal(keys[0], shape, dtype) if codec is None else code(keys[0], shape, codec, dtype),
        normal(keys[1], (features,), dtype),
        normal(keys[2], shape, dtype),
    )


def _case(
    name: str,
    tokens: int,
    features: int,
    bits: int | None,
    dtype: Any = jnp.bfloat16,
    small: bool = False,
    **changes: Any,
) -> Case:
    codec = None if bits is None else Quantized(bits, **changes)
    make = functools.partial(_make, tokens=tokens, features=features, codec=codec, dtype=dtype)
    return Case(name, make, {"eps": 1e-6, "with_value": bits is not None}, small)


CASES = (
    _case("whole groups", 9, 256, 4, small=True),
    _case("three groups, dither", 5, 192, 2, jnp.float32, True, group=64, rounding="dither"),
    _case("exact", 7, 48, None, small=True),
    _case("balanced, rotated, 6 bits", 5, 192, 6, small=True, group=64, **BALANCED),
    *(
        _case(f"{name}, 4 bits, normal levels, balanced, rotated", TOKENS, features, 4,
              levels="normal", **BALANCED)
        for name, features in (("llama_1b", 2048), ("llama_7b", 4096))
    ),
    *(
        _case(f"llama_1b, {bits} bits, balanced, rotated", TOKENS, 2048, bits, **BALANCED)
        for bits in (5, 6)
    ),
    _case("smollm2_135m, 5 bits, groups of 64", TOKENS, 576, 5, group=64, **BALANCED),
    _case("llama_1b, exact", TOKENS, 2048, None),
    _case("llama_7b, exact", TOKENS, 4096, None),
    _case("llama_60m, 4 bits", TOKENS, 512, 4),
    _case("llama_350m, 4 bits", TOKENS, 1024, 4),
    _case("llama_1b, 4 bits", TOKENS, 2048, 4),
    _case("llama_1b, 4 bits, dither", TOKENS, 2048, 4, rounding="dither"),
    _case("llama_1b, 2 bits, normal levels", TOKENS, 2048, 2, levels="normal"),
    _case("llama_7b, 4 bits", TOKENS, 4096, 4),
    _case("llama3_3b, 4 bits", TOKENS, 3072, 4),
)  # fmt: skip
