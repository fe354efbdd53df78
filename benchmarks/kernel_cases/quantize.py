"""Arguments of `quantize`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from actjax import Quantized
from actjax.formats.code import QuantizeInputs
from actjax.formats.noise import seed_of
from benchmarks.kernel_cases.case import BALANCED, TOKENS, Case, balanced_cases, channels_of, normal


def _make(
    key: jax.Array, tokens: int, features: int, dtype: Any, outliers: int, codec: Quantized
) -> tuple[Any, ...]:
    seed = seed_of(jax.random.fold_in(key, 1)) if codec.needs_key else None
    order = jax.random.permutation(jax.random.fold_in(key, 2), features)
    channels = order[:outliers].astype(jnp.int32) if outliers else None
    balance = channels_of(jax.random.fold_in(key, 5), features, codec)
    return (QuantizeInputs(normal(key, (tokens, features), dtype), seed, channels, *balance),)


def _case(
    name: str,
    tokens: int,
    features: int,
    bits: int,
    *,
    dtype: Any = jnp.bfloat16,
    outliers: int = 0,
    small: bool = False,
    **changes: Any,
) -> Case:
    codec = Quantized(bits, **changes)
    make = functools.partial(
        _make, tokens=tokens, features=features, dtype=dtype, outliers=outliers, codec=codec
    )
    return Case(name, make, {"format": codec.format}, small)


CASES = (
    _case("whole groups", 9, 256, 4, small=True),
    _case("groups left over, dither", 5, 341, 2, rounding="dither", dtype=jnp.float32, small=True),
    _case("outliers, 8 bits", 6, 300, 8, rounding="stochastic", outliers=5, small=True),
    # In float32: numbers of bfloat16 may lie exactly between two of eight levels.
    _case("outliers, 3 bits", 7, 200, 3, outliers=2, dtype=jnp.float32, small=True),
    _case("normal levels", 4, 192, 2, levels="normal", group=64, small=True),
    _case("balanced, rotated, normal levels, outliers", 9, 576, 4, outliers=3, levels="normal",
          small=True, **BALANCED),
    _case("balanced, rotated, normal levels, odd last group", 9, 213, 4, levels="normal",
          small=True, **BALANCED),
    _case("balanced, rotated, normal levels, 3 bits", 5, 341, 3, levels="normal", small=True,
          dtype=jnp.float32, **BALANCED),
    _case("balanced, rotated, 5 bits", 6, 213, 5, small=True, dtype=jnp.float32, **BALANCED),
    _case("balanced, rotated, 6 bits", 5, 192, 6, group=64, small=True, **BALANCED),
    *balanced_cases(_case),
    *(
        _case(
            f"llama_1b block input, {bits} bits, {rounding}", TOKENS, 2048, bits, rounding=rounding
        )
        for bits in (1, 2, 4, 8)
        for rounding in ("nearest", "dither")
    ),
    _case("llama_1b block input, 4 bits, stochastic", TOKENS, 2048, 4, rounding="stochastic"),
    _case("llama_1b block input, 2 bits, normal levels", TOKENS, 2048, 2, levels="normal"),
    _case("llama_1b block input, float32, 4 bits", TOKENS, 2048, 4, dtype=jnp.float32),
    _case(
        "llama_7b block input, 2 bits, normal levels, balanced, rotated, 0.5% whole", TOKENS, 4096,
        2, levels="normal", outliers=20, **BALANCED,
    ),
    _case("smollm2_135m block input, 5 bits, groups of 64", TOKENS, 576, 5, group=64, **BALANCED),
    _case("llama_350m gate, 4 bits", TOKENS, 2736, 4),
    _case("llama_1b gate, 4 bits", TOKENS, 5461, 4),
    _case("llama_1b gate, 4 bits, dither", TOKENS, 5461, 4, rounding="dither"),
    _case("llama_7b gate, 4 bits", TOKENS, 11008, 4),
    _case("llama3_8b gate, 4 bits", TOKENS, 14336, 4),
    _case("qwen3_0_6b gate, 4 bits", TOKENS, 3072, 4),
)  # fmt: skip
