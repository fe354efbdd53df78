"""Oracles of the optimizers in NumPy float64, written directly from the definitions.

They follow the papers, not the library; `test_state_oracles.py` compares every function with
another way to compute it. Every argument is converted to float64, and every result is float64.

Sources:
  Zhao et al., "GaLore" (2024): Adam on projected gradients (Algorithm 2).
  Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022): the dynamic map.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def _f64(a: npt.ArrayLike) -> Array:
    return np.array(a, dtype=np.float64)


# Subspaces.


def galore_adam(
    weight: npt.ArrayLike,
    grads: Sequence[npt.ArrayLike],
    basis: npt.ArrayLike,
    *,
    lr: float,
    scale: float,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float = 0.0,
    side: Literal["input", "output"] = "input",
) -> list[Array]:
    """Returns the weights after each step of Adam in a fixed basis `P`.

    On the input side `R = Pᵀ G` and the update is `scale P N`; on the output side `R = G P` and
    `scale N Pᵀ`. `N = m̂ / (sqrt(v̂) + eps)`, with a bias correction whose count starts at 1. Weight
    decay is decoupled and in full space: `W <- W - lr (update + weight_decay W)`.
    Source: Zhao et al. (2024), Algorithm 2.

    Args:
      weight: [d, n].
      grads: a gradient [d, n] for each step.
      basis: [d, k] for the input side, [n, k] for the output side.
      lr: learning rate.
      scale: factor of the update, the paper's `α`.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: rate of the weight decay, which `scale` does not multiply.
      side: the side of the weight that is projected.
    """
    w, p = _f64(weight), _f64(basis)
    if p.shape[0] != w.shape[0 if side == "input" else 1]:
        raise ValueError(f"basis {p.shape} does not fit weight {w.shape} on the {side} side.")
    m = v = np.zeros(())
    history: list[Array] = []
    for t, grad in enumerate(grads, start=1):
        g = _f64(grad)
        r = p.T @ g if side == "input" else g @ p
        m = b1 * m + (1 - b1) * r
        v = b2 * v + (1 - b2) * r**2
        step = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
        update = scale * (p @ step if side == "input" else step @ p.T)
        w = w - lr * (update + weight_decay * w)
        history.append(w)
    return history


def top_left_singular_vectors(matrix: npt.ArrayLike, k: int) -> Array:
    """Returns the `k` leading left singular vectors [d, k] of a matrix [d, n].

    Signs, and rotations among equal singular values, depend on LAPACK: compare `U Uᵀ`.
    """
    return np.linalg.svd(_f64(matrix), full_matrices=False)[0][:, :k]


# Eight bits.


def dynamic_levels(unsigned: bool) -> Array:
    """Returns the levels of the dynamic map, ascending: 256 unsigned, or 255 signed.

    Magnitudes: 0, and `10^(p - P) (0.1 + 0.9 (j + 1) / 2^p)` for `p = 0..P` and `j = 0..2^p - 1`,
    with `P = 7` unsigned and 6 signed. As in Dettmers et al. (2022), fractions are evenly spaced
    within a decade, and each decade has one bit less for them than the decade above.
    """
    top = 7 if unsigned else 6
    magnitudes = [
        10.0 ** (p - top) * (0.1 + 0.9 * (j + 1) / 2**p)
        for p in range(top + 1)
        for j in range(2**p)
    ]
    negative = [] if unsigned else [-a for a in magnitudes]
    return np.array(sorted([*negative, 0.0, *magnitudes]))


def nearest_level(x: npt.ArrayLike, levels: npt.ArrayLike) -> Array:
    """Returns the level nearest to each value, by search; the first of two at equal distance."""
    values, table = _f64(x), _f64(levels)
    return table[np.argmin(np.abs(values[..., None] - table), axis=-1)]


def blockwise_round_trip(x: npt.ArrayLike, unsigned: bool, block: int) -> Array:
    """Returns `x` after encoding and decoding in blocks along its last axis.

    Each block is divided by its largest magnitude and rounded to the nearest levels. Unsigned
    values other than zero are rounded at least to the lowest level other than zero.

    Args:
      x: [..., n]; not negative if `unsigned`.
      unsigned: whether the unsigned levels are used.
      block: values that share a scale; the last block of a row may be shorter.
    """
    values, levels = _f64(x), dynamic_levels(unsigned)
    lowest = levels[levels > 0].min()
    out = np.zeros_like(values)
    for row in np.ndindex(values.shape[:-1]):
        for start in range(0, values.shape[-1], block):
            part = values[row][start : start + block]
            scale = np.max(np.abs(part))
            if scale == 0:
                continue
            level = nearest_level(part / scale, levels)
            if unsigned:
                level = np.where((part != 0) & (level == 0), lowest, level)
            out[row][start : start + block] = level * scale
    return out
