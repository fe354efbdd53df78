"""FlaxLlama of Hugging Face: `pip install transformers==4.44.2`."""

import jax
import jax.numpy as jnp
import optax
from transformers import LlamaConfig
from transformers.models.llama.modeling_flax_llama import FlaxLlamaForCausalLM

from benchmarks.anybody import data
from benchmarks.anybody.case import Case


def make() -> Case:
    config = LlamaConfig(
        vocab_size=data.VOCAB,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=256,
    )
    model = FlaxLlamaForCausalLM(config, input_shape=(1, 128), seed=0)
    batches = data.text(4, rows=4, length=128)

    def loss(params, batch):
        logits = model(batch["inputs"], params=params, train=True).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    return Case(
        "transformers FlaxLlama",
        loss,
        jax.tree.map(jnp.asarray, model.params),
        batches,
        jax.checkpoint(loss),
        "jax.checkpoint of the model: FlaxLlama has no rematerialisation",
    )
