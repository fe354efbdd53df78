"""The storage choices of `--method`, by name."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from actjax import (
    Codec,
    Exact,
    Offloaded,
    PointApproximation,
    Quantized,
    RandomizedSVD,
    RandomProjection,
)
from actjax.optim import Side, Source
from models import CompressedResiduals, ModelConfig, Remat, Storage, StorageChoice
from models.storage import LINEAR_INPUTS
from train.options import CODE_BITS, KEPT_SITES, MORE_BITS, RENAMED, MethodOptions, near_hint


@dataclasses.dataclass(frozen=True)
class Subspace:
    """How a method projects gradients.

    Attributes:
      source: where the bases come from, as in `actjax.optim.subspace`.
      side: the side of a weight that is projected. With "input", inputs are stored as coordinates
        in the bases; otherwise gradients are dense.
    """

    source: Source = "gradient"
    side: Side = "input"

    def largest_rank(self, model: ModelConfig) -> int:
        """Returns the smallest projected dimension of the layers' weights."""
        inputs = (model.hidden_size, model.num_heads * model.head_size, model.ffn_size)
        keys_and_values = model.num_kv_heads * model.head_size
        return min(inputs) if self.side == "input" else min(*inputs, keys_and_values)


@dataclasses.dataclass(frozen=True)
class Method:
    """A named storage choice.

    Attributes:
      summary: one line for a user.
      storage: from options to what each site stores. For a method with a subspace, this is what
        the refresh steps store.
      subspace: how gradients are projected; None for full-rank optimizer states.
      bits: default of `--bits`.
      average_bits: default of `--average-bits`; 0 for the same bits at every site.
      adaptive: sites whose bits can be chosen one by one.
      lean: whether the optimizer runs in the backward pass, by default with 8-bit moments.
      adapters: whether low-rank adapters of frozen weights are trained instead of the model.
      four_bit: whether the frozen weights of the layers are held in NF4.
      calibrates: whether statistics of channels are measured before training, and then given.
      zero_padding: whether padding is embedded as zero. Trained models give padding, like a first
        token, the largest activations of all, and the means and deviations of a sequence fit them:
        the gradient of SmolLM2-135M in four bits is off by 0.157 with padding and by 0.130 with
        zeros. The factors of `low_rank` (0.311, 0.333) and the tokens of `pamm` (0.236, 0.293) are
        better with padding.
      published_ranks: whether small models get the ranks of GaLore (2024, Table 2), which are
        above a quarter of their width.
    """

    summary: str
    storage: Callable[[MethodOptions], StorageChoice]
    subspace: Subspace | None = None
    bits: int = 16
    average_bits: float = 0.0
    adaptive: tuple[str, ...] = ()
    lean: bool = False
    adapters: bool = False
    four_bit: bool = False
    calibrates: bool = False
    zero_padding: bool = False
    published_ranks: bool = False

    def rank(self, model: ModelConfig) -> int:
        """Returns the default of `--rank`."""
        if self.subspace is None:
            return 32
        published = {256: 128, 768: 256} if self.published_ranks else {}
        return published.get(model.hidden_size, max(1, model.hidden_size // 4))

    def resolve(self, options: MethodOptions, model: ModelConfig) -> MethodOptions:
        """Returns options with the method's defaults filled in."""
        average = options.average_bits or (0.0 if options.bits else self.average_bits)
        bits: Any = options.bits or self.bits
        if average and not options.bits:
            bits = max(b for b in CODE_BITS if b <= average)
        rank = options.rank or self.rank(model)
        return dataclasses.replace(options, rank=rank, bits=bits, average_bits=average)

    def storage_of(self, options: MethodOptions, bits: Mapping[str, int]) -> StorageChoice:
        """Returns what each site stores, with the given bits at some sites."""
        storage = self.storage(options)
        return dataclasses.replace(storage, **{site: _code(options, n) for site, n in bits.items()})


def _placed(codec: Codec, o: MethodOptions) -> Codec:
    return Offloaded(codec) if o.offload else codec


def _linear_inputs(codec: Codec) -> Storage:
    return Storage(attention_in=codec, attention_out=codec, mlp_in=codec, mlp_out=codec)


def _randomized_svd(o: MethodOptions) -> Storage:
    return _linear_inputs(_placed(RandomizedSVD(o.rank, o.power_iterations), o))


_QUANTIZER = ("group", "rounding", "balance", "outlier_fraction")
"""Options that are fields of `actjax.Quantized`."""


def _code(o: MethodOptions, bits: int) -> Codec:
    """Returns the code of numbers in `bits` bits."""
    if bits == 16:
        return _placed(Exact(), o)
    settings = {name: getattr(o, name) for name in _QUANTIZER}
    levels, rotate = o.levels, o.rotate
    if levels == "auto":
        # Uniform levels reach the largest numbers of a group; if they are few, they are far apart.
        # Normal levels cut these numbers off, which is harmless only where they have been rotated.
        levels = "normal" if bits <= 4 and o.rounding == "nearest" else "uniform"
        rotate = True
    elif bits > 4:
        levels = "uniform"
    return _placed(Quantized(bits, levels=levels, rotate=rotate, **settings), o)


def _codes(
    o: MethodOptions,
    sites: Iterable[str],
    code: Callable[[MethodOptions, int], Codec] = _code,
) -> dict[str, Codec]:
    """Returns the code of each site, by `code` from options and bits."""
    more = {} if o.same_bits else MORE_BITS
    return {site: code(o, _at_least(o.bits + more.get(site, 0))) for site in sites}


def _at_least(bits: int) -> int:
    return 16 if bits >= 16 else next((n for n in CODE_BITS if n >= bits), CODE_BITS[-1])


def _rebuilt(o: MethodOptions) -> Storage:
    """Returns a storage of one code per value, with linear inputs rebuilt from the codes."""
    if "attention_out" in o.sites:
        raise ValueError(
            "`--sites attention_out` is for gact: the other methods rebuild the input of the output"
            " projection. Drop it."
        )
    kept: dict[str, Any] = _codes(o, o.sites or KEPT_SITES)
    rebuilt: dict[str, Any] = dict.fromkeys(LINEAR_INPUTS)
    return Storage(**kept, **rebuilt)


def _residuals(o: MethodOptions) -> CompressedResiduals:
    """Returns the compressed residuals of a whole block (GACT)."""
    sites: dict[str, Any] = _codes(o, o.sites or (*KEPT_SITES, "attention_out"))
    return CompressedResiduals(**sites)


def _points(o: MethodOptions) -> Storage:
    ratio = None if o.points else o.ratio
    code = PointApproximation(ratio, o.points or None, tolerance=o.tolerance)
    return Storage(attention_in=_placed(code, o))


def _exact_or_remat(o: MethodOptions) -> StorageChoice:
    return Remat() if o.remat else Storage()


def _calibrated_code(o: MethodOptions, bits: int, outlier_fraction: float = 0.0) -> Codec:
    """Returns a code whose statistics of channels `train.calibration` measures."""
    if o.scaling == "group":
        # Not options of this method, and what it calibrates.
        fixed: Any = {"group": MethodOptions.group, "rotate": True, "balance": True}
        return _code(dataclasses.replace(o, outlier_fraction=outlier_fraction, **fixed), bits)
    levels = "normal" if o.levels == "normal" and bits <= 4 else "uniform"
    code = Quantized(
        bits,
        scaling="channel",
        rounding=o.rounding,
        levels=levels,
        outlier_fraction=outlier_fraction,
    )
    return _placed(code, o)


def _calibrated(o: MethodOptions) -> StorageChoice:
    """Returns HyC-LoRA's codes, whose statistics of channels are calibrated.

    With rematerialization there is one, of the input of a block: that of its first norm.
    """
    if o.bits == 16:
        raise ValueError("`--bits 16` quantizes nothing: use `--method qlora` instead.")
    whole = 0.0 if o.level == "none" else o.outlier_fraction or 0.005
    norm = _calibrated_code(o, o.bits, whole)
    if o.remat:
        given = "--same-bits" if o.same_bits else "--level intra" if o.level == "intra" else ""
        if given:
            raise ValueError(
                f"`{given}` has no effect with `--remat`, which stores one input of each block and"
                " no queries, keys or values: drop one of the two."
            )
        return Remat(codec=norm)
    sites: dict[str, Any] = _codes(o, KEPT_SITES, _calibrated_code)
    sites |= {"attention_norm": norm, "mlp_norm": norm}
    inter = o.level == "intra+inter"
    inputs: dict[str, Any] = dict.fromkeys(
        LINEAR_INPUTS, None if inter else _calibrated_code(o, o.bits)
    )
    return Storage(**sites, **inputs, split_adapters=inter)


GALORE_BETA2 = 0.999
"""The decay of the second moment in the experiments of GaLore: the default of Adam."""

METHODS: dict[str, Method] = {
    "exact": Method("every input stored exactly: exact gradients", lambda _: Storage()),
    "remat": Method(
        "jax.checkpoint on each block: exact gradients, 25% more matmul operations",
        lambda o: Remat(codec=_placed(Exact(), o)),
    ),
    "pamm": Method(
        "input of q, k and v as a few tokens (PAMM): biased",
        _points,
    ),
    "low_rank": Method(
        "linear inputs and weight gradients as factors (Wei et al., Ours): biased",
        _randomized_svd,
    ),
    "subspace": Method(
        "inputs, gradients and moments in a subspace (Wei et al., Ours+)",
        _randomized_svd,
        Subspace(),
    ),
    "galore": Method(
        "moments in a subspace, dense exact gradients (GaLore)",
        lambda _: Storage(),
        Subspace(side="smaller"),
        published_ranks=True,
    ),
    "random_projection": Method(
        "inputs, gradients and moments in a random subspace (CompAct)",
        lambda o: _linear_inputs(_placed(RandomProjection(o.rank), o)),
        Subspace(source="random"),
    ),
    "gact": Method(
        "residuals of each block, in bits chosen per site (GACT)",
        _residuals,
        bits=4,
        average_bits=4.0,
        adaptive=(*KEPT_SITES, "attention_out"),
        zero_padding=True,
    ),
    "quantized": Method(
        "one code per value in a few bits, linear inputs rebuilt",
        _rebuilt,
        bits=4,
        adaptive=KEPT_SITES,
        zero_padding=True,
    ),
    "compressed_remat": Method(
        "remat with each block's input in a few bits",
        lambda o: Remat(codec=_code(o, o.bits)),
        bits=4,
        zero_padding=True,
    ),
    "lean": Method(
        "quantized, full-rank 8-bit moments, in-backward updates, bfloat16 weights: recommended",
        _rebuilt,
        bits=4,
        adaptive=KEPT_SITES,
        lean=True,
        zero_padding=True,
    ),
    "lean_remat": Method(
        "lean with compressed_remat in place of quantized: for long sequences",
        lambda o: Remat(codec=_code(o, o.bits)),
        bits=4,
        lean=True,
        zero_padding=True,
    ),
    "lean_subspace": Method(
        "lean with gradients and moments in a subspace",
        _rebuilt,
        Subspace(),
        bits=4,
        lean=True,
        zero_padding=True,
    ),
    "lora": Method(
        "adapters of frozen weights: exact gradients",
        _exact_or_remat,
        adapters=True,
    ),
    "qlora": Method(
        "adapters of frozen 4-bit weights (NF4): exact gradients",
        _exact_or_remat,
        adapters=True,
        four_bit=True,
    ),
    "hyc_lora": Method(
        "qlora with activations in a few bits, channels calibrated (HyC-LoRA)",
        _calibrated,
        bits=2,
        adapters=True,
        four_bit=True,
        calibrates=True,
    ),
}


def method(name: str) -> Method:
    """Returns a method by its name.

    Raises:
      ValueError: an unknown or a former name.
    """
    if name in RENAMED:
        raise ValueError(f"`--method {name}` is now `--method {RENAMED[name]}`.")
    if name not in METHODS:
        hint = near_hint(name, METHODS)
        raise ValueError(f"unknown `--method` {name!r}.{hint} There are: {', '.join(METHODS)}.")
    return METHODS[name]
