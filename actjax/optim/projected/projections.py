"""Which weights are projected, on which side, and to which shape."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax

from actjax._core.paths import named_leaves
from actjax._math.precision import accumulation_dtype, matmul
from actjax.factored.low_rank import LowRank, is_low_rank

Side = Literal["input", "output", "smaller", "both"]


class Projection(NamedTuple):
    """How one weight is projected: to `Pᵀ G`, `G Q`, or `Pᵀ G Q`.

    Attributes:
      input_basis: name of `P`, [..., d, k]; None if the input side is not projected.
      output_basis: name of `Q`, [..., n, k]; None if the output side is not projected.
    """

    input_basis: str | None
    output_basis: str | None

    def sizes(self, shape: Sequence[int]) -> dict[str, int]:
        """Returns the dimension that each of the bases projects, by the name of the basis."""
        pairs = ((self.input_basis, shape[-2]), (self.output_basis, shape[-1]))
        return {name: size for name, size in pairs if name is not None}

    def project(self, g: Any, bases: Mapping[str, jax.Array]) -> jax.Array:
        """Returns `Pᵀ G` [..., k, n], `G Q` [..., d, k], or `Pᵀ G Q` [..., k, k]."""
        left, right = self._of(bases)
        if isinstance(g, LowRank):
            if g.basis_name is not None and g.basis_name == self.input_basis and right is None:
                return g.right.astype(accumulation_dtype(g.dtype))
            thin = g.left if left is None else matmul(left.mT, g.left)
            return matmul(thin, g.right if right is None else matmul(g.right, right))
        g = g if left is None else matmul(left.mT, g)
        return g if right is None else matmul(g, right)

    def project_back(self, n: jax.Array, bases: Mapping[str, jax.Array]) -> jax.Array:
        """Returns `P N`, `N Qᵀ`, or `P N Qᵀ`, [..., d, n]."""
        left, right = self._of(bases)
        n = n if right is None else matmul(n, right.mT)
        return n if left is None else matmul(left, n)

    def _of(self, bases: Mapping[str, Any]) -> tuple[Any, Any]:
        names = self.input_basis, self.output_basis
        left, right = (None if name is None else bases[name] for name in names)
        return left, right


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
        plan[path] = projection = _projection(path, leaf.shape, side, group)
        for name, projected in projection.sizes(leaf.shape).items():
            if rank > projected:
                raise ValueError(
                    f"`rank` {rank} of subspace is above {projected}, the projected dimension of"
                    f" `{path}` with shape {leaf.shape}: lower it, or leave this weight out of"
                    " `groups`."
                )
            size = (*leaf.shape[:-2], projected)
            first, expected = sizes.setdefault(name, (path, size))
            if size != expected:
                raise ValueError(
                    f"`groups` of subspace gives `{first}` and `{path}` the same basis, but their"
                    f" projected dimensions (with leading axes) are {expected} and {size}."
                )
    return plan


def _projection(path: str, shape: Sequence[int], side: Side, group: str) -> Projection:
    # The weights of an input group share a basis on the input side only.
    if side == "input":
        return Projection(group, None)
    if side == "both":
        return Projection(path, f"{path}:output")
    on_input = side == "smaller" and shape[-2] <= shape[-1]
    return Projection(path, None) if on_input else Projection(None, path)
