"""Which weights are projected, on which side of each, and to what."""

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
      group: name of its basis.
      on_input: whether `P` is [d, k], else [n, k].
    """

    group: str
    on_input: bool

    def size(self, weight: Any) -> int:
        """Returns the dimension that is projected."""
        return weight.shape[-2 if self.on_input else -1]

    def project(self, g: Any, basis: jax.Array) -> jax.Array:
        """Returns `Pᵀ G` [..., k, n], or `G P` [..., d, k]."""
        if isinstance(g, LowRank):
            if g.basis == self.group and self.on_input:
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
    """Returns how each weight is projected, by path; others are left out."""
    plan: dict[str, Projection] = {}
    sizes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path, leaf in named_leaves(params, is_leaf=is_low_rank).items():
        group = (path if leaf.ndim == 2 else None) if groups is None else groups.get(path)
        if group is None:
            continue
        if leaf.ndim < 2:
            raise ValueError(f"`groups` names `{path}` of shape {leaf.shape}, which is no matrix.")
        on_input = side == "input" or (side == "smaller" and leaf.shape[-2] <= leaf.shape[-1])
        # Weights of one input share it on the side of the input alone.
        plan[path] = projection = Projection(group if side == "input" else path, on_input)
        if rank > projection.size(leaf):
            raise ValueError(
                f"`rank` {rank} of subspace is above the {projection.size(leaf)} dimensions of"
                f" `{path}`, of shape {leaf.shape}, that are projected: lower it, or leave this"
                " weight out of `groups`."
            )
        size = (*leaf.shape[:-2], projection.size(leaf))
        first, expected = sizes.setdefault(projection.group, (path, size))
        if size != expected:
            raise ValueError(
                f"`groups` of subspace gives `{first}` and `{path}` one basis, but what it would"
                f" project, with leading axes, is {expected} and {size}."
            )
    return plan


def projected_zeros(weight: Any, projection: Projection | None, rank: int) -> jax.Array:
    """Returns zeros of the shape that the gradient of a weight is projected to."""
    *lead, d, n = weight.shape if projection is not None else (0, 0)
    shape = weight.shape
    if projection is not None:
        shape = (*lead, rank, n) if projection.on_input else (*lead, d, rank)
    return jnp.zeros(shape, accumulation_dtype(weight.dtype))
