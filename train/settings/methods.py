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
from actjax.formats.packing import BITS as CODE_BITS
from actjax.optim import Side, Source
from models import CompressedResiduals, ModelConfig, Remat, Storage, StorageChoice
from models.storage import LINEAR_INPUTS, REBUILT, SITES
from train.settings.codecs import codec_at, fix_bits, read_codecs
from train.settings.messages import check_known
from train.settings.options import RENAMED, MethodOptions


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


def _no_sites(_: MethodOptions) -> tuple[str, ...]:
    """Returns the sites of a method without any."""
    return ()


@dataclasses.dataclass(frozen=True)
class Method:
    """A named storage choice.

    Attributes:
      summary: one line for a user.
      storage: from options to what each site stores. For a method with a subspace, this is what
        the refresh steps store.
      sites: from options to the sites that `--codec` can name.
      subspace: how gradients are projected; None for full-rank optimizer states.
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
      for_comparison: whether it is a published method that is kept to be compared with: the search
        of `--budget` leaves it out.
      published_ranks: whether small models get the ranks of GaLore (2024, Table 2), which are
        above a quarter of their width.
    """

    summary: str
    storage: Callable[[MethodOptions], StorageChoice]
    sites: Callable[[MethodOptions], tuple[str, ...]] = _no_sites
    subspace: Subspace | None = None
    average_bits: float = 0.0
    adaptive: tuple[str, ...] = ()
    lean: bool = False
    adapters: bool = False
    four_bit: bool = False
    calibrates: bool = False
    zero_padding: bool = False
    for_comparison: bool = False
    published_ranks: bool = False

    def rank(self, model: ModelConfig, *, projects: bool = False) -> int:
        """Returns the default of `--rank`; `projects` tells whether the optimizer has one too."""
        if self.subspace is None and not projects:
            return 32
        published = {256: 128, 768: 256} if self.published_ranks else {}
        return published.get(model.hidden_size, max(1, model.hidden_size // 4))

    def resolve(
        self, options: MethodOptions, model: ModelConfig, *, projects: bool = False
    ) -> MethodOptions:
        """Returns options with the method's defaults filled in.

        Args:
          options: as the user gave them.
          model: dimensions.
          projects: whether the optimizer projects gradients.

        Raises:
          ValueError: `--codec` and another flag that exclude each other.
        """
        fixed = fix_bits(options.codec)
        if fixed and options.average_bits:
            raise ValueError(
                f"`--average-bits {options.average_bits}` and the bits in `--codec"
                f" {' '.join(options.codec)}` exclude each other: drop one."
            )
        average = options.average_bits or (0.0 if fixed else self.average_bits)
        rank = options.rank or self.rank(model, projects=projects)
        return dataclasses.replace(options, rank=rank, average_bits=average)

    def storage_of(self, options: MethodOptions, bits: Mapping[str, int]) -> StorageChoice:
        """Returns what each site stores, with the given bits at some sites."""
        storage = self.storage(options)
        chosen = {site: _code(options, site, bits=n) for site, n in bits.items()}
        return dataclasses.replace(storage, **chosen)


KEPT_SITES = tuple(site for site in SITES if site not in LINEAR_INPUTS)
"""Sites that are stored where the inputs of linear operators are rebuilt."""
MORE_BITS = {"q": 1, "k": 2, "v": 1}
"""Bits that some sites get above the others. Attention multiplies errors of queries and keys, and
in models with grouped queries keys and values are the smallest of the arrays."""
BLOCK = "block"
"""Site of the input of a block, where the rest of the block is computed again."""


def _placed(codec: Codec, o: MethodOptions) -> Codec:
    return Offloaded(codec) if o.offload and not isinstance(codec, Offloaded) else codec


def _chosen(o: MethodOptions, site: str, default: Codec) -> Codec:
    """Returns the codec of a site: that of `--codec`, or the default."""
    text = codec_at(o.codec, site)
    return _placed(default if text is None else text.build(default), o)


_BALANCED = {"rotate": True, "balance": True}
"""The fields of the codes that lose least on trained activations."""


def _code(
    o: MethodOptions,
    site: str,
    *,
    default_bits: int = 4,
    bits: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Codec:
    """Returns the code of numbers in a few bits, or the other codec that `--codec` names.

    Args:
      o: options of the method.
      site: the site.
      default_bits: of the method, if `--codec` gives none.
      bits: bits that were chosen by sensitivity.
      settings: fields of `actjax.Quantized` that the method gives.
    """
    text, is_offloaded = codec_at(o.codec, site), o.offload
    if text is not None and text.kind == "Offloaded" and "codec" in text.given:
        inner = text.given["codec"]
        if inner.kind == "Quantized":
            text, is_offloaded = inner, True
    if text is not None and text.kind != "Quantized":
        return _placed(text.build(Exact()), o)
    named = {} if text is None else text.given
    # Fields that `--codec` gives have its values.
    fields = {**(_BALANCED if settings is None else settings), **named}
    if o.average_bits and bits is None:
        default_bits = max(n for n in CODE_BITS if n <= o.average_bits)
    names_site = site in read_codecs(o.codec)
    count = bits or fields.pop("bits", default_bits)
    # Published codes by channel have the same bits everywhere.
    if bits is None and not names_site and fields.get("scaling") != "channel":
        wanted = count + MORE_BITS.get(site, 0)
        count = next((n for n in CODE_BITS if n >= wanted), CODE_BITS[-1])
    fields |= {"bits": count}
    # Uniform levels reach the largest numbers of a group; if they are few, they are far apart.
    # Normal levels cut these numbers off, which is harmless only where they have been rotated.
    to_nearest = fields.get("rounding", "nearest") == "nearest"
    if "levels" not in fields and count <= 4 and to_nearest and fields.get("rotate"):
        fields["levels"] = "normal"
    if count > 4 and not (names_site and bits is None):
        fields["levels"] = "uniform"
    return Offloaded(Quantized(**fields)) if is_offloaded else Quantized(**fields)


def _at(sites: Iterable[str], codec_of: Callable[[str], Codec | None]) -> dict[str, Any]:
    """Returns the codec of each site."""
    return {site: codec_of(site) for site in sites}


def _rebuilt(o: MethodOptions) -> Storage:
    """Returns a storage of one code per value, with linear inputs rebuilt from the codes."""
    rebuilt = _at(LINEAR_INPUTS, lambda _: None)
    return Storage(**_at(KEPT_SITES, lambda site: _code(o, site)), **rebuilt)


_RESIDUALS = (*KEPT_SITES, "attention_out")


def coordinate_bits(o: MethodOptions) -> int:
    """Returns the bits of the coordinates that a subspace stores of linear inputs.

    Raises:
      ValueError: a codec that coordinates cannot have.
    """
    text = codec_at(o.codec, "")
    if text is None or (text.kind, text.fields) == ("Exact", ()):
        return 16
    bits = text.given.get("bits")
    if text.kind != "Quantized" or bits not in (4, 8) or len(text.fields) > 1:
        raise ValueError(
            f"`--codec {' '.join(o.codec)}`: coordinates in a subspace are stored as Exact(),"
            " Quantized(8) or Quantized(4), without other fields."
        )
    return bits


def _exact_or_remat(o: MethodOptions) -> StorageChoice:
    return Remat() if o.remat else REBUILT


def _calibrated(o: MethodOptions) -> StorageChoice:
    """Returns HyC-LoRA's codes, whose statistics of channels are calibrated.

    With rematerialization there is one, of the input of a block: that of its first norm.
    """

    def code(site: str, outlier_fraction: float = 0.0) -> Codec:
        text = codec_at(o.codec, site)
        by_channel = text is not None and text.given.get("scaling") == "channel"
        # As published: without levels for normal numbers too.
        usual = {"levels": "uniform"} if by_channel else _BALANCED
        settings = {"outlier_fraction": outlier_fraction, **usual}
        return _code(o, site, default_bits=2, settings=settings)

    outliers = 0.0 if o.level == "none" else 0.005
    if o.remat:
        if o.level == "intra":
            raise ValueError(
                "`--level intra` has no effect with `--remat`, which stores one input of each block"
                " and no queries, keys or values: drop one of the two."
            )
        return Remat(codec=code(BLOCK, outliers))
    inter = o.level == "intra+inter"
    sites = _at(KEPT_SITES, lambda site: code(site, outliers if site.endswith("_norm") else 0.0))
    sites |= _at(LINEAR_INPUTS, lambda site: None if inter else code(site))
    return Storage(**sites, split_adapters=inter)


GALORE_BETA2 = 0.999
"""The decay of the second moment in the experiments of GaLore: the default of Adam."""

METHODS: dict[str, Method] = {
    "exact": Method("everything stored exactly: exact gradients", lambda _: REBUILT),
    "remat": Method(
        "jax.checkpoint on each block: exact gradients, 25% more matmul operations",
        lambda o: Remat(codec=_placed(Exact(), o)),
    ),
    "pamm": Method(
        "input of q, k and v as a few tokens (PAMM): biased",
        lambda o: dataclasses.replace(
            REBUILT, attention_in=_chosen(o, "attention_in", PointApproximation(1 / 512))
        ),
        lambda _: ("attention_in",),
        for_comparison=True,
    ),
    "low_rank": Method(
        "linear inputs and weight gradients as factors (Wei et al., Ours): biased",
        lambda o: Storage(
            **_at(LINEAR_INPUTS, lambda site: _chosen(o, site, RandomizedSVD(o.rank)))
        ),
        lambda _: LINEAR_INPUTS,
        for_comparison=True,
    ),
    "subspace": Method(
        "inputs, gradients and moments in a subspace (Wei et al., Ours+)",
        lambda o: Storage(**dict.fromkeys(LINEAR_INPUTS, RandomizedSVD(o.rank))),
        subspace=Subspace(),
        for_comparison=True,
    ),
    "galore": Method(
        "moments in a subspace, dense exact gradients (GaLore)",
        lambda _: REBUILT,
        subspace=Subspace(side="smaller"),
        for_comparison=True,
        published_ranks=True,
    ),
    "random_projection": Method(
        "inputs, gradients and moments in a random subspace (CompAct)",
        lambda o: Storage(**dict.fromkeys(LINEAR_INPUTS, RandomProjection(o.rank))),
        subspace=Subspace(source="random"),
        for_comparison=True,
    ),
    "gact": Method(
        "residuals of each block, in bits chosen per site (GACT)",
        lambda o: CompressedResiduals(**_at(_RESIDUALS, lambda site: _code(o, site))),
        lambda _: _RESIDUALS,
        average_bits=4.0,
        adaptive=_RESIDUALS,
        for_comparison=True,
        zero_padding=True,
    ),
    "lean": Method(
        "one code per value in 4 bits, linear inputs rebuilt, full-rank 8-bit moments, in-backward"
        " updates, bfloat16 weights: recommended",
        _rebuilt,
        lambda _: KEPT_SITES,
        adaptive=KEPT_SITES,
        lean=True,
        zero_padding=True,
    ),
    "lean_remat": Method(
        "remat with each block's input in 4 bits, and otherwise as lean: for long sequences",
        lambda o: Remat(codec=_code(o, BLOCK)),
        lambda _: (BLOCK,),
        lean=True,
        zero_padding=True,
    ),
    "lean_subspace": Method(
        "lean with gradients and moments in a subspace",
        _rebuilt,
        lambda _: KEPT_SITES,
        subspace=Subspace(),
        lean=True,
        zero_padding=True,
    ),
    "lora": Method("adapters of frozen weights: exact gradients", _exact_or_remat, adapters=True),
    "qlora": Method(
        "adapters of frozen 4-bit weights (NF4): exact gradients",
        _exact_or_remat,
        adapters=True,
        four_bit=True,
    ),
    "hyc_lora": Method(
        "qlora with activations in a few bits, channels calibrated (HyC-LoRA)",
        _calibrated,
        lambda o: (
            (BLOCK,)
            if o.remat
            else (KEPT_SITES if o.level == "intra+inter" else (*KEPT_SITES, *LINEAR_INPUTS))
        ),
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
    check_known("`--method`", name, METHODS)
    return METHODS[name]
