"""Dimensions of a decoder."""

import dataclasses

from actjax.ops.attention import Implementation

WIDE = 1024
"""Feed-forward widths from here on are stored in whole groups of `WIDE_MULTIPLE`."""
WIDE_MULTIPLE, NARROW_MULTIPLE = 128, 8
"""Numbers that stored feed-forward widths are multiples of: a whole group of a code from `WIDE` on,
below it 16 bytes of 16-bit numbers, without which matrix products lose their fast kernels."""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies to longer contexts, as in Llama 3.1.

    A frequency whose wavelength is above `original_max_seq_len / low_freq_factor` is divided by
    `factor`. Below `original_max_seq_len / high_freq_factor` it is unchanged. In between, the two
    are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int


@dataclasses.dataclass(frozen=True)
class LinearRopeScaling:
    """Division of positions by `factor` (position interpolation; Chen et al., 2023)."""

    factor: float


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Dimensions of a Llama-like decoder: Llama 2 and 3, Mistral, Qwen 2.5 and 3.

    Raises:
      ValueError: dimensions that contradict each other.
    """

    vocab_size: int
    hidden_size: int
    ffn_size: int
    """Width of the feed-forward network as published; see `stored_ffn_size`."""
    num_layers: int
    num_heads: int
    num_kv_heads: int = 0
    """Number of key/value heads; `num_heads` if 0."""
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
    """Number of positions that a token attends to, including itself (Mistral); all if None."""
    attention: Implementation | None = None
    """Implementation of attention, as for `actjax.attention`; the best for the device if None."""
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.num_kv_heads == 0:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if self.head_size == 0 and self.num_heads > 0:
            if self.hidden_size % self.num_heads:
                raise ValueError(
                    f"`hidden_size` {self.hidden_size} is not a multiple of `num_heads`"
                    f" {self.num_heads}: pass `head_size`."
                )
            object.__setattr__(self, "head_size", self.hidden_size // self.num_heads)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (not isinstance(value, int) or value < 1):
                raise ValueError(f"`{field.name}` must be an integer >= 1, got {value!r}.")
        if not 0 <= self.norm_eps < 1:
            raise ValueError(f"`norm_eps` must be in [0, 1), got {self.norm_eps!r}.")
        if not self.rope_theta >= 1:  # Below, later features would turn faster than the first.
            raise ValueError(f"`rope_theta` must be at least 1, got {self.rope_theta!r}.")
        if not self.init_std >= 0:
            raise ValueError(f"`init_std` must be at least 0, got {self.init_std!r}.")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"`num_heads` {self.num_heads} must be a multiple of"
                f" `num_kv_heads` {self.num_kv_heads}."
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"`sliding_window` must be at least 1, got {self.sliding_window}.")
        if self.head_size % 2:
            raise ValueError(f"`head_size` must be even for RoPE, got {self.head_size}.")

    @property
    def stored_ffn_size(self) -> int:
        """Width that feed-forward weights are stored with: `ffn_size`, rounded up.

        A multiple of 128 from 1,024 on, else of 8. The further entries are zero and stay zero
        (`models.padding`), so the model is that of the published width.
        """
        multiple = WIDE_MULTIPLE if self.ffn_size >= WIDE else NARROW_MULTIPLE
        return -(-self.ffn_size // multiple) * multiple


def site_width(config: ModelConfig, site: str) -> int:
    """Returns the number of features that a site stores of a token."""
    if site in ("gate", "up", "mlp_out"):
        return config.stored_ffn_size
    if site in ("k", "v"):
        return config.num_kv_heads * config.head_size
    if site in ("q", "attention_out"):
        return config.num_heads * config.head_size
    return config.hidden_size
