"""Llama 3 of Tunix, in Flax nnx.

`pip install google-tunix` wants other versions of tokenizers and transformers than
`transformers_llama.py`: use a second environment.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.llama3 import model as llama3

from benchmarks.anybody import data
from benchmarks.anybody.case import Case

_CONFIG = llama3.ModelConfig(
    num_layers=6,
    vocab_size=data.VOCAB,
    embed_dim=128,
    hidden_dim=384,
    num_heads=4,
    head_dim=32,
    num_kv_heads=2,
    rope_theta=10_000,
    norm_eps=1e-5,
)


def make() -> Case:
    length = 128
    graph, params = nnx.split(llama3.Llama3(_CONFIG, rngs=nnx.Rngs(0)))
    changed = dataclasses.replace(_CONFIG, remat_config=llama3.RematConfig.DECODER)
    remat_graph, _ = nnx.split(nnx.eval_shape(lambda: llama3.Llama3(changed, rngs=nnx.Rngs(0))))
    mask = np.tril(np.ones((1, length, length), bool))

    def loss(params, batch, graph=graph):
        tokens = batch["inputs"]
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        logits, _ = nnx.merge(graph, params)(tokens, positions, None, mask)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    remat = functools.partial(loss, graph=remat_graph)
    batches = data.text(4, rows=4, length=length)
    return Case("Tunix Llama 3", loss, params, batches, remat, "RematConfig.DECODER")
