"""Models that are small enough for tests and still have every part, with padding.

All functions are jitted: run eagerly, each would compile a program for every shape.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from actjax._core.paths import named_leaves
from models import Decoder, ModelConfig
from models.padding import keeps_padding, pad, published_shape

CONFIG = ModelConfig(
    vocab_size=61, hidden_size=24, ffn_size=44, num_layers=3, num_heads=6, num_kv_heads=2
)


def add_noise(tree: Any, seed: int, scale: float, config: ModelConfig = CONFIG) -> Any:
    named, treedef = named_leaves(tree), jax.tree.structure(tree)
    keys = jax.random.split(jax.random.key(seed), len(named))
    noisy = []
    for (name, w), key in zip(named.items(), keys, strict=True):
        shape = published_shape(name, w.shape, config)
        noise = scale * jax.random.normal(key, shape, w.dtype)
        noisy.append(w + pad(name, noise, config))
    return jax.tree.unflatten(treedef, noisy)


def zero_padding(tree: Any, config: ModelConfig = CONFIG) -> Any:
    """Returns parameters of a decoder or of adapters with zeros in the padding."""
    return keeps_padding(config).update(tree, optax.EmptyState())[0]


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def decoder(config: ModelConfig = CONFIG, dtype: str = "float32") -> Decoder:
    """Returns a model whose norm scales are not all one, so that a missing scale is noticed."""
    return add_noise(Decoder(config, jax.random.key(0), dtype=dtype), 1, 0.1, config)


@functools.partial(jax.jit, static_argnames=("config", "rows", "length"))
def batch(
    config: ModelConfig = CONFIG, rows: int = 2, length: int = 11
) -> tuple[jax.Array, jax.Array]:
    """Returns tokens and targets, [rows, length] each."""
    tokens = jax.random.randint(jax.random.key(2), (rows, length + 1), 0, config.vocab_size)
    return tokens[:, :-1].astype(jnp.int32), tokens[:, 1:].astype(jnp.int32)


@jax.jit
def gradients(model: Decoder, scale: float = 1.0) -> Decoder:
    """Returns random numbers in the shape of the gradient of a model."""
    return add_noise(
        jax.tree.map(jnp.zeros_like, model), 7, scale, getattr(model, "config", CONFIG)
    )
