"""Adam with moments in 4 bits, each array in two passes over memory."""

import optax

from actjax.formats.four_bit import GROUP
from actjax.kernels.adam_4bit.api import adam_4bit
from actjax.optim.states.adam_8bit import Hyper, coded_adam
from actjax.optim.states.four_bit import FourBitState, GroupOf, four_bit


def scale_by_adam_4bit(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    *,
    group: int | GroupOf = GROUP,
    min_size: int = 4096,
) -> optax.GradientTransformationExtraArgs:
    """Returns `four_bit(optax.scale_by_adam(b1, b2, eps, eps_root))` on float32, in two passes.

    It computes the same function with the same state, so checkpoints of both are interchangeable.
    On an NVIDIA GPU, decoded moments exist only in registers: the first pass finds the largest new
    second moment of each row and column, the second one updates everything. Gradients of any dtype
    are converted to float32, and the returned updates are float32.

    Args:
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      eps_root: added to the second moment before the root.
      group: values of a first moment that share a scale, or a function from the shape of a moment
        to this number.
      min_size: moments with fewer elements, and those of vectors, stay in float32.

    Raises:
      ValueError: a decay outside [0, 1), a negative `eps` or `eps_root`, a group that is odd or
        below two, a size below one.
    """
    hyper = Hyper.checked("scale_by_adam_4bit", b1, b2, eps, eps_root)
    stored = four_bit(hyper.adam(), group=group, min_size=min_size)
    return coded_adam("scale_by_adam_4bit", hyper, stored, adam_4bit, FourBitState)
