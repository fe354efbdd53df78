"""Linear operators that hold a code of their input instead of the input.

For `z = x w` the value and `dx = dz wᵀ` do not read the stored input, so only `dw = x_hatᵀ dz`
carries the error of the codec; it is unbiased if the codec is (Wei et al., 2026, Theorems 3.2 and
3.3).
"""

from typing import Any, overload

import jax

from actjax._core.checks import check_codec, check_floating
from actjax._math.padding import check_features
from actjax.codecs import Codec, Exact
from actjax.weights.base import ArrayWeight, as_weight
from actjax.weights.lora import LowRankSum
from actjax.weights.product import Biases, Weights, joined_products, product


@overload
def linear(
    x: jax.Array,
    w: jax.Array,
    *,
    bias: jax.Array | None = None,
    codec: Codec = Exact(),
    key: jax.Array | None = None,
    features: int | None = None,
    name: str = "input",
) -> jax.Array: ...
@overload
def linear(
    x: jax.Array,
    w: tuple[jax.Array, ...],
    *,
    bias: tuple[jax.Array | None, ...] | None = None,
    codec: Codec = Exact(),
    key: jax.Array | None = None,
    features: int | None = None,
    name: str = "input",
) -> tuple[jax.Array, ...]: ...
@overload
def linear(
    x: jax.Array,
    w: Any,
    *,
    bias: Any = None,
    codec: Codec = Exact(),
    key: jax.Array | None = None,
    features: int | None = None,
    split: bool = False,
    name: str = "input",
) -> Any: ...
def linear(
    x: jax.Array,
    w: Any,
    *,
    bias: Any = None,
    codec: Codec = Exact(),
    key: jax.Array | None = None,
    features: int | None = None,
    split: bool = False,
    name: str = "input",
) -> Any:
    """Returns `x @ w + bias`, and holds `codec.encode(x, key)` instead of `x`.

    With a tuple of weights, returns a tuple of outputs that share one stored copy of `x`.

    The values and `dx` are exact. `dw = x_hatᵀ dz` carries the error of the codec; it is unbiased
    if the codec is, since it is linear in `x`. Products are computed in the dtype of `x`, with sums
    in float32 at least. A weight of another dtype is cast in both passes, and no cast copy is kept.

    Args:
      x: activations, [..., d].
      w: weight, [d, n], or a tuple of weights [d, n_i]; arrays, or Flax nnx variables of them.
        Under `actjax.value_and_grad` they may be `TappedWeight`s, whose gradient has two factors.
        An `actjax.LoRA` is a weight with an adapter. An `actjax.FrozenWeight` has no gradient; if
        all weights are frozen, nothing of `x` is held.
      bias: [n], or a tuple of biases (or None) as long as `w`. Its gradient is exact.
      codec: stores `x`.
      key: randomness of the encoding; consumed. Needed if `codec.needs_key`.
      features: number of features of `x` that are not padding, beyond which `x` is zero; None for
        all. The decoded `x` is zero there too, and so are these rows of the gradients of weights.
      split: whether a `LoRA` gives an `actjax.LowRankSum`: frozen part and adapter part apart.
      name: the name of the stored input in `actjax.explain`.

    Returns:
      [..., n] in the dtype of `x`, or a tuple of such arrays.

    Raises:
      ValueError: shapes that do not fit, a missing key, a codec that does not fit `x`, or
        `features` out of range.
      TypeError: `codec` is not a codec, or `x` or a weight is not floating point.
    """
    weights, biases = check_linear(x, w, bias)
    check_codec(codec)
    features = check_features(features, x.shape[-1])
    if codec.needs_key:
        codec.required_key(key)

    def run(weights: Weights, biases: Biases) -> tuple[jax.Array, ...]:
        return product(name, x, weights, biases, key, codec, features)

    outputs: Any = joined_products(run, weights, biases, split, name)
    return outputs if isinstance(w, tuple | list) else outputs[0]


def qkv_projection(
    x: jax.Array,
    wq: Any,
    wk: Any,
    wv: Any,
    *,
    bias: tuple[jax.Array | None, jax.Array | None, jax.Array | None] | None = None,
    codec: Codec = Exact(),
    key: jax.Array | None = None,
    split: bool = False,
    name: str = "qkv input",
) -> tuple[Any, Any, Any]:
    """Returns the query, key and value projections of `x`, which share one stored copy of it.

    The same as `linear(x, (wq, wk, wv), ...)`; see there for what is exact.

    Args:
      x: activations, [..., d].
      wq: [d, heads * head_dim].
      wk: [d, kv_heads * head_dim].
      wv: [d, kv_heads * head_dim].
      bias: the three biases, or None.
      codec: stores `x`; with a `PointApproximation` this is PAMM.
      key: randomness of the encoding; consumed.
      split: as for `linear`.
      name: the name of the stored input in `actjax.explain`.

    Returns:
      q, k and v, [..., n_i] in the dtype of `x`; with `split`, an `actjax.LowRankSum` where the
      weight is an `actjax.LoRA`.
    """
    q, k, v = linear(x, (wq, wk, wv), bias=bias, codec=codec, key=key, split=split, name=name)
    return q, k, v


def check_linear(x: Any, w: Any, bias: Any) -> tuple[Weights, Biases]:
    """Returns weights and biases as tuples, or raises if they do not fit.

    Args:
      x: the input, or its shape and dtype.
      w: as for `linear`.
      bias: as for `linear`.

    Raises:
      ValueError: shapes that do not fit.
      TypeError: an array that is not floating point, or a `LowRankSum` as input.
    """
    single = not isinstance(w, tuple | list)
    listed_biases = (bias,) if single else bias
    listed_weights = (w,) if single else tuple(w)
    biases = (None,) * len(listed_weights) if listed_biases is None else tuple(listed_biases)
    if isinstance(x, LowRankSum):
        raise TypeError(
            "`x` is a LowRankSum, which only nonlinear operators accept: pass `x.value()`."
        )
    check_floating("x", x)
    weights = tuple(as_weight(w) for w in listed_weights)
    if not weights:
        raise ValueError("`w` is an empty tuple: pass at least one weight.")
    if len(biases) != len(weights):
        raise ValueError(
            f"`bias` has {len(biases)} entries for {len(weights)} weights: pass one each, or None."
        )
    for i, (w, bias) in enumerate(zip(weights, biases, strict=True)):
        name = "w" if len(weights) == 1 else f"w[{i}]"
        check_floating(name, w.weight if isinstance(w, ArrayWeight) else w)
        if w.ndim != 2 or x.ndim < 1 or x.shape[-1] != w.shape[0]:
            hint = " Did you pass it transposed?" if x.shape[-1:] == w.shape[-1:] else ""
            raise ValueError(
                f"`{name}` must be [d, n] with d = {x.shape[-1:]} features of `x`:"
                f" got x{x.shape} @ {name}{w.shape}.{hint}"
            )
        w.check(name)
        if bias is None:
            continue
        check_floating("bias" if len(weights) == 1 else f"bias[{i}]", bias)
        if bias.shape != w.shape[1:]:
            raise ValueError(
                f"the bias of `{name}`{w.shape} must be {w.shape[1:]}, got {bias.shape}."
            )
    return weights, biases
