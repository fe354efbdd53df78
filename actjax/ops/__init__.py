"""Operators with custom backward passes, each usable alone inside any JAX function."""

from actjax.ops.attention import HeadNorm, attention
from actjax.ops.conv import conv
from actjax.ops.cross_entropy import cross_entropy
from actjax.ops.embedding import embedding
from actjax.ops.gelu import gelu
from actjax.ops.glu import swiglu
from actjax.ops.layer_norm import layer_norm
from actjax.ops.linear import linear, qkv_projection
from actjax.ops.norm import rms_norm
from actjax.ops.rebuilt_input import attention_linear, gelu_linear, norm_linear, swiglu_linear
from actjax.ops.rope import rope
from actjax.ops.token_log_probs import token_log_probs

__all__ = [
    "HeadNorm",
    "attention",
    "attention_linear",
    "conv",
    "cross_entropy",
    "embedding",
    "gelu",
    "gelu_linear",
    "layer_norm",
    "linear",
    "norm_linear",
    "qkv_projection",
    "rms_norm",
    "rope",
    "swiglu",
    "swiglu_linear",
    "token_log_probs",
]
