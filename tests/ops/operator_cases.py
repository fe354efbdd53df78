"""Linear operators and operators with a rebuilt input, with their oracles, as a table."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import oracles
from cheap_codecs import Coarse, CoarseRandom
from ops.helpers import KEY, THETA, normal, tables

from actjax import (
    Exact,
    attention,
    attention_linear,
    gelu,
    gelu_linear,
    linear,
    norm_linear,
    rms_norm,
    swiglu,
    swiglu_linear,
)

NEAREST = Coarse()
DRAWN = CoarseRandom()
BATCH, LENGTH, HEADS, KV_HEADS, SIZE = 2, 5, 4, 2, 2
WIDTH = HEADS * SIZE
"""Features of the linear input, and of everything that is normalized or gated."""
EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Operator:
    """An operator that ends in a linear operator.

    Attributes:
      call: from activations, the scale of the norm (or None) and weights to outputs.
      first: from activations and scale to the linear input, by operators of actjax.
      oracle: from activations and scale to the linear input, in NumPy.
      vjp: from activations, scale and cotangent to the cotangents of the first two, in NumPy.
      shapes: shapes of the activations.
      has_scale: whether the operator has a norm.
    """

    call: Callable[..., Any]
    first: Callable[..., Any]
    oracle: Callable[..., Any]
    vjp: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    has_scale: bool = False

    def activations(self, dtype=None) -> tuple[jax.Array, ...]:
        return tuple(normal(i, *shape, dtype=dtype) for i, shape in enumerate(self.shapes))

    def scale(self) -> np.ndarray | None:
        numbers = 1 + np.random.default_rng(9).standard_normal(WIDTH) / 4
        return numbers.astype(jax.dtypes.canonicalize_dtype(float)) if self.has_scale else None

    def codecs(self, codec: Any) -> tuple[Any, ...]:
        """Returns a codec for each activation."""
        return codec if isinstance(codec, tuple) else (codec,) * len(self.shapes)

    def stored_bytes(self, codec: Any, dtype: Any) -> int:
        """Returns the bytes of the codes of all activations."""
        pairs = zip(self.codecs(codec), self.shapes, strict=True)
        return sum(c.stored_bytes((*s[:2], math.prod(s[2:])), dtype) for c, s in pairs)


def merged(x):
    """Returns an activation as it is encoded: with merged heads."""
    return x.reshape(*x.shape[:2], -1)


def norm_vjp(x, scale, dy):
    dx, dscale = oracles.rms_norm_vjp(x, scale, EPS, dy)
    return (dx,), dscale


def turn(x, sign=1):
    return oracles.rope(x, sign * np.arange(LENGTH), THETA)


def attention_vjp(q, k, v, dy):
    dq, dk, dv = oracles.attention_vjp(turn(q), turn(k), v, np.reshape(dy, np.shape(q)), True)
    return (turn(dq, -1), turn(dk, -1), dv), None


TOKENS = (BATCH, LENGTH, WIDTH)
LINEAR = Operator(
    lambda xs, _, w, **options: linear(*xs, w, **options),
    lambda xs, _: xs[0],
    lambda xs, _: xs[0],
    lambda xs, _, dy: ((dy,), None),
    (TOKENS,),
)
REBUILT = {
    "norm": Operator(
        lambda xs, scale, w, **options: norm_linear(*xs, scale, w, eps=EPS, **options),
        lambda xs, scale: rms_norm(*xs, scale, eps=EPS),
        lambda xs, scale: oracles.rms_norm(*xs, scale, EPS),
        lambda xs, scale, dy: norm_vjp(*xs, scale, dy),
        (TOKENS,),
        has_scale=True,
    ),
    "swiglu": Operator(
        lambda xs, _, w, **options: swiglu_linear(*xs, w, **options),
        lambda xs, _: swiglu(*xs),
        lambda xs, _: oracles.swiglu(*xs),
        lambda xs, _, dy: (oracles.swiglu_vjp(*xs, dy), None),
        (TOKENS,) * 2,
    ),
    "gelu": Operator(
        lambda xs, _, w, **options: gelu_linear(*xs, w, approximate=False, **options),
        lambda xs, _: gelu(*xs, approximate=False),
        lambda xs, _: oracles.gelu(*xs, approximate=False),
        lambda xs, _, dy: ((oracles.gelu_vjp(*xs, False, dy),), None),
        (TOKENS,),
    ),
    "attention": Operator(
        lambda xs, _, w, **options: attention_linear(*xs, w, rope=tables(LENGTH, SIZE), **options),
        lambda xs, _: attention(*xs, merge_heads=True, rope=tables(LENGTH, SIZE)),
        lambda xs, _: merged(oracles.attention(*map(turn, xs[:2]), xs[2], True)),
        lambda xs, _, dy: attention_vjp(*xs, dy),
        tuple((BATCH, LENGTH, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)),
    ),
}
"""The operators with a rebuilt input."""
OPERATORS = {"linear": LINEAR, **REBUILT}
MIXED = {
    "norm": (DRAWN,),
    "swiglu": (NEAREST, DRAWN),
    "gelu": (DRAWN,),
    "attention": (DRAWN, Exact(), NEAREST),
}
"""A codec for each input."""


def decoded(name: str, activations: Any, codec: Any, key: jax.Array = KEY) -> tuple[Any, ...]:
    """Returns what the backward pass sees."""
    if name == "linear":  # With a single input its key is not folded.
        return (codec.decode(codec.encode(*activations, key)),)
    hats = []
    for i, (x, c) in enumerate(zip(activations, OPERATORS[name].codecs(codec), strict=True)):
        code = c.encode(merged(x), jax.random.fold_in(key, i))
        hats.append(c.decode(code).reshape(x.shape))
    return tuple(hats)
