"""Adam with moments in 8 bits, each array in one pass over memory."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from actjax.kernels.adam_8bit.api import adam_8bit
from actjax.optim.eight_bit import EightBitState, eight_bit, is_blockwise


def scale_by_adam_8bit(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    *,
    block: int = 256,
    min_size: int = 4096,
) -> optax.GradientTransformationExtraArgs:
    """Returns `eight_bit(optax.scale_by_adam(b1, b2, eps, eps_root))` on float32, in one pass.

    The same function and the same state, so a checkpoint of one serves the other; but for an NVIDIA
    GPU moments are floats in registers alone. Gradients of any dtype are taken in float32, and so
    are updates returned.

    Args:
      b1: decay of the first moment.
      b2: decay of the second.
      eps: added to the root of the second moment.
      eps_root: added below that root.
      block: values that share a scale.
      min_size: moments of fewer elements stay in float32.

    Raises:
      ValueError: a decay outside [0, 1), a negative `eps`, a block or size below one.
    """
    # Plain numbers, which a compiled step is told once; arrays could not be compared.
    b1, b2, eps, eps_root = float(b1), float(b2), float(eps), float(eps_root)
    for name, decay in (("b1", b1), ("b2", b2)):
        if not 0 <= decay < 1:
            raise ValueError(f"`{name}` of scale_by_adam_8bit must be in [0, 1), got {decay!r}.")
    for name, value in (("eps", eps), ("eps_root", eps_root)):
        if not value >= 0:
            raise ValueError(f"`{name}` of scale_by_adam_8bit must be >= 0, got {value!r}.")
    adam = optax.scale_by_adam(b1=b1, b2=b2, eps=eps, eps_root=eps_root)
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
        corrections = 1 - jnp.asarray([b1, b2], jnp.float32) ** count

        def step(mu: Any, nu: Any, grad: jax.Array) -> tuple[Any, Any, Any]:
            if is_blockwise(mu):
                return adam_8bit(
                    grad, mu, nu, corrections, b1=b1, b2=b2, eps=eps, eps_root=eps_root
                )
            grad = grad.astype(jnp.float32)
            mu = b1 * mu + (1 - b1) * grad
            nu = b2 * nu + (1 - b2) * (grad * grad)
            root = jnp.sqrt(nu / corrections[1] + eps_root)
            return mu / corrections[0] / (root + eps), mu, nu

        leaves, treedef = jax.tree.flatten(old.mu, is_leaf=is_blockwise)
        moments = jax.tree.leaves(old.nu, is_leaf=is_blockwise)
        grads = treedef.flatten_up_to(updates)
        results = [step(*one) for one in zip(leaves, moments, grads, strict=True)]
        changes, mus, nus = (treedef.unflatten([result[i] for result in results]) for i in range(3))
        return changes, EightBitState(optax.ScaleByAdamState(count, mus, nus))

    return optax.GradientTransformationExtraArgs(cast(Any, init), cast(Any, update))
