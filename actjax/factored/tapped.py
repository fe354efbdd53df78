"""Weights whose gradient comes in two factors.

JAX wants a cotangent shaped like its primal, so a factored gradient cannot be the cotangent of a
weight. It can be the cotangent of two zero arrays shaped like its factors, *taps*, that travel with
the weight: a `TappedWeight` is a pytree node and passes through `scan`, `vmap` and user code
untouched. Only actjax's linear operators open it; their backward pass returns the factors as the
cotangents of the taps, and nothing for the weight.
"""

import dataclasses
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from actjax._core.coded_call import Held, Holdable
from actjax._math.precision import matmul_transposed, product_dtype
from actjax.weights.base import ArrayWeight, StoredInput, WrappedWeight, conversions


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class TappedWeight(WrappedWeight, Holdable):
    """A weight [d, n] with the taps at which its gradient will appear.

    Attributes:
      weight: [d, n]. Its cotangent is zero.
      left: zeros, [d, k]; None if another weight of the same operator has this tap, or if `basis`
        is given.
      right: zeros, [k, n].
      basis: [d, k] if the operator stores its input in this basis, else None.
      path: path of the weight in the parameters, for messages. Static.
      bits: bits of a stored coordinate in the basis: 16 for the dtype of the input, or 8. Static.
    """

    weight: Any
    left: Any
    right: Any
    basis: Any
    path: str = dataclasses.field(metadata={"static": True})
    bits: int = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        return f"TappedWeight({self.path})"

    def astype(self, dtype: Any) -> "TappedWeight":
        """Returns the weight cast to a dtype. The gradient keeps the dtype of the parameter."""
        return dataclasses.replace(self, weight=self.weight.astype(dtype))

    def __getitem__(self, index: Any) -> "TappedWeight":
        # `param[...]` is how nnx reads the value of a variable.
        return self if index is Ellipsis else self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            f"the weight `{self.path}` has a factored gradient, so only `actjax.linear` and"
            " `actjax.qkv_projection` can read it, and only `.astype` can cast it: use these, give"
            " the operator codec=Exact(), or differentiate with jax.value_and_grad."
        )

    def __jax_array__(self) -> Any:
        current = conversions.get()
        return self._refuse() if current is None else current.convert(self, self.path)

    __array__ = __add__ = __radd__ = __mul__ = __rmul__ = __matmul__ = _refuse
    __rmatmul__ = __sub__ = __rsub__ = __truediv__ = __pow__ = __neg__ = __iter__ = _refuse

    @property
    def T(self) -> NoReturn:  # noqa: N802
        """Raises: no operator could return a gradient of the transpose."""
        self._refuse()

    def input_basis(self) -> tuple[jax.Array, int] | None:
        return None if self.basis is None else (self.basis, self.bits)

    def with_unquantized_input(self) -> "TappedWeight":
        return dataclasses.replace(self, bits=16)

    def plain(self) -> ArrayWeight:
        return ArrayWeight(self.weight)

    def times(self, x: jax.Array) -> jax.Array:
        return self.plain().times(x)

    def transposed_times(self, dz: jax.Array) -> jax.Array:
        return self.plain().transposed_times(dz)

    def hold(self) -> "HeldWeight":
        return self._held(self.basis)

    def hold_for_linear(self) -> "HeldWeight":
        # The operator keeps the basis itself, if a gradient reads it.
        return self._held(None)

    def _held(self, basis: Any) -> "HeldWeight":
        left = None if self.left is None else jax.ShapeDtypeStruct(self.left.shape, self.left.dtype)
        right = jax.ShapeDtypeStruct(self.right.shape, self.right.dtype)
        return HeldWeight(self.weight, basis, left, right, self.path, self.bits)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeldWeight(WrappedWeight, Held):
    """A `TappedWeight` between the passes, without its taps, whose values nothing reads.

    Attributes:
      weight: [d, n].
      basis: as in `TappedWeight`; None also where the backward pass does not read it.
      left: shape and dtype of the tap; None if there is none. Static.
      right: shape and dtype of the tap. Static.
      path: as in `TappedWeight`. Static.
      bits: as in `TappedWeight`. Static.
    """

    weight: Any
    basis: Any
    left: jax.ShapeDtypeStruct | None = dataclasses.field(metadata={"static": True})
    right: jax.ShapeDtypeStruct = dataclasses.field(metadata={"static": True})
    path: str = dataclasses.field(metadata={"static": True})
    bits: int = dataclasses.field(metadata={"static": True})

    def restore(self) -> TappedWeight:
        left = None if self.left is None else jnp.zeros(self.left.shape, self.left.dtype)
        right = jnp.zeros(self.right.shape, self.right.dtype)
        return TappedWeight(self.weight, left, right, self.basis, self.path, self.bits)

    def transposed_times(self, dz: jax.Array) -> jax.Array:
        return matmul_transposed(dz, self.weight.astype(dz.dtype), product_dtype(dz))

    def gradient(self, stored: StoredInput, dz: jax.Array) -> TappedWeight:
        # A basis is known to the caller: only the other factor is a gradient then.
        in_basis = stored.is_in_basis
        left = None if in_basis or self.left is None else stored.left().astype(self.left.dtype)
        assert in_basis or (left is None) == (self.left is None)
        right = stored.right(dz, self.right.dtype).astype(self.right.dtype)
        return TappedWeight(None, left, right, None, self.path, self.bits)


def plain_weights(tree: Any) -> Any:
    """Returns a pytree with every tapped weight in it replaced by its array."""
    is_tapped = lambda x: isinstance(x, TappedWeight)  # noqa: E731
    return jax.tree.map(lambda x: x.weight if is_tapped(x) else x, tree, is_leaf=is_tapped)
