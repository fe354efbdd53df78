"""Adam with moments in 8 bits, each array in one pass over memory."""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from actjax._core.flax import in_structure_of, without_variables
from actjax.kernels.adam_8bit.api import adam_8bit
from actjax.kernels.blockwise import is_blockwise
from actjax.optim.eight_bit import BlockOf, EightBitState, eight_bit


def scale_by_adam_8bit(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    *,
    block: int | BlockOf = 256,
    min_size: int = 4096,
) -> optax.GradientTransformationExtraArgs:
    """Returns `eight_bit(optax.scale_by_adam(b1, b2, eps, eps_root))` on float32, in one pass.

    It computes the same function with the same state, so checkpoints of both are interchangeable.
    On an NVIDIA GPU, decoded moments exist only in registers. Gradients of any dtype are converted
    to float32, and the returned updates are float32.

    Args:
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      eps_root: added to the second moment before the root.
      block: values that share a scale, or a function from the shape of a moment to this number.
      min_size: moments with fewer elements stay in float32.

    Raises:
      ValueError: a decay outside [0, 1), a negative `eps` or `eps_root`, a block or size below one.
    """
    # Python floats are static in a compiled step.
    hyper = _Hyper(float(b1), float(b2), float(eps), float(eps_root))
    _check(hyper)
    adam = optax.scale_by_adam(hyper.b1, hyper.b2, hyper.eps, hyper.eps_root)
    stored = eight_bit(adam, block=block, min_size=min_size)

    def init(params: optax.Params) -> EightBitState:
        wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        return cast(EightBitState, stored.init(wide))

    def update(
        updates: optax.Updates, state: EightBitState, params: Any = None, **extra: Any
    ) -> tuple[optax.Updates, EightBitState]:
        del params, extra
        old: optax.ScaleByAdamState = state.inner
        count = optax.safe_increment(old.count)
        corrections = 1 - jnp.asarray([hyper.b1, hyper.b2], jnp.float32) ** count
        mus, treedef = jax.tree.flatten(old.mu, is_leaf=is_blockwise)
        nus = jax.tree.leaves(old.nu, is_leaf=is_blockwise)
        grads = treedef.flatten_up_to(without_variables(updates))
        results = [
            _update_one(grad, mu, nu, corrections, hyper)
            for grad, mu, nu in zip(grads, mus, nus, strict=True)
        ]
        changes, mu, nu = (treedef.unflatten([result[i] for result in results]) for i in range(3))
        state = EightBitState(optax.ScaleByAdamState(count, mu, nu))
        return in_structure_of(changes, updates), state

    return optax.GradientTransformationExtraArgs(cast(Any, init), cast(Any, update))


class _Hyper(NamedTuple):
    """Hyperparameters, as for `scale_by_adam_8bit`."""

    b1: float
    b2: float
    eps: float
    eps_root: float


def _check(hyper: _Hyper) -> None:
    for name in ("b1", "b2"):
        decay = getattr(hyper, name)
        if not 0 <= decay < 1:
            raise ValueError(f"`{name}` of scale_by_adam_8bit must be in [0, 1), got {decay!r}.")
    for name in ("eps", "eps_root"):
        value = getattr(hyper, name)
        if not value >= 0:
            raise ValueError(f"`{name}` of scale_by_adam_8bit must be >= 0, got {value!r}.")


def _update_one(
    grad: jax.Array, mu: Any, nu: Any, corrections: jax.Array, hyper: _Hyper
) -> tuple[Any, Any, Any]:
    """Returns the update of one array and its new moments, in the form of the old ones.

    Args:
      grad: gradient.
      mu: first moment, `Blockwise` or float32.
      nu: second moment, likewise.
      corrections: `1 - b1^t` and `1 - b2^t`, [2].
      hyper: hyperparameters.
    """
    if is_blockwise(mu):
        return adam_8bit(grad, mu, nu, corrections, **hyper._asdict())
    b1, b2, eps, eps_root = hyper
    grad = grad.astype(jnp.float32)
    mu = b1 * mu + (1 - b1) * grad
    nu = b2 * nu + (1 - b2) * (grad * grad)
    root = jnp.sqrt(nu / corrections[1] + eps_root)
    return mu / corrections[0] / (root + eps), mu, nu
