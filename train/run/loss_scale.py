"""The dynamic scale of the loss in float16.

Gradients of activations are smaller than float16 can represent (6e-8), and zero without a scale
(Micikevicius et al., "Mixed Precision Training", 2018, section 3.2). The loss is multiplied by the
scale, and the gradient of the weights divided by it. A step whose gradient is not finite changes
no weight. The rule of the scale, with its constants, is that of `torch.amp.GradScaler`; the largest
scale is that of Apex.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from actjax.factored.low_rank import scale_tree

FIRST, LARGEST = 2.0**16, 2.0**24
INTERVAL = 2000
"""Steps without a change after which the scale is doubled."""
MOST_SKIPPED = 20
"""Steps in a row that may be skipped before a run is stopped."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """The scale of the loss, and what it was decided by. Part of the training state.

    Attributes:
      value: the factor of the loss, a power of two; float32 scalar.
      finite: steps since `value` was last changed, int32 scalar.
      skipped: steps of the run that were skipped, int32 scalar.
      in_a_row: latest steps, if these were skipped, int32 scalar.
    """

    value: Any
    finite: Any
    skipped: Any
    in_a_row: Any

    @classmethod
    def first(cls) -> "LossScale":
        """Returns the scale before the first step."""
        zero = jnp.zeros((), jnp.int32)
        return cls(jnp.float32(FIRST), zero, zero, zero)

    def removed(self, loss: jax.Array, grads: Any) -> tuple[jax.Array, Any]:
        """Returns a loss and a gradient without the scale. `LowRank` gradients stay factored."""
        inverse = 1 / self.value
        return loss * inverse, scale_tree(grads, inverse)

    def after(self, is_finite: jax.Array) -> "LossScale":
        """Returns the scale after a step, half as large if the step was skipped."""
        finite = jnp.where(is_finite, self.finite + 1, 0)
        is_due = finite == INTERVAL
        grown = jnp.where(is_due, jnp.minimum(2 * self.value, LARGEST), self.value)
        skips = 1 - is_finite.astype(jnp.int32)
        return LossScale(
            jnp.where(is_finite, grown, self.value / 2),
            jnp.where(is_due, 0, finite),
            self.skipped + skips,
            skips * (self.in_a_row + 1),
        )

    def metrics(self) -> dict[str, jax.Array]:
        """Returns the scale and the counts of skipped steps as float32 scalars, by name."""
        counts = {"skipped": self.skipped, "skipped_in_a_row": self.in_a_row}
        counts = {name: x.astype(jnp.float32) for name, x in counts.items()}
        return {"loss_scale": self.value, **counts}


def update_if(is_finite: jax.Array, update: Callable[..., Any], *state: Any) -> Any:
    """Returns `update(*state)`, or `(*state, 0)` unless `is_finite`, in place in both cases.

    Args:
      is_finite: boolean scalar.
      update: from arrays to the same arrays, and a float32 scalar.
      *state: the arrays.
    """
    # A loop of one step or none: its carry keeps its buffers, whereas XLA copies what a branch of a
    # conditional passes through.
    return jax.lax.fori_loop(
        0,
        is_finite.astype(jnp.int32),
        lambda _, carry: update(*carry[:-1]),
        (*state, jnp.zeros((), jnp.float32)),
    )


def is_exhausted(metrics: dict[str, float]) -> bool:
    """Returns whether a run must stop: the scale is below 1, or too many steps were skipped."""
    return metrics["loss_scale"] < 1 or metrics["skipped_in_a_row"] >= MOST_SKIPPED
