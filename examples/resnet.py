"""A residual network with batch norms, of `flax.nnx`, on handwritten digits.

`python -m examples.resnet --steps 300` trains it on the 1,797 images of 8 x 8 pixels that come with
scikit-learn. A batch norm writes its statistics while the loss runs; `actjax.compress_residuals`
keeps what it writes.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import optax
from flax import nnx

from examples import compare
from examples.digits import load_digits


@dataclasses.dataclass(frozen=True)
class Config(compare.Settings):
    """Flags of the example."""

    learning_rate: float = 3e-3
    """Largest learning rate of AdamW."""
    width: int = 16
    """Number of channels at 8 x 8 pixels; twice as many at 4 x 4."""
    blocks: int = 3
    """Number of blocks at each resolution."""


class Block(nnx.Module):
    """Two convolutions, each after a batch norm and a ReLU, with a skip."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.BatchNorm(width, rngs=rngs) for _ in range(2)])
        self.convs = nnx.List(
            [nnx.Conv(width, width, (3, 3), use_bias=False, rngs=rngs) for _ in range(2)]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            y = conv(nnx.relu(norm(y)))
        return x + y


class ResNet(nnx.Module):
    """Blocks at 8 x 8 and at 4 x 4 pixels, and a classifier of their mean."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        def stack(width: int) -> Block:
            @nnx.split_rngs(splits=config.blocks)
            @nnx.vmap(in_axes=0, out_axes=0)
            def blocks(rngs: nnx.Rngs) -> Block:
                return Block(width, rngs)

            return blocks(rngs)

        width = config.width
        self.stem = nnx.Conv(1, width, (3, 3), rngs=rngs)
        self.fine = stack(width)
        self.down = nnx.Conv(width, 2 * width, (2, 2), strides=(2, 2), rngs=rngs)
        self.coarse = stack(2 * width)
        self.norm = nnx.BatchNorm(2 * width, rngs=rngs)
        self.head = nnx.Linear(2 * width, 10, rngs=rngs)

    def __call__(self, images: jax.Array, *, remat: bool = False, unroll: bool = False) -> Any:
        x = compare.run_blocks(self.fine, self.stem(images), remat=remat, unroll=unroll)
        x = compare.run_blocks(self.coarse, self.down(x), remat=remat, unroll=unroll)
        return self.head(nnx.relu(self.norm(x)).mean((1, 2)))


def loss(model: ResNet, batch: compare.Batch, **how: bool) -> jax.Array:
    """Returns the mean cross-entropy of a batch."""
    logits = model(batch["images"], **how)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def run(config: Config) -> tuple[compare.Example, list[dict[str, Any]]]:
    """Returns the example and its rows."""
    digits = load_digits()

    def batches(seed: int) -> Iterator[compare.Batch]:
        return digits.batches(config.batch_size, seed)

    def evaluate(model: ResNet) -> dict[str, jax.Array]:
        model.eval()  # Batch norms use the statistics that training has written.
        logits = model(digits.test["images"])
        labels = digits.test["labels"]
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return {"loss": entropy.mean(), "accuracy": (logits.argmax(-1) == labels).mean()}

    example = compare.Example(
        "ResNet on digits", lambda seed: ResNet(config, nnx.Rngs(seed)), loss, batches, evaluate
    )
    return example, compare.compare(config, example)


if __name__ == "__main__":
    compare.run(Config, __doc__, run)
