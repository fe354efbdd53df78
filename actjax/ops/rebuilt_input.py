"""Linear operators with a rebuilt input: it is recomputed from codes of the operator before.

The output of a norm, of SwiGLU or of attention is the input of a linear operator. It follows from
values that are kept anyway: elementwise for norm and SwiGLU, and by the forward pass of attention
from q, k and v. The linear input therefore needs no bytes. The error of `dw` is that of the codes,
without a low-rank truncation, and no product with a weight is computed twice.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from actjax._core.checks import check_codecs
from actjax._core.coded_call import Operator, coded_call, differentiate, restore
from actjax.codecs import Codec, Exact
from actjax.ops.activations import Activation, of_sums, split_sums
from actjax.ops.attention import HeadNorm, Implementation, beside, check_attention, from_merged
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
    """Returns `linear(rms_norm(x, scale), w)`, and keeps only a code of `x`.

    The value is exact. The gradients are exact at the decoded `x`; for example
    `dw = n(x_hat)ᵀ dz`. The cotangent that the norm's backward pass gets from `linear` is exact.

    Args:
      x: [..., d].
      scale: of the norm, [d].
      w: weight [d, n] or a tuple of weights, as for `actjax.linear`.
      eps: as for `actjax.rms_norm`.
      bias: as for `actjax.linear`.
      codec: how `x` is kept.
      key: randomness of the encoding; consumed. Required if `codec.needs_key`.
      split: as for `actjax.linear`.
      name: name of the kept input in `actjax.explain`.

    Returns:
      [..., n] in the dtype of `x`, or a tuple of these.

    Raises:
      ValueError: shapes do not fit, or the key is missing.
      TypeError: an array is not floating point, or `codec` is not a codec.
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
    name: str = "",
) -> Any:
    """Returns `linear(swiglu(gate, up), w)`, and keeps only codes of `gate` and `up`.

    The value is exact. The gradients are exact at the decoded `gate` and `up`.

    Args:
      gate: [..., f]; an array or an `actjax.LowRankSum`, whose low-rank part is kept exactly.
      up: [..., f], of the same dtype, likewise.
      w: weight [f, n] or a tuple of weights, as for `actjax.linear`.
      bias: as for `actjax.linear`.
      codec: how `gate` and `up` are kept; one codec or a pair.
      key: randomness of the encoding; one key or a pair; consumed. Required if a codec draws random
        numbers.
      name: prefix of the names in `actjax.explain`.

    Returns:
      [..., n] in the dtype of `gate`, or a tuple of these.

    Raises:
      ValueError: shapes do not fit, or the key is missing.
      TypeError: an array is not floating point, or `codec` is not a codec.
    """
    check_gate(gate, up)
    codecs = check_codecs(codec, ("gate", "up"), key)

    names = f"{name} gate".strip(), f"{name} up".strip()
    return _then_linear(Activate(), (gate, up), (), w, bias, codecs, key, "swiglu_linear", names)


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
    name: str = "",
) -> Any:
    """Returns `linear(attention(q, k, v), w)`, and keeps only codes of q, k and v.

    The value is exact. The gradients are exact at the decoded q, k and v. The backward pass runs
    the forward pass of attention again. This gives the input of the linear operator and everything
    that the backward pass of attention needs.

    Args:
      q: queries, [B, S, H, D], before `norm` and `rope`; an array or an `actjax.LowRankSum`, whose
        low-rank part is kept exactly.
      k: keys, [B, S, G, D] with G key/value heads, likewise.
      v: values, [B, S, G, D], likewise.
      w: weight [H * D, n] or a tuple of weights, as for `actjax.linear`.
      causal: as for `actjax.attention`.
      window: as for `actjax.attention`.
      segments: as for `actjax.attention`.
      rope: as for `actjax.attention`.
      norm: as for `actjax.attention`.
      bias: as for `actjax.linear`.
      codec: how q, k and v are kept; one codec or three.
      key: randomness of the encoding; one key or three; consumed. Required if a codec draws random
        numbers.
      implementation: as for `actjax.attention`.
      name: prefix of the names in `actjax.explain`.

    Returns:
      [B, S, n] in the dtype of `q`, or a tuple of these.

    Raises:
      ValueError: shapes do not fit, or the key is missing.
      TypeError: an array is not floating point, or `codec` is not a codec.
    """
    sight = check_attention(q, k, v, causal, window, segments)
    codecs = check_codecs(codec, ("q", "k", "v"), key)
    attend, more = from_merged(q, k, sight, norm, implementation), beside(segments, rope, norm)

    merged = tuple(x.reshape(*x.shape[:2], -1) for x in (q, k, v))
    names = tuple(f"{name} {letter}".strip() for letter in "qkv")
    operator = "attention_linear"
    return _then_linear(attend, merged, more, w, bias, codecs, key, operator, names)


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
    """Returns `linear(before(activations, others), w, bias)`, and keeps codes of the activations.

    Args:
      before: computes the linear input; closes over no arrays.
      activations: the first argument of `before`.
      others: the second argument of `before`, kept as it is.
      w: as for `linear`.
      bias: as for `linear`.
      codecs: one for each activation.
      key: randomness of the encoding, or None.
      operator: name of the operator in `actjax.explain`.
      names: one for each activation.
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
    """`linear(before(activations, others), weights, biases)`; `others` holds the last three.

    Attributes:
      before: computes the linear input; closes over no arrays.
    """

    before: Callable[[Any, Any], jax.Array]

    def __call__(self, activations: Any, others: Any) -> tuple[jax.Array, ...]:
        rest, weights, biases = others
        return product("rebuilt input", self.before(activations, rest), weights, biases)

    def forward(self, activations: Any, others: Any) -> tuple[jax.Array, ...]:
        rest, weights, biases = others
        return self(activations, (rest, tuple(w.plain() for w in weights), biases))

    def backward(self, codes, codecs, held, cotangent):
        others, weights, biases = restore(held)
        # The linear operator itself is not computed again, only its input.
        dx = input_grad(weights, cotangent)
        x, dactivations, dothers = differentiate(
            self.before, codes, codecs, others, dx, with_value=True
        )
        return dactivations, (dothers, *parameter_grads(x, weights, biases, cotangent))
