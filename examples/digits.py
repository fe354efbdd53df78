"""The 1,797 handwritten digits of scikit-learn: images of 8 x 8 pixels, and their classes."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import sklearn.datasets

_HELD_OUT = 360


@dataclasses.dataclass(frozen=True)
class Digits:
    """Images [n, 8, 8, 1] of mean 0 and deviation 1, and labels [n].

    Attributes:
      train: images and labels to train on.
      test: images and labels that are held out.
    """

    train: dict[str, np.ndarray]
    test: dict[str, Any]

    def batches(self, size: int, seed: int) -> Iterator[dict[str, Any]]:
        """Yields batches without end, each image once an epoch."""
        generator = np.random.default_rng(seed)
        count = len(self.train["labels"])
        if size > count:
            raise ValueError(f"`batch_size` is {size}, but there are {count} images.")
        while True:
            order = generator.permutation(count)
            for first in range(0, count - size + 1, size):
                rows = order[first : first + size]
                yield {name: jnp.asarray(x[rows]) for name, x in self.train.items()}


def load_digits() -> Digits:
    """Returns the digits; the last 360 are held out."""
    data = sklearn.datasets.load_digits()
    images = data.images[..., None].astype(np.float32)
    images = (images - images.mean()) / images.std()
    whole = {"images": images, "labels": data.target.astype(np.int32)}
    train = {name: x[:-_HELD_OUT] for name, x in whole.items()}
    return Digits(train, {name: jnp.asarray(x[-_HELD_OUT:]) for name, x in whole.items()})
