"""Arguments of the kernels that read tokens: codes and backward passes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from actjax import Quantized
from actjax.formats.balance import balance_of
from actjax.formats.code import QuantizedCode, QuantizeInputs
from actjax.formats.quantize import quantize
from benchmarks.kernel_cases.case import TOKENS, Case, normal

_BALANCED = {"rotate": True, "balance": True}
"""Settings of the programs for `Quantized`, without bits and levels."""
_NORMAL = {"levels": "normal", **_BALANCED}


def _code(key: jax.Array, shape: tuple[int, ...], codec: Quantized, dtype: Any) -> QuantizedCode:
    """Returns a code of normally distributed numbers, with a mean and a spread for each channel."""
    mean, spread = _channels(jax.random.fold_in(key, 2), shape[-1], codec)
    inputs = QuantizeInputs(normal(key, shape, dtype), mean=mean, spread=spread)
    made = quantize(inputs, format=codec.format_of(shape[-1]))
    return dataclasses.replace(made, mean=mean, spread=spread)


def _channels(
    key: jax.Array, features: int, codec: Quantized
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns random means and spreads of channels, as stored; None without `codec.balance`."""
    if not codec.balance:
        return None, None
    numbers, deviation, mean = (normal(k, (16, features)) for k in jax.random.split(key, 3))
    return balance_of(numbers * jnp.exp(deviation[0]) + mean[0], codec.scale_dtype)


def _quantize_inputs(
    key: jax.Array, tokens: int, features: int, dtype: Any, codec: Quantized
) -> tuple[Any, ...]:
    mean, spread = _channels(jax.random.fold_in(key, 5), features, codec)
    return (QuantizeInputs(normal(key, (tokens, features), dtype), mean=mean, spread=spread),)


def _one_code(key: jax.Array, tokens: int, features: int, dtype: Any, codec: Quantized) -> Any:
    return (_code(key, (tokens, features), codec, dtype),)


def _norm_arguments(
    key: jax.Array, tokens: int, features: int, dtype: Any, codec: Quantized | None
) -> tuple[Any, ...]:
    keys, shape = jax.random.split(key, 4), (tokens, features)
    return (
        normal(keys[0], shape, dtype) if codec is None else _code(keys[0], shape, codec, dtype),
        normal(keys[1], (features,), dtype),
        normal(keys[2], shape, dtype),
        None if codec is None else normal(keys[3], shape, dtype),
    )


def _swiglu_arguments(
    key: jax.Array, tokens: int, features: int, dtype: Any, gate: Quantized, up: Quantized
) -> tuple[Any, ...]:
    keys, shape = jax.random.split(key, 3), (tokens, features)
    gate_code, up_code = _code(keys[0], shape, gate, dtype), _code(keys[1], shape, up, dtype)
    return gate_code, up_code, normal(keys[2], shape, dtype)


def _swiglu_inputs(
    key: jax.Array, tokens: int, features: int, dtype: Any, gate: Quantized, up: Quantized
) -> tuple[Any, ...]:
    keys = jax.random.split(key)
    return tuple(
        _quantize_inputs(k, tokens, features, dtype, codec)[0]
        for k, codec in zip(keys, (gate, up), strict=True)
    )


