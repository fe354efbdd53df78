"""A model of another library, as a benchmark sees it."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

Loss = Callable[[Any, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its data and its loss.

    Attributes:
      name: the library and the model.
      loss: from parameters and a batch to a scalar. Random keys and statistics are in the batch.
      params: a pytree of arrays.
      batches: several batches.
      remat_loss: the same loss with the rematerialisation of the library.
      remat: what rematerialises, in words.
      learning_rate: of Adam.
    """

    name: str
    loss: Loss
    params: Any
    batches: Sequence[Any]
    remat_loss: Loss
    remat: str
    learning_rate: float = 1e-3
