"""Operators with a rebuilt input: the linear input is recomputed from codes instead of stored.

The outputs of a norm, of SwiGLU, of GELU and of attention are inputs of linear operators. They
follow from values that are kept anyway: by another forward pass for attention, elementwise for the
others. One code for each of these values is enough, then: `dw` is as accurate as this code, without
a low-rank truncation, and no product with a weight is computed twice.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from actjax._core.checks import check_codecs, check_floating
from actjax._core.coded_call import (
    Operator,
    coded_call,
    differentiate,
    restore,
    value_and_codes,
)
from actjax._math.padding import check_features
from actjax.codecs import Codec, Exact
from actjax.ops.activations import Activation, of_sums, split_sums
from actjax.ops.attention import (
    HeadNorm,
    Implementation,
    OnDevices,
    check_attention,
    from_merged,
    side_inputs_of,
)
from actjax.ops.gelu import Gelu
from actjax.ops.glu import Activate, check_gate
from actjax.ops.linear import check_linear
from actjax.ops.norm import Normalize, check_norm
from actjax.weights.lora import LowRankSum
from actjax.weights.product import input_grad, joined_products, parameter_grads, product


def norm_linear(
    x: jax.Array,
    scale: jax.Array,
    w: Any,
    *,
    eps: float = 1e-6,
    bias: Any = None,
    codec: Codec = Exact(),
    key: jax.Array | None = None,
    split: bool = False,
    name: str = "norm input",
) -> Any:
    """Returns `linear(rms_norm(x, scale), w)`, and holds only the code of `x`.

    The value is exact. The gradients are those at the decoded `x`, for example
    `dw = n(x_hat)ᵀ dz`. The cotangent that the linear operator passes to the norm is exact.

    Args:
      x: [..., d].
      scale: scale of the norm, [d].
      w: weight [d, n] or a tuple of weights, as for `actjax.linear`.
      eps: as for `actjax.rms_norm`.
      bias: as for `actjax.linear`.
      codec: stores `x`.
      key: randomness of the encoding; consumed. Needed if `codec.needs_key`.
      split: as for `actjax.linear`.
      name: the name of the kept input in `actjax.explain`.

    Returns:
      [..., n] in the dtype of `x`, or a tuple of such arrays.

    Raises:
      ValueError: shapes that do not fit, or a missing key.
      TypeError: an array that is not floating point, or a `codec` that is not a codec.
    """
    check_norm(x, scale)
    codecs = check_codecs(codec, ("x",), key)
    return _then_linear(
        Normalize(eps), (x,), scale, w, bias, codecs, key, "norm_linear", (name,), split
    )


def swiglu_linear(
    gate: Activation,
    up: Activation,
    w: Any,
    *,
    bias: Any = None,
    codec: Codec | Sequence[Codec] = Exact(),
    key: jax.Array | Sequence[jax.Array] | None = None,
    features: int | None = None,
    name: str = "",
) -> Any:
    """Returns `linear(swiglu(gate, up), w)`, and holds only codes of `gate` and `up`.

    The value is exact. The gradients are those at the decoded `gate` and `up`.

    Args:
      gate: [..., f]; as for `actjax.swiglu`.
      up: [..., f], of the same dtype; as for `actjax.swiglu`.
      w: weight [f, n] or a tuple of weights, as for `actjax.linear`.
      bias: as for `actjax.linear`.
      codec: stores `gate` and `up`, or a pair of codecs.
      key: randomness of the encoding, or a pair of keys; consumed. Needed if a codec draws random
        numbers.
      features: as for `actjax.swiglu`. Rows of the gradient of `w` are zero beyond it.
      name: prefix of the names that `actjax.explain` gives the kept arrays.

    Returns:
      [..., n] in the dtype of `gate`, or a tuple of such arrays.

    Raises:
      ValueError: shapes that do not fit, a missing key, or `features` out of range.
      TypeError: an array that is not floating point, or a `codec` that is not a codec.
    """
    check_gate(gate, up)
    codecs = check_codecs(codec, ("gate", "up"), key)
    names = f"{name} gate".strip(), f"{name} up".strip()
    activate = Activate(check_features(features, gate.shape[-1]))
    return _then_linear(activate, (gate, up), (), w, bias, codecs, key, "swiglu_linear", names)


def gelu_linear(
    x: Activation,
    w: Any,
    *,
    approximate: bool = True,
    bias: Any = None,
    codec: Codec = Exact(),
    key: jax.Array | None = None,
    name: str = "gelu input",
) -> Any:
    """Returns `linear(gelu(x), w)`, and holds only the code of `x`.

    The value is exact. The gradients are those at the decoded `x`.

    Args:
      x: [..., f]; as for `actjax.gelu`.
      w: weight [f, n] or a tuple of weights, as for `actjax.linear`.
      approximate: as for `actjax.gelu`.
      bias: as for `actjax.linear`.
      codec: stores `x`.
      key: randomness of the encoding; consumed. Needed if `codec.needs_key`.
      name: the name of the kept input in `actjax.explain`.

    Returns:
      [..., n] in the dtype of `x`, or a tuple of such arrays.

    Raises:
      ValueError: shapes that do not fit, or a missing key.
      TypeError: an array that is not floating point, or a `codec` that is not a codec.
    """
    check_floating("x", x)
    codecs = check_codecs(codec, ("x",), key)
    gelu = Gelu(approximate)
    return _then_linear(gelu, (x,), (), w, bias, codecs, key, "gelu_linear", (name,))


def attention_linear(
    q: Activation,
    k: Activation,
    v: Activation,
    w: Any,
    *,
    causal: bool = True,
    window: int | None = None,
    segments: jax.Array | None = None,
    rope: tuple[jax.Array, jax.Array] | None = None,
    norm: HeadNorm | None = None,
    bias: Any = None,
    codec: Codec | Sequence[Codec] = Exact(),
    key: jax.Array | Sequence[jax.Array] | None = None,
    implementation: Implementation | None = None,
    on_devices: OnDevices | None = None,
    name: str = "",
) -> Any:
    """Returns `linear(attention(q, k, v), w)`, and holds only codes of q, k and v.

    The value is exact. The gradients are those at the decoded q, k and v. The backward pass runs
    the forward pass of attention again, which gives the input of the linear operator and what the
    backward pass of attention needs.

    Args:
      q: queries, [B, S, H, D], before `norm` and `rope`; as for `actjax.attention`.
      k: keys, [B, S, G, D], before `norm` and `rope`.
      v: values, [B, S, G, D].
      w: weight [H * D, n] or a tuple of weights, as for `actjax.linear`.
      causal: this and the next four are as for `actjax.attention`.
      window: number of positions that a position sees at most.
      segments: [B, S] integers; a position sees only positions with its number.
      rope: cosines and sines of the rotation.
      norm: scales of the norms of the heads of q and k.
      bias: as for `actjax.linear`.
      codec: stores q, k and v, or a sequence of three codecs.
      key: randomness of the encoding, or a sequence of three keys; consumed. Needed if a codec
        draws random numbers.
      implementation: as for `actjax.attention`.
      on_devices: as for `actjax.attention`.
      name: prefix of the names that `actjax.explain` gives the kept arrays.

    Returns:
      [B, S, n] in the dtype of `q`, or a tuple of such arrays.

    Raises:
      ValueError: shapes that do not fit, or a missing key.
      TypeError: an array that is not floating point, or a `codec` that is not a codec.
    """
    mask = check_attention(q, k, v, causal, window, segments)
    codecs = check_codecs(codec, ("q", "k", "v"), key)
    attend = from_merged(q, k, mask, norm, implementation, on_devices, rope is not None)
    side_inputs = side_inputs_of(segments, rope, norm)
    merged = tuple(x.reshape(*x.shape[:2], -1) for x in (q, k, v))
    names = tuple(f"{name} {letter}".strip() for letter in "qkv")
    operator = "attention_linear"
    return _then_linear(attend, merged, side_inputs, w, bias, codecs, key, operator, names)


def _then_linear(
    before: Callable[[Any, Any], jax.Array],
    activations: tuple[Activation, ...],
    others: Any,
    w: Any,
    bias: Any,
    codecs: tuple[Codec, ...],
    key: Any,
    operator: str,
    names: tuple[str, ...],
    split: bool = False,
) -> Any:
    """Returns `linear(before(activations, others), w, bias)`, and holds codes of the activations.

    Args:
      before: computes the linear input, in both passes; closes over no arrays.
      activations: the arrays that the codecs store.
      others: a pytree that `before` also reads; kept as it is.
      w: as for `linear`.
      bias: as for `linear`.
      codecs: one for each activation.
      key: randomness of the encoding, or None.
      operator: the name of this operator in `actjax.explain`.
      names: the name of each activation in `actjax.explain`.
      split: as for `linear`.
    """
    bases, lows = split_sums(activations)
    if any(isinstance(x, LowRankSum) for x in activations):
        before, others = of_sums(before), (others, lows)
    weights, biases = check_linear(jax.eval_shape(before, bases, others), w, bias)

    def run(weights: Any, biases: Any) -> tuple[jax.Array, ...]:
        then = _ThenLinear(before)
        return coded_call(then, bases, (others, weights, biases), codecs, key, operator, names)

    outputs: Any = joined_products(run, weights, biases, split, names[0])
    return outputs if isinstance(w, tuple | list) else outputs[0]


@dataclasses.dataclass(frozen=True)
class _ThenLinear(Operator):
    """`linear(before(activations, before_others), weights, biases)`, with these three as `others`.

    Attributes:
      before: computes the linear input; closes over no arrays.
    """

    before: Callable[[Any, Any], jax.Array]

    def __call__(self, activations: Any, others: Any) -> tuple[jax.Array, ...]:
        before_others, weights, biases = others
        return product("rebuilt input", self.before(activations, before_others), weights, biases)

    def forward_with_codes(self, activations, others, codecs, key, operator, names):
        before_others, weights, biases = others
        x, codes = value_and_codes(
            self.before, activations, before_others, codecs, key, operator, names
        )
        plain = tuple(w.plain() for w in weights)
        return product("rebuilt input", x, plain, biases), codes

    def backward(self, codes, codecs, held, cotangent):
        before_others, weights, biases = restore(held)
        # Only the input of the linear operator is computed again, not its output.
        dx = input_grad(weights, cotangent)
        x, dactivations, dothers = differentiate(
            self.before, codes, codecs, before_others, dx, with_value=True
        )
        return dactivations, (dothers, *parameter_grads(x, weights, biases, cotangent))
