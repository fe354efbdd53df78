"""APOLLO: Adam's step sizes from a random projection of the gradient, applied to the gradient.

Zhu et al., "APOLLO: SGD-like Memory, AdamW-level Performance" (2024, arXiv 2412.05270), Algorithm
1: what Adam does to a gradient is mostly to scale its channels, and norms of channels survive a
random projection. So Adam runs on `R = Pᵀ G`, with moments of rank k, and column `j` of the
gradient itself is scaled by `‖ψ(R)_:j‖ / ‖R_:j‖`. The update is full-rank, and no basis is computed
or stored.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
import optax

from actjax._core.flax import in_structure_of, without_variables
from actjax._core.paths import map_named, named_leaves
from actjax._math.precision import accumulation_dtype, matmul
from actjax.codecs.base import check_positive_integer
from actjax.low_rank import is_low_rank
from actjax.optim.bases import random_basis
from actjax.optim.checks import (
    check_callable,
    check_inner,
    check_keeps_sign,
    check_parameters,
)
from actjax.optim.remainders import check_growth, limit_growth, step_size

Granularity = Literal["channel", "tensor"]


class ApolloState(NamedTuple):
    """State of `apollo`.

    Attributes:
      step: number of updates taken, int32.
      inner: state of the inner transform, on projected gradients.
      norms: norm of the last update of each scaled weight, [...] float32, by its path.
    """

    step: Any
    inner: Any
    norms: dict[str, Any]


def apollo(
    inner: optax.GradientTransformation,
    rank: int = 256,
    *,
    gap: int = 200,
    scale: float = 1.0,
    granularity: Granularity = "channel",
    limit: float = 1.01,
    weights: Callable[[str, Any], bool] | None = None,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Returns APOLLO, and with `rank=1, granularity="tensor"` APOLLO-Mini (section 4.2).

    A weight [d, n] is projected on its smaller side, and its channels are the entries of the larger
    one. The projection has entries `N(0, 1/k)`. It is drawn from the seed where it is used and
    drawn anew every `gap` steps, so that none is stored. It takes dense gradients: those of
    jax.grad, or of one layer within `in_backward`.

        tx = optax.chain(
            actjax.optim.apollo(optax.scale_by_adam(), rank=256),
            optax.add_decayed_weights(0.1),
            optax.scale_by_learning_rate(1e-2),
        )

    State: that of `inner` on [k, n], and one float32 for each weight.

    Args:
      inner: a transform of gradients without a learning rate, whose sign would be lost in a norm,
        such as `optax.scale_by_adam()`, or `eight_bit` of it. Other parameters than the scaled
        weights get its update in full space. It gets projected parameters, as that of `subspace`.
      rank: k. Weights with a smaller side below it are an error.
      gap: steps in which the projection stays the same.
      scale: α, a factor of the updates of the scaled weights. A projection of rank k makes the
        scaling smaller by about the root of k over the projected dimension, which α makes up for.
      granularity: "channel" has a step size for each channel, "tensor" one for each weight.
      limit: largest growth of the norm of an update from one step to the next (as in Fira); inf for
        none.
      weights: from the path of an array, such as "layers.q", and the array, of which only the shape
        is known, to whether it is a scaled weight; by default those with two axes are.
      seed: seed of the projections.

    Raises:
      TypeError: `inner` is not a transform.
      ValueError: an argument out of range; at `init`, a weight that is no matrix or smaller than
        `rank`; at `update`, a factored gradient.
    """
    settings = _Apollo(inner, rank, gap, scale, granularity, limit, weights, seed)
    return optax.GradientTransformationExtraArgs(
        cast(Any, settings.init), cast(Any, settings.update)
    )


