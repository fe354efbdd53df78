"""What must hold of the results of a codec."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

import actjax
from actjax.codecs.base import Codec
from actjax.kernels.format import group_count
from benchmarks.random_arrays.codecs import Entry, innermost, is_factored
from benchmarks.random_arrays.contents import FINITE, NOT_FINITE


def largest_of(entry: Entry, shape: tuple[int, ...], dtype: str) -> float:
    """Returns the largest number that a codec takes without an overflow.

    For `Quantized` as it documents: the range of a group must be a number of the dtype, and rotated
    values, which grow by the root of the group, are below that number over the same root. The
    product with random or orthonormal factors of the others grows with the numbers that it sums.
    """
    top, codec = float(jnp.finfo(dtype).max), innermost(entry.codec)
    if isinstance(codec, actjax.Exact):
        return top
    if isinstance(codec, actjax.Quantized):
        size = min(codec.group, max(1, shape[-1]))
        rotated = 1 / size if codec.rotate else 1
        dithered = 2 / 3 if codec.rounding == "dither" else 1
        return top / 2 * rotated * dithered / (64 if codec.balance else 1) * 0.99
    return top * 2.0**-10 / max(1, np.prod(shape)) ** 0.5


@dataclasses.dataclass(frozen=True)
class Result:
    """What came back of an array.

    Attributes:
      x: the array.
      decoded: its approximation.
      grad: the weight gradient.
      dz: the gradient of the output.
    """

    x: np.ndarray
    decoded: np.ndarray
    grad: np.ndarray
    dz: np.ndarray


def faults_of(entry: Entry, codec: Codec, content: str, result: Result) -> list[str]:
    """Returns what is wrong with the result of an array; nothing if all is well.

    Args:
      entry: which codec, as in the table.
      codec: the codec itself, with ranks of the shape.
      content: name of what the array holds.
      result: what came back.
    """
    x, decoded, grad = result.x, result.decoded, result.grad
    faults = []
    if (decoded.shape, decoded.dtype) != (x.shape, x.dtype):
        faults.append(f"decodes to {decoded.dtype}{decoded.shape}")
    wanted = (*x.shape[-1:], *result.dz.shape[-1:])
    if (grad.shape, grad.dtype) != (wanted, np.dtype("float32")):
        faults.append(f"has a gradient {grad.dtype}{grad.shape}, not float32{wanted}")
    if faults:
        return faults
    wide, back = x.astype("float64"), decoded.astype("float64")
    if content in NOT_FINITE:
        return _hidden(entry, wide, back, grad)
    top = float(jnp.finfo(x.dtype).max)
    faults += _of_finite(entry, codec, content, wide, back, top)
    if content in FINITE and not np.isfinite(grad).all() and _fits(back, result.dz):
        faults.append("has a gradient that is not finite")
    return faults


def _of_finite(
    entry: Entry, codec: Codec, content: str, x: np.ndarray, back: np.ndarray, top: float
) -> list[str]:
    if not x.size:
        return []
    finite = np.isfinite(back)
    if content in FINITE and not finite.all() and not _may_overflow(codec, x, top):
        return [f"decodes finite numbers to {back[~finite].flat[0]}"]
    if entry.calibration is not None:
        return []  # Errors depend on what was calibrated on, and numbers out of range saturate.
    if content == "zeros" and np.any(back):
        return ["decodes zeros to other numbers"]
    # Only where it is finite: what overflows as documented is seen.
    error = np.where(finite, np.abs(back - x), 0)
    bound = _bound(entry, x)
    if np.any(error > bound):
        place = np.unravel_index(np.argmax(error - bound), x.shape)
        return [f"decodes {x[place]:g} to {back[place]:g}, an error above {bound[place]:g}"]
    return []


def _may_overflow(codec: Codec, x: np.ndarray, top: float) -> bool:
    """Returns whether `PointApproximation` may take a tiny point for a huge token.

    Args:
      codec: the codec.
      x: the array.
      top: the largest number of its dtype.
    """
    sizes = np.abs(x).max(-1)
    codec = innermost(codec)
    if not isinstance(codec, actjax.PointApproximation) or not sizes.any():
        return False
    return bool(sizes.max() / sizes[sizes > 0].min() > top)


def _bound(entry: Entry, x: np.ndarray) -> np.ndarray:
    """Returns a bound for the error of each number."""
    codec, dtype_error = innermost(entry.codec), 2.0**-7
    if isinstance(codec, actjax.Exact):
        return np.zeros_like(x)
    size = np.abs(x).max(initial=0)
    if not isinstance(codec, actjax.Quantized) or codec.balance or codec.levels == "normal":
        # Not wrong by orders of magnitude: a product with a chi-squared factor is below this.
        return np.full_like(x, 1000 * size + 1e-37)
    top = 2**codec.bits - 1
    levels = 0.5 if codec.rounding == "nearest" else 1.0
    ranges, sizes = _ranges(codec, x)
    # A scale and an offset are rounded to 8 bits, the result to the dtype, and a scale below 2^-126
    # is taken for zero.
    scale = (ranges + sizes * dtype_error) / top * (1 + dtype_error) + 2.0**-126
    bound = levels * scale * 1.01 + sizes * dtype_error + 2.0**-126 * top
    if codec.rotate:  # The error of a rotated group moves between its numbers.
        bound = bound * min(codec.group, x.shape[-1])
    return bound


def _ranges(codec: actjax.Quantized, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns for each number the range and the largest size of those that share its scale."""
    if codec.scaling == "channel" and not codec.rotate:
        size = np.abs(x).max(axis=tuple(range(x.ndim - 1)), keepdims=True, initial=0)
        return np.broadcast_to(2 * size, x.shape), np.broadcast_to(size, x.shape)
    ranges, sizes = np.zeros_like(x), np.zeros_like(x)
    axes = tuple(range(x.ndim)) if codec.scaling == "channel" else (-1,)
    for group in range(group_count(x.shape[-1], codec.group)):
        place = (..., slice(group * codec.group, (group + 1) * codec.group))
        size = np.abs(x[place]).max(axis=axes, keepdims=True, initial=0)
        high, low = (f(x[place], axis=axes, keepdims=True) for f in (np.max, np.min))
        if codec.outlier_fraction:  # Channels that are stored whole are zeros among the others.
            high, low = np.maximum(high, 0), np.minimum(low, 0)
        width = 2 * codec.group * size if codec.rotate or len(axes) > 1 else high - low
        ranges[place], sizes[place] = width, size
    return ranges, sizes


