"""Grouped-query attention whose memory is linear in the sequence length."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp

from actjax._core.checks import all_exact, check_codecs, check_floating
from actjax._core.coded_call import coded_call
from actjax._gpu import is_before_ampere
from actjax.codecs import Codec, Exact
from actjax.formats.code import Format, QuantizedCode, QuantizeInputs
from actjax.kernels.dequantize.api import dequantize
from actjax.kernels.quantize.api import quantize
from actjax.kernels.rope_decode.api import rope_decode
from actjax.kernels.rope_encode.api import rope_encode
from actjax.ops.activations import Activation, of_sums, split_sums
from actjax.ops.attention_implementations import IMPLEMENTATIONS
from actjax.ops.mask import Mask
from actjax.ops.norm import rms_norm
from actjax.ops.rope import check_tables
from actjax.ops.rope import rope as apply_rope
from actjax.ops.splash import splash_or
from actjax.weights.lora import LowRankSum

Implementation = Literal["blockwise", "cudnn", "dense", "splash"]

OnDevices = Callable[..., jax.Array]
"""`on_devices(attend, q, k, v, segments)` returns `attend(q, k, v, segments)`, [B, S, H * D]."""


@dataclasses.dataclass(frozen=True)
class HeadNorm:
    """RMS norms of each head of queries and keys (Dehghani et al., 2023; Qwen 3).

    Attributes:
      q: scale of the norm of queries, [D].
      k: scale of the norm of keys, [D].
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
    on_devices: OnDevices | None = None,
    name: str = "",
) -> jax.Array:
    """Returns `softmax(q kᵀ / sqrt(D)) v` for each head.

    The value is exact. With a lossy codec the backward pass holds only codes of q, k and v, taken
    before `norm` and `rope` with merged heads. It runs the forward pass again on the decoded
    values, and the gradients are those at these values. They are biased even if the codec is not,
    and their error propagates upstream (Wei et al., 2026, Theorems 3.2 and 3.3).

    Args:
      q: queries, [B, S, H, D]; an array, or an `actjax.LowRankSum`, whose low-rank part is kept as
        it is beside the code of its base.
      k: keys, [B, S, G, D], with H a multiple of G; query head h reads key head `h // (H / G)`.
      v: values, [B, S, G, D].
      causal: whether position i sees only positions up to i.
      window: number of positions that a position sees at most, itself included (Jiang et al.,
        "Mistral 7B", 2023); needs `causal`. None for no limit.
      segments: [B, S] integers, in any order; a position sees only positions with its number, so
        that several documents can share a sequence. None for a single document. Memory is linear in
        S: "cudnn" takes sequences of more than 4,096 tokens in chunks of 1,024 queries, each with a
        bias [B, 1, 1024, T] for the T keys between the ends of its documents. T is rounded up, so
        one document takes 1.3 times the products of a causal call without segments, and many
        contiguous ones take fewer.
      rope: cosines and sines that rotate q and k, as for `actjax.rope`; None for no rotation.
      norm: scales of the norms of the heads of q and k, applied before the rotation (Qwen 3); None
        for no norm.
      codec: stores q, k and v, or a sequence of three codecs.
      key: randomness of the encoding, or a sequence of three keys; consumed. Needed if a codec
        draws random numbers.
      implementation: "cudnn" (NVIDIA GPU from Ampere on, 16-bit inputs); "splash" (TPU; lengths
        that are multiples of 128; elsewhere JAX interprets it, slowly); "blockwise" (any backend);
        "dense" (all scores at once; has derivatives of any order, and autodiff decides what it
        keeps); or None: cuDNN where the default backend is such a GPU and the dtype is of 16 bits,
        splash where it is a TPU and the length fits, else blockwise. An implementation that is
        given is used, or raises.
      recompute: whether to hold only q, k and v, and run the forward pass again in the backward
        pass. This costs two products; it pays where nothing else keeps the output. It is needed
        where `actjax.compress_residuals` compresses q and k: the log-sum-exp that is held otherwise
        belongs to exact scores, and the weights of decoded scores would not add up to one. Lossy
        codecs always recompute.
      merge_heads: whether to return [B, S, H * D]. This is the array that attention keeps, so a
        `linear` that follows and stores its input exactly costs no second copy.
      on_devices: function `(attend, q, k, v, segments)` that calls `attend` with these arguments,
        normalized and rotated, and returns its result, [B, S, H * D]. It decides how devices divide
        them, and may repeat keys and values over heads: each head needs all tokens, so devices that
        share a sequence exchange tokens for heads, and back (Jacobs et al., "DeepSpeed Ulysses",
        2023). It closes over no arrays. None for a call without it.
      name: prefix of the names that `actjax.explain` gives the kept arrays.

    Returns:
      [B, S, H, D], or [B, S, H * D], in the dtype of `q`.

    Raises:
      ValueError: shapes or dtypes that do not fit, an unknown implementation, a missing key.
      TypeError: an input that is not floating point, or a `codec` that is not a codec.
    """
    mask = check_attention(q, k, v, causal, window, segments)
    codecs = check_codecs(codec, ("q", "k", "v"), key)
    if all_exact(codecs):
        q, k, v = (x.value() if isinstance(x, LowRankSum) else x for x in (q, k, v))
        q, k = _prepare(q, k, rope, norm, name)
        run: Any = _Attend(_function_of(implementation, q.dtype), mask, name, on_devices)
        inputs, side_inputs = (q, k, v), segments
        if not recompute:
            merged = run(inputs, side_inputs)
            return merged if merge_heads else merged.reshape(q.shape)
    else:
        run = from_merged(q, k, mask, norm, implementation, on_devices, rope is not None)
        side_inputs = side_inputs_of(segments, rope, norm)
        inputs, lows = split_sums([x.reshape(*x.shape[:2], -1) for x in (q, k, v)])
        if any(isinstance(x, LowRankSum) for x in (q, k, v)):
            run, side_inputs = of_sums(run), (side_inputs, lows)
    names = [f"{name} {letter}".strip() for letter in "qkv"]
    merged = coded_call(run, inputs, side_inputs, codecs, key, "attention", names)
    return merged if merge_heads else merged.reshape(q.shape)


