"""A case: the arguments and options that a kernel is tested or timed with."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

TOKENS = 8192
"""Tokens of a batch of 8 sequences of 1,024."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of a kernel, named by their origin, such as "llama_1b gate, 4 bits"."""

    name: str
    make: functools.partial[tuple[Any, ...]]
    """Returns random arguments for a `jax.random` key; `tokens` is one of its keywords."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Static arguments by name."""
    small: bool = False
    """Whether the interpreter needs seconds for it, not minutes."""
    joined: Callable[[Any], Any] | None = None
    """Makes of the results what is defined of them, where they are parts of any size."""

    def shapes(self) -> tuple[Any, ...]:
        """Returns the shapes and dtypes of the arguments."""
        return jax.eval_shape(self.make, jax.eval_shape(lambda: jax.random.key(0)))

    def longer(self, times: int) -> "Case":
        """Returns the case with `times` as many tokens: a longer run of the same program."""
        tokens = self.make.keywords["tokens"] * times
        return dataclasses.replace(self, make=functools.partial(self.make, tokens=tokens))

    def least_bytes(self, reference: Callable[..., Any]) -> int:
        """Returns the bytes of all arguments and results, each read or written once."""
        arguments = self.shapes()
        results = jax.eval_shape(functools.partial(reference, **self.options), *arguments)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((arguments, results)))


def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    """Returns normally distributed numbers."""
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)
