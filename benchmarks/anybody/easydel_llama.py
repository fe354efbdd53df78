"""Llama of EasyDeL, in Flax nnx: `pip install easydel torch` (its imports want PyTorch).

pip installs jax 0.9 with easydel 0.3.0: use a separate environment.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from easydel import LlamaConfig, LlamaForCausalLM
from easydel.infra.etils import EasyDeLGradientCheckPointers
from flax import nnx

from benchmarks.anybody import data
from benchmarks.anybody.case import Case


def _model(remat: EasyDeLGradientCheckPointers) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=data.VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        gradient_checkpointing=remat,
        attn_mechanism="vanilla",
    )
    return LlamaForCausalLM(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0))


def make() -> Case:
    parts = nnx.split(_model(EasyDeLGradientCheckPointers.NONE), nnx.Param, ...)
    graph, params, rest = parts
    remat_graph, _, remat_rest = nnx.split(
        _model(EasyDeLGradientCheckPointers.NOTHING_SAVEABLE), nnx.Param, ...
    )

    def loss(params, batch, graph=graph, rest=rest):
        model = nnx.merge(graph, params, rest, copy=True)
        with model.config.mesh:
            logits = model(input_ids=batch["inputs"]).logits
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return losses.mean()

    remat = functools.partial(loss, graph=remat_graph, rest=remat_rest)
    batches = data.text(4, rows=4, length=128)
    params = jax.tree.map(jnp.asarray, params)
    return Case("EasyDeL Llama", loss, params, batches, remat, "gradient_checkpointing")
