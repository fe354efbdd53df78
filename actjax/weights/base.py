"""The interface between linear operators and the kinds of weights.

A weight [d, n] is an array, or a pytree around one: frozen, in 4 bits, with an adapter, tapped.
Each kind is a subclass of `Weight` in a separate file. The operators only call the methods of
`Weight`.
"""

import contextvars
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from actjax._math.padding import zero_beyond
from actjax._math.precision import contract_tokens, matmul, matmul_transposed, product_dtype
from actjax.codecs import Codec, Exact
from actjax.codecs import basis as in_basis


@dataclasses.dataclass(frozen=True)
class StoredInput:
    """The input `x` [..., d] of a linear operator, as the backward pass reads it.

    Attributes:
      codec: how `x` is stored, unless it is stored in a basis.
      code: the code of `x`; a `BasisCode` if `x` is stored in a basis.
      basis: the basis [d, k] of this code, if a weight needs its gradient in full, else None.
      features: number of features of `x` that are not padding; None for all. The decoded input is
        zero beyond it; an `Exact` code is zero there itself.
    """

    codec: Codec
    code: Any
    basis: jax.Array | None = None
    features: int | None = None

    @property
    def is_in_basis(self) -> bool:
        """Whether coordinates in a basis are stored."""
        return isinstance(self.code, in_basis.BasisCode)

    def value(self) -> jax.Array:
        """Returns the decoded input `x_hat`, [..., d]."""
        if not self.is_in_basis:
            return self._unpadded(self.codec.decode(self.code), -1)
        coordinates = in_basis.decode(self.code)
        decoded = matmul(coordinates, self._basis.astype(coordinates.dtype).T)
        return self._unpadded(decoded, -1)

    def weight_grad(self, dz: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """Returns `x_hatᵀ dz`, [d, n], in a dtype."""
        if self.is_in_basis:
            right = self.right(dz, jnp.float32)
            gradient = matmul(self._basis.astype(right.dtype), right)
            return self._unpadded(gradient, -2).astype(dtype)
        if isinstance(self.codec, Exact):
            narrow = product_dtype(self.code, dz.dtype, dtype)
            return contract_tokens(self.code, dz, dtype=narrow).astype(dtype)
        return self._unpadded(self.codec.weight_grad(self.code, dz), -2).astype(dtype)

    def left(self) -> jax.Array:
        """Returns the factor [d, k] of `x_hatᵀ dz` that all weights of this input share."""
        codec: Any = self.codec
        return self._unpadded(codec.left(self.code), -2)

    def right(self, dz: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Returns the factor [k, n] of `x_hatᵀ dz`; in a basis `P` it is `(x P)ᵀ dz`.

        Args:
          dz: cotangent of the product.
          dtype: that which the factor is rounded to, at most: it may have more bits.
        """
        if self.is_in_basis:
            coordinates = in_basis.decode(self.code)
            narrow = product_dtype(coordinates, dz.dtype, dtype)
            return contract_tokens(coordinates, dz, dtype=narrow)
        codec: Any = self.codec
        return codec.right(self.code, dz)

    def _unpadded(self, x: jax.Array, axis: int) -> jax.Array:
        """Returns an array, of the decoded input or a gradient, with zeros for the padding."""
        is_exact = isinstance(self.codec, Exact) and not self.is_in_basis
        return x if is_exact else zero_beyond(self.features, x, axis)

    @property
    def _basis(self) -> jax.Array:
        assert self.basis is not None
        return self.basis


class Weight:
    """A weight [d, n] as linear operators read it.

    Subclasses are pytrees with `shape`, `ndim` and `dtype`.

    Attributes:
      needs_input: whether the gradient reads the input of the operator.
    """

    needs_input: ClassVar[bool] = True

    def without_variables(self) -> "Weight":
        """Returns the weight with the values of Flax variables in place of these variables."""
        return self

    def check(self, name: str) -> None:
        """Raises unless the parts of the weight fit together; messages call the weight `name`."""
        del name

    def parts(self) -> tuple["Weight", ...]:
        """Returns the weights that the operator multiplies its input by."""
        return (self,)

    def join(self, products: Sequence[jax.Array], split: bool, name: str) -> Any:
        """Returns the output of the operator from the products with `parts()`.

        Args:
          products: one for each part.
          split: whether to return an `actjax.LowRankSum` if there is an adapter.
          name: the name of an adapter in `actjax.explain`.
        """
        del split, name
        (product,) = products
        return product

    def input_basis(self) -> tuple[jax.Array, int] | None:
        """Returns the basis [d, k] to store the input in and the bits of a coordinate, or None."""
        return None

    def plain(self) -> "Weight":
        """Returns the weight without the parts that only its gradient uses."""
        return self

    def with_unquantized_input(self) -> "Weight":
        """Returns the weight, whose `input_basis` does not quantize coordinates."""
        return self

    def times(self, x: jax.Array) -> jax.Array:
        """Returns `x w`, [..., n], in the `product_dtype`."""
        raise NotImplementedError

    def transposed_times(self, dz: jax.Array) -> jax.Array:
        """Returns `dz wᵀ`, [..., d], in the `product_dtype`."""
        raise NotImplementedError

    def hold_for_linear(self) -> "Weight":
        """Returns the form in which a linear operator keeps the weight for its backward pass."""
        return self

    def gradient(self, stored: StoredInput, dz: jax.Array) -> Any:
        """Returns the cotangent of the weight, a pytree like it; None if it has no gradient."""
        raise NotImplementedError


class WrappedWeight(Weight):
    """A weight around an array or another weight.

    Attributes:
      weight: the wrapped array or weight, [d, n].
    """

    weight: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.weight.shape

    @property
    def ndim(self) -> int:
        """Number of axes of the weight."""
        return self.weight.ndim

    @property
    def dtype(self) -> Any:
        """Dtype of the weight."""
        return self.weight.dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ArrayWeight(WrappedWeight):
    """A plain array.

    Attributes:
      weight: [d, n].
    """

    weight: Any

    def times(self, x: jax.Array) -> jax.Array:
        return matmul(x, self.weight.astype(x.dtype), dtype=product_dtype(x))

    def transposed_times(self, dz: jax.Array) -> jax.Array:
        return matmul_transposed(dz, self.weight.astype(dz.dtype), product_dtype(dz))

    def gradient(self, stored: StoredInput, dz: jax.Array) -> "ArrayWeight":
        return ArrayWeight(stored.weight_grad(dz, self.dtype))


class Conversions:
    """Weights that code of other libraries converted to arrays, while a function is traced.

    `jnp.asarray(weight)`, as in `nnx.Linear`, returns the array of the weight. An operator that
    gets this very array finds the weight again. A cast in between makes another array.
    """

    def __init__(self) -> None:
        """Begins with no weight."""
        self._known: dict[int, tuple[Any, WrappedWeight, str]] = {}
        self._read: set[int] = set()
        self._shared: set[str] = set()

    def convert(self, weight: WrappedWeight, path: str) -> Any:
        """Returns the array of a weight, and remembers it."""
        name = id(weight.weight)
        if name in self._known and self._known[name][2] != path:
            # Outside of jit two parameters may be one array, which then identifies neither.
            self._shared |= {path, self._known[name][2]}
        self._known[name] = weight.weight, weight, path
        return weight.weight

    def find(self, x: Any) -> Any:
        """Returns the weight whose array `x` is; `x` itself if it is none."""
        if id(x) not in self._known:
            return x
        self._read.add(id(x))
        return self._known[id(x)][1]

    def lost(self) -> set[str]:
        """Returns the paths of the weights that no operator found again."""
        unread = (path for name, (_, _, path) in self._known.items() if name not in self._read)
        return {*unread, *self._shared}


conversions: contextvars.ContextVar[Conversions | None] = contextvars.ContextVar(
    "conversions", default=None
)
"""The conversions of the function being traced; None where a weight must not be converted."""


def value_of(x: Any) -> Any:
    """Returns the value of a Flax nnx variable, and any other object unchanged."""
    return x.get_value() if hasattr(x, "get_value") else x


def as_weight(w: Any) -> Weight:
    """Returns an array, a Flax variable or a weight as a `Weight`."""
    w = value_of(w)
    if (current := conversions.get()) is not None:
        w = current.find(w)
    return w.without_variables() if isinstance(w, Weight) else ArrayWeight(w)


def shape_text(x: Any) -> str:
    """Returns the dtype and shape of an array as text, without its numbers."""
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return repr(x)
    return f"{x.dtype}{list(x.shape)}"
