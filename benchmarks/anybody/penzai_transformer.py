"""The Llama-like transformer of penzai: `pip install penzai`."""

import functools

import jax
import optax
from penzai import pz
from penzai.models.transformer import model_parts
from penzai.models.transformer.variants import llamalike_common

from benchmarks.anybody import data
from benchmarks.anybody.case import Case

_CONFIG = llamalike_common.LlamalikeTransformerConfig(
    num_kv_heads=2,
    query_head_multiplier=2,
    embedding_dim=128,
    projection_dim=32,
    mlp_hidden_dim=384,
    num_decoder_blocks=2,
    vocab_size=data.VOCAB,
    mlp_variant="swiglu",
    tie_embedder_and_logits=False,
)


@pz.pytree_dataclass
class _Rematerialised(pz.nn.Layer):
    """A layer whose forward pass runs again in the backward pass. penzai has none."""

    body: pz.nn.Layer

    def __call__(self, x, **side_inputs):
        return jax.checkpoint(lambda body, x, side: body(x, **side))(self.body, x, side_inputs)


def make() -> Case:
    model = llamalike_common.build_llamalike_transformer(_CONFIG, jax.random.key(0))
    params, skeleton = pz.unbind_params(model, freeze=True)[::-1]
    values = {param.label: param.value for param in params}

    def loss(values, batch, remat=False):
        frozen = [pz.ParameterValue(value=value, label=label) for label, value in values.items()]
        model = pz.bind_variables(skeleton, frozen)
        if remat:
            model = (
                model.select().at_instances_of(model_parts.TransformerBlock).apply(_Rematerialised)
            )
        logits = model(pz.nx.wrap(batch["inputs"]).tag("batch", "seq"))
        logits = logits.unwrap("batch", "seq", "vocabulary")
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    remat = functools.partial(loss, remat=True)
    batches = data.text(4, rows=4, length=128)
    return Case("penzai transformer", loss, values, batches, remat, "jax.checkpoint of each block")
