"""Grouped-query attention whose memory is linear in the sequence length."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from actjax._core.checks import all_exact, check_codecs, check_floating
from actjax._core.coded_call import coded_call
from actjax.codecs import Codec, Exact
from actjax.ops.activations import Activation, of_sums, split_sums
from actjax.ops.attention_forms import FORMS, Sight
from actjax.ops.norm import rms_norm
from actjax.ops.rope import rope as rotate
from actjax.weights.lora import LowRankSum

Implementation = Literal["blockwise", "cudnn", "dense"]


@dataclasses.dataclass(frozen=True)
class HeadNorm:
    """Norms of queries and keys by head (Dehghani et al., 2023; Qwen 3).

    Attributes:
      q: scale of the queries' norm, [D].
      k: scale of the keys', [D].
      eps: as for `actjax.rms_norm`.
    """

    q: jax.Array
    k: jax.Array
    eps: float = 1e-6


def attention(
    q: Activation,
    k: Activation,
    v: Activation,
    *,
    causal: bool = True,
    window: int | None = None,
    segments: jax.Array | None = None,
    rope: tuple[jax.Array, jax.Array] | None = None,
    norm: HeadNorm | None = None,
    codec: Codec | Sequence[Codec] = Exact(),
    key: jax.Array | Sequence[jax.Array] | None = None,
    implementation: Implementation | None = None,
    recompute: bool = False,
    merge_heads: bool = False,
    name: str = "",
) -> jax.Array:
    """Returns `softmax(q kᵀ / sqrt(D)) v` for each head.

    The value is exact. With a lossy codec nothing but codes of q, k and v is held, as they are
    before `norm` and `rope` and with heads merged; the backward pass runs the forward pass again on
    what they decode to, and its gradients are those at the decoded values: biased even where the
    codec is not, and their error reaches all that is upstream (Wei et al., 2026, Theorems 3.2 and
    3.3).

    Args:
      q: queries, [B, S, H, D]; an array, or an `actjax.LowRankSum`, of which a lossy codec stores
        one part, and the other is held as it is.
      k: keys, [B, S, G, D], with H a multiple of G; query head h reads key head `h // (H / G)`.
      v: values, [B, S, G, D].
      causal: whether position i sees positions up to i alone.
      window: how many positions one sees at most, itself among them (Jiang et al., "Mistral 7B",
        2023); needs `causal`. None for no limit.
      segments: [B, S] integers; a position sees those of its own number alone. That is how several
        documents share a sequence. None if all see all.
      rope: cosines and sines to rotate q and k by, as for `actjax.rope`; None for no rotation.
      norm: scales to normalise the heads of q and k by, before they are rotated (Qwen 3); None for
        no norm.
      codec: what is kept of q, k and v, or three of such.
      key: randomness of the encoding, or a tuple of a key for each; consumed. Needed if a codec
        draws.
      implementation: "cudnn" (NVIDIA GPU, 16-bit inputs), "blockwise" (any backend), "dense" (all
        scores at once, and derivatives of any order, for which autodiff keeps what it will), or
        None for cuDNN where the default backend is a GPU and the dtype allows it, else blockwise.
        A name that is asked for is used, or raises.
      recompute: whether to hold q, k and v alone and run the forward pass again in the backward
        pass. Worth its two products where nothing else keeps the output, and needed where q and k
        are to be compressed by `actjax.compress_residuals`: the log-sum-exp that is held otherwise
        is that of exact scores, and weights of others would not add up to one. Lossy codecs do so
        anyway.
      merge_heads: whether to return [B, S, H * D]. It is then the very array that attention
        keeps, so a `linear` that follows and keeps its input exactly costs no second copy.
      name: put before the names that `actjax.explain` gives what is kept.

    Returns:
      [B, S, H, D], or [B, S, H * D], in the dtype of `q`.

    Raises:
      ValueError: shapes or dtypes that do not fit, an unknown implementation, a missing key.
      TypeError: inputs that are not floating point, or `codec` is no codec.
    """
    sight = check_attention(q, k, v, causal, window, segments)
    codecs = check_codecs(codec, ("q", "k", "v"), key)
    form = _form(implementation, q.dtype)
    names = [f"{name} {letter}".strip() for letter in "qkv"]
    if all_exact(codecs):
        q, k, v = (x.value() if isinstance(x, LowRankSum) else x for x in (q, k, v))
        q, k = _prepare(q, k, rope, norm, name)
        run: Any = _Form(form, sight, name)
        if not recompute:
            merged = run((q, k, v), segments)
        else:
            merged = coded_call(run, (q, k, v), segments, codecs, key, "attention", names)
    else:
        run, more = from_merged(q, k, sight, norm, implementation), beside(segments, rope, norm)
        inputs, lows = split_sums([x.reshape(*x.shape[:2], -1) for x in (q, k, v)])
        if any(isinstance(x, LowRankSum) for x in (q, k, v)):
            run, more = of_sums(run), (more, lows)
        merged = coded_call(run, inputs, more, codecs, key, "attention", names)
    return merged if merge_heads else merged.reshape(q.shape)


Beside = tuple[Any, Any, Any]
"""What attention reads beside q, k and v: segments, RoPE tables, and scales of norms; each may be
None."""


def beside(segments: Any, rope: Any, norm: HeadNorm | None) -> Beside:
    """Returns arguments of `attention` as data."""
    return segments, rope, None if norm is None else (norm.q, norm.k)


def from_merged(
    q: Activation,
    k: Activation,
    sight: Sight,
    norm: HeadNorm | None,
    implementation: Implementation | None,
) -> Callable[[Any, Beside], jax.Array]:
    """Returns exact attention as a function of (q, k, v) with merged heads and of `Beside`.

    It closes over no arrays.

    Args:
      q: queries, of which shape and dtype are read.
      k: keys, likewise.
      sight: which positions see which.
      norm: of which `eps` is read.
      implementation: as for `attention`.
    """
    form, shapes = _form(implementation, q.dtype), (q.shape, k.shape, k.shape)
    eps = None if norm is None else norm.eps

    def run(merged: tuple[jax.Array, jax.Array, jax.Array], more: Beside) -> jax.Array:
        q, k, v = (x.reshape(shape) for x, shape in zip(merged, shapes, strict=True))
        segments, rope, scales = more
        norm = None if eps is None else HeadNorm(scales[0], scales[1], eps)
        return form(sight, "", *_prepare(q, k, rope, norm, ""), v, segments)

    return run


def _prepare(
    q: jax.Array, k: jax.Array, rope: Any, norm: HeadNorm | None, name: str
) -> tuple[jax.Array, jax.Array]:
    """Returns queries and keys, normalised and rotated."""
    if norm is not None:
        q = rms_norm(q, norm.q, eps=norm.eps, name=f"{name} q norm input".strip())
        k = rms_norm(k, norm.k, eps=norm.eps, name=f"{name} k norm input".strip())
    return (q, k) if rope is None else (rotate(q, *rope), rotate(k, *rope))


def _form(implementation: Implementation | None, dtype: jnp.dtype) -> Any:
    """Returns the function of an implementation, by its name or the best for this device."""
    if implementation is None:
        gpu = jax.default_backend() == "gpu"
        implementation = "cudnn" if gpu and dtype.itemsize == 2 else "blockwise"
    if implementation not in get_args(Implementation):
        raise ValueError(
            f"`implementation` must be one of {get_args(Implementation)} or None,"
            f" got {implementation!r}."
        )
    return FORMS[implementation]


def check_attention(
    q: Activation,
    k: Activation,
    v: Activation,
    causal: bool,
    window: int | None,
    segments: jax.Array | None,
) -> Sight:
    """Returns which positions see which; raises unless shapes and dtypes fit one another."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_floating(name, array)
    shapes = f"q{q.shape}, k{k.shape}, v{v.shape}"
    if 0 in q.shape:
        raise ValueError(f"`q` must not be empty, got {shapes}.")
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(
            f"`q` must be [B, S, H, D] and `k` and `v` both [B, S, G, D], got {shapes}."
        )
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"`q` and `k` must agree in batch, length and head size, got {shapes}.")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"the heads of `q` must be a multiple of those of `k`, got {shapes}.")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"`q`, `k` and `v` must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}."
        )
    if window is not None and (not causal or window < 1):
        raise ValueError(f"`window` must be at least 1, and needs causal=True: got {window}.")
    if segments is not None and (
        segments.shape != q.shape[:2] or not jnp.issubdtype(segments.dtype, jnp.integer)
    ):
        raise ValueError(
            f"`segments` must be integers {q.shape[:2]}, got {segments.dtype}{segments.shape}."
        )
    return Sight(causal, window)


@dataclasses.dataclass(frozen=True)
class _Form:
    """An implementation of attention as a function for `coded_call`."""

    form: Any
    sight: Sight
    name: str

    def __call__(self, qkv: Any, segments: jax.Array | None) -> jax.Array:
        return self.form(self.sight, self.name, *qkv, segments)
