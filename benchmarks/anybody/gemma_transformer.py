"""The transformer of Google's gemma package, with the layers of Gemma 3.

`pip install gemma==3.3.0` into the environment of `tunix_llama.py`. Besides what Tunix needs it
imports kauldron, einops, typeguard, and, through kauldron, chex, lark, toolz and TensorFlow (with
astunparse, flatbuffers and gast); of these `pip install --no-deps gemma` would install none.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from gemma import gm
from gemma.gm.nn import _modules as modules
from gemma.gm.nn import _transformer as transformer

from benchmarks.anybody import data
from benchmarks.anybody.case import Case

_LAYERS = 6
_KINDS = modules.AttentionType
_CONFIG = gm.nn.config.TransformerConfig(
    num_embed=data.VOCAB,
    embed_dim=128,
    hidden_dim=512,
    num_heads=4,
    head_dim=32,
    num_kv_heads=1,
    final_logit_softcap=None,
    use_post_attn_norm=True,
    use_post_ffw_norm=True,
    use_qk_norm=True,
    attention_types=gm.nn.config.make_attention_layers_types(
        (_KINDS.LOCAL_SLIDING, _KINDS.LOCAL_SLIDING, _KINDS.GLOBAL), num_layers=_LAYERS
    ),
    sliding_window_size=64,
)


class _Rematerialised(transformer.Transformer):
    """The same with `nn.remat` of each block, which gemma itself does not offer."""

    def setup(self):
        block = modules.Block
        modules.Block = nn.remat(block)
        try:
            super().setup()
        finally:
            modules.Block = block


def make() -> Case:
    model = transformer.Transformer(config=_CONFIG, dtype=jnp.float32, tokens="batch.tokens")
    rematted = _Rematerialised(config=_CONFIG, dtype=jnp.float32, tokens="batch.tokens")
    batches = data.text(4, rows=4, length=128)
    params = model.init(jax.random.key(0), jnp.asarray(batches[0]["inputs"]))["params"]

    def loss(params, batch, model=model):
        logits = model.apply({"params": params}, batch["inputs"]).logits
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    remat = functools.partial(loss, model=rematted)
    return Case("gemma transformer", loss, params, batches, remat, "nn.remat of each block")
