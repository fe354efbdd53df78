"""FlaxBert of Hugging Face, masked tokens, with dropout: `pip install transformers==4.44.2`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from transformers import BertConfig, FlaxBertForMaskedLM

from benchmarks.anybody import data
from benchmarks.anybody.case import Case

_MASK = data.VOCAB - 2


def _masked(batch: dict, seed: int) -> dict:
    rng = np.random.default_rng(seed)
    chosen = rng.random(batch["inputs"].shape) < 0.15
    lengths = rng.integers(96, 129, (len(chosen), 1))
    valid = np.arange(chosen.shape[1]) < lengths
    return {
        "inputs": np.where(chosen, _MASK, batch["inputs"]),
        "valid": valid.astype(np.int32),
        "targets": batch["inputs"],
        "weights": (chosen & valid).astype(np.float32),
        "key": jax.random.PRNGKey(seed),
    }


def make() -> Case:
    config = BertConfig(
        vocab_size=data.VOCAB,
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=6,
        max_position_embeddings=128,
    )
    model = FlaxBertForMaskedLM(config, input_shape=(1, 128), seed=0)
    rematted = FlaxBertForMaskedLM(
        config, input_shape=(1, 128), seed=0, gradient_checkpointing=True, _do_init=False
    )

    def loss(params, batch, model=model):
        logits = model(
            batch["inputs"],
            batch["valid"],
            params=params,
            dropout_rng=batch["key"],
            train=True,
        ).logits
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.sum(each * batch["weights"]) / jnp.sum(batch["weights"])

    batches = [_masked(batch, i) for i, batch in enumerate(data.text(4, rows=4, length=128))]
    params = jax.tree.map(jnp.asarray, model.params)
    remat = functools.partial(loss, model=rematted)
    return Case("transformers FlaxBert", loss, params, batches, remat, "gradient_checkpointing")
