"""`hk.nets.ResNet` of Haiku, which has batch norm, with four blocks: `pip install dm-haiku`."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import optax

from benchmarks.anybody import data
from benchmarks.anybody.case import Case


def _model(images: jax.Array, remat: bool) -> jax.Array:
    net = hk.nets.ResNet(
        blocks_per_group=(1, 1, 1, 1),
        num_classes=10,
        bottleneck=False,
        channels_per_group=(32, 64, 128, 256),
        use_projection=(True, True, True, True),
        # By default it starts at zero, and with it all gradients but its own.
        logits_config={"w_init": hk.initializers.VarianceScaling()},
    )
    if remat:
        for group in net.block_groups:
            group.blocks = [hk.remat(block, static_argnums=(1, 2)) for block in group.blocks]
    return net(images, is_training=True)


def make() -> Case:
    model = hk.transform_with_state(_model)
    batches = data.images(4, rows=16, size=48)
    params, state = model.init(jax.random.key(0), jnp.asarray(batches[0]["image"]), False)
    batches = [{**batch, "state": state} for batch in batches]

    def loss(params, batch, remat=False):
        logits, _ = model.apply(params, batch["state"], None, batch["image"], remat)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    remat = functools.partial(loss, remat=True)
    return Case("Haiku ResNet, 4 blocks", loss, params, batches, remat, "hk.remat of each block")
