"""Adam with moments in 8 bits, each array in one pass over memory, and what 4 bits share of it."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from actjax._core.flax import in_structure_of, without_variables
from actjax.factored.low_rank import is_low_rank
from actjax.kernels.adam_8bit.api import adam_8bit
from actjax.optim.checks import check_parameters
from actjax.optim.layers import densify
from actjax.optim.states.eight_bit import BlockOf, EightBitState, eight_bit
from actjax.optim.states.stored import is_code


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
    hyper = Hyper.checked("scale_by_adam_8bit", b1, b2, eps, eps_root)
    stored = eight_bit(hyper.adam(), block=block, min_size=min_size)
    return coded_adam("scale_by_adam_8bit", hyper, stored, adam_8bit, EightBitState)


class Hyper(NamedTuple):
    """Hyperparameters, as for `scale_by_adam_8bit`."""

    b1: float
    b2: float
    eps: float
    eps_root: float

    @classmethod
    def checked(cls, name: str, b1: Any, b2: Any, eps: Any, eps_root: Any) -> "Hyper":
        """Returns hyperparameters of the transform `name`.

        Raises:
          ValueError: a decay outside [0, 1), a negative `eps` or `eps_root`.
        """
        # Python floats are static in a compiled step.
        hyper = cls(float(b1), float(b2), float(eps), float(eps_root))
        for field in ("b1", "b2"):
            decay = getattr(hyper, field)
            if not 0 <= decay < 1:
                raise ValueError(f"`{field}` of {name} must be in [0, 1), got {decay!r}.")
        for field in ("eps", "eps_root"):
            value = getattr(hyper, field)
            if not value >= 0:
                raise ValueError(f"`{field}` of {name} must be >= 0, got {value!r}.")
        return hyper

    def adam(self) -> optax.GradientTransformation:
        """Returns optax's transform."""
        return optax.scale_by_adam(self.b1, self.b2, self.eps, self.eps_root)


def coded_adam(
    owner: str,
    hyper: Hyper,
    stored: optax.GradientTransformation,
    update_codes: Callable[..., tuple[jax.Array, Any, Any]],
    make_state: Callable[[optax.ScaleByAdamState], Any],
) -> optax.GradientTransformationExtraArgs:
    """Returns Adam on moments in few bits, each array in one function.

    Args:
      owner: name of the transform in errors.
      hyper: hyperparameters.
      stored: `hyper.adam()` in a wrapper that stores its moments in few bits.
      update_codes: a function such as `actjax.kernels.adam_8bit.api.adam_8bit`.
      make_state: from the state of Adam to that of `stored`, which has it as its field `inner`.
    """

    def init(params: optax.Params) -> Any:
        check_parameters(owner, params)
        return stored.init(jax.tree.map(lambda x: x.astype(jnp.float32), params))

    def update(
        updates: optax.Updates, state: Any, params: Any = None, **extra: Any
    ) -> tuple[optax.Updates, Any]:
        del params, extra
        old: optax.ScaleByAdamState = state.inner
        count = optax.safe_increment(old.count)
        decays = jnp.asarray([hyper.b1, hyper.b2], jnp.float32)
        corrections = 1 - jax.lax.pow(decays, count)
        mus, treedef = jax.tree.flatten(old.mu, is_leaf=is_code)
        nus = jax.tree.leaves(old.nu, is_leaf=is_code)
        grads = treedef.flatten_up_to(densify(without_variables(updates)))
        results = [
            _update_one(update_codes, grad, mu, nu, corrections, hyper)
            for grad, mu, nu in zip(grads, mus, nus, strict=True)
        ]
        changes, mu, nu = (treedef.unflatten([result[i] for result in results]) for i in range(3))
        state = make_state(optax.ScaleByAdamState(count, mu, nu))
        return in_structure_of(changes, updates, is_low_rank), state

    return optax.GradientTransformationExtraArgs(cast(Any, init), cast(Any, update))


def _update_one(
    update_codes: Callable[..., tuple[jax.Array, Any, Any]],
    grad: jax.Array,
    mu: Any,
    nu: Any,
    corrections: jax.Array,
    hyper: Hyper,
) -> tuple[Any, Any, Any]:
    """Returns the update of one array and its new moments, in the form of the old ones.

    Args:
      update_codes: as in `coded_adam`.
      grad: gradient.
      mu: first moment, in few bits or float32.
      nu: second moment, likewise.
      corrections: `1 - b1^t` and `1 - b2^t`, [2].
      hyper: hyperparameters.
    """
    if is_code(mu):
        return update_codes(grad, mu, nu, corrections, **hyper._asdict())
    b1, b2, eps, eps_root = hyper
    grad = grad.astype(jnp.float32)
    mu = b1 * mu + (1 - b1) * grad
    nu = b2 * nu + (1 - b2) * (grad * grad)
    root = jnp.sqrt(nu / corrections[1] + eps_root)
    return mu / corrections[0] / (root + eps), mu, nu
