"""The contract of a codec: what an operator stores between its forward and its backward pass."""

import abc
import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from actjax._math.precision import matmul

Code = Any
"""Result of `Codec.encode`, a pytree of arrays. All else is freed after the forward pass."""


@dataclasses.dataclass(frozen=True, repr=False)
class Codec(abc.ABC):
    """Decides what is stored of an activation `x` of shape [..., d] (T tokens by d features).

    A codec is hashable and compares by value, so it can be a static argument under `jax.jit`. It is
    also a pytree without leaves, so it can be an ordinary argument. Its methods are pure functions
    of arrays: they work under `jit`, `vmap` and `lax.scan`.

    The docstring of a subclass states its storage (bytes), its error and bias, what several devices
    exchange for it, and its source. The tests in `tests/codecs` check them.

    Attributes:
      biased: whether `E[decode(encode(x, key))]` over keys differs from `x`.
      needs_key: whether `encode` draws random numbers.
    """

    biased: ClassVar[bool]
    needs_key: ClassVar[bool]

    def __init_subclass__(cls, *, holds_arrays: bool = False, **kwargs: Any) -> None:
        """Makes a codec a pytree without leaves.

        Args:
          holds_arrays: whether it has arrays, and registers itself as a pytree with leaves.
          **kwargs: passed to other base classes.
        """
        super().__init_subclass__(**kwargs)
        if not holds_arrays:
            jax.tree_util.register_static(cls)

    def __repr__(self) -> str:
        """The constructor call that makes this codec, without defaults."""
        settings = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(settings)})"

    @abc.abstractmethod
    def encode(self, x: jax.Array, key: jax.Array | None = None) -> Code:
        """Returns what is stored of `x`.

        Args:
          x: activations, [..., d], floating point.
          key: a `jax.random` key; consumed. Required if and only if `needs_key`.

        Raises:
          ValueError: the codec does not fit the shape of `x`, or the key is missing.
        """

    @abc.abstractmethod
    def decode(self, code: Code) -> jax.Array:
        """Returns the approximation `x_hat` of `x`, in the shape and dtype of `x`."""

    @abc.abstractmethod
    def weight_grad(self, code: Code, dz: jax.Array) -> jax.Array:
        """Returns the weight gradient `x_hatᵀ dz`, [d, n], without forming `x_hat` where possible.

        It is accumulated and returned in float32, or in float64 if `dz` or the code has it.

        Args:
          code: what `encode` returned.
          dz: gradient of the output of the linear operator, [..., n].
        """

    @abc.abstractmethod
    def stored_bytes(self, shape: Sequence[int], dtype: jax.typing.DTypeLike) -> int:
        """Returns the bytes of `encode(x)`, with scales, indices and keys.

        Args:
          shape: shape of `x`, [..., d].
          dtype: dtype of `x`.
        """

    def grouped_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape, [..., d], in which an array is best stored that has no tokens.

        `compress_residuals` reshapes to it. By default the shape itself.

        Args:
          shape: shape of the array.
        """
        return tuple(shape)

    def gradient_rank(self, shape: Sequence[int]) -> int | None:
        """Returns the rank of a weight gradient in two factors; None if the gradient is dense.

        Args:
          shape: shape of `x`, [..., d].
        """
        del shape
        return None

    def required_key(self, key: Any) -> jax.Array:
        """Returns `key`, or raises a `ValueError` that says how to make one."""
        if not hasattr(key, "dtype"):
            raise ValueError(
                f"`codec` {self} draws random numbers, but got key={key!r}: pass `key`, for example"
                " jax.random.fold_in(jax.random.key(seed), step)."
            )
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape != ():
            raise ValueError(
                f"`key` of {self} must be a single key, got keys of shape {key.shape}."
            )
        return key


@dataclasses.dataclass(frozen=True, repr=False)
class FactoredCodec(Codec):
    """A codec whose weight gradient is a product of two thin factors, `left right`.

    Subclasses define the factors instead of `weight_grad`.
    """

    @abc.abstractmethod
    def gradient_rank(self, shape: Sequence[int]) -> int:
        """Returns k, the rank of `weight_grad`, for `x` of this shape."""

    @abc.abstractmethod
    def left(self, code: Code) -> jax.Array:
        """Returns the factor [d, k], which all weights with this input share."""

    @abc.abstractmethod
    def right(self, code: Code, dz: jax.Array) -> jax.Array:
        """Returns the factor [k, n], accumulated in float32; it costs `2 T k n` operations."""

    def weight_grad(self, code: Code, dz: jax.Array) -> jax.Array:
        right = self.right(code, dz)
        return matmul(self.left(code).astype(right.dtype), right)


def token_count(shape: Sequence[int]) -> int:
    """Returns T, the number of tokens in an activation of shape [..., d]."""
    return math.prod(shape[:-1])


def check_activation(codec: Codec, x: Any) -> None:
    """Raises an error unless `x` is a floating point array [..., d]."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        raise TypeError(f"`x` of {codec} must be an array, got {type(x).__name__}: jnp.asarray(x).")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"`x` of {codec} must be floating point, got {dtype}: cast it.")
    if jnp.dtype(dtype).itemsize < 2:
        raise TypeError(
            f"`x` of {codec} must have numbers of 16 bits or more, got {dtype}: cast it."
        )
    if x.ndim < 1:
        raise ValueError(f"`x` of {codec} must have features, [..., d], got shape {x.shape}.")


def check_positive_integer(codec: str, name: str, value: object, minimum: int = 1) -> None:
    """Raises a `ValueError` unless `value` is an integer of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        raise ValueError(f"`{name}` of {codec} must be an integer >= {minimum}, got {value!r}.")


def raw_key(key: jax.Array) -> tuple[jax.Array, Any]:
    """Returns the words of a key, which a code can hold, and the generator to wrap them with.

    Old-style keys (`jax.random.PRNGKey`) are words already: their generator is None.
    """
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(key), jax.random.key_impl(key)
    return key, None


def wrap_key(words: jax.Array, impl: Any) -> jax.Array:
    """Returns the key of the words; the inverse of `raw_key`."""
    return words if impl is None else jax.random.wrap_key_data(words, impl=impl)


def key_bytes() -> int:
    """Returns the bytes of a key of the default generator of JAX."""
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).size * 4
