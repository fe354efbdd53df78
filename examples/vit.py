"""A vision transformer of `flax.nnx` on handwritten digits, trained in several ways.

`python -m examples.vit --steps 300` trains it on the 1,797 images of 8 x 8 pixels that come with
scikit-learn. The model knows nothing of actjax: `actjax.compress_residuals` takes its loss.
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

    batch_size: int = 32
    """Number of images in a batch."""
    learning_rate: float = 2e-3
    """Largest learning rate of AdamW."""
    depth: int = 4
    """Number of blocks."""
    width: int = 64
    """Number of features, in heads of 16."""
    patch: int = 2
    """Side of a patch, in pixels."""


class Block(nnx.Module):
    """Attention and a feed-forward network, each after a norm and with a skip."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(width // 16, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class ViT(nnx.Module):
    """Patches, positions, blocks, and a classifier of their mean."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        width, patch = config.width, config.patch

        @nnx.split_rngs(splits=config.depth)
        @nnx.vmap(in_axes=0, out_axes=0)
        def blocks(rngs: nnx.Rngs) -> Block:
            return Block(width, rngs)

        window = patch, patch
        self.patches = nnx.Conv(1, width, window, strides=window, padding="VALID", rngs=rngs)
        self.positions = nnx.Param(0.02 * rngs.normal((8 // patch, 8 // patch, width)))
        self.blocks = blocks(rngs)  # One module: its variables have a leading axis of blocks.
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, images: jax.Array, *, remat: bool = False, unroll: bool = False) -> Any:
        x = self.patches(images) + self.positions[...]
        x = x.reshape(len(x), -1, x.shape[-1])
        x = compare.run_blocks(self.blocks, x, remat=remat, unroll=unroll)
        return self.head(self.norm(x).mean(1))


def loss(model: ViT, batch: compare.Batch, **how: bool) -> jax.Array:
    """Returns the mean cross-entropy of a batch."""
    logits = model(batch["images"], **how)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def run(config: Config) -> tuple[compare.Example, list[dict[str, Any]]]:
    """Returns the example and its rows."""
    digits = load_digits()

    def batches(seed: int) -> Iterator[compare.Batch]:
        return digits.batches(config.batch_size, seed)

    def evaluate(model: ViT) -> dict[str, jax.Array]:
        logits = model(digits.test["images"])
        labels = digits.test["labels"]
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return {"loss": entropy.mean(), "accuracy": (logits.argmax(-1) == labels).mean()}

    example = compare.Example(
        "ViT on digits", lambda seed: ViT(config, nnx.Rngs(seed)), loss, batches, evaluate
    )
    return example, compare.compare(config, example)


if __name__ == "__main__":
    compare.run(Config, __doc__, run)
