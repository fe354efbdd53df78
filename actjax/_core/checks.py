"""Argument checks that the operators share."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from actjax.codecs import Codec, Exact


def check_floating(name: str, x: Any) -> None:
    """Raises a `TypeError` unless `x` has floating point numbers of 16 bits or more."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise TypeError(
            f"`{name}` must be a floating point array, got {dtype or type(x).__name__}:"
            " cast it with `.astype(jnp.float32)` or `.astype(jnp.bfloat16)`."
        )


def check_codec(codec: object) -> None:
    """Raises a `TypeError` unless `codec` is a codec."""
    if not isinstance(codec, Codec):
        hint = " (an instance, not the class)" if isinstance(codec, type) else ""
        raise TypeError(
            f"`codec` must be an actjax.Codec{hint}, for example Exact(), got {codec!r}."
        )


def check_codecs(codec: Any, names: Sequence[str], key: Any) -> tuple[Codec, ...]:
    """Returns the codec of each input of an operator.

    Args:
      codec: one codec for all inputs, or a sequence with a codec for each.
      names: names of the inputs.
      key: randomness of the encoding: one key, a sequence with a key for each input, or None.

    Raises:
      TypeError: an entry is not a codec.
      ValueError: the number of codecs or keys is not the number of inputs, or a key is missing.
    """
    codecs = tuple(codec) if isinstance(codec, tuple | list) else (codec,) * len(names)
    if len(codecs) != len(names):
        raise ValueError(
            f"`codec` must be one codec, or one for each of {', '.join(names)}: got {len(codecs)}."
        )
    several = isinstance(key, tuple | list)
    if several and len(key) != len(names):
        raise ValueError(
            f"`key` must be one key, or one for each of {', '.join(names)}: got {len(key)}."
        )
    for i, entry in enumerate(codecs):
        check_codec(entry)
        if entry.needs_key:
            entry.required_key(key[i] if several else key)
    return codecs


def all_exact(codecs: Sequence[Codec]) -> bool:
    """Returns whether all codecs are `Exact`, so that an operator may store other exact values."""
    return all(isinstance(codec, Exact) for codec in codecs)
