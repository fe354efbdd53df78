"""Weights in bfloat16 that learn from updates below their last place.

A bfloat16 number has 8 significant bits. Rounded to the nearest, a weight plus an update below
1/256 to 1/512 of it is the weight again, and the update is lost. Stochastic rounding (Gupta et al.,
"Deep Learning with Limited Numerical Precision", 2015) keeps its mean and adds noise.
"""

import dataclasses
import zlib
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from actjax.codecs.base import check_positive_integer
from actjax.factored.taps import Bases
from actjax.optim.checks import OutermostTransformation, check_inner
from actjax.optim.layers import LayerwiseState, densify
from actjax.optim.projected.subspace import Subspace, SubspaceTransformation
from actjax.optim.rounding.bfloat16 import difference, round_stochastically, words_by_position


class RoundedState(NamedTuple):
    """State of `stochastic_rounding`.

    Attributes:
      step: number of updates taken, int32.
      key: key data (`jax.random.key_data`) of the key for the rounding.
      inner: state of the inner transform.
    """

    step: Any
    key: Any
    inner: Any


@dataclasses.dataclass(frozen=True, eq=False)
class WeightRounding:
    """Settings and functions of an optimizer that rounds weights.

    Attributes:
      inner: the transform whose updates are added.
      seed: seed of the rounding.
    """

    inner: optax.GradientTransformationExtraArgs
    seed: int

    @property
    def key(self) -> jax.Array:
        """The key that `seed` stands for, which is not that of a subspace of the same seed."""
        return jax.random.fold_in(jax.random.key(self.seed), zlib.crc32(b"rounding"))

    def init(self, params: Any) -> RoundedState:
        """Returns the first state of the plain optax transform."""
        self.check_params(params)
        return self.state_of(self.inner.init(self.seen_by_inner(params)), self.key)

    def check_params(self, params: Any) -> None:
        """Raises a `ValueError` for float16 parameters, or if none is bfloat16."""
        dtypes = {jnp.result_type(x) for x in jax.tree.leaves(params)}
        if not dtypes:
            raise ValueError(
                "stochastic_rounding got no weights. Inside `optax.masked` and"
                " `optax.multi_transform` it works in a plain optax loop, where some of its weights"
                " are bfloat16; for `actjax.optim` make it the outermost transform."
            )
        if jnp.dtype("float16") in dtypes:
            raise ValueError(
                "stochastic_rounding rounds to bfloat16, but some weights are float16: store them"
                " in bfloat16, or in float32 without rounding."
            )
        if jnp.dtype("bfloat16") not in dtypes:
            present = ", ".join(sorted(map(str, dtypes)))
            raise ValueError(
                "stochastic_rounding has no effect, because no weight is bfloat16 (they are"
                f" {present}): drop it, or store the weights in bfloat16."
            )

    def seen_by_inner(self, params: Any) -> Any:
        """Returns the parameters with whose dtypes the inner transform makes its state.

        float32 in the place of bfloat16, in which a second moment could not decay by 0.999. The
        bases of a subspace have the dtype of the weights.
        """
        if isinstance(self.inner, SubspaceTransformation):
            return params
        return jax.tree.map(_widened, params)

    def state_of(self, inner: Any, key: jax.Array) -> RoundedState:
        """Returns the first state of a part of the parameters, such as one layer.

        Args:
          inner: first state of the inner transform.
          key: key of the rounding.
        """
        return RoundedState(jnp.zeros((), jnp.int32), jax.random.key_data(key), inner)

    def update(
        self, updates: Any, state: RoundedState, params: Any = None, **extra: Any
    ) -> tuple[Any, RoundedState]:
        """Returns what `optax.apply_updates` adds to give rounded weights, and the next state.

        Raises:
          ValueError: `params` is not given, or `state` is not of `init`.
        """
        if params is None:
            raise ValueError(
                "stochastic_rounding reads the weights that it rounds: call"
                " `tx.update(grads, state, params)`."
            )
        if not isinstance(state, RoundedState):
            raise ValueError(
                "`state` of stochastic_rounding must be what `tx.init` returned, got"
                f" {type(state).__name__}: what `actjax.optim.init` returns is for"
                " `actjax.optim.apply`."
            )
        new, state, before_rounding = self.apply(updates, state, params, **extra)
        differences = jax.tree.map(
            lambda w, n, u: difference(n, w) if _is_bfloat16(w) else u, params, new, before_rounding
        )
        return differences, state

    def apply(
        self, grads: Any, state: RoundedState, params: Any, **extra: Any
    ) -> tuple[Any, RoundedState, Any]:
        """Returns the new parameters and state, and the updates before they were rounded.

        Args:
          grads: gradient, with `LowRank` for factored gradients.
          state: the state.
          params: the parameters.
          **extra: further arguments of the inner transform.
        """
        if not isinstance(self.inner, SubspaceTransformation):
            grads = jax.tree.map(_widened, densify(grads))
        wide = jax.tree.map(_widened, params)
        updates, inner = self.inner.update(grads, state.inner, wide, **extra)
        leaves, treedef = jax.tree.flatten(params)
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        seeds = jax.random.bits(key, (len(leaves), 2), jnp.uint32)
        columns = leaves, treedef.flatten_up_to(updates), seeds
        new = treedef.unflatten([_rounded(*leaf) for leaf in zip(*columns, strict=True)])
        return new, RoundedState(state.step + 1, state.key, inner), updates


