"""Arguments to try kernels on: small ones, for tests, and those of real models, for benchmarks."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from actjax.kernels.format import Format, QuantizedCode
from actjax.kernels.noise import seed_of
from actjax.kernels.quantize.reference import quantize

TOKENS = 8192
"""Of a batch of 8 sequences of 1,024."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of a kernel.

    Attributes:
      name: whose they are.
      make: from a `jax.random` key to the arguments, all of them random; `tokens` is one of its
        keywords.
      options: static arguments by name.
      small: whether the interpreter takes a moment for it, and not minutes.
    """

    name: str
    make: functools.partial[tuple[Any, ...]]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    small: bool = False

    def shapes(self) -> tuple[Any, ...]:
        """Returns the shapes and dtypes of the arguments."""
        return jax.eval_shape(self.make, jax.eval_shape(lambda: jax.random.key(0)))

    def longer(self, times: int) -> "Case":
        """Returns the case with so many times the tokens: a longer run of the same program."""
        tokens = self.make.keywords["tokens"] * times
        return dataclasses.replace(self, make=functools.partial(self.make, tokens=tokens))

    def least_bytes(self, reference: Callable[..., Any]) -> int:
        """Returns the bytes of all arguments and results, each read or written once.

        Args:
          reference: the definition of the kernel.
        """
        given = self.shapes()
        made = jax.eval_shape(functools.partial(reference, **self.options), *given)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((given, made)))


def format_of(bits: int, **changes: Any) -> Format:
    """Returns the format of `actjax.Quantized(bits)`, or one that differs in what is given."""
    usual: dict[str, Any] = {
        "group": 128,
        "rounding": "nearest",
        "scaling": "group",
        "scale_dtype": "bfloat16",
        "levels": "uniform",
        "rotate": False,
    }
    return Format(bits=bits, **{**usual, **changes})


def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    """Returns normally distributed numbers."""
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def code(
    key: jax.Array, shape: tuple[int, ...], format: Format, dtype: Any = jnp.bfloat16
) -> QuantizedCode:
    """Returns a code of normally distributed numbers."""
    seed = None if format.rounding == "nearest" else seed_of(jax.random.fold_in(key, 1))
    return quantize(normal(key, shape, dtype), seed, None, None, None, format=format)
