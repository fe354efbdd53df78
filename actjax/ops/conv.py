"""Convolution that holds a code of its input instead of the input.

A convolution is linear in its input and in its weight. As in `actjax.linear`, value and `dx` do not
read the stored input, so only `dw` carries the error of the codec; it is unbiased if the codec is
(Wei et al., 2026, Theorems 3.2 and 3.3). GACT (Liu et al., 2022) does the same.
"""

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any

import jax

from actjax._core.checks import check_codecs, check_floating
from actjax._core.coded_call import Operator, coded_call, decode_late, encode_all, key_of
from actjax._core.no_derivative import no_derivative
from actjax._core.tags import encoded_first, name_code
from actjax.codecs import Codec, Exact
from actjax.weights.base import Weight, value_of


def conv(
    x: jax.Array,
    w: jax.Array,
    *,
    strides: int | Sequence[int] = 1,
    padding: str | Sequence[tuple[int, int]] = "SAME",
    dilation: int | Sequence[int] = 1,
    feature_group_count: int = 1,
    codec: Codec = Exact(),
    key: jax.Array | None = None,
    name: str = "conv input",
) -> jax.Array:
    """Returns the convolution of `x` with the window `w`, and holds a code of `x` instead of `x`.

    `z[n, p, o] = Σ_{q, c} x[n, strides p + dilation q - before, c] w[q, c, o]`, with zeros outside
    of `x`, as `jax.lax.conv_general_dilated` and `flax.linen.Conv` compute it.

    The value and `dx` are exact; `dx` reads only `w`. `dw` is that at the decoded `x`; it is
    unbiased if the codec is, since it is linear in `x`. As in plain JAX the three convolutions are
    in the dtype of `x`: sums are taken in float32 at least, and each result, `dw` too, is rounded
    to that dtype once. A weight of another dtype is cast in both passes, and no cast copy is kept.

    Any codec fits: a token is a position of the output of the layer before, its features are the
    channels. A low rank is therefore at most C, and the backward pass decodes `x` as a whole.
    `Quantized` joins positions where channels are few, as `actjax.Codec.grouped_shape` says; with
    `balance` a sequence is a line along the last spatial axis.

    Source: Wei et al. (2026), Theorem 3.2; GACT, arXiv:2206.11357.

    Args:
      x: activations, [N, *spatial, C], with any number of spatial axes.
      w: weight, [*window, C / feature_group_count, O]; an array, or a Flax nnx variable of one.
      strides: distance of neighboring windows, for all spatial axes or for each.
      padding: "SAME", "SAME_LOWER", "VALID", or pairs (before, after), one for each spatial axis.
      dilation: distance of neighboring entries of a window, for all spatial axes or for each.
      feature_group_count: number of groups of channels that are convolved separately; C for a
        depthwise convolution.
      codec: stores `x`.
      key: randomness of the encoding; consumed. Needed if `codec.needs_key`.
      name: the name of the stored input in `actjax.explain`.

    Returns:
      [N, *positions, O] in the dtype of `x`.

    Raises:
      ValueError: shapes or settings that do not fit, a missing key, a codec that does not fit `x`.
      TypeError: an array that is not floating point, a `w` that is not an array, or a `codec` that
        is not a codec.
    """
    w = value_of(w)
    _check_arrays(x, w, feature_group_count)
    codecs = check_codecs(codec, ("x",), key)
    axes = x.ndim - 2
    steps = _for_each_axis("strides", strides, axes)
    spread = _for_each_axis("dilation", dilation, axes)
    # Entries of the window are moved apart.
    reach = tuple((n - 1) * apart + 1 for n, apart in zip(w.shape[:-2], spread, strict=True))
    pads = _pads(padding, x.shape[1:-1], reach, steps)
    _check_reach(x, w, reach, pads)
    convolution = _Convolution(x.shape, steps, pads, spread, feature_group_count)
    return coded_call(convolution, (x,), w, codecs, key, "conv", (name,))


def _check_arrays(x: Any, w: Any, groups: Any) -> None:
    check_floating("x", x)
    if isinstance(w, Weight):
        raise TypeError(
            f"`w` must be an array, got {type(w).__name__}: only linear operators take such a"
            " weight."
        )
    check_floating("w", w)
    if not _is_integer(groups) or groups < 1:
        raise ValueError(f"`feature_group_count` must be an integer >= 1, got {groups!r}.")
    if x.ndim < 2 or w.ndim != x.ndim:
        raise ValueError(
            "`x` must be [N, *spatial, C] and `w` [*window, C / groups, O] with as many axes, got"
            f" x{x.shape} and w{w.shape}."
        )
    if w.shape[-2] * groups != x.shape[-1]:
        raise ValueError(
            f"`w` must be [*window, C / groups, O] with C = {x.shape[-1]} channels of `x` in"
            f" `feature_group_count` = {groups} groups, got x{x.shape} and w{w.shape}."
        )
    if w.shape[-1] % groups:
        raise ValueError(
            f"`feature_group_count` = {groups} must divide the {w.shape[-1]} outputs of w{w.shape}."
        )


