"""Attention by JAX's splash kernels for TPUs.

They skip blocks that see nothing, and hold q, k, v, the output and a log-sum-exp (Dao, 2023).
"""

import dataclasses
import functools
import importlib
import math
from typing import Any

import jax

from actjax._core.reverse_mode import ReverseMode
from actjax._shards import is_partitioned
from actjax.ops.mask import Mask

_LANES = 128
_BLOCKS = (512, 256, _LANES)
"""Queries and keys of a block, the largest first."""
_FUSED_LENGTH = 4096
"""Length up to which a single kernel computes all gradients.

It writes a gradient of the queries for each block of keys: at 32,768 tokens, 64 times the bytes of
the queries. Longer sequences take two kernels, with 7 products of a block in place of 5.
"""
_LIBRARY = "jax.experimental.pallas.ops.tpu.splash_attention"


@functools.partial(ReverseMode, nondiff_argnums=(0, 1))
def splash(mask: Mask, name: str, q: Any, k: Any, v: Any, segments: Any) -> jax.Array:
    """Returns attention with merged heads: one of `actjax.ops.attention_implementations`.

    Raises:
      ValueError: a length that is not a multiple of 128, or arrays that XLA divides over devices.
    """
    del name
    return _run(mask, segments, q, k, v)


def _run(mask: Mask, segments: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    if reason := _refuses(q):
        raise ValueError(f"`implementation` 'splash' of attention {reason}: use 'blockwise'.")
    kernels = _library("splash_attention_kernel")
    length, heads, size = q.shape[1:]
    block = next(block for block in _BLOCKS if length % block == 0)
    fused = length <= _FUSED_LENGTH
    sizes = kernels.BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block,
        block_kv_dkv_compute=block, use_fused_bwd_kernel=fused,
        block_q_dq=None if fused else block, block_kv_dq=None if fused else block,
    )  # fmt: skip
    kernel: Any = kernels.make_splash_mha(
        mask=_library("splash_attention_mask").MultiHeadMask([_splash_mask(mask, length)] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        interpret=jax.default_backend() != "tpu",
    )
    # The kernels do not scale scores.
    scaled = (q * (1 / math.sqrt(size))).astype(q.dtype)
    q_rows, k_rows, v_rows = (x.swapaxes(1, 2) for x in (scaled, k, v))

    def of_row(q: jax.Array, k: jax.Array, v: jax.Array, segments: Any) -> Any:
        return kernel(q, k, v, None if segments is None else kernels.SegmentIds(segments, segments))

    return _merged(jax.vmap(of_row)(q_rows, k_rows, v_rows, segments))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Residuals:
    """The leaves of the pullback of the kernels.

    Attributes:
      leaves: arrays; arrays of heads are merged, [B, S, H * D]. Heads of 64 numbers, [B, H, S, 64],
        would take the 128 lanes of 128.
      treedef: structure of the pullback. Static.
      heads: heads of each leaf; 0 for one that is not merged. Static.
    """

    leaves: Any
    treedef: Any = dataclasses.field(metadata={"static": True})
    heads: tuple[int, ...] = dataclasses.field(metadata={"static": True})


def _splash_fwd(mask, name, q, k, v, segments):
    del name
    out, pullback = jax.vjp(functools.partial(_run, mask, segments), q, k, v)
    leaves, treedef = jax.tree.flatten(pullback)
    ends = q.shape[1], q.shape[3]
    heads = tuple(x.shape[1] if x.ndim == 4 and x.shape[2:] == ends else 0 for x in leaves)
    leaves = [_merged(x) if n else x for x, n in zip(leaves, heads, strict=True)]
    return out, _Residuals(leaves, treedef, heads)


def _splash_bwd(mask, name, residuals, dout):
    del mask, name
    leaves = [
        x.reshape(*x.shape[:2], n, -1).swapaxes(1, 2) if n else x
        for x, n in zip(residuals.leaves, residuals.heads, strict=True)
    ]
    return *jax.tree.unflatten(residuals.treedef, leaves)(dout), None


splash.defvjp(_splash_fwd, _splash_bwd)


def _merged(x: jax.Array) -> jax.Array:
    """[B, H, S, D] to [B, S, H * D]."""
    x = x.swapaxes(1, 2)
    return x.reshape(*x.shape[:2], -1)


def splash_or(fallback: Any) -> Any:
    """Returns `splash`, or another implementation for queries that `splash` refuses."""
    return functools.partial(_splash_or, fallback)


def _splash_or(fallback: Any, mask: Mask, name: str, q: Any, *others: Any) -> jax.Array:
    chosen = fallback if _refuses(q) else splash
    return chosen(mask, name, q, *others)


def _refuses(q: jax.Array) -> str | None:
    """Returns why the kernels cannot take the queries; None if they can."""
    if q.shape[1] % _LANES:
        return f"takes lengths that are multiples of {_LANES}, got {q.shape[1]}"
    if is_partitioned(q):
        return "takes arrays of one device, or within `jax.shard_map`"
    try:
        _library("splash_attention_kernel")
    except ImportError:
        return f"needs {_LIBRARY}, which JAX {jax.__version__} does not have"
    return None


def _library(module: str) -> Any:
    """Imports a module of JAX's where it is used, since it needs Pallas."""
    return importlib.import_module(f"{_LIBRARY}.{module}")


def _splash_mask(mask: Mask, length: int) -> Any:
    masks, shape = _library("splash_attention_mask"), (length, length)
    if not mask.causal:
        return masks.FullMask(shape)
    if mask.window is None:
        return masks.CausalMask(shape)
    return masks.LocalMask(shape, (mask.window - 1, 0), 0)
