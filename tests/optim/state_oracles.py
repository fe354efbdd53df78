"""Oracles of optimizers with small states in NumPy float64, written directly from the papers.

They work on one matrix [d, n] (input, output) and take and return plain arrays; nothing is changed
in place. A step returns the update without the learning rate, and its new state.
`test_state_oracles.py` compares every function with another way to compute it.

A rounding may differ between two precisions where a value is near a tie. Functions that round
therefore return a mask of ties, so that a comparison can leave them out.

Sources:
  Li et al., "Memory Efficient Optimizers with 4-bit States" (2023), arXiv 2309.01507.
  Shazeer and Stern, "Adafactor" (2018), arXiv 1804.04235.
  Chen et al., "Fira" (2024), arXiv 2410.01623.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

TIE = 1e-6


def _f64(a: npt.ArrayLike) -> Array:
    return np.array(a, dtype=np.float64)


def _ratio(a: Array, b: Array) -> Array:
    """Returns `a / b`, and 0 where `b` is 0."""
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape)), where=b != 0)


# Adam.


@dataclass(frozen=True)
class AdamState:
    """Moments of the gradient; `None` before the first step."""

    m: Array | None = None
    v: Array | None = None


def adam_step(
    g: npt.ArrayLike, state: AdamState, t: int, b1: float, b2: float, eps: float
) -> tuple[Array, AdamState]:
    """Returns `m̂ / (sqrt(v̂) + eps)` and the new moments.

    Source: Kingma and Ba (2015), Algorithm 1.

    Args:
      g: gradient of any shape.
      state: moments.
      t: number of this step, from 1.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
    """
    g = _f64(g)
    zeros = np.zeros_like(g)
    m = b1 * (zeros if state.m is None else state.m) + (1 - b1) * g
    v = b2 * (zeros if state.v is None else state.v) + (1 - b2) * g**2
    return m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps), AdamState(m, v)


# Four bits.


def _nearest(values: Array, levels: Array) -> tuple[Array, Mask]:
    """Returns the levels nearest to the values, and where a value is within `TIE` of a tie."""
    middles = (levels[1:] + levels[:-1]) / 2
    rounded = levels[np.argmin(np.abs(values[..., None] - levels), axis=-1)]
    return rounded, np.min(np.abs(values[..., None] - middles), axis=-1) <= TIE


SIGNED_LEVELS = np.array([0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1])
"""Magnitudes of a first moment in 4 bits that was divided by scales of rows and columns."""


def quantize_blocks(x: npt.ArrayLike, block: int) -> tuple[Array, Mask]:
    """Returns `x` after encoding and decoding in blocks along its last axis, and where ties are.

    The scale of a block is its largest magnitude; `|x| / scale` is rounded to the nearest of
    `SIGNED_LEVELS`, and keeps the sign of `x`. A block of zeros stays so.
    Source: Li et al. (2023), section 2.2 (block-wise normalization). Their blocks run over the
    flattened tensor, and these begin anew in each row.

    Args:
      x: [..., n].
      block: values that share a scale; the last block of a row may be shorter.
    """
    x = _f64(x)
    decoded, ties = np.zeros_like(x), np.zeros(x.shape, np.bool_)
    for start in range(0, x.shape[-1], block):
        part = x[..., start : start + block]
        scale = np.max(np.abs(part), axis=-1, keepdims=True)
        level, near = _nearest(_ratio(np.abs(part), scale), SIGNED_LEVELS)
        decoded[..., start : start + block] = np.sign(part) * level * scale
        ties[..., start : start + block] = near
    return decoded, ties


def quantize_signed(m: npt.ArrayLike, block: int = 128) -> tuple[Array, Mask]:
    """Returns `m` after rounding with scales of rows, columns and blocks, and the ties.

    `m_ij` is divided by the smaller of the largest magnitudes of its row and of its column (Li et
    al., 2023, section 4.2, which they use for second moments). The rest is rounded in blocks, to
    `SIGNED_LEVELS`.

    Args:
      m: [d, n].
      block: values of a row that share a scale.
    """
    m = _f64(m)
    size = np.abs(m)
    scale = np.minimum(size.max(axis=1, keepdims=True), size.max(axis=0, keepdims=True))
    decoded, ties = quantize_blocks(_ratio(m, scale), block)
    return decoded * scale, ties & (scale > 0)


def quantize_rank_one(v: npt.ArrayLike, bits: int = 4) -> tuple[Array, Mask]:
    """Returns `v` after encoding and decoding with a scale for each row and column, and the ties.

    The scale of `v_ij` is the smaller of the largest values of its row and of its column. Levels
    are `(i + 1) / 2^bits` for `i = 0..2^bits - 1`, without zero: a zero whose row and column are
    not zero becomes the lowest level. Where the scale is 0, so is the result.
    Source: Li et al. (2023), section 2.2 (linear mapping) and section 4.2 (rank-1 normalization).

    Args:
      v: [d, n], not negative.
      bits: bits of a code.
    """
    v = _f64(v)
    if np.any(v < 0):
        raise ValueError("v has negative values.")
    scale = np.minimum(v.max(axis=1, keepdims=True), v.max(axis=0, keepdims=True))
    level, ties = _nearest(_ratio(v, scale), np.arange(1, 2**bits + 1) / 2**bits)
    return level * scale, ties & (scale > 0)


def adam_4bit_step(
    g: npt.ArrayLike,
    state: AdamState,
    t: int,
    b1: float,
    b2: float,
    eps: float,
    block: int = 128,
) -> tuple[Array, AdamState]:
    """Returns the update of Adam with moments of 4 bits, and the decoded new moments.

    `m = b1 dec(m) + (1 - b1) g` and `v = b2 dec(v) + (1 - b2) g²`; the update is
    `m̂ / (sqrt(v̂) + eps)` of these, before they are rounded for the state.
    Source: Li et al. (2023), Algorithm 1 and equation 1, with section 4.2 for `v`, and for `m` too.

    Args (others as for `adam_step`):
      g: gradient [d, n].
      block: values of a row of `m` that share a scale.
    """
    update, new = adam_step(g, state, t, b1, b2, eps)
    assert new.m is not None
    assert new.v is not None
    return update, AdamState(quantize_signed(new.m, block)[0], quantize_rank_one(new.v)[0])


# A factored second moment.


@dataclass(frozen=True)
class FactoredState:
    """First moment [d, n] (`None` without one), means of rows [d] and of columns [n]."""

    m: Array | None = None
    row: Array | None = None
    col: Array | None = None


def factored_adam_step(
    g: npt.ArrayLike,
    state: FactoredState,
    t: int,
    b1: float,
    b2: float,
    eps: float,
    eps_squared: float = 1e-30,
) -> tuple[Array, FactoredState]:
    """Returns the update of Adam with a factored second moment, and the new state.

    `row_i <- b2 row_i + (1 - b2) mean_j(g_ij² + eps_squared)`, `col_j` likewise over `i`, and
    `v_ij = row_i col_j / mean(row)`. Both moments have Adam's bias correction, and the update is
    `m̂ / (sqrt(v̂) + eps)`, with `m̂ = g` and no first moment if `b1` is 0.
    Source: Shazeer and Stern (2018), Algorithm 4, for the factors (sums there, means here, which
    give the same `v`). Their clipped updates, relative steps and growing `b2` are not part of it.

    Args (others as for `adam_step`):
      g: gradient [d, n].
      state: first moment and factors.
      b1: decay of the first moment; 0 for none.
      eps_squared: added to squares of the gradient.
    """
    g = _f64(g)
    squares = g**2 + eps_squared
    row = np.zeros(g.shape[0]) if state.row is None else state.row
    col = np.zeros(g.shape[1]) if state.col is None else state.col
    row = b2 * row + (1 - b2) * squares.mean(axis=1)
    col = b2 * col + (1 - b2) * squares.mean(axis=0)
    v = np.outer(row, col) / row.mean()
    m = None
    if b1:
        m = b1 * (np.zeros_like(g) if state.m is None else state.m) + (1 - b1) * g
    m_hat = g if m is None else m / (1 - b1**t)
    return m_hat / (np.sqrt(v / (1 - b2**t)) + eps), FactoredState(m, row, col)


# Subspaces with a remainder.


def limit_growth(x: npt.ArrayLike, previous: float | None, limit: float) -> tuple[Array, float]:
    """Returns `x` with its norm at most `limit` times `previous`, and the norm that it has.

    Source: Fira's norm-growth limiter, Chen et al. (2024), equation 12 and Algorithm 1: `S` becomes
    `limit S / max(|S| / |S_before|, limit)`, where `S_before` is itself limited.

    Args:
      x: any shape.
      previous: norm that the last step returned; `None` for no limit.
      limit: largest growth of the norm in a step.
    """
    x = _f64(x)
    norm = float(np.linalg.norm(x))
    if previous is None or norm <= limit * previous:
        return x, norm
    return x * (limit * previous / norm), limit * previous


@dataclass(frozen=True)
class FiraState:
    """Number of steps, moments, and norm of what was limited last; `None` before the first step."""

    t: int = 0
    adam: AdamState = AdamState()
    norm: float | None = None


def fira_step(
    g: npt.ArrayLike,
    p: npt.ArrayLike,
    state: FiraState,
    scale: float,
    b1: float,
    b2: float,
    eps: float,
    limit: float = 1.01,
) -> tuple[Array, FiraState]:
    """Returns the update of Fira with Adam in a given basis on the input side, and the new state.

    `r = pᵀ g`, `n` is the update of Adam for `r`, and column `j` of the remainder `g - p r` is
    multiplied by `|n_:j| / |r_:j|`, which is 0 where its denominator is. The limiter acts on that
    scaled remainder `s` alone, before `scale`. The update is `scale (p n + s)`.
    Source: Chen et al. (2024), equations 11 and 12 and Algorithm 1. Their code gives the scale to
    what leaves the subspace and to nothing else.

    Args (others as for `adam_step`):
      g: gradient [d, n].
      p: orthonormal basis [d, k].
      state: state of the last step.
      scale: the paper's `α`.
      limit: largest growth of the norm of the scaled remainder in a step.
    """
    g, p = _f64(g), _f64(p)
    r = p.T @ g
    n, adam = adam_step(r, state.adam, state.t + 1, b1, b2, eps)
    columns = _ratio(np.linalg.norm(n, axis=0), np.linalg.norm(r, axis=0))
    s, norm = limit_growth(columns * (g - p @ r), state.norm, limit)
    return scale * (p @ n + s), FiraState(state.t + 1, adam, norm)