SideInputs = tuple[Any, Any, Any]
"""Inputs of attention other than q, k and v: segments, RoPE tables, scales of norms, or Nones."""


def side_inputs_of(segments: Any, rope: Any, norm: HeadNorm | None) -> SideInputs:
    """Returns these arguments of `attention` as a pytree of arrays."""
    return segments, rope, None if norm is None else (norm.q, norm.k)


def from_merged(
    q: Activation,
    k: Activation,
    mask: Mask,
    norm: HeadNorm | None,
    implementation: Implementation | None,
    on_devices: OnDevices | None,
    has_rope: bool,
) -> Callable[[Any, SideInputs], jax.Array]:
    """Returns exact attention as a function of (q, k, v), with merged heads, and of `SideInputs`.

    The function closes over no arrays.

    Args:
      q: queries; only their shape and dtype are read.
      k: keys; only their shape is read.
      mask: the mask.
      norm: only its `eps` is read.
      implementation: as for `attention`.
      on_devices: as for `attention`.
      has_rope: whether q and k are rotated.
    """
    attend = _Attend(_function_of(implementation, q.dtype), mask, "", on_devices)
    shapes = q.shape, k.shape, k.shape
    if norm is None and has_rope:
        return _Rotated(attend, shapes)
    return _Merged(attend, shapes, None if norm is None else norm.eps)


