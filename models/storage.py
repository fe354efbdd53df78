"""The three types that choose what a block of the decoder stores for its backward pass.

`Storage` chooses a codec for each operator, `Remat` recomputes whole blocks, and
`CompressedResiduals` compresses what JAX keeps of a whole block. All three are pytrees of codecs.
The arrays of a codec that holds some, such as `actjax.Calibrated`, have a leading axis of layers.
"""

import dataclasses
import functools
from typing import Any, Literal, Self, get_args

import jax

from actjax import Codec, Exact

Policy = Literal["full", "dots"]

LINEAR_INPUTS = ("attention_in", "attention_out", "mlp_in", "mlp_out")
"""Sites that can be rebuilt instead of stored."""
SITES = (*LINEAR_INPUTS, "attention_norm", "q", "k", "v", "mlp_norm", "gate", "up")
"""Sites of a block. The key of a layer is folded with their positions here, so the order is part of
what makes a run repeatable."""
BLOCK_INPUT = "block"
"""Name of the key that `Remat` draws from. It is folded after the keys of `SITES`."""

_MOVED = {
    "remat": "Remat(policy=...)",
    "block": "Remat(codec=...)",
    "residuals": "CompressedResiduals(<site>=<codec>)",
    "compensate": "Storage(split_adapters=...)",
}
"""Former keywords of `Storage`, and their replacements."""


class _StorageChoice:
    """Base of the three types."""

    @property
    def codecs(self) -> dict[str, Codec]:
        """The codecs, by field. Sites that are rebuilt are left out."""
        fields: Any = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        values = {field.name: getattr(self, field.name) for field in fields}
        return {name: value for name, value in values.items() if isinstance(value, Codec)}

    def _check_codec(self, field: str, *, or_none: bool = False) -> None:
        codec = getattr(self, field)
        if not isinstance(codec, Codec) and not (or_none and codec is None):
            raise TypeError(
                f"`{type(self).__name__}.{field}` must be an actjax.Codec, got {codec!r}."
            )


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=SITES, meta_fields=["split_adapters"]
)
@dataclasses.dataclass(frozen=True)
class Storage(_StorageChoice):
    """The codecs of the operators of a block.

    The inputs of a block's linear operators are named as in Wei et al. (2026), Table 1. An input
    whose codec is `None` is not stored. The backward pass rebuilds it from what the operator before
    it stores: the norm, q, k and v, or gate and up.

    Raises:
      TypeError: the value of a site is not a codec, or a former keyword.
    """

    attention_in: Codec | None = Exact()
    """Input of the query, key and value projections."""
    attention_out: Codec | None = Exact()
    """Input of the output projection. `Exact()` shares the array with attention. With another codec
    attention does not store its output, and runs its forward pass again in the backward pass."""
    mlp_in: Codec | None = Exact()
    """Input of the gate and up projections."""
    mlp_out: Codec | None = Exact()
    """Input of the down projection."""
    attention_norm: Codec = Exact()
    """Input of the norm before attention."""
    q: Codec = Exact()
    """Queries; a code is taken before RoPE."""
    k: Codec = Exact()
    """Keys; a code is taken before RoPE."""
    v: Codec = Exact()
    """Values."""
    mlp_norm: Codec = Exact()
    """Input of the norm before the feed-forward network."""
    gate: Codec = Exact()
    """Argument of SiLU."""
    up: Codec = Exact()
    """Factor of SiLU's value."""
    split_adapters: bool = False
    """For weights with an adapter: encode only the frozen part of q, k, v, gate and up, and add the
    adapter's part again in the backward pass (HyC-LoRA, 2025, Algorithm 2)."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuses former keywords, and names their replacements."""
        del args
        for keyword in kwargs.keys() & _MOVED.keys():
            raise TypeError(f"Storage has no keyword `{keyword}`: use {_MOVED[keyword]}.")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for site in SITES:
            self._check_codec(site, or_none=site in LINEAR_INPUTS)


REBUILT = Storage(attention_in=None, mlp_in=None, mlp_out=None)
"""Everything exact, and nothing stored that element-wise operations rebuild."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codec"], meta_fields=["policy"])
@dataclasses.dataclass(frozen=True)
class Remat(_StorageChoice):
    """Rematerialization: the backward pass runs the forward pass of each block again.

    Raises:
      TypeError: `codec` is not a codec.
      ValueError: an unknown `policy`, or a `codec` for one that stores more than the input.
    """

    policy: Policy = "full"
    """"full" stores only the input of the block; "dots" stores what the policy
    `dots_with_no_batch_dims_saveable` of `jax.checkpoint` saves."""
    codec: Codec = Exact()
    """Codec of the input of the block. Needs policy="full" unless it is `Exact()`."""

    def __post_init__(self) -> None:
        if self.policy not in get_args(Policy):
            raise ValueError(
                f"`Remat.policy` must be one of {get_args(Policy)}, got {self.policy!r}."
            )
        self._check_codec("codec")
        if self.policy != "full" and not isinstance(self.codec, Exact):
            raise ValueError(
                f"`Remat.codec` {self.codec} needs policy='full', got policy={self.policy!r}."
            )


_RESIDUALS = ("attention_norm", "q", "k", "v", "attention_out", "mlp_norm", "gate", "up")


@functools.partial(jax.tree_util.register_dataclass, data_fields=_RESIDUALS, meta_fields=[])
@dataclasses.dataclass(frozen=True)
class CompressedResiduals(_StorageChoice):
    """The codecs of the arrays of a block that `actjax.compress_residuals` stores.

    The inputs of the norms' and SwiGLU's linear operators are rebuilt.

    Raises:
      TypeError: the value of a site is not a codec.
    """

    attention_norm: Codec = Exact()
    """Input of the norm before attention."""
    q: Codec = Exact()
    """Queries, before RoPE."""
    k: Codec = Exact()
    """Keys, before RoPE."""
    v: Codec = Exact()
    """Values."""
    attention_out: Codec = Exact()
    """Output of attention, which its projection reads too."""
    mlp_norm: Codec = Exact()
    """Input of the norm before the feed-forward network."""
    gate: Codec = Exact()
    """Argument of SiLU."""
    up: Codec = Exact()
    """Factor of SiLU's value."""

    def __post_init__(self) -> None:
        for site in _RESIDUALS:
            self._check_codec(site)


StorageChoice = Storage | Remat | CompressedResiduals
