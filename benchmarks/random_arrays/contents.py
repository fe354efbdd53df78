"""What the arrays hold."""

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

Random = np.random.Generator
Shape = tuple[int, ...]
Fill = Callable[[Random, Shape, float], np.ndarray]
"""From random numbers, a shape and the largest number that a codec takes to values in float64."""


def _rows(x: np.ndarray) -> np.ndarray:
    """Returns a view of the tokens, [T, d]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _one_token(rng: Random, shape: Shape, largest: float) -> np.ndarray:
    x = rng.normal(size=shape)
    rows = _rows(x)
    if len(rows):
        rows[rng.integers(len(rows))] *= min(1e4, largest / 8)
    return x


def _outlier(rng: Random, shape: Shape, largest: float) -> np.ndarray:
    return _with(rng, rng.normal(size=shape), min(1e4, largest), 1)


def _with(rng: Random, x: np.ndarray, value: float, count: int) -> np.ndarray:
    """Returns `x` with a value at random places."""
    if x.size:
        x.flat[rng.integers(x.size, size=count)] = value
    return x


def _mixed(rng: Random, shape: Shape, largest: float) -> np.ndarray:
    top = np.log10(largest) / 2
    return rng.choice([-1, 1], shape) * 10.0 ** rng.uniform(-top, top, shape)


def _parts(rng: Random, shape: Shape, largest: float) -> np.ndarray:
    """Returns tokens of different contents."""
    names = [name for name in FINITE if name != "tokens of all kinds"]
    x = np.zeros(shape)
    rows = _rows(x)
    for i in range(len(rows)):
        name = names[int(rng.integers(len(names)))]
        rows[i] = FINITE[name](rng, (1, shape[-1]), largest)[0]
    return x


FINITE: dict[str, Fill] = {
    "normal": lambda rng, shape, largest: rng.normal(size=shape),
    "zeros": lambda rng, shape, largest: np.zeros(shape) * rng.choice([-1.0, 1.0]),
    "a constant": lambda rng, shape, largest: np.full(shape, rng.normal()),
    "huge": lambda rng, shape, largest: largest * rng.uniform(-1, 1, shape),
    "a huge constant": lambda rng, shape, largest: np.full(shape, largest),
    "tiny": lambda rng, shape, largest: rng.normal(size=shape) / largest,
    "subnormal": lambda rng, shape, largest: 1e-40 * rng.normal(size=shape),
    "one outlier": _outlier,
    "one huge token": _one_token,
    "integers": lambda rng, shape, largest: rng.integers(-9, 10, shape).astype(float),
    "alternating signs": lambda rng, shape, largest: (
        np.where(np.indices(shape).sum(0) % 2, -1.0, 1.0) * abs(rng.normal())
    ),
    "a direction": lambda rng, shape, largest: (
        rng.normal(size=(*shape[:-1], 1)) * rng.normal(size=shape[-1:])
    ),
    "mixed scales": _mixed,
    "tokens of all kinds": _parts,
}
"""Finite contents, by name."""

LARGEST: dict[str, Fill] = {
    "at the largest": lambda rng, shape, largest: np.inf * rng.choice([-1, 1], shape),
}
"""Contents that are clipped to the largest number of the dtype: a codec may overflow."""

NOT_FINITE: dict[str, Fill] = {
    "one NaN": lambda rng, shape, largest: _with(rng, rng.normal(size=shape), np.nan, 1),
    "NaN": lambda rng, shape, largest: np.full(shape, np.nan),
    "one infinity": lambda rng, shape, largest: _with(
        rng, rng.normal(size=shape), rng.choice([-np.inf, np.inf]), 1
    ),
    "infinities": lambda rng, shape, largest: _with(
        rng, _with(rng, rng.normal(size=shape), np.inf, 2), -np.inf, 2
    ),
    "NaN and infinities": lambda rng, shape, largest: _with(
        rng, _with(rng, rng.normal(size=shape), np.inf, 2), np.nan, 2
    ),
    "a token of NaN": lambda rng, shape, largest: _token(rng, shape, np.nan),
    "a token of infinity": lambda rng, shape, largest: _token(rng, shape, np.inf),
}
"""Contents that are not finite."""

CONTENTS = FINITE | LARGEST | NOT_FINITE


def _token(rng: Random, shape: Shape, value: float) -> np.ndarray:
    x = rng.normal(size=shape)
    rows = _rows(x)
    if len(rows):
        rows[rng.integers(len(rows))] = value
    return x


def draw(name: str, rng: Random, shape: Shape, dtype: str, largest: float) -> np.ndarray:
    """Returns an array of a dtype.

    Args:
      name: of the contents.
      rng: random numbers.
      shape: its shape.
      dtype: its dtype.
      largest: the largest number that a codec takes.
    """
    top = float(jnp.finfo(dtype).max)
    x = CONTENTS[name](rng, shape, largest)
    if name in NOT_FINITE:
        return x.astype(jnp.dtype(dtype))
    # In float64 first: a number between the largest two would be rounded to infinity.
    return np.clip(x, -top, top).astype(jnp.dtype(dtype))
