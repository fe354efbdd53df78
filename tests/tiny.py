"""Models small enough for tests that still have every part."""

import functools

import jax
import jax.numpy as jnp

from models import Decoder, ModelConfig

CONFIG = ModelConfig(
    vocab_size=61, hidden_size=24, ffn_size=44, num_layers=3, num_heads=6, num_kv_heads=2
)


# Compiled as a whole: eagerly, each shape of each operation is a program.
@functools.partial(jax.jit, static_argnums=(0, 1))
def decoder(config: ModelConfig = CONFIG, dtype: str = "float32") -> Decoder:
    """Returns a model whose norms are not all one, so that a missing scale shows."""
    return _noisy(Decoder(config, jax.random.key(0), dtype=dtype))


def _noisy(model: Decoder) -> Decoder:
    leaves, treedef = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [
        w + 0.1 * jax.random.normal(k, w.shape, w.dtype) for w, k in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(treedef, noisy)


def batch(
    config: ModelConfig = CONFIG, rows: int = 2, length: int = 11
) -> tuple[jax.Array, jax.Array]:
    """Returns tokens and targets, [rows, length] each."""
    return _batch(config.vocab_size, rows, length)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _batch(vocab_size: int, rows: int, length: int) -> tuple[jax.Array, jax.Array]:
    tokens = jax.random.randint(jax.random.key(2), (rows, length + 1), 0, vocab_size)
    return tokens[:, :-1].astype(jnp.int32), tokens[:, 1:].astype(jnp.int32)


@jax.jit
def gradients(model: Decoder, scale: float = 1.0) -> Decoder:
    """Returns random numbers in place of the gradient of a model."""
    leaves, treedef = jax.tree.flatten(model)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    drawn = [
        scale * jax.random.normal(k, w.shape, w.dtype) for w, k in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(treedef, drawn)
