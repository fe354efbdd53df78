"""A small denoising UNet of `flax.nnx` on handwritten digits: it predicts noise.

`python -m examples.unet --steps 300` trains it on the 1,797 images of 8 x 8 pixels that come with
scikit-learn. Blocks have different shapes, so they run one after the other in Python. The skips
from the way down to the way up stay stored until the end.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples import compare
from examples.digits import load_digits


@dataclasses.dataclass(frozen=True)
class Config(compare.Settings):
    """Flags of the example."""

    learning_rate: float = 2e-3
    """Largest learning rate of AdamW."""
    width: int = 32
    """Number of channels at 8 x 8 pixels; twice as many below."""


class Block(nnx.Module):
    """Two convolutions after norms, with a skip; the amount of noise is added in between."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs) -> None:
        self.first_norm = nnx.GroupNorm(inputs, num_groups=8, rngs=rngs)
        self.first = nnx.Conv(inputs, outputs, (3, 3), rngs=rngs)
        self.amount = nnx.Linear(2, outputs, rngs=rngs)
        self.second_norm = nnx.GroupNorm(outputs, num_groups=8, rngs=rngs)
        self.second = nnx.Conv(outputs, outputs, (3, 3), rngs=rngs)
        self.skip = nnx.Conv(inputs, outputs, (1, 1), rngs=rngs)

    def __call__(self, x: jax.Array, amount: jax.Array) -> jax.Array:
        y = self.first(nnx.silu(self.first_norm(x)))
        y = y + self.amount(amount)[:, None, None]
        return self.skip(x) + self.second(nnx.silu(self.second_norm(y)))


class UNet(nnx.Module):
    """Blocks at 8 x 8, 4 x 4 and 2 x 2 pixels, down and up again."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(1, width, (3, 3), rngs=rngs)
        self.down = nnx.List([Block(width, 2 * width, rngs), Block(2 * width, 2 * width, rngs)])
        self.middle = Block(2 * width, 2 * width, rngs)
        self.up = nnx.List([Block(4 * width, 2 * width, rngs), Block(4 * width, width, rngs)])
        self.norm = nnx.GroupNorm(width, num_groups=8, rngs=rngs)
        self.head = nnx.Conv(width, 1, (3, 3), rngs=rngs)

    def __call__(self, images: jax.Array, amount: jax.Array, *, remat: bool = False) -> jax.Array:
        def call(block: Block, x: jax.Array) -> jax.Array:
            return block(x, amount)

        run: Callable[..., jax.Array] = nnx.remat(call) if remat else call
        x, skips = self.stem(images), []
        for block in self.down:
            x = run(block, x)
            skips.append(x)
            x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
        x = run(self.middle, x)
        for block in self.up:
            x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
            x = run(block, jnp.concatenate([x, skips.pop()], -1))
        return self.head(nnx.silu(self.norm(x)))


def loss(model: UNet, batch: compare.Batch, **how: bool) -> jax.Array:
    """Returns the mean squared error of the predicted noise; 1 for a prediction of zero."""
    angle = batch["angle"]
    amount = jnp.stack([jnp.cos(angle), jnp.sin(angle)], -1)
    image, noise = amount.T[..., None, None, None]
    noisy = image * batch["images"] + noise * batch["noise"]
    return jnp.mean((model(noisy, amount, **how) - batch["noise"]) ** 2)


def with_noise(batch: dict[str, Any], generator: np.random.Generator) -> compare.Batch:
    """Returns a batch with noise: `cos(angle) image + sin(angle) noise` is what the model sees."""
    shape = batch["images"].shape
    return {
        "images": batch["images"],
        "noise": jnp.asarray(generator.normal(size=shape), jnp.float32),
        "angle": jnp.asarray(generator.uniform(0, np.pi / 2, len(batch["images"])), jnp.float32),
    }


def run(config: Config) -> tuple[compare.Example, list[dict[str, Any]]]:
    """Returns the example and its rows."""
    digits = load_digits()
    test = with_noise(digits.test, np.random.default_rng(0))

    def batches(seed: int) -> Iterator[compare.Batch]:
        generator = np.random.default_rng(seed)
        return (with_noise(batch, generator) for batch in digits.batches(config.batch_size, seed))

    example = compare.Example(
        "Denoising UNet on digits",
        lambda seed: UNet(config.width, nnx.Rngs(seed)),
        loss,
        batches,
        lambda model: {"loss": loss(model, test)},
        scanned=False,
    )
    return example, compare.compare(config, example)


if __name__ == "__main__":
    compare.run(Config, __doc__, run)
