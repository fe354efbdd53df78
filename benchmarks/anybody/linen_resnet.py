"""A ResNet of Flax linen with BatchNorm: `pip install flax`."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from benchmarks.anybody import data
from benchmarks.anybody.case import Case


class _Block(nn.Module):
    """The residual block of the ResNet in Flax's ImageNet example."""

    filters: int
    strides: int
    train: bool

    @nn.compact
    def __call__(self, x):
        norm = functools.partial(nn.BatchNorm, use_running_average=not self.train, momentum=0.9)
        strides = (self.strides, self.strides)
        y = nn.relu(norm()(nn.Conv(self.filters, (3, 3), strides, use_bias=False)(x)))
        y = norm(scale_init=nn.initializers.zeros_init())(
            nn.Conv(self.filters, (3, 3), use_bias=False)(y)
        )
        if x.shape != y.shape:
            x = norm()(nn.Conv(self.filters, (1, 1), strides, use_bias=False)(x))
        return nn.relu(x + y)


class _ResNet(nn.Module):
    classes: int = 10
    sizes: tuple[int, ...] = (1, 1, 1)
    filters: int = 16
    remat: bool = False

    @nn.compact
    def __call__(self, x, train: bool):
        block = nn.remat(_Block) if self.remat else _Block
        x = nn.Conv(self.filters, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        for i, count in enumerate(self.sizes):
            for j in range(count):
                name = f"block_{i}_{j}"
                strides = 2 if i and not j else 1
                x = block(self.filters * 2**i, strides, train, name=name)(x)
        return nn.Dense(self.classes)(x.mean((1, 2)))


def make() -> Case:
    batches = data.images(4, rows=16, size=32)
    variables = _ResNet().init(jax.random.key(0), jnp.asarray(batches[0]["image"]), train=False)
    batches = [{**batch, "stats": variables["batch_stats"]} for batch in batches]

    def loss(params, batch, remat=False):
        logits, _ = _ResNet(remat=remat).apply(
            {"params": params, "batch_stats": batch["stats"]},
            batch["image"],
            train=True,
            mutable=["batch_stats"],
        )
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    remat = functools.partial(loss, remat=True)
    return Case("Flax linen ResNet", loss, variables["params"], batches, remat, "nn.remat")