def _fits(back: np.ndarray, dz: np.ndarray) -> bool:
    """Returns whether the sums of a weight gradient are far from the largest float32."""
    axes = tuple(range(back.ndim - 1))
    sums = np.tensordot(np.abs(back), np.abs(dz.astype("float64")), axes=(axes, axes))
    return bool(np.max(sums, initial=0) < float(np.finfo("float32").max) * 2.0**-8)


def _hidden(entry: Entry, x: np.ndarray, back: np.ndarray, grad: np.ndarray) -> list[str]:
    """Returns a fault if NaN and infinities are turned into finite numbers, or reach too far.

    They must be seen in the token and, for groups, in their group. `Quantized` documents that one
    spoils its sequence if channels are balanced. A scale by channel spoils its channel.
    """
    codec = innermost(entry.codec)
    bad, bad_back = ~np.isfinite(x), ~np.isfinite(back)
    if not bad.any():
        return []
    exact = isinstance(codec, actjax.Exact)
    if exact and not np.array_equal(x, back, equal_nan=True):
        return ["changes numbers"]
    scopes = _scopes(codec, x.shape)
    unseen = bad & ~_any_within(bad_back, scopes)
    is_quantized = isinstance(codec, actjax.Quantized)
    # As `Calibrated` documents: a code by channel has no place for them, and its scale is given.
    saturates = is_quantized and entry.calibration is not None and not codec.balance
    if unseen.any() and not saturates:
        place = np.unravel_index(np.argmax(unseen), x.shape)
        return [f"turns {x[place]} into {back[place]:g}"]
    if np.isfinite(grad).all() and not saturates:
        return ["has a finite gradient"]
    alone = isinstance(codec, actjax.Quantized) and not codec.balance and not is_factored(codec)
    spread = bad_back & ~_any_within(bad, scopes)
    if (exact or alone) and spread.any():
        place = np.unravel_index(np.argmax(spread), x.shape)
        return [f"spoils {x[place]:g}, which shares no scale with them"]
    return []


def _scopes(codec: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a number for each entry: equal for those that one number may spoil."""
    tokens = np.arange(int(np.prod(shape[:-1]))).reshape(*shape[:-1], 1)
    features = np.arange(shape[-1])
    if not isinstance(codec, actjax.Quantized):
        per_token = not isinstance(codec, actjax.Exact)
        return tokens * shape[-1] + (0 if per_token else features) + np.zeros(shape, int)
    groups = features // codec.group
    if codec.scaling == "channel":
        shared = groups if codec.rotate else features
        return np.broadcast_to(shared, shape)
    return tokens * shape[-1] + groups


def _any_within(flags: np.ndarray, scopes: np.ndarray) -> np.ndarray:
    """Returns whether a flag is set anywhere in the scope of each entry."""
    found = np.bincount(scopes.ravel(), flags.ravel())
    return found[scopes] > 0
