"""The diffusion UNet of FlaxDiff: `pip install flaxdiff`."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from flaxdiff.models import simple_unet

from benchmarks.anybody import data
from benchmarks.anybody.case import Case


def _unet() -> simple_unet.Unet:
    return simple_unet.Unet(
        emb_features=64,
        feature_depths=(16,),
        attention_configs=({"heads": 4},),
        num_res_blocks=1,
        num_middle_res_blocks=1,
    )


def make() -> Case:
    size, rows = 16, 8
    model, context = _unet(), jnp.zeros((rows, 8, 64))
    images = data.images(4, rows, size)
    params = model.init(jax.random.key(0), images[0]["image"], jnp.zeros(rows), context)["params"]
    batches = [
        {"image": x["image"], "key": jax.random.key(i),
         "context": jax.random.normal(jax.random.key(9 + i), context.shape)}
        for i, x in enumerate(images)
    ]  # fmt: skip

    def loss(params, batch, model=model):
        time_key, noise_key = jax.random.split(batch["key"])
        time = jax.random.uniform(time_key, (rows,))
        noise = jax.random.normal(noise_key, batch["image"].shape)
        angle = (0.5 * jnp.pi * time)[:, None, None, None]
        noisy = jnp.cos(angle) * batch["image"] + jnp.sin(angle) * noise
        found = model.apply({"params": params}, noisy, 1000 * time, batch["context"])
        return jnp.mean((found - noise) ** 2)

    def remat(params, batch):
        kinds = {name: getattr(simple_unet, name) for name in ("ResidualBlock", "TransformerBlock")}
        try:
            for name, kind in kinds.items():
                setattr(simple_unet, name, nn.remat(kind))
            return loss(params, batch, _unet())
        finally:
            for name, kind in kinds.items():
                setattr(simple_unet, name, kind)

    remat = functools.wraps(loss)(remat)
    return Case("FlaxDiff UNet", loss, params, batches, remat, "nn.remat of each block")
