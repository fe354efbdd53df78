"""What a decoder is, and what it stores for its backward pass."""

import dataclasses
import functools
from typing import Literal, get_args

import jax

from actjax import Codec, Exact
from actjax.ops.attention import Implementation

Remat = Literal["none", "full", "dots"]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of rotary frequencies to longer contexts.

    Frequencies with a wavelength above `original_max_seq_len / low_freq_factor` are divided by
    `factor`, those below `original_max_seq_len / high_freq_factor` stay, and those between are
    interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int


@dataclasses.dataclass(frozen=True)
class LinearRopeScaling:
    """Positions divided by `factor` (Chen et al., 2023, position interpolation)."""

    factor: float


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Dimensions of a Llama-like decoder: Llama 2 and 3, Mistral, Qwen 2.5 and 3.

    Raises:
      ValueError: dimensions that do not fit one another.
    """

    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int = 0
    """Heads of keys and values; as many as `num_heads` if 0."""
    head_size: int = 0
    """`hidden_size / num_heads` if 0."""
    max_seq_len: int = 1024
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | LinearRopeScaling | None = None
    tie_embeddings: bool = False
    attention_bias: bool = False
    """Biases of the query, key and value projections (Qwen 2.5)."""
    qk_norm: bool = False
    """Norms of the heads of queries and keys, before RoPE (Qwen 3)."""
    sliding_window: int | None = None
    """Positions that a position sees at most, itself among them (Mistral); all if None."""
    attention: Implementation | None = None
    """Implementation of attention, as for `actjax.attention`; the best for the device if None."""
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.num_kv_heads == 0:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.head_size == 0 and self.num_heads > 0:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"`hidden_size` {self.hidden_size} is no multiple of `num_heads`"
                    f" {self.num_heads}: give `head_size`."
                )
            object.__setattr__(self, "head_size", self.hidden_size // self.num_heads)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (not isinstance(value, int) or value < 1):
                raise ValueError(f"`{field.name}` must be an integer >= 1, got {value!r}.")
        if not 0 <= self.norm_eps < 1:
            raise ValueError(f"`norm_eps` must be in [0, 1), got {self.norm_eps!r}.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"`num_heads` {self.num_heads} must be a multiple of"
                f" `num_kv_heads` {self.num_kv_heads}."
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"`sliding_window` must be at least 1, got {self.sliding_window}.")
        if self.head_size % 2:
            raise ValueError(f"`head_size` must be even for RoPE, got {self.head_size}.")


LINEAR_INPUTS = ("attention_in", "attention_out", "mlp_in", "mlp_out")
"""Sites that may be rebuilt."""
SITES = (*LINEAR_INPUTS, "attention_norm", "q", "k", "v", "mlp_norm", "gate", "up")
"""Order in which a layer's key is folded for its sites: part of what makes a run repeatable."""
_CODECS = [*SITES, "block"]


@functools.partial(
    jax.tree_util.register_dataclass,
    meta_fields=["remat", "residuals", "compensate"],
    data_fields=_CODECS,
)
@dataclasses.dataclass(frozen=True)
class Storage:
    """What each site of a block stores for the backward pass.

    A pytree of codecs: of those that hold arrays, such as `actjax.Calibrated`, the arrays have a
    leading axis of layers.

    The inputs of a block's linear operators are named as in Wei et al. (2026), Table 1. Where one
    is `None`, it is not stored, but rebuilt from what the operator before it keeps: the norm, q, k
    and v, or gate and up.

    Raises:
      ValueError: an unknown `remat`.
      TypeError: a site that is given no codec.
    """

    attention_in: Codec | None = Exact()
    """Input of the query, key and value projections."""
    attention_out: Codec | None = Exact()
    """Input of the output projection. `Exact()` shares the array with attention; with another codec
    attention runs its forward pass again in the backward pass, rather than keep the array alone."""
    mlp_in: Codec | None = Exact()
    """Input of the gate and up projections."""
    mlp_out: Codec | None = Exact()
    """Input of the down projection."""
    attention_norm: Codec = Exact()
    """Input of the norm before attention."""
    q: Codec = Exact()
    """Queries, before RoPE if stored as a code."""
    k: Codec = Exact()
    """Keys, likewise."""
    v: Codec = Exact()
    """Values."""
    mlp_norm: Codec = Exact()
    """Input of the norm before the feed-forward network."""
    gate: Codec = Exact()
    """What SiLU is taken of."""
    up: Codec = Exact()
    """What that is multiplied with."""
    remat: Remat = "none"
    """Rematerialise each block: "full" keeps its input alone, "dots" what `jax.checkpoint`'s policy
    `dots_with_no_batch_dims_saveable` keeps."""
    block: Codec = Exact()
    """What a block under remat="full" keeps of its input."""
    residuals: bool = False
    """Compress what JAX keeps of the block as a whole (`actjax.compress_residuals`) and not what
    each operator keeps: linear inputs are rebuilt, and the codec of `attention_out` is of what
    attention and its projection share."""
    compensate: bool = False
    """Where a weight has an adapter, store of q, k, v, gate and up what the frozen weight gives,
    and add the adapter's part again in the backward pass (HyC-LoRA, 2025, Algorithm 2)."""

    def __post_init__(self) -> None:
        if self.remat not in get_args(Remat):
            raise ValueError(f"`remat` must be one of {get_args(Remat)}, got {self.remat!r}.")
        for site in _CODECS:
            codec = getattr(self, site)
            if not isinstance(codec, Codec) and not (codec is None and site in LINEAR_INPUTS):
                raise TypeError(f"`storage.{site}` must be an actjax.Codec, got {codec!r}.")
        if self.remat != "full" and not isinstance(self.block, Exact):
            raise ValueError(f"`storage.block` {self.block} needs remat='full': {self.remat!r}.")
        if self.residuals and self.remat != "none":
            raise ValueError(f"`storage.residuals` needs remat='none', got {self.remat!r}.")
        if self.residuals and self.compensate:
            raise ValueError(
                "`storage.compensate` is for operators that store each for itself: it needs"
                " residuals=False."
            )

    @property
    def codecs(self) -> dict[str, Codec]:
        """What is stored, by site; without sites that are rebuilt."""
        sites = {site: getattr(self, site) for site in _CODECS}
        return {site: codec for site, codec in sites.items() if codec is not None}


def site_width(config: ModelConfig, site: str) -> int:
    """Returns how many numbers a site of a block keeps of a token."""
    if site in ("gate", "up", "mlp_out"):
        return config.ffn_size
    if site in ("k", "v"):
        return config.num_kv_heads * config.head_size
    if site in ("q", "attention_out"):
        return config.num_heads * config.head_size
    return config.hidden_size
