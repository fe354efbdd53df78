"""A transformer of Haiku with `hk.experimental.layer_stack`: `pip install dm-haiku`."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.anybody import data
from benchmarks.anybody.case import Case

_WIDTH, _LAYERS = 128, 8


def _norm(x: jax.Array) -> jax.Array:
    return hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)


def _block(x: jax.Array) -> jax.Array:
    """The layer of Haiku's transformer example."""
    mask = np.tril(np.ones((1, 1, x.shape[1], x.shape[1]), bool))
    init = hk.initializers.VarianceScaling(2 / _LAYERS)
    h = _norm(x)
    x = x + hk.MultiHeadAttention(_WIDTH // 32, 32, w_init=init, model_size=_WIDTH)(h, h, h, mask)
    mlp = hk.Sequential([hk.Linear(4 * _WIDTH, w_init=init), jax.nn.gelu,
                         hk.Linear(_WIDTH, w_init=init)])  # fmt: skip
    h = mlp(_norm(x))
    return x + hk.dropout(hk.next_rng_key(), 0.1, h)


def _model(tokens: jax.Array, remat: bool) -> jax.Array:
    x = hk.Embed(data.VOCAB, _WIDTH)(tokens)
    positions = hk.get_parameter("positions", x.shape[1:], init=hk.initializers.TruncatedNormal())
    block = hk.remat(_block) if remat else _block
    x = hk.experimental.layer_stack(_LAYERS)(block)(x + 0.02 * positions)
    return hk.Linear(data.VOCAB)(_norm(x))


def make() -> Case:
    model = hk.transform(_model)
    batches = data.text(4, rows=4, length=128)
    params = model.init(jax.random.key(0), jnp.asarray(batches[0]["inputs"]), False)
    batches = [{**batch, "key": jax.random.key(i)} for i, batch in enumerate(batches)]

    def loss(params, batch, remat=False):
        logits = model.apply(params, batch["key"], batch["inputs"], remat)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    remat = functools.partial(loss, remat=True)
    return Case("Haiku transformer, layer_stack", loss, params, batches, remat, "hk.remat")