def _for_each_axis(name: str, setting: Any, axes: int) -> tuple[int, ...]:
    """Returns an integer for each spatial axis, or raises."""
    numbers = setting if isinstance(setting, Sequence) else (setting,) * axes
    if len(numbers) != axes or not all(_is_integer(number) and number >= 1 for number in numbers):
        raise ValueError(
            f"`{name}` must be an integer >= 1, or {axes} of them, one for each spatial axis of"
            f" `x`: got {setting!r}."
        )
    return tuple(map(int, numbers))


def _is_integer(x: Any) -> bool:
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def _pads(
    padding: Any, spatial: Sequence[int], window: Sequence[int], strides: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Returns the zeros before and after each spatial axis, or raises."""
    if isinstance(padding, str) and padding in ("SAME", "SAME_LOWER", "VALID"):
        pads = jax.lax.padtype_to_pads(spatial, window, strides, padding)
        return tuple((int(before), int(after)) for before, after in pads)
    pairs = padding if isinstance(padding, Sequence) else (padding,)
    if len(pairs) != len(spatial) or not all(map(_is_pair, pairs)):
        raise ValueError(
            '`padding` must be "SAME", "SAME_LOWER", "VALID", or a pair of integers for each of the'
            f" {len(spatial)} spatial axes of `x`, got {padding!r}."
        )
    return tuple((int(before), int(after)) for before, after in pairs)


def _is_pair(x: Any) -> bool:
    return isinstance(x, tuple | list) and len(x) == 2 and all(map(_is_integer, x))


def _check_reach(
    x: jax.Array, w: jax.Array, reach: Sequence[int], padding: Sequence[tuple[int, int]]
) -> None:
    """Raises if there is no position for the window."""
    padded = [size + sum(pair) for size, pair in zip(x.shape[1:-1], padding, strict=True)]
    if any(not 0 < r <= size for r, size in zip(reach, padded, strict=True)):
        raise ValueError(
            f"the window of `w`, {tuple(reach)} positions with its dilation, must fit into `x` with"
            f" its padding, {tuple(padded)} positions: got x{x.shape} and w{w.shape}. Pad more, or"
            ' pass padding="SAME".'
        )


@dataclasses.dataclass(frozen=True)
class _Convolution(Operator):
    """The convolution as an operator of one activation, with the weight as `others`.

    Attributes:
      shape: shape of the input.
      strides: for each spatial axis.
      padding: zeros before and after each spatial axis.
      dilation: for each spatial axis.
      groups: number of groups of channels.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int

    def __call__(self, activations: Sequence[jax.Array], others: jax.Array) -> jax.Array:
        (x,) = activations
        # With float32 results of bfloat16 operands, XLA for GPUs (JAX 0.10) converts the operands,
        # and runs cuDNN in float32. In their own dtype its sums are in float32 all the same.
        return jax.lax.conv_general_dilated(
            x,
            others.astype(x.dtype),
            self.strides,
            self.padding,
            rhs_dilation=self.dilation,
            dimension_numbers=_channels_last(x.ndim),
            feature_group_count=self.groups,
        )

    def encode(self, activations, others, codecs, key, operator, names):
        (x,), (codec,), (name,) = activations, codecs, names
        grouped = codec.grouped_shape(x.shape)
        if grouped == x.shape:
            return encode_all(activations, codecs, key, operator, names)
        x, code = encoded_first(x, codec.encode(no_derivative(x.reshape(grouped)), key_of(key, 0)))
        return (x,), (name_code(code, x, repr(codec), operator, name),)

    def backward(self, codes, codecs, held, cotangent):
        (x,), dz = decode_late(codes, codecs, cotangent)
        x = x.reshape(self.shape)
        (dx,) = jax.linear_transpose(lambda x: self((x,), held), x)(dz)
        (dw,) = jax.linear_transpose(lambda w: self((x,), w), held)(dz)
        return (dx,), dw


def _channels_last(ndim: int) -> jax.lax.ConvDimensionNumbers:
    """Returns the axes of arrays [N, *spatial, C] and [*window, C, O]."""
    last, spatial = ndim - 1, range(1, ndim - 1)
    data, window = (0, last, *spatial), (last, last - 1, *range(last - 1))
    return jax.lax.ConvDimensionNumbers(data, window, data)