@dataclasses.dataclass(frozen=True)
class _Merged:
    """Attention of merged heads.

    Attributes:
      attend: attention of heads that are ready.
      shapes: shapes of q, k and v, [B, S, H, D].
      eps: as for `HeadNorm`; None for no norm.
    """

    attend: "_Attend"
    shapes: tuple[tuple[int, ...], ...]
    eps: float | None = None

    def __call__(self, merged: Any, side_inputs: SideInputs) -> jax.Array:
        segments, rope, scales = side_inputs
        q, k, v = self.heads(merged)
        norm = None if self.eps is None else HeadNorm(scales[0], scales[1], self.eps)
        return self.attend((*_prepare(q, k, rope, norm, ""), v), segments)

    def heads(self, merged: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Returns arrays of merged heads as [B, S, H, D]."""
        return tuple(x.reshape(shape) for x, shape in zip(merged, self.shapes, strict=True))


@dataclasses.dataclass(frozen=True)
class _Rotated(_Merged):
    """Attention of heads that RoPE rotates, where they are encoded and where they are decoded."""

    reads_arrays: ClassVar[bool] = False

    def with_codes(
        self, inputs: Sequence[QuantizeInputs], formats: Sequence[Format], side_inputs: SideInputs
    ) -> tuple[jax.Array, Sequence[QuantizedCode]]:
        """As `actjax._core.coded_call.WritesCodes`."""
        segments, (cos, sin), _ = side_inputs
        # The kernel does not know where a head ends.
        check_tables(self.shapes[0], cos, sin)
        pairs = zip(inputs[:2], formats[:2], strict=True)
        q, k = (rope_encode(x, cos, sin, format=format) for x, format in pairs)
        of_v = quantize(inputs[2], format=formats[2])
        value = self.attend(self.heads((q[0], k[0], inputs[2].x)), segments)
        return value, (q[1], k[1], of_v)

    def from_codes(
        self,
        codes: tuple[QuantizedCode, QuantizedCode, QuantizedCode],
        side_inputs: SideInputs,
        cotangent: jax.Array,
        with_value: bool,
    ) -> tuple[jax.Array | None, tuple[jax.Array, ...], SideInputs]:
        """As `actjax._core.coded_call.FromCodes`."""
        segments, (cos, sin), _ = side_inputs
        merged = *(rope_decode(code, cos, sin) for code in codes[:2]), dequantize(codes[2])
        run = lambda *qkv: self.attend(qkv, segments)  # noqa: E731
        value, pullback = jax.vjp(run, *self.heads(merged))
        dq, dk, dv = pullback(cotangent)
        # The transpose of a rotation is the opposite one.
        of_inputs = apply_rope(dq, cos, -sin), apply_rope(dk, cos, -sin), dv
        dmerged = tuple(x.reshape(y.shape) for x, y in zip(of_inputs, merged, strict=True))
        return value if with_value else None, dmerged, (None, None, None)


def _prepare(
    q: jax.Array, k: jax.Array, rope: Any, norm: HeadNorm | None, name: str
) -> tuple[jax.Array, jax.Array]:
    """Returns normalized and rotated queries and keys."""
    if norm is not None:
        q = rms_norm(q, norm.q, eps=norm.eps, name=f"{name} q norm input".strip())
        k = rms_norm(k, norm.k, eps=norm.eps, name=f"{name} k norm input".strip())
    return (q, k) if rope is None else (apply_rope(q, *rope), apply_rope(k, *rope))


def _function_of(implementation: Implementation | None, dtype: jnp.dtype) -> Any:
    """Returns the function of an implementation; for None, the best for the default backend."""
    if implementation is None:
        if jax.default_backend() == "tpu":
            return splash_or(IMPLEMENTATIONS["blockwise"])
        has_cudnn = jax.default_backend() == "gpu" and not is_before_ampere()
        implementation = "cudnn" if has_cudnn and dtype.itemsize == 2 else "blockwise"
    if implementation not in get_args(Implementation):
        raise ValueError(
            f"`implementation` must be one of {get_args(Implementation)} or None,"
            f" got {implementation!r}."
        )
    return IMPLEMENTATIONS[implementation]


def check_attention(
    q: Activation,
    k: Activation,
    v: Activation,
    causal: bool,
    window: int | None,
    segments: jax.Array | None,
) -> Mask:
    """Returns the mask, or raises if shapes or dtypes do not fit."""
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
    return Mask(causal, window)


@dataclasses.dataclass(frozen=True)
class _Attend:
    """An implementation of attention with its settings, as a function for `coded_call`."""

    function: Any
    mask: Mask
    name: str
    on_devices: OnDevices | None

    def __call__(self, qkv: Any, segments: jax.Array | None) -> jax.Array:
        q, k, v = qkv
        attend = functools.partial(self.function, self.mask, self.name)
        if self.on_devices is None:
            return attend(q, k, v, segments)
        return self.on_devices(attend, q, k, v, segments)
