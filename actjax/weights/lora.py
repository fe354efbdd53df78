"""Low-rank adapters of frozen weights, and their outputs in two parts.

LoRA (Hu et al., 2022): `y = x W + s (x A) B`, with `W` frozen. Only the two thin matrices have
gradients, `dB = (s x A)ᵀ dy` and `dA = xᵀ (s dy Bᵀ)`. `dA` reads the decoded input; `x A` is kept
as it is. A frozen `W` saves a third of its products.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from actjax._core.checks import check_floating
from actjax._core.tags import keep_output
from actjax._math.precision import accumulation_dtype, matmul
from actjax.weights.base import Weight, WrappedWeight, as_weight, shape_text, value_of
from actjax.weights.dropped import DroppedInput
from actjax.weights.frozen import frozen
from actjax.weights.product import single_product


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class LoRA(WrappedWeight):
    """A frozen weight [d, n] with an adapter of rank r: `W + scale A B` (Hu et al., 2022).

    A pytree that linear operators accept as a weight. Differentiate with respect to `a` and `b`.

    Attributes:
      weight: [d, n]; an array, or an `actjax.NF4Weight` (QLoRA, Dettmers et al., 2023).
      a: [d, r].
      b: [r, n].
      key: randomness of the dropout; None for no dropout.
      scale: `alpha / r`. Static.
      dropout: share of the inputs of the adapter that are set to zero. Static.
    """

    weight: Any
    a: Any
    b: Any
    key: Any = None
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})
    dropout: float = dataclasses.field(default=0.0, metadata={"static": True})

    def __repr__(self) -> str:
        return f"LoRA({shape_text(self.weight)}, a={shape_text(self.a)}, scale={self.scale})"

    def __getitem__(self, index: Any) -> "LoRA":
        # `param[...]` is how nnx reads the value of a variable.
        if index is not Ellipsis:
            raise TypeError(
                f"only linear operators of actjax read {self!r}: call `merged()` for the array."
            )
        return self

    def merged(self, dtype: Any = None) -> jax.Array:
        """Returns `W + scale A B` as an array [d, n], of the dtype of the weight by default."""
        weight = frozen(self.weight).astype(accumulation_dtype(self.dtype))
        a, b = self.a.astype(weight.dtype), self.b.astype(weight.dtype)
        return (weight + self.scale * matmul(a, b, "highest")).astype(dtype or self.dtype)

    def without_variables(self) -> "LoRA":
        values = {name: value_of(getattr(self, name)) for name in ("weight", "a", "b")}
        return dataclasses.replace(self, **values)

    def check(self, name: str) -> None:
        """Raises unless the parts fit together.

        Raises:
          ValueError: shapes that do not fit, a dropout out of range, or a scale that is not finite.
          TypeError: factors that are not floating point.
        """
        check_floating(f"{name}.a", self.a)
        check_floating(f"{name}.b", self.b)
        d, n = self.shape
        a, b = tuple(self.a.shape), tuple(self.b.shape)
        if len(a) != 2 or len(b) != 2 or (a[0], b[1]) != (d, n) or a[1] != b[0]:
            raise ValueError(
                f"`{name}` is a LoRA of a weight {(d, n)}, so `a` must be [{d}, r] and `b`"
                f" [r, {n}]: got a{a}, b{b}."
            )
        if 0 in (*a, *b):
            raise ValueError(f"the factors of `{name}` must not be empty: got a{a}, b{b}.")
        if not math.isfinite(self.scale):
            raise ValueError(f"`scale` of `{name}` must be finite, got {self.scale}.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"`dropout` of `{name}` must be in [0, 1), got {self.dropout}.")

    def parts(self) -> tuple[Weight, ...]:
        dropped = self.dropout > 0 and self.key is not None
        down = DroppedInput(self.a, self.key, self.dropout) if dropped else as_weight(self.a)
        return frozen(self.weight), down

    def join(self, products: Sequence[jax.Array], split: bool, name: str) -> Any:
        base, low = products
        left = (self.scale * low).astype(low.dtype)
        if not split:
            return LowRankSum(base, left, self.b).value(name)
        return LowRankSum(base, keep_output(left, "lora", name), self.b)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRankSum:
    """An activation in two parts, `base + left right`: the split output of an adapted weight.

    A nonlinear operator stores a code of `base` only. It keeps `left`, a few numbers per token, as
    it is, and computes the sum again in the backward pass (HyC-LoRA, 2025, Algorithm 2).
    Quantization then does not touch what the adapter has learned.

    Attributes:
      base: [..., n].
      left: [..., r].
      right: [r, n].
    """

    base: jax.Array
    left: jax.Array
    right: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the activation."""
        return self.base.shape

    @property
    def ndim(self) -> int:
        """Number of axes of the activation."""
        return self.base.ndim

    @property
    def dtype(self) -> Any:
        """Dtype of the activation."""
        return self.base.dtype

    def reshape(self, *shape: int) -> "LowRankSum":
        """Returns the sum with its axis of features split into several axes, or merged again."""
        return dataclasses.replace(self, base=self.base.reshape(*shape))

    def value(self, name: str = "adapter") -> jax.Array:
        """Returns the activation, and holds `left`, which has this name in `actjax.explain`."""
        return self.base + single_product(name, self.left, self.right).reshape(self.base.shape)
