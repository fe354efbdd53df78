"""Which weights are projected, on which side, and to which shape."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from actjax._core.paths import named_leaves
from actjax._math.precision import accumulation_dtype, matmul
from actjax.low_rank import LowRank, is_low_rank

Side = Literal["input", "output", "smaller"]


class Projection(NamedTuple):
    """How one weight is projected.

    Attributes:
      basis_name: name of its basis.
      on_input: whether `P` is [d, k] on the input side, rather than [n, k] on the output side.
    """

    basis_name: str
    on_input: bool

    def size(self, weight: Any) -> int:
        """Returns the dimension that is projected."""
        return weight.shape[-2 if self.on_input else -1]

    def project(self, g: Any, basis: jax.Array) -> jax.Array:
        """Returns `Pᵀ G` [..., k, n], or `G P` [..., d, k]."""
        if isinstance(g, LowRank):
            if g.basis_name == self.basis_name and self.on_input:
                return g.right.astype(accumulation_dtype(g.dtype))
            if self.on_input:
                return matmul(matmul(basis.mT, g.left), g.right)
            return matmul(g.left, matmul(g.right, basis))
        return matmul(basis.mT, g) if self.on_input else matmul(g, basis)

    def project_back(self, n: jax.Array, basis: jax.Array) -> jax.Array:
        """Returns `P N`, or `N Pᵀ`, [..., d, n]."""
        return matmul(basis, n) if self.on_input else matmul(n, basis.mT)


def plan_projections(
    params: Any, *, rank: int, side: Side, groups: Mapping[str, str] | None
) -> dict[str, Projection]:
    """Returns the projection of each projected weight, by path.

    Args:
      params: the parameters, their gradients, or their shapes.
      rank: k.
      side: which side is projected.
      groups: from the path of each projected weight to its input group; None projects every array
        with two axes.

    Raises:
      ValueError: a weight that is not a matrix or has fewer than `rank` rows (columns, on the
        output side), or weights of one input group whose projected shapes differ.
    """
    plan: dict[str, Projection] = {}
    sizes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path, leaf in named_leaves(params, is_leaf=is_low_rank).items():
        group = (path if leaf.ndim == 2 else None) if groups is None else groups.get(path)
        if group is None:
            continue
        if leaf.ndim < 2:
            raise ValueError(f"`groups` names `{path}` of shape {leaf.shape}, which is no matrix.")
        on_input = side == "input" or (side == "smaller" and leaf.shape[-2] <= leaf.shape[-1])
        # The weights of an input group share a basis on the input side only.
        plan[path] = projection = Projection(group if side == "input" else path, on_input)
        if rank > projection.size(leaf):
            raise ValueError(
                f"`rank` {rank} of subspace is above {projection.size(leaf)}, the projected"
                f" dimension of `{path}` with shape {leaf.shape}: lower it, or leave this weight"
                " out of `groups`."
            )
        size = (*leaf.shape[:-2], projection.size(leaf))
        first, expected = sizes.setdefault(projection.basis_name, (path, size))
        if size != expected:
            raise ValueError(
                f"`groups` of subspace gives `{first}` and `{path}` the same basis, but their"
                f" projected dimensions (with leading axes) are {expected} and {size}."
            )
    return plan


def projected_zeros(weight: Any, projection: Projection | None, rank: int) -> jax.Array:
    """Returns zeros with the shape of the projected gradient of a weight.

    Args:
      weight: array or shape, [..., d, n] if it is projected.
      projection: how it is projected; None if it is not.
      rank: k.
    """
    shape = weight.shape
    if projection is not None:
        *lead, d, n = shape
        shape = (*lead, rank, n) if projection.on_input else (*lead, d, rank)
    return jnp.zeros(shape, accumulation_dtype(weight.dtype))
