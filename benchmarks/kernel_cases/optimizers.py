"""Arguments of `adam_8bit` and of the two programs of `adam_4bit`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from actjax.formats.blockwise import blockwise_zeros
from actjax.formats.four_bit import rank_one_zeros, signed_zeros
from actjax.kernels.adam_4bit.reference import Means
from benchmarks.kernel_cases.case import Case, normal

_SHAPES = {
    "llama_60m query": (512, 512),
    "llama_350m gate": (1024, 2736),
    "llama_1b query": (2048, 2048),
    "llama_1b gate": (2048, 5504),
    "llama_1b down": (5504, 2048),
    "llama_7b gate": (4096, 11008),
    "llama3_8b gate": (4096, 14336),
}
_DECAYS = {"b1": 0.9, "b2": 0.999}
_EPSILONS = {"eps": 1e-8, "eps_root": 0.0}


def _moments(
    key: jax.Array, tokens: int, features: int, dtype: Any, make: Callable[..., Any]
) -> tuple[Any, ...]:
    """Returns a gradient and its encoded moments."""
    keys, shape = jax.random.split(key, 3), (tokens, features)
    first, second = (normal(key, shape, jnp.float32) for key in keys[1:])
    mu, nu = make(shape, jnp.float32)
    return normal(keys[0], shape, dtype), mu.encode(first), nu.encode(second**2)


def _in_8_bits(shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
    mu, nu = (blockwise_zeros(shape, dtype, unsigned=unsigned) for unsigned in (False, True))
    return mu, nu


def _in_4_bits(shape: tuple[int, ...], dtype: Any, group: int) -> tuple[Any, Any]:
    return signed_zeros(shape, dtype, group), rank_one_zeros(shape, dtype, group)


def _make_8bit(key: jax.Array, tokens: int, features: int, dtype: Any) -> tuple[Any, ...]:
    moments = _moments(key, tokens, features, dtype, _in_8_bits)
    return *moments, jnp.asarray([0.19, 0.002], jnp.float32)


def _make_maxima(
    key: jax.Array, tokens: int, features: int, dtype: Any, group: int = 128
) -> tuple[Any, ...]:
    make = functools.partial(_in_4_bits, group=group)
    return _moments(key, tokens, features, dtype, make)


def _make_4bit(
    key: jax.Array, tokens: int, features: int, dtype: Any, group: int = 128
) -> tuple[Any, ...]:
    keys = jax.random.split(key, 5)
    # Scales of any size: values above them take the highest level.
    shapes = ((tokens, 1), (1, features)) * 2
    scales = (
        0.1 + normal(key, shape, jnp.float32) ** 2
        for key, shape in zip(keys[1:], shapes, strict=True)
    )
    corrections = jnp.asarray([0.19, 0.002], jnp.float32)
    return *_make_maxima(keys[0], tokens, features, dtype, group), tuple(scales), corrections


def _make_factored_maxima(*args: Any, **sizes: Any) -> tuple[Any, ...]:
    grad, mu, _ = _make_maxima(*args, **sizes)
    return grad, mu, None


def _make_factored(*args: Any, **sizes: Any) -> tuple[Any, ...]:
    grad, mu, nu, scales, corrections = _make_4bit(*args, **sizes)
    return grad, mu, Means(nu.rows, nu.columns), scales[:2], corrections


def _cases(make: Any, options: dict[str, float], small: dict[str, tuple]) -> tuple[Case, ...]:
    """Returns cases from names and shapes; those of `small` may have a dtype and a group."""

    def case(
        name: str, rows: int, features: int, dtype: Any = jnp.bfloat16, **arguments: Any
    ) -> Case:
        made = functools.partial(make, tokens=rows, features=features, dtype=dtype, **arguments)
        return Case(name, made, options, name in small)

    return (
        *(case(name, *shape[:3], **dict(shape[3:])) for name, shape in small.items()),
        *(case(name, *shape) for name, shape in _SHAPES.items()),
        case("llama_1b embedding, float32 gradient", 32000, 2048, jnp.float32),
    )


_SMALL = {
    "whole groups": (6, 512),
    "a group left over": (21, 300, jnp.float32, ("group", 64)),
}
ADAM_8BIT = _cases(
    _make_8bit,
    _DECAYS | _EPSILONS,
    {"whole blocks": (6, 512), "a block left over": (6, 300, jnp.float32)},
)


def _whole_sums(results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Adds the parts of sums of squares, which a program may divide as it likes."""
    *largest, of_rows, of_columns = results
    return *largest, of_rows.sum(-1), of_columns.sum(-2)


def _factored(
    make: Any, options: dict[str, float], joined: Callable[[Any], Any] | None = None
) -> tuple[Case, ...]:
    """Returns cases with a factored second moment."""
    sizes = {
        "factored": {"tokens": 21, "features": 300, "group": 64},
        "llama_1b gate, factored": {"tokens": 2048, "features": 5504},
        "llama_1b down, factored": {"tokens": 5504, "features": 2048},
    }
    return tuple(
        Case(
            name,
            functools.partial(make, dtype=jnp.bfloat16, **size),
            options,
            name == "factored",
            joined,
        )
        for name, size in sizes.items()
    )


ADAM_4BIT_MAXIMA = (
    *_cases(_make_maxima, _DECAYS, _SMALL),
    *_factored(_make_factored_maxima, _DECAYS, _whole_sums),
)
ADAM_4BIT = (
    *_cases(_make_4bit, _DECAYS | _EPSILONS, _SMALL),
    *_factored(_make_factored, _DECAYS | _EPSILONS),
)
