"""A transformer of haliax with `Stacked` layers: `pip install haliax`."""
# ruff: noqa: E402

import dataclasses
import functools

import equinox as eqx
import jax
from jax._src import tree_util
from jax._src.numpy import einsum, lax_numpy

# haliax 1.3 uses names that JAX has dropped or moved.
tree_util.BuiltInKeyEntry = tree_util.KeyEntry
lax_numpy._einsum = einsum._einsum

import haliax as hax
import haliax.nn as hnn
from haliax import Axis

from benchmarks.anybody import data
from benchmarks.anybody.case import Case

_BATCH, _POS, _KEY_POS = Axis("batch", 4), Axis("position", 128), Axis("key_position", 128)
_EMBED, _HEADS, _SIZE = Axis("embed", 128), Axis("heads", 4), Axis("head_size", 32)
_MLP, _VOCAB, _LAYERS = Axis("mlp", 512), Axis("vocab", data.VOCAB), Axis("layers", 8)


class _Block(eqx.Module):
    norms: tuple[hnn.LayerNorm, hnn.LayerNorm]
    q: hnn.Linear
    k: hnn.Linear
    v: hnn.Linear
    o: hnn.Linear
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(key: jax.Array) -> "_Block":
        keys = jax.random.split(key, 6)
        heads = (_HEADS, _SIZE)
        return _Block(
            (hnn.LayerNorm.init(_EMBED), hnn.LayerNorm.init(_EMBED)),
            *(hnn.Linear.init(_EMBED, heads, key=k) for k in keys[:3]),
            hnn.Linear.init(heads, _EMBED, key=keys[3]),
            hnn.Linear.init(_EMBED, _MLP, key=keys[4]),
            hnn.Linear.init(_MLP, _EMBED, key=keys[5]),
        )

    def __call__(self, x: hax.NamedArray) -> hax.NamedArray:
        h = self.norms[0](x)
        q, k, v = self.q(h), self.k(h), self.v(h)
        k, v = k.rename({_POS: _KEY_POS}), v.rename({_POS: _KEY_POS})
        mask = hnn.attention.causal_mask(_POS, _KEY_POS)
        x = x + self.o(hnn.attention.dot_product_attention(_KEY_POS, _SIZE, q, k, v, mask))
        return x + self.down(hnn.gelu(self.up(self.norms[1](x))))


class _Model(eqx.Module):
    embedding: hnn.Embedding
    positions: hnn.Embedding
    layers: hnn.Stacked
    norm: hnn.LayerNorm

    @staticmethod
    def init(key: jax.Array) -> "_Model":
        keys = jax.random.split(key, 3)
        return _Model(
            hnn.Embedding.init(_VOCAB, _EMBED, key=keys[0]),
            hnn.Embedding.init(_POS, _EMBED, key=keys[1]),
            hnn.Stacked.init(_LAYERS, _Block)(jax.random.split(keys[2], _LAYERS.size)),
            hnn.LayerNorm.init(_EMBED),
        )

    def __call__(self, tokens: hax.NamedArray) -> hax.NamedArray:
        x = self.embedding(tokens) + self.positions.weight
        return self.embedding.unembed(self.norm(self.layers.fold(x)))


def make() -> Case:
    params = _Model.init(jax.random.key(0))

    def loss(model, batch):
        tokens, targets = (hax.named(batch[name], (_BATCH, _POS)) for name in ("inputs", "targets"))
        labels = hnn.one_hot(targets, _VOCAB)
        return hnn.cross_entropy_loss(model(tokens), _VOCAB, labels, hax.mean).scalar()

    def remat(model, batch):
        layers = dataclasses.replace(model.layers, gradient_checkpointing=True)
        return loss(dataclasses.replace(model, layers=layers), batch)

    return Case(
        "haliax transformer",
        loss,
        params,
        data.text(4, rows=_BATCH.size, length=_POS.size),
        functools.wraps(loss)(remat),
        "Stacked(gradient_checkpointing=True)",
    )
