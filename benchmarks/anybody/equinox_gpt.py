"""A GPT of Equinox, 4 layers unrolled by Python: `pip install equinox`."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from benchmarks.anybody import data
from benchmarks.anybody.case import Case


class _Block(eqx.Module):
    """A block of GPT-2: attention and an MLP, each after a layer norm."""

    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]
        self.attention = eqx.nn.MultiheadAttention(
            width // 32,
            width,
            use_query_bias=True,
            use_key_bias=True,
            use_value_bias=True,
            use_output_bias=True,
            key=keys[0],
        )
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[1])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[2])

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = jnp.tril(jnp.ones((x.shape[0], x.shape[0]), bool))
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attention(h, h, h, mask)
        h = jax.vmap(self.norms[1])(x)
        return x + jax.vmap(lambda y: self.down(jax.nn.gelu(self.up(y))))(h)


class _GPT(eqx.Module):
    embedding: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list[_Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, layers: int, width: int, length: int, key: jax.Array) -> None:
        keys = jax.random.split(key, layers + 3)
        self.embedding = eqx.nn.Embedding(data.VOCAB, width, key=keys[0])
        self.positions = eqx.nn.Embedding(length, width, key=keys[1])
        self.blocks = [_Block(width, k) for k in keys[3:]]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, data.VOCAB, use_bias=False, key=keys[2])

    def __call__(self, tokens: jax.Array, remat: bool) -> jax.Array:
        x = jax.vmap(self.embedding)(tokens) + self.positions.weight[: len(tokens)]
        for block in self.blocks:
            x = eqx.filter_checkpoint(block)(x) if remat else block(x)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def make() -> Case:
    model = _GPT(4, 64, 64, jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, batch, remat=False):
        model = eqx.combine(params, static)
        logits = jax.vmap(lambda x: model(x, remat))(batch["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    remat = functools.partial(loss, remat=True)
    batches = data.text(4, rows=4, length=64)
    return Case("Equinox GPT, 4 layers", loss, params, batches, remat, "eqx.filter_checkpoint")