@dataclasses.dataclass(frozen=True)
class _Apollo:
    """Arguments and functions of `apollo`."""

    inner: optax.GradientTransformation
    rank: int
    gap: int
    scale: float
    granularity: Granularity
    limit: float
    weights: Callable[[str, Any], bool] | None
    seed: int

    def __post_init__(self) -> None:
        check_inner("apollo", "inner", self.inner)
        for name, smallest in (("rank", 1), ("gap", 1), ("seed", 0)):
            check_positive_integer("apollo", name, getattr(self, name), minimum=smallest)
        # An array comes from optax.inject_hyperparams, and its value is not known.
        is_positive = isinstance(self.scale, int | float) and 0 < self.scale < math.inf
        if not is_positive and not isinstance(self.scale, jax.Array):
            raise ValueError(
                f"`scale` of apollo must be a finite number above 0, got {self.scale!r}."
            )
        if self.granularity not in get_args(Granularity):
            raise ValueError(
                f"`granularity` of apollo must be one of {get_args(Granularity)}:"
                f" {self.granularity!r}."
            )
        if self.weights is not None:
            check_callable("weights", self.weights)
        check_growth("apollo", self.limit)
        check_keeps_sign("apollo", self.inner)

    def init(self, params: optax.Params) -> ApolloState:
        params = without_variables(params)
        check_parameters("apollo", params)
        step = jnp.zeros((), jnp.int32)
        shapes = jax.eval_shape(self._projected, params, step)
        small = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        leaves = named_leaves(params)
        norms = {
            name: jnp.zeros(leaves[name].shape[:-2], jnp.float32)
            for name in sorted(self._chosen(params))
        }
        return ApolloState(step, self.inner.init(small), norms)

    def update(
        self, updates: optax.Updates, state: ApolloState, params: Any = None, **extra: Any
    ) -> tuple[optax.Updates, ApolloState]:
        grads, norms = without_variables(updates), dict(state.norms)
        _check_dense(grads)
        small = self._projected(grads, state.step)
        seen = None
        if params is not None:
            seen = self._projected(without_variables(params), state.step)
        inner = optax.with_extra_args_support(self.inner)
        adapted, new = inner.update(small, state.inner, seen, **extra)
        gradients, before = named_leaves(grads), named_leaves(small)

        def scaled(name: str, n: jax.Array) -> jax.Array:
            if name not in norms:
                return n
            g, r = gradients[name].astype(n.dtype), before[name]
            one = -2 if _projects_input(g.shape) else -1
            sizes = step_size(r, n, (one,) if self.granularity == "channel" else (-2, -1))
            changed = self.scale * g * sizes
            changed, norms[name] = limit_growth(changed, state.norms[name], self.limit)
            return changed

        changes = map_named(scaled, adapted)
        return in_structure_of(changes, updates), ApolloState(state.step + 1, new, norms)

    def _projected(self, tree: Any, step: jax.Array) -> Any:
        """Returns the gradients in the subspace, and the others in full space."""
        chosen = self._chosen(tree)
        key = jax.random.fold_in(jax.random.key(self.seed), step // self.gap)

        def project(name: str, g: jax.Array) -> jax.Array:
            g = g.astype(accumulation_dtype(g.dtype))
            if name not in chosen:
                return g
            on_input = _projects_input(g.shape)
            size = g.shape[-2 if on_input else -1]
            drawn = jax.random.fold_in(key, zlib.crc32(name.encode()))
            p = random_basis(drawn, (size, self.rank)).astype(g.dtype)
            return matmul(p.T, g) if on_input else matmul(g, p)

        return map_named(project, tree)

    def _chosen(self, tree: Any) -> set[str]:
        """Returns the paths of the scaled weights.

        Raises:
          ValueError: one of them is no matrix, or smaller than the rank.
        """
        leaves = named_leaves(tree)
        is_scaled = self.weights or (lambda _, x: x.ndim == 2)
        chosen = {name for name, x in leaves.items() if is_scaled(name, x)}
        for name in sorted(chosen):
            shape = tuple(leaves[name].shape)
            if len(shape) < 2:
                raise ValueError(
                    f"`weights` of apollo chooses `{name}` of shape {shape}: no matrix."
                )
            if self.rank > min(shape[-2:]):
                raise ValueError(
                    f"`rank` {self.rank} of apollo is above {min(shape[-2:])}, the smaller side of"
                    f" `{name}` with shape {shape} (or of a piece of it, as `actjax.optim.apply`"
                    " updates large matrices outside the layers): lower it, or leave this weight"
                    " out of `weights`."
                )
        return chosen


def _projects_input(shape: tuple[int, ...]) -> bool:
    return shape[-2] <= shape[-1]


def _check_dense(grads: Any) -> None:
    for name, g in named_leaves(grads, is_leaf=is_low_rank).items():
        if is_low_rank(g):
            raise ValueError(
                f"apollo scales the gradient itself, but that of `{name}` is factored: take it with"
                " jax.grad, or in actjax.optim.in_backward with codecs that are not factored."
            )