def _rounded(weight: jax.Array, update: jax.Array, seed: jax.Array) -> jax.Array:
    """Returns a weight plus its update.

    Args:
      weight: the old weight.
      update: what is added.
      seed: of the random bits, uint32 [2].
    """
    if not _is_bfloat16(weight):
        return (weight + update).astype(weight.dtype)
    total = _widened(weight) + update.astype(jnp.float32)
    return round_stochastically(total, words_by_position(total.shape, seed))


class RoundedTransformation(OutermostTransformation):
    """The optax transform of a `WeightRounding`, whose methods `init` and `update` are.

    `actjax.optim.init`, `apply` and `in_backward` recognize it, and write rounded weights directly.
    """

    @property
    def rounding(self) -> WeightRounding:
        """Settings and functions."""
        return cast(WeightRounding, cast(Any, self.init).__self__)


class RoundedSubspaceTransformation(RoundedTransformation, SubspaceTransformation):
    """A `RoundedTransformation` around a `SubspaceTransformation`: it has the methods of both."""

    @property
    def subspace(self) -> Subspace:
        return cast(SubspaceTransformation, self.rounding.inner).subspace

    def refresh(self, grads: Any, state: RoundedState, params: Any) -> RoundedState:
        return state._replace(inner=self.subspace.refresh(grads, state.inner, params))

    def bases(self, state: Any) -> Bases:
        if isinstance(state, LayerwiseState):
            layers = state.layers.inner if isinstance(state.layers, RoundedState) else ()
            return self.subspace.bases(LayerwiseState(layers, state.rest.inner))
        return self.subspace.bases(state.inner if isinstance(state, RoundedState) else state)


def stochastic_rounding(
    inner: optax.GradientTransformation, *, seed: int = 0
) -> RoundedTransformation:
    """Wraps a transform so that bfloat16 weights are rounded stochastically after each update.

    A weight plus its update, added in float32, becomes one of its two neighbors in bfloat16: the
    nearer, the more often. Nothing is lost on average, however small the update. Rounding to
    nearest, which JAX and optax do, loses every update below 1/512 of the weight.

        tx = actjax.optim.stochastic_rounding(optax.adamw(1e-4))
        state = actjax.optim.init(tx, params)
        params, state = actjax.optim.apply(tx, grads, state, params)

    In a plain optax loop, `optax.apply_updates(params, updates)` gives exactly the rounded weights.
    The updates are differences of weights, which nothing may change: this is the outermost
    transform, and in `optax.chain` the last. What `optax.chain` returns is not recognized by
    `actjax.optim.apply`, so write `stochastic_rounding(optax.chain(clip, adamw))` there.

    Bias: 2^-17 of the spacing of two weights at most, from the addition in float32, which loses
    updates below 2^-25 of the weight, as it does for float32 weights.
    Variance: below 1/4 of the spacing squared for each update, and on average 1/6.
    State: that of `inner`, and 12 bytes (for each layer, in `actjax.optim.init`).

    `inner` gets weights and gradients as float32, so its moments are float32 unless it stores them
    otherwise. Call `init` under `jax.jit`, where the float32 weights are not held in memory. The
    random numbers depend on the seed, the step, the layer and the position in the array; a resumed
    run and any mesh of devices get the same. So do two transforms of one seed, as in
    `optax.multi_transform`, and the members of an ensemble under `jax.vmap`: give each its own.
    Parameters of other dtypes get the update of `inner`.

    Args:
      inner: any optax transform, such as `optax.adamw`, `eight_bit` or `subspace`.
      seed: seed of the rounding.

    Raises:
      TypeError: `inner` is not a transform.
      ValueError: `inner` rounds weights itself, or `seed` is negative; at `init`, no parameter is
        bfloat16, or one is float16.
    """
    check_inner("stochastic_rounding", "inner", inner)
    check_positive_integer("stochastic_rounding", "seed", seed, minimum=0)
    settings = WeightRounding(optax.with_extra_args_support(inner), seed)
    is_subspace = isinstance(inner, SubspaceTransformation)
    make = RoundedSubspaceTransformation if is_subspace else RoundedTransformation
    return make(cast(Any, settings.init), cast(Any, settings.update))


def _is_bfloat16(x: Any) -> bool:
    return jnp.result_type(x) == jnp.bfloat16


def _widened(x: Any) -> Any:
    return x.astype(jnp.float32) if _is_bfloat16(x) else x
