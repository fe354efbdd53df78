"""The Gaussian error linear unit (Hendrycks and Gimpel, 2016), which keeps its input, or a code."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from actjax._core.checks import all_exact, check_codecs, check_floating
from actjax._core.coded_call import coded_call
from actjax._core.reverse_mode import ReverseMode
from actjax._core.tags import keep
from actjax._math.precision import accumulation_dtype
from actjax.codecs import Codec, Exact
from actjax.ops.activations import Activation, of_sums, split_sums
from actjax.weights.lora import LowRankSum


def gelu(
    x: Activation,
    *,
    approximate: bool = True,
    codec: Codec = Exact(),
    key: jax.Array | None = None,
    name: str = "gelu input",
) -> jax.Array:
    """Returns `x Φ(x)`, or its approximation by tanh, computed in float32, and holds only `x`.

    The value is exact. The gradient is that at the decoded `x`. It is biased even if the codec is
    not, and its error propagates upstream (Wei et al., 2026, Theorems 3.2 and 3.3). Autodiff would
    also keep the cubic, the tanh and their float32 copies.

    Source: Hendrycks and Gimpel, arXiv:1606.08415, section 2: `x Φ(x) = x/2 (1 + erf(x / √2))`, and
    the approximation `x/2 (1 + tanh(√(2/π) (x + 0.044715 x³)))`. The latter is computed as
    `x sigmoid(2 √(2/π) (x + 0.044715 x³))`, which is the same number without cancellation.

    Args:
      x: any shape; an array, or an `actjax.LowRankSum`, whose low-rank part is kept as it is beside
        the code of its base.
      approximate: whether to use tanh in place of erf.
      codec: stores `x`.
      key: randomness of the encoding; consumed. Needed if `codec.needs_key`.
      name: the name of the kept input in `actjax.explain`.

    Returns:
      An array of the shape and dtype of `x`.

    Raises:
      ValueError: a missing key, or a codec that does not fit `x`.
      TypeError: `x` is not floating point, or `codec` is not a codec.
    """
    check_floating("x", x)
    codecs = check_codecs(codec, ("x",), key)
    if all_exact(codecs):
        return _gelu(approximate, name, x.value() if isinstance(x, LowRankSum) else x)
    inputs, lows = split_sums((x,))
    if isinstance(x, LowRankSum):
        operator = of_sums(Gelu(approximate))
        return coded_call(operator, inputs, ((), lows), codecs, key, "gelu", (name,))
    return coded_call(Gelu(approximate), inputs, (), codecs, key, "gelu", (name,))


@dataclasses.dataclass(frozen=True)
class Gelu:
    """GELU as a function of activations; there are no other arguments.

    Attributes:
      approximate: as for `gelu`.
    """

    approximate: bool

    def __call__(self, activations: tuple[jax.Array], _: tuple[()]) -> jax.Array:
        return _gelu(self.approximate, "", *activations)


@functools.partial(ReverseMode, nondiff_argnums=(0, 1))
def _gelu(approximate: bool, name: str, x: jax.Array) -> jax.Array:
    del name
    wide = x.astype(accumulation_dtype(x.dtype))
    return (wide * _gate(wide, approximate)[0]).astype(x.dtype)


_SLOPE, _CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715
_SATURATED = 30.0
"""Beyond it the sigmoid of the approximation is 0 or 1, in float64 too, and cubes may overflow."""


def _gate(x: jax.Array, approximate: bool) -> tuple[jax.Array, jax.Array]:
    """Returns the number in [0, 1] that `x` is multiplied by, and its derivative."""
    if not approximate:
        density = jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return 0.5 * jax.lax.erfc(-x / math.sqrt(2)), density
    x = jnp.clip(x, -_SATURATED, _SATURATED)
    z = _SLOPE * x * (1 + _CUBIC * x * x)
    gate = jax.nn.sigmoid(z)
    return gate, gate * jax.nn.sigmoid(-z) * _SLOPE * (1 + 3 * _CUBIC * x * x)


def _gelu_fwd(approximate, name, x):
    with jax.named_scope("actjax.gelu"):
        x, held = keep(x, Exact(), None, "gelu", name)
        return _gelu(approximate, name, x), held


def _gelu_bwd(approximate, name, x, dy):
    del name
    with jax.named_scope("actjax.gelu"):
        wide = x.astype(accumulation_dtype(x.dtype))
        gate, slope = _gate(wide, approximate)
        dx = dy.astype(wide.dtype) * (gate + wide * slope)
    return (dx.astype(x.dtype),)


_gelu.defvjp(_gelu_fwd, _gelu_bwd)
