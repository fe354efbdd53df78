"""Low-rank adapters of frozen weights, and their outputs in two parts.

LoRA (Hu et al., 2022): `y = x W + s (x A) B`, with `W` frozen. The gradients are those of the two
thin matrices, `dB = (s x A)ᵀ dy` and `dA = xᵀ (s dy Bᵀ)`: of `x` what the codec stores is read, and
`x A` is kept as it is. `W` has none, so a third of its products falls away.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from actjax._core.tags import keep_output
from actjax._math.precision import accumulation_dtype, matmul
from actjax.codecs import Exact
from actjax.ops.checks import check_floating
from actjax.ops.linear_vjp import Biases, Weights, linear_vjp
from actjax.weights.frozen import DroppedInput, WrappedWeight, array_of, frozen, shape_text


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class LoRA(WrappedWeight):
    """A frozen weight [d, n] with an adapter of rank r: `W + scale A B` (Hu et al., 2022).

    A pytree, for `actjax.linear` and the operators that end in one, wherever a weight may stand.
    Differentiate with respect to `a` and `b`.

    Attributes:
      weight: [d, n]; an array, or an `actjax.NF4Weight` (QLoRA, Dettmers et al., 2023).
      a: [d, r].
      b: [r, n].
      key: randomness of the dropout; None for none.
      scale: `alpha / r`. Static.
      dropout: share of the adapter's inputs that are set to zero. Static.
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
            raise TypeError(f"only actjax operators read {self!r}: use `merged()` for the array.")
        return self

    def merged(self, dtype: Any = None) -> jax.Array:
        """Returns `W + scale A B` as an array [d, n], of the dtype of the weight by default."""
        weight = array_of(self.weight, accumulation_dtype(self.dtype))
        a, b = self.a.astype(weight.dtype), self.b.astype(weight.dtype)
        return (weight + self.scale * matmul(a, b, "highest")).astype(dtype or self.dtype)

    def opened(self) -> "LoRA":
        """Returns it with the values of Flax variables in their place."""
        value = lambda x: x.get_value() if hasattr(x, "get_value") else x  # noqa: E731
        parts = {name: value(getattr(self, name)) for name in ("weight", "a", "b")}
        return dataclasses.replace(self, **parts)

    def check(self, name: str) -> None:
        """Raises unless the parts fit one another.

        Raises:
          ValueError: shapes that do not fit, or a dropout out of range.
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

    @property
    def down(self) -> Any:
        """What multiplies the input first."""
        if self.dropout == 0 or self.key is None:
            return self.a
        return DroppedInput(self.a, self.key, self.dropout)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRankSum:
    """An activation in two parts, `base + left right`: what an adapted weight gives.

    A nonlinear operator that is given one stores a code of `base` alone: `left`, a few numbers a
    token, is kept as it is, and the sum is made again in the backward pass (HyC-LoRA, 2025,
    Algorithm 2). What the adapter has learned is then not lost to quantization.

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
        """Axes of the activation."""
        return self.base.ndim

    @property
    def dtype(self) -> Any:
        """Dtype of the activation."""
        return self.base.dtype

    def reshape(self, *shape: int) -> "LowRankSum":
        """Returns it with the axis of features cut into several, or put together again."""
        return dataclasses.replace(self, base=self.base.reshape(*shape))

    def value(self, name: str = "adapter") -> jax.Array:
        """Returns the activation; of it `left` is held, and `actjax.explain` calls it `name`."""
        lows: Any = linear_vjp(name, self.left, (self.right,), (None,), None, Exact())
        return self.base + lows[0].reshape(self.base.shape)


Activation = jax.Array | LowRankSum


def call_adapted(
    run: Callable[[Weights, Biases], tuple[jax.Array, ...]],
    weights: Weights,
    biases: Biases,
    split: bool,
    name: str,
) -> tuple[Any, ...]:
    """Returns a linear operator's outputs, where some weights may be `LoRA`s.

    Args:
      run: the operator, for weights without adapters. The adapters' first factors are given to it
        beside the weights, so that all of them share what it stores of its input.
      weights: what may have adapters.
      biases: one each, or None.
      split: whether to return a `LowRankSum` where there is an adapter.
      name: what `actjax.explain` calls the input.
    """
    adapted = [w for w in weights if isinstance(w, LoRA)]
    if not adapted:
        return run(weights, biases)
    bases = tuple(frozen(w.weight) if isinstance(w, LoRA) else w for w in weights)
    downs = tuple(w.down for w in adapted)
    outputs = run((*bases, *downs), (*biases, *(None for _ in downs)))
    lows = iter(outputs[len(weights) :])
    labels = iter([f"{name} adapter"] if len(adapted) == 1 else _numbered(name, len(adapted)))
    results: list[Any] = []
    for w, output in zip(weights, outputs, strict=False):
        if not isinstance(w, LoRA):
            results.append(output)
            continue
        low = next(lows)
        left = (w.scale * low).astype(low.dtype)
        if split:
            left = keep_output(left, "lora", next(labels))
            results.append(LowRankSum(output, left, w.b))
        else:
            results.append(LowRankSum(output, left, w.b).value(next(labels)))
    return tuple(results)


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name} adapter {i}" for i in range(count)]


Lows = tuple[tuple[jax.Array, jax.Array] | None, ...]
"""Of each activation the parts `left` and `right`, if it is a sum."""


def split_sums(activations: Sequence[Activation]) -> tuple[tuple[jax.Array, ...], Lows]:
    """Returns what of activations is to be stored as a code, and what is kept as it is."""
    bases = tuple(x.base if isinstance(x, LowRankSum) else x for x in activations)
    lows = tuple((x.left, x.right) if isinstance(x, LowRankSum) else None for x in activations)
    return bases, lows


def of_sums(fun: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns a function of activations and others as one of their bases and of (others, lows)."""

    def run(bases: Sequence[jax.Array], others: tuple[Any, Lows]) -> Any:
        rest, lows = others
        activations = tuple(
            base if low is None else base + matmul(*low).astype(base.dtype)
            for base, low in zip(bases, lows, strict=True)
        )
        return fun(activations, rest)

    return run
