"""A case: the arguments and options that a kernel is tested or timed with."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from actjax import Quantized
from actjax.formats.balance import balance_of
from actjax.formats.code import QuantizedCode, QuantizeInputs
from actjax.formats.noise import seed_of
from actjax.formats.quantize import quantize

TOKENS = 8192
"""Tokens of a batch of 8 sequences of 1,024."""

BALANCED = {"rotate": True, "balance": True}
"""Settings of `Quantized`, beside the bits and the levels, that the programs use."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of a kernel.

    Attributes:
      name: what the arguments belong to, such as "llama_1b gate, 4 bits".
      make: returns random arguments for a `jax.random` key; `tokens` is one of its keywords.
      options: static arguments by name.
      small: whether the interpreter needs seconds for it, not minutes.
    """

    name: str
    make: functools.partial[tuple[Any, ...]]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    small: bool = False

    def shapes(self) -> tuple[Any, ...]:
        """Returns the shapes and dtypes of the arguments."""
        return jax.eval_shape(self.make, jax.eval_shape(lambda: jax.random.key(0)))

    def longer(self, times: int) -> "Case":
        """Returns the case with `times` as many tokens: a longer run of the same program."""
        tokens = self.make.keywords["tokens"] * times
        return dataclasses.replace(self, make=functools.partial(self.make, tokens=tokens))

    def least_bytes(self, reference: Callable[..., Any]) -> int:
        """Returns the bytes of all arguments and results, each read or written once.

        Args:
          reference: the definition of the kernel.
        """
        arguments = self.shapes()
        results = jax.eval_shape(functools.partial(reference, **self.options), *arguments)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((arguments, results)))


def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    """Returns normally distributed numbers."""
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def code(
    key: jax.Array, shape: tuple[int, ...], codec: Quantized, dtype: Any = jnp.bfloat16
) -> QuantizedCode:
    """Returns a code of normally distributed numbers, with a mean and a spread for each channel."""
    seed = seed_of(jax.random.fold_in(key, 1)) if codec.needs_key else None
    mean, spread = channels_of(jax.random.fold_in(key, 2), shape[-1], codec)
    inputs = QuantizeInputs(normal(key, shape, dtype), seed, None, mean, spread)
    made = quantize(inputs, format=codec.format)
    return dataclasses.replace(made, mean=mean, spread=spread)


def channels_of(
    key: jax.Array, features: int, codec: Quantized
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns random means and spreads of channels, as stored; None without `codec.balance`."""
    if not codec.balance:
        return None, None
    numbers, deviation, mean = (normal(k, (16, features)) for k in jax.random.split(key, 3))
    return balance_of(numbers * jnp.exp(deviation[0]) + mean[0], codec.scale_dtype)


def balanced_cases(make: Callable[..., Case]) -> list[Case]:
    """Returns cases of the codes that the programs use, for arrays of real models.

    Args:
      make: from name, tokens, features, bits and settings of `Quantized` to a case.
    """
    some = {"llama_1b block input": 2048, "llama_1b gate": 5461}
    others = {"llama_7b gate": 11008, "smollm2_135m block input": 576, "smollm2_135m key": 192}
    normal = [
        make(f"{name}, 4 bits, normal levels, balanced, rotated", TOKENS, features, 4,
             levels="normal", **BALANCED)
        for name, features in (some | others).items()
    ]  # fmt: skip
    return normal + [
        make(f"{name}, {bits} bits, balanced, rotated", TOKENS, features, bits, **BALANCED)
        for name, features in some.items()
        for bits in (4, 5, 6)
    ]
