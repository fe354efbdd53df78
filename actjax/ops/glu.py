"""The gated linear unit of Llama (Shazeer, "GLU variants improve transformer", 2020)."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax

from actjax._core.checks import all_exact, check_codecs, check_floating
from actjax._core.coded_call import coded_call
from actjax._core.reverse_mode import ReverseMode
from actjax._core.tags import keep
from actjax._math.padding import check_features, zero_beyond
from actjax._math.precision import accumulation_dtype
from actjax.codecs import Codec, Exact
from actjax.formats.code import Format, QuantizedCode, QuantizeInputs
from actjax.kernels.swiglu_backward.api import swiglu_backward
from actjax.kernels.swiglu_backward.reference import value_and_grads
from actjax.kernels.swiglu_encode import reference
from actjax.kernels.swiglu_encode.api import swiglu_encode
from actjax.ops.activations import Activation, of_sums, split_sums
from actjax.weights.lora import LowRankSum


def swiglu(
    gate: Activation,
    up: Activation,
    *,
    codec: Codec | Sequence[Codec] = Exact(),
    key: jax.Array | Sequence[jax.Array] | None = None,
    features: int | None = None,
    name: str = "",
) -> jax.Array:
    """Returns `silu(gate) * up`, computed in float32, and holds only `gate` and `up`.

    The value is exact. The gradients are those at the decoded `gate` and `up`. They are biased even
    if the codec is not, and their error propagates upstream (Wei et al., 2026, Theorems 3.2 and
    3.3). Autodiff would also keep the sigmoid, its derivative and the activated gate.

    Args:
      gate: [..., f]; an array, or an `actjax.LowRankSum`, whose low-rank part is kept as it is
        beside the code of its base.
      up: [..., f], of the same dtype; an array or a `LowRankSum`.
      codec: stores `gate` and `up`, or a pair of codecs.
      key: randomness of the encoding, or a pair of keys; consumed. Needed if a codec draws random
        numbers.
      features: number of features that are not padding; None for all. The value and the gradients
        are zero beyond it.
      name: prefix of the names that `actjax.explain` gives the kept arrays.

    Returns:
      [..., f] in the dtype of `gate`.

    Raises:
      ValueError: the two differ in shape or dtype, a missing key, or `features` out of range.
      TypeError: an input that is not floating point, or a `codec` that is not a codec.
    """
    check_gate(gate, up)
    codecs = check_codecs(codec, ("gate", "up"), key)
    activate = Activate(check_features(features, gate.shape[-1]))
    if all_exact(codecs):
        gate, up = (x.value() if isinstance(x, LowRankSum) else x for x in (gate, up))
        return _swiglu(name, activate.features, gate, up)
    names = f"{name} gate".strip(), f"{name} up".strip()
    inputs, lows = split_sums((gate, up))
    if any(isinstance(x, LowRankSum) for x in (gate, up)):
        return coded_call(of_sums(activate), inputs, ((), lows), codecs, key, "swiglu", names)
    return coded_call(activate, inputs, (), codecs, key, "swiglu", names)


def check_gate(gate: Activation, up: Activation) -> None:
    """Raises unless both are floating point arrays of the same shape and dtype."""
    check_floating("gate", gate)
    check_floating("up", up)
    if gate.ndim == 0:
        raise ValueError("`gate` must have features, [..., f], got a scalar.")
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            "`gate` and `up` must agree in shape and dtype, got"
            f" gate {gate.dtype}{gate.shape} and up {up.dtype}{up.shape}."
        )


@dataclasses.dataclass(frozen=True)
class Activate:
    """SwiGLU of a pair of activations, whose backward pass can read their codes.

    Attributes:
      features: number of features that are not padding; None for all.
    """

    features: int | None = None
    reads_arrays: ClassVar[bool] = False

    def __call__(self, activations: tuple[jax.Array, jax.Array], _: tuple[()]) -> jax.Array:
        return _swiglu("", self.features, *activations)

    def with_codes(
        self, inputs: Sequence[QuantizeInputs], formats: Sequence[Format], _: tuple[()]
    ) -> tuple[jax.Array, Sequence[QuantizedCode]]:
        """As `actjax._core.coded_call.WritesCodes`."""
        (gate, up), both = inputs, (formats[0], formats[1])
        value, *codes = swiglu_encode(gate, up, formats=both, features=self.features)
        return value, codes

    def from_codes(
        self,
        codes: tuple[QuantizedCode, QuantizedCode],
        _: tuple[()],
        cotangent: jax.Array,
        with_value: bool,
    ) -> tuple[jax.Array | None, tuple[jax.Array, jax.Array], tuple[()]]:
        """As `actjax._core.coded_call.FromCodes`."""
        value, dgate, dup = swiglu_backward(
            *codes, cotangent, with_value=with_value, features=self.features
        )
        return value, (dgate, dup), ()


@functools.partial(ReverseMode, nondiff_argnums=(0, 1))
def _swiglu(name: str, features: int | None, gate: jax.Array, up: jax.Array) -> jax.Array:
    del name
    return reference.value(gate, up, features)


def _swiglu_fwd(name, features, gate, up):
    with jax.named_scope("actjax.swiglu"):
        gate, held_gate = keep(gate, Exact(), None, "swiglu", f"{name} gate".strip())
        up, held_up = keep(up, Exact(), None, "swiglu", f"{name} up".strip())
        return _swiglu(name, features, gate, up), (held_gate, held_up)


def _swiglu_bwd(name, features, residuals, dy):
    del name
    gate, up = residuals
    with jax.named_scope("actjax.swiglu"):
        wide = accumulation_dtype(gate.dtype)
        g, u, dy = gate.astype(wide), up.astype(wide), zero_beyond(features, dy.astype(wide))
        _, dgate, dup = value_and_grads(g, u, dy)
    return dgate.astype(gate.dtype), dup.astype(up.dtype)


_swiglu.defvjp(_swiglu_fwd, _swiglu_bwd)
