"""FlaxLlama of Hugging Face: `pip install transformers==4.44.2`."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from transformers import LlamaConfig
from transformers.models.llama import modeling_flax_llama as llama

from benchmarks.anybody import data
from benchmarks.anybody.case import Case

_LAYER = llama.FlaxLlamaDecoderLayer


def _rematerialised(*args, **kwargs):
    """Returns a layer under `nn.remat`, whose flags must not be keywords."""
    layer = nn.remat(_LAYER, static_argnums=(4, 5, 6))(*args, **kwargs)

    def call(x, attention_mask, position_ids, deterministic, init_cache, output_attentions):
        flags = (deterministic, init_cache, output_attentions)
        return layer(x, attention_mask, position_ids, *flags)

    return call


def make() -> Case:
    config = LlamaConfig(
        vocab_size=data.VOCAB,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=256,
    )
    model = llama.FlaxLlamaForCausalLM(config, input_shape=(1, 128), seed=0)
    batches = data.text(4, rows=4, length=128)

    def loss(params, batch):
        logits = model(batch["inputs"], params=params, train=True).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    @functools.wraps(loss)
    def remat(params, batch):
        # FlaxLlama offers no rematerialisation; FlaxBert does it in this way.
        llama.FlaxLlamaDecoderLayer = _rematerialised
        try:
            return loss(params, batch)
        finally:
            llama.FlaxLlamaDecoderLayer = _LAYER

    params = jax.tree.map(jnp.asarray, model.params)
    return Case("transformers FlaxLlama", loss, params, batches, remat, "nn.remat of each layer")
