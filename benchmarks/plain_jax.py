"""The same decoder in ordinary JAX, differentiated by JAX.

A good user would write it without actjax: layers are stacked and scanned. Attention and the chunked
cross-entropy are those of actjax, so that only blocks are compared. `naive` replaces these two by
their textbook forms.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import actjax
from models import Decoder
from models.rope import rope_tables

_policies = jax.checkpoint_policies
POLICIES = {
    "full": _policies.nothing_saveable,
    "dots_saveable": _policies.dots_saveable,
    "dots": _policies.dots_with_no_batch_dims_saveable,
    "names": _policies.save_only_these_names("q", "k", "v", "gate", "up"),
    "offload_dots": _policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "offload_inputs": _policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["block"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
"""Policies of `jax.checkpoint` around a block."""


@dataclasses.dataclass(frozen=True)
class PlainJax:
    """Options of the plain decoder."""

    remat: str = "none"
    """No policy, "none", or one of `POLICIES`."""
    naive: bool = False
    """Whether to compute all logits at once, and to store attention weights."""


def loss_function(config: PlainJax, compute_dtype: str) -> Callable[..., jax.Array]:
    """Returns the loss as a function of a `Decoder`, tokens and targets, [B, S] both."""

    def loss(model: Decoder, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = model.embedding[...][tokens].astype(compute_dtype)
        tables = rope_tables(model.config, tokens.shape[1])

        def body(x, block):
            return _block(model.config, config, block, x, tables), None

        if config.remat != "none":
            body = jax.checkpoint(body, prevent_cse=False, policy=POLICIES[config.remat])
        x, _ = jax.lax.scan(body, x, model.layers)
        x = _rms_norm(x, model.norm[...], model.config.norm_eps)
        if not config.naive:
            return actjax.cross_entropy(x, model.head, targets)
        logits = (x @ model.head.astype(x.dtype)).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

    return loss


def _block(dims, config, block, x, tables):
    attention, mlp, x = block.attention, block.mlp, checkpoint_name(x, "block")
    h = _rms_norm(x, block.attention_norm[...], dims.norm_eps)
    q, k, v = (
        checkpoint_name(_times(h, w), name).reshape(*h.shape[:2], -1, dims.head_size)
        for name, w in (("q", attention.q), ("k", attention.k), ("v", attention.v))
    )
    q, k = _rope(q, *tables), _rope(k, *tables)
    if config.naive:
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    else:
        out = actjax.attention(q, k, v)
    x = x + _times(out.reshape(*x.shape[:2], -1), attention.o)
    h = _rms_norm(x, block.mlp_norm[...], dims.norm_eps)
    gate, up = (
        checkpoint_name(_times(h, w), name) for name, w in (("gate", mlp.gate), ("up", mlp.up))
    )
    return x + _times(jax.nn.silu(gate) * up, mlp.down)


def _times(x, parameter):
    """Returns `x` times a weight; with an adapter, as in the code of QLoRA's authors."""
    w = parameter[...]
    if not isinstance(w, actjax.LoRA):
        return x @ w.astype(x.dtype)
    # Weights in 4 bits are decoded again in the backward pass, as in bitsandbytes. JAX alone would
    # store the decoded weights of all layers.
    base = actjax.linear(x, actjax.FrozenWeight(w.weight))
    return base + w.scale * ((x @ w.a.astype(x.dtype)) @ w.b.astype(x.dtype))


def _rms_norm(x, scale, eps):
    wide = x.astype(jnp.float32)
    unit = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    return (unit * scale).astype(x.dtype)


def _rope(x, cos, sin):
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
