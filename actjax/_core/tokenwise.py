"""Operators on tokens: `jax.vmap` of one makes a single call with all tokens.

A layer of Equinox is a function of one token, mapped over the others. `jax.vmap` of an operator
with a custom backward pass computes a gradient of the weight for each token and adds them up. Here
mapping the tokens puts them into one array, so that the gradient is one product, and a codec that
looks at all tokens sees them.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import jax
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from actjax._shards import is_bound


class TokenFunction(Protocol):
    """A hashable function of tokens with any leading axes, and of arrays that all tokens share."""

    def __call__(self, x: jax.Array, /, *shared: jax.Array) -> jax.Array:
        """Returns an array with the leading axes of `x`."""
        ...


def tokenwise(operator: TokenFunction, x: jax.Array, *shared: jax.Array) -> jax.Array:
    """Returns `operator(x, *shared)`; mapped over `x`, it is one call for all tokens.

    A map over shared arrays, such as the weights of several models, is an ordinary `vmap`. So is a
    map of arrays that are bound to devices.

    Args:
      operator: a function that treats each token alike.
      x: [..., d].
      *shared: weights.
    """
    if is_bound((x, shared)):
        return operator(x, *shared)
    return _tokenwise.bind(x, *shared, operator=operator)


_tokenwise = core.Primitive("actjax_tokenwise")


@_tokenwise.def_impl
def _run(x: jax.Array, *shared: jax.Array, operator: TokenFunction) -> jax.Array:
    return operator(x, *shared)


@functools.partial(jax.jit, static_argnums=0)
def _traced(operator: Callable[..., jax.Array], *args: jax.Array) -> jax.Array:
    return operator(*args)


@_tokenwise.def_abstract_eval
def _result(*args: Any, operator: Hashable) -> ShapedArray:
    shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args)
    result = _traced.eval_shape(operator, *shapes)
    return ShapedArray(result.shape, result.dtype)


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, operator: TokenFunction
) -> tuple[jax.Array, jax.Array]:
    return jax.jvp(operator, tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


def _batched(
    args: Sequence[Any], axes: Sequence[Any], *, operator: TokenFunction
) -> tuple[jax.Array, int | None]:
    """Adds the mapped axis to the axes of the tokens."""
    mapped = [isinstance(a, int) for a in axes]
    if any(mapped[1:]):
        in_axes = tuple(a if m else None for a, m in zip(axes, mapped, strict=True))
        return jax.vmap(operator, in_axes)(*args), 0
    x, *shared = args
    return _tokenwise.bind(jax.numpy.moveaxis(x, axes[0], 0), *shared, operator=operator), 0


ad.primitive_jvps[_tokenwise] = _jvp
batching.primitive_batchers[_tokenwise] = _batched
mlir.register_lowering(
    _tokenwise,
    lambda ctx, *args, operator: mlir.lower_fun(operator, multiple_results=False)(ctx, *args),
)
