"""The storage choices of `--method`, by name."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from actjax import (
    Codec,
    Exact,
    Offloaded,
    PointApproximation,
    Quantized,
    RandomizedSVD,
    RandomProjection,
)
from actjax.codecs.low_rank import Sketch
from actjax.kernels.format import Levels, Rounding
from actjax.kernels.packing import BITS
from actjax.optim.projections import Side
from actjax.optim.subspace import Moments, Source
from models import CompressedResiduals, ModelConfig, Remat, Storage, StorageChoice
from models.storage import LINEAR_INPUTS, SITES

_KEPT = tuple(site for site in SITES if site not in LINEAR_INPUTS)
"""What is kept where linear inputs are rebuilt."""


Level = Literal["none", "intra", "intra+inter"]


@dataclasses.dataclass(frozen=True)
class MethodOptions:
    """What a method can be told. A method ignores what is not its own."""

    rank: int = 0
    """Rank of what `low_rank` stores of each linear input, and of the subspace of `subspace`,
    `galore` and `random_projection`. 0: 32 for `low_rank`, a quarter of the width for the
    others."""
    ratio: float = 1 / 512
    """Share of the tokens that `pamm` stores."""
    tolerance: float = float("inf")
    """`pamm` drops tokens whose relative error is above this; infinite keeps all."""
    power_iterations: int = 0
    """Passes of `low_rank`, and of the refresh steps of `subspace`, over their sketch: each costs
    two thin products and lowers the error."""
    sketch: Sketch = "gaussian"
    """What these multiply by: random normals, or random rows of the activation."""
    gap: int = 200
    """Steps between two changes of the subspace."""
    scale: float = 0.25
    """Factor of updates from the subspace (GaLore's alpha)."""
    moments: Moments = "keep"
    """What a change of the subspace does to its moments: keep, reset or rotate them."""
    bits: Literal[0, 1, 2, 3, 4, 8, 16] = 0
    """Bits of a number that `gact`, `quantized`, `compressed_remat`, `hyc_lora` and the frugal
    methods store, and of an input's coordinate in the subspace of `subspace` and
    `random_projection`: there 4, 8, or 16. 16 is the compute dtype as it is. 0: 4, but 16 in a
    subspace and 2 for `hyc_lora`."""
    sites: tuple[str, ...] = ()
    """Which of attention_norm, q, k, v, mlp_norm, gate, up (and attention_out for `gact`) are
    stored in bits; the others as they are. All if none are named."""
    group: int = 128
    """Neighbouring numbers that share a scale."""
    rounding: Rounding = "nearest"
    """To bits: nearest (least error, biased), stochastic (unbiased, twice the variance) or dither
    (unbiased, with the variance of nearest)."""
    levels: Levels = "uniform"
    """What bits stand for: uniform levels, or those that suit normally distributed numbers, for up
    to 4 bits rounded to the nearest."""
    rotate: bool = False
    """Rotate each group by a Hadamard matrix before it is rounded, which spreads outliers."""
    outlier_fraction: float = 0.0
    """Share of the channels, those with the largest norms, that are stored whole. Of `hyc_lora` the
    inputs of norms have 0.005 by default."""
    level: Level = "intra+inter"
    """What `hyc_lora` does beside quantizing by channel: none; intra, store the outlier channels of
    the inputs of norms whole; intra+inter, also store of q, k, v, gate and up what frozen weights
    give, keep the adapters' part exactly, and rebuild the inputs of linear operators."""
    average_bits: float = 0.0
    """Bits of a number, on average over the sites: those of each site are chosen by how much the
    gradient suffers (`gact`, `quantized`, `frugal`; room for two gradients is needed). 0: 4 for
    `gact`, and `--bits` at every site for others."""
    adapt_every: int = 1000
    """Steps between two choices of bits; there are more before the first step and after 10 and 100,
    when what needs bits changes quickly."""
    offload: bool = False
    """Keep what is stored of activations in host memory between the passes; of `remat` the inputs
    of the blocks."""
    stagger: bool = False
    """Change the subspaces of layers one after the other within a gap, and not all at once."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"`--rank` must be at least 0, got {self.rank}.")
        if self.gap < 1:
            raise ValueError(f"`--gap` must be at least 1, got {self.gap}.")
        if self.adapt_every < 1:
            raise ValueError(f"`--adapt-every` must be at least 1, got {self.adapt_every}.")
        unknown = [site for site in self.sites if site not in (*_KEPT, "attention_out")]
        if unknown:
            known = ", ".join((*_KEPT, "attention_out"))
            raise ValueError(f"`--sites` must be of {known}, got {', '.join(unknown)}.")
        if not (self.average_bits == 0 or 1 <= self.average_bits <= 8):
            raise ValueError(f"`--average-bits` must be 0 or in [1, 8], got {self.average_bits}.")


@dataclasses.dataclass(frozen=True)
class Subspace:
    """How a method projects gradients.

    Attributes:
      source: where bases come from, as in `actjax.optim.subspace`.
      side: which side of a weight is projected.
        Inputs are stored in the bases of the input side, and gradients are dense otherwise.
    """

    source: Source = "gradient"
    side: Side = "input"

    def largest_rank(self, model: ModelConfig) -> int:
        """Returns the smallest dimension that is projected, over the weights of the layers."""
        inputs = (model.hidden_size, model.num_heads * model.head_size, model.ffn_size)
        keys_and_values = model.num_kv_heads * model.head_size
        return min(inputs) if self.side == "input" else min(*inputs, keys_and_values)


@dataclasses.dataclass(frozen=True)
class Method:
    """A named choice of what is stored.

    Attributes:
      summary: one line for a user.
      storage: from options to what each site stores; under a subspace, in the steps that change it.
      subspace: how gradients are projected; None if optimizer states are full.
      bits: of what it stores, where none are given.
      average_bits: likewise, 0 if all sites have the same.
      adaptive: sites whose bits can be chosen one by one.
      frugal: whether the optimizer runs in the backward pass, its states in 8 bits unless another
        dtype is asked for.
      adapters: whether low-rank adapters are trained, and the model itself is not.
      four_bit: whether the weights of its layers are then held in NF4.
    """

    summary: str
    storage: Callable[[MethodOptions], StorageChoice]
    subspace: Subspace | None = None
    bits: int = 16
    average_bits: float = 0.0
    adaptive: tuple[str, ...] = ()
    frugal: bool = False
    adapters: bool = False
    four_bit: bool = False

    def rank(self, model: ModelConfig) -> int:
        """Returns the rank where none is given."""
        return 32 if self.subspace is None else max(1, model.hidden_size // 4)

    def resolve(self, options: MethodOptions, model: ModelConfig) -> MethodOptions:
        """Returns options with what was left to the method.

        Raises:
          ValueError: average bits for a method whose sites all have the same, or offload for one
            that stores nothing by itself.
        """
        if options.average_bits and not self.adaptive:
            able = ", ".join(name for name, one in METHODS.items() if one.adaptive)
            raise ValueError(
                f"`--average-bits` {options.average_bits} is for {able}: use `--bits`, or one of"
                " these."
            )
        average = options.average_bits or (0.0 if options.bits else self.average_bits)
        bits: Any = options.bits or self.bits
        if average and not options.bits:
            bits = max(b for b in BITS if b <= average)
        rank = options.rank or self.rank(model)
        resolved = dataclasses.replace(options, rank=rank, bits=bits, average_bits=average)
        in_bases = self.subspace is not None and not self.frugal
        if options.offload and (in_bases or self.storage(resolved) == Storage()):
            raise ValueError(
                "`--offload` is not for this method, which stores arrays that operators share, or"
                " coordinates in a subspace: use remat, compressed_remat, quantized or gact."
            )
        return resolved

    def storage_of(self, options: MethodOptions, bits: Mapping[str, int]) -> StorageChoice:
        """Returns what each site stores, with the bits of some sites given."""
        storage = self.storage(options)
        return dataclasses.replace(
            storage, **{site: with_bits(getattr(storage, site), n) for site, n in bits.items()}
        )


def with_bits(codec: Any, bits: int) -> Codec:
    """Returns a codec with other bits; levels that there are for few bits only become uniform."""
    if isinstance(codec, Offloaded):
        return Offloaded(with_bits(codec.codec, bits))
    levels = codec.levels if bits <= 4 else "uniform"
    return dataclasses.replace(codec, bits=bits, levels=levels)


def _placed(codec: Codec, o: MethodOptions) -> Codec:
    return Offloaded(codec) if o.offload else codec


def _linear_inputs(codec: Codec) -> Storage:
    return Storage(attention_in=codec, attention_out=codec, mlp_in=codec, mlp_out=codec)


def _randomized_svd(o: MethodOptions) -> Storage:
    return _linear_inputs(_placed(RandomizedSVD(o.rank, o.power_iterations, o.sketch), o))


def _code(o: MethodOptions) -> Codec:
    if o.bits == 16:
        return _placed(Exact(), o)
    code = Quantized(
        o.bits,
        group=o.group,
        rounding=o.rounding,
        outlier_fraction=o.outlier_fraction,
        levels=o.levels if o.bits <= 4 else "uniform",
        rotate=o.rotate,
    )
    return _placed(code, o)


def _rebuilt(o: MethodOptions) -> Storage:
    """Returns one code for each value that is kept, and linear inputs rebuilt from these."""
    if "attention_out" in o.sites:
        raise ValueError(
            "`--sites` attention_out is kept by gact alone: other methods rebuild what it feeds."
        )
    kept: dict[str, Any] = dict.fromkeys(o.sites or _KEPT, _code(o))
    rebuilt: dict[str, Any] = dict.fromkeys(LINEAR_INPUTS)
    return Storage(**kept, **rebuilt)


def _residuals(o: MethodOptions) -> CompressedResiduals:
    """Returns a block whose residuals are compressed as a whole."""
    sites: dict[str, Any] = dict.fromkeys(o.sites or (*_KEPT, "attention_out"), _code(o))
    return CompressedResiduals(**sites)


def _by_channel(o: MethodOptions) -> Storage:
    """Returns HyC-LoRA's codes: scales of channels, measured once (`train.calibration`)."""
    if o.bits == 16:
        raise ValueError("`--bits` 16 stores nothing in few bits: take `--method qlora` for that.")
    code = Quantized(o.bits, scaling="channel", rounding=o.rounding, levels=o.levels)
    norm: Codec = code
    if o.level != "none":
        norm = dataclasses.replace(code, outlier_fraction=o.outlier_fraction or 0.005)
    sites: dict[str, Any] = {**dict.fromkeys(_KEPT, code), "attention_norm": norm, "mlp_norm": norm}
    inter = o.level == "intra+inter"
    inputs: dict[str, Any] = dict.fromkeys(LINEAR_INPUTS, None if inter else code)
    return Storage(**sites, **inputs, split_adapters=inter)


METHODS: dict[str, Method] = {
    "exact": Method(
        "our operators, every linear input stored as it is: exact gradients", lambda _: Storage()
    ),
    "remat": Method(
        "jax.checkpoint around each block: exact gradients, a third more compute",
        lambda o: Remat(codec=_placed(Exact(), o)),
    ),
    "pamm": Method(
        "the input of q, k and v as a few tokens, an index and a scale (PAMM): biased",
        lambda o: Storage(
            attention_in=_placed(PointApproximation(o.ratio, tolerance=o.tolerance), o)
        ),
    ),
    "low_rank": Method(
        "linear inputs and weight gradients in two factors (Wei et al., Ours): biased",
        _randomized_svd,
    ),
    "subspace": Method(
        "linear inputs, gradients and moments in a subspace (Wei et al., Ours+)",
        _randomized_svd,
        Subspace(),
    ),
    "galore": Method(
        "moments in a subspace, exact and dense gradients (GaLore)",
        lambda _: Storage(),
        Subspace(side="smaller"),
    ),
    "random_projection": Method(
        "linear inputs, gradients and moments in a random subspace (CompAct)",
        lambda o: _linear_inputs(_placed(RandomProjection(o.rank), o)),
        Subspace(source="random"),
    ),
    "gact": Method(
        "what JAX keeps of a block in bits chosen for each array (GACT), cheap arrays rebuilt",
        _residuals,
        bits=4,
        average_bits=4.0,
        adaptive=(*_KEPT, "attention_out"),
    ),
    "quantized": Method(
        "every kept value once, in a few bits; linear inputs rebuilt from it",
        _rebuilt,
        bits=4,
        adaptive=_KEPT,
    ),
    "compressed_remat": Method(
        "remat, the input of each block in a few bits: a third more compute",
        lambda o: Remat(codec=_code(o)),
        bits=4,
    ),
    "frugal": Method(
        "quantized, full-rank 8-bit moments, updated in the backward pass: our advice",
        _rebuilt,
        bits=4,
        adaptive=_KEPT,
        frugal=True,
    ),
    "frugal_subspace": Method(
        "frugal with gradients and moments in a subspace: the smallest",
        _rebuilt,
        Subspace(),
        bits=4,
        frugal=True,
    ),
    "lora": Method(
        "low-rank adapters of frozen weights: exact gradients",
        lambda _: Storage(),
        adapters=True,
    ),
    "qlora": Method(
        "low-rank adapters of frozen weights in 4 bits (NF4): exact gradients",
        lambda _: Storage(),
        adapters=True,
        four_bit=True,
    ),
    "hyc_lora": Method(
        "qlora, activations in a few bits by channel, what adapters add kept exactly (HyC-LoRA)",
        _by_channel,
        bits=2,
        adapters=True,
        four_bit=True,
    ),
}


def method(name: str) -> Method:
    """Returns a method by its name.

    Raises:
      ValueError: an unknown name.
    """
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"unknown `--method` {name!r}.{hint} There are: {', '.join(METHODS)}.")
    return METHODS[name]