def _case(
    make: Callable[..., Any],
    name: str,
    sizes: tuple[int, int],
    dtype: Any = jnp.bfloat16,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> Case:
    """Returns a case; it is small if its tokens are fewer than those of a batch."""
    tokens, features = sizes
    made = functools.partial(make, tokens=tokens, features=features, dtype=dtype, **arguments)
    return Case(name, made, options or {}, tokens < 64)


def _quantize(name: str, sizes: Any, bits: int, dtype: Any = jnp.bfloat16, **settings: Any) -> Case:
    codec = Quantized(bits, **settings)
    options = {"format": codec.format_of(sizes[-1])}
    return _case(_quantize_inputs, name, sizes, dtype, options, codec=codec)


def _dequantize(
    name: str, sizes: Any, bits: int, dtype: Any = jnp.bfloat16, **settings: Any
) -> Case:
    return _case(_one_code, name, sizes, dtype, codec=Quantized(bits, **settings))


def _norm(
    name: str, sizes: Any, bits: int | None, dtype: Any = jnp.bfloat16, **settings: Any
) -> Case:
    codec = None if bits is None else Quantized(bits, **settings)
    options = {"eps": 1e-6, "with_value": bits is not None}
    return _case(_norm_arguments, name, sizes, dtype, options, codec=codec)


def _swiglu(
    name: str, sizes: Any, bits: tuple[int, int], dtype: Any = jnp.bfloat16, **settings: Any
) -> Case:
    gate, up = (Quantized(n, **settings) for n in bits)
    return _case(_swiglu_arguments, name, sizes, dtype, {"with_value": True}, gate=gate, up=up)


def _swiglu_encode(
    name: str, sizes: Any, bits: tuple[int, int], dtype: Any = jnp.bfloat16, **settings: Any
) -> Case:
    gate, up = (Quantized(n, **settings) for n in bits)
    formats = tuple(codec.format_of(sizes[-1]) for codec in (gate, up))
    options = {"formats": formats, "features": sizes[-1] - 3}
    return _case(_swiglu_inputs, name, sizes, dtype, options, gate=gate, up=up)


def _norm_inputs(*args: Any, features: int, dtype: Any, **sizes: Any) -> tuple[Any, ...]:
    inputs = _quantize_inputs(*args, features=features, dtype=dtype, **sizes)
    return *inputs, normal(jax.random.fold_in(args[0], 9), (features,), dtype)


def _norm_encode(
    name: str, sizes: Any, bits: int, dtype: Any = jnp.bfloat16, **settings: Any
) -> Case:
    codec = Quantized(bits, **settings)
    options = {"format": codec.format_of(sizes[-1]), "eps": 1e-6}
    return _case(_norm_inputs, name, sizes, dtype, options, codec=codec)


def _rope_inputs(*args: Any, head: int, **sizes: Any) -> tuple[Any, ...]:
    (inputs,) = _quantize_inputs(*args, **sizes)
    mean, spread = (None if x is None else x[None] for x in (inputs.mean, inputs.spread))
    rows = dataclasses.replace(inputs, x=inputs.x[None], mean=mean, spread=spread)
    return rows, *_tables(len(inputs.x), head)


def _rope_code(*args: Any, head: int, **sizes: Any) -> tuple[Any, ...]:
    (code,) = _one_code(*args, **sizes)
    return jax.tree.map(lambda x: x[None], code), *_tables(len(code.scale), head)


def _tables(positions: int, head: int) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines of RoPE."""
    frequencies = 10000.0 ** -(jnp.arange(0, head, 2) / head)
    angles = jnp.arange(positions)[:, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def _rope(
    name: str, sizes: Any, head: int, bits: int, dtype: Any = jnp.bfloat16, **settings: Any
) -> tuple[Case, Case]:
    """Returns a case of `rope_encode` and one of `rope_decode`."""
    codec = Quantized(bits, **settings)
    options, common = {"format": codec.format_of(sizes[-1])}, {"head": head, "codec": codec}
    return (
        _case(_rope_inputs, name, sizes, dtype, options, **common),
        _case(_rope_code, name, sizes, dtype, **common),
    )


def _by_bits(name: str, features: int, make: Callable[..., Case], *bits: int) -> list[Case]:
    """Returns cases of a large array with uniform levels."""
    return [
        make(f"{name}, {n} bits, balanced, rotated", (TOKENS, features), n, **_BALANCED)
        for n in bits
    ]


_GATES = {"llama_1b": 5504, "llama_7b": 11008, "llama3_8b": 14336, "llama_60m": 1376}


def _of_programs(make: Callable[..., Case]) -> list[Case]:
    """Returns cases of the codes that the programs use, for arrays of real models."""
    arrays = {
        "llama_1b block input": 2048,
        "llama_1b gate": 5504,
        "llama_7b gate": 11008,
        "llama3_8b gate": 14336,
        "smollm2_135m block input": 576,
        "smollm2_135m key": 192,
    }
    suffix = "4 bits, normal levels, balanced, rotated"
    return [
        *(
            make(f"{name}, {suffix}", (TOKENS, width), 4, **_NORMAL)
            for name, width in arrays.items()
        ),
        *_by_bits("llama_1b block input", 2048, make, 4, 5, 6),
        *_by_bits("llama_1b gate", 5504, make, 4, 5, 6),
    ]


QUANTIZE = (
    _quantize("balanced, rotated, normal levels, odd last group", (9, 213), 4, **_NORMAL),
    _quantize("balanced, rotated, normal levels, 3 bits", (5, 341), 3, jnp.float32, **_NORMAL),
    _quantize("balanced, rotated, 5 bits", (6, 213), 5, jnp.float32, **_BALANCED),
    _quantize("balanced, rotated, 6 bits, float32 scales", (5, 192), 6, group=64,
              scale_dtype="float32", **_BALANCED),
    *_of_programs(_quantize),
    _quantize("smollm2_135m block input, 5 bits, groups of 64", (TOKENS, 576), 5, group=64,
              **_BALANCED),
)  # fmt: skip
DEQUANTIZE = (
    _dequantize("balanced, rotated, normal levels", (9, 576), 4, **_NORMAL),
    _dequantize("balanced, rotated, 5 bits", (6, 213), 5, jnp.float32, **_BALANCED),
    _dequantize("balanced, rotated, 8 bits", (6, 213), 8, jnp.float32, **_BALANCED),
    *_of_programs(_dequantize),
)
RMS_NORM_BACKWARD = (
    _norm("exact", (7, 48), None),
    _norm("balanced, rotated, 6 bits", (5, 192), 6, group=64, **_BALANCED),
    *(
        _norm(f"{name}, 4 bits, normal levels, balanced, rotated", (TOKENS, width), 4, **_NORMAL)
        for name, width in {"llama_1b": 2048, "llama_7b": 4096}.items()
    ),
    *_by_bits("llama_1b", 2048, _norm, 5, 6),
    _norm("smollm2_135m, 5 bits, groups of 64", (TOKENS, 576), 5, group=64, **_BALANCED),
    _norm("llama_1b, exact", (TOKENS, 2048), None),
    _norm("llama_7b, exact", (TOKENS, 4096), None),
)
ROPE_ENCODE, ROPE_DECODE = zip(
    _rope("two heads a group, a group filled up", (9, 192), 64, 4, **_NORMAL),
    _rope("heads of 32, two planes", (5, 256), 32, 5, rotate=True),
    _rope("llama_1b query, 5 bits, balanced, rotated", (TOKENS, 2048), 64, 5, **_BALANCED),
    _rope("llama_7b query, 5 bits, balanced, rotated", (TOKENS, 4096), 128, 5, **_BALANCED),
    strict=True,
)
# `rope_decode` has no program for heads of several groups.
ROPE_ENCODE = (
    *ROPE_ENCODE,
    _rope("heads of two groups, float32", (5, 512), 256, 6, jnp.float32, rotate=True)[0],
)
RMS_NORM_ENCODE = (
    _norm_encode("4 bits, a group filled up", (9, 336), 4, **_NORMAL),
    _norm_encode("two planes, float32", (5, 256), 5, jnp.float32, rotate=True),
    *(
        _norm_encode(
            f"{name}, 4 bits, normal levels, balanced, rotated", (TOKENS, width), 4, **_NORMAL
        )
        for name, width in {"llama_1b": 2048, "llama_7b": 4096, "smollm2_135m": 576}.items()
    ),
)
SWIGLU_BACKWARD = (
    _swiglu("balanced, rotated, 4 and 6 bits", (9, 320), (4, 6), **_BALANCED),
    *(
        _swiglu(f"{name}, 4 bits, normal levels, balanced, rotated", (TOKENS, width), (4, 4),
                **_NORMAL)
        for name, width in _GATES.items()
    ),
    *(
        _swiglu(f"llama_1b, {n} bits, balanced, rotated", (TOKENS, 5504), (n, n), **_BALANCED)
        for n in (5, 6)
    ),
)  # fmt: skip
SWIGLU_ENCODE = (
    _swiglu_encode("3 and 4 bits, a group filled up", (9, 336), (3, 4), **_NORMAL),
    _swiglu_encode(
        "two planes, float32 and float32 scales",
        (5, 256),
        (5, 6),
        jnp.float32,
        scale_dtype="float32",
        **_BALANCED,
    ),
    *(
        _swiglu_encode(
            f"{name}, 4 bits, normal levels, balanced, rotated", (TOKENS, width), (4, 4), **_NORMAL
        )
        for name, width in _GATES.items()
    ),
)
