"""The table of the tensors of a Hugging Face checkpoint and the parameters of the decoder."""

import dataclasses

from models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
      tensor: name in the file, with {} for the number of the layer.
      parameter: path in the `Decoder`.
      transposed: whether the file has [out, in] where the parameter is [in, out].
    """

    tensor: str
    parameter: str
    transposed: bool = False

    @property
    def stacked(self) -> bool:
        """Whether the parameter has a leading axis of layers."""
        return self.parameter.startswith("layers.")


def table(config: ModelConfig) -> tuple[Row, ...]:
    """Returns the rows of a model, in the order in which its tensors are written."""
    rows = [Row("model.embed_tokens.weight", "embedding")]
    layer = [("input_layernorm.weight", "attention_norm", False)]
    for name in "qkvo":
        layer.append((f"self_attn.{name}_proj.weight", f"attention.{name}", True))
    if config.attention_bias:
        for name in "qkv":
            layer.append((f"self_attn.{name}_proj.bias", f"attention.{name}_bias", False))
    if config.qk_norm:
        for name in "qk":
            layer.append((f"self_attn.{name}_norm.weight", f"attention.{name}_norm", False))
    layer.append(("post_attention_layernorm.weight", "mlp_norm", False))
    for name in ("gate", "up", "down"):
        layer.append((f"mlp.{name}_proj.weight", f"mlp.{name}", True))
    rows += [Row(f"model.layers.{{}}.{t}", f"layers.{p}", flipped) for t, p, flipped in layer]
    rows.append(Row("model.norm.weight", "norm"))
    if not config.tie_embeddings:
        rows.append(Row("lm_head.weight", "output", True))
    return tuple(rows)


def is_ignored(tensor: str) -> bool:
    """Returns whether a tensor is not a parameter: old files hold the frequencies of RoPE."""
    return tensor.endswith(".rotary_emb.inv_freq")
