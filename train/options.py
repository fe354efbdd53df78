"""Flags of the methods, and the methods that each flag is for."""

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any, Literal, get_args

import tyro

from actjax import Rounding, Scaling
from actjax.optim import Moments
from models.storage import LINEAR_INPUTS, SITES

KEPT_SITES = tuple(site for site in SITES if site not in LINEAR_INPUTS)
"""Sites that are stored where the inputs of linear operators are rebuilt."""

Bits = Literal[0, 1, 2, 3, 4, 5, 6, 8, 16]
CODE_BITS = tuple(bits for bits in get_args(Bits) if 0 < bits < 16)
"""Bits that a quantized number can have."""

MORE_BITS = {"q": 1, "k": 2, "v": 1}
"""Bits that some sites get above `--bits`. Attention multiplies errors of queries and keys, and in
models with grouped queries keys and values are the smallest of the arrays."""

ChosenLevels = Literal["auto", "uniform", "normal"]
Level = Literal["none", "intra", "intra+inter"]


_MOST_ITERATIONS = 100
"""Largest number of power iterations: a compiled step holds the products of each."""


@dataclasses.dataclass(frozen=True)
class MethodOptions:
    """Options of the methods. A flag that the chosen method does not use is an error.

    Raises:
      ValueError: an option is out of range.
    """

    rank: int = 0
    """Rank of the factors or of the subspace. 0: 32 for low_rank, a quarter of the model's width
    for the others; galore has the ranks of its paper, 128 for a width of 256 and 256 for 768."""
    ratio: float = 1 / 512
    """Share of the tokens that is stored."""
    points: int = 0
    """Number of tokens that are stored, instead of a share. 0: given by `--ratio`."""
    tolerance: float = float("inf")
    """Drop tokens whose relative error is above this; inf keeps all."""
    power_iterations: int = 0
    """Power iterations of the randomized SVD. Each costs two thin products and lowers the error."""
    gap: int = 200
    """Steps between two refreshes of the subspace."""
    scale: float = 0.25
    """Factor of the updates from the subspace (GaLore's alpha)."""
    moments: Moments = "keep"
    """What a refresh does to the moments in the subspace: keep, reset or rotate them."""
    bits: Bits = 0
    """Bits of each stored number; 16 stores it in the compute dtype. Where q, k and v are quantized
    they get 1, 2 and 1 more, up to 8, except with `--same-bits`. subspace and random_projection
    store coordinates in 4, 8 or 16 bits. 0: 16 for subspace and random_projection, 2 for hyc_lora,
    4 for the others."""
    sites: tuple[str, ...] = ()
    """Sites to quantize: attention_norm, q, k, v, mlp_norm, gate, up, and for gact also
    attention_out. The other sites are stored exactly. Default: all."""
    group: int = 128
    """Neighbouring numbers that share a scale."""
    rounding: Rounding = "nearest"
    """nearest (least error, biased), stochastic (unbiased, twice the variance) or dither (unbiased,
    with the variance of nearest)."""
    same_bits: bool = False
    """Give q, k and v no more bits than the other sites."""
    levels: ChosenLevels = "auto"
    """Quantization levels: uniform, or normal for normally distributed numbers. normal is for up to
    4 bits and for rounding to nearest; sites with more bits get uniform levels. auto: rotated
    groups with normal levels for up to 4 bits rounded to nearest, else with uniform levels. With
    `--scaling channel`: uniform."""
    rotate: tyro.conf.FlagCreatePairsOff[bool] = False
    """With `--levels uniform` or `normal`: rotate each group by a Hadamard matrix before
    quantization, which spreads outliers. `--levels auto` rotates them anyway."""
    balance: bool = True
    """Subtract the mean of each channel and divide by the root of its deviation before
    quantization."""
    outlier_fraction: float = 0.0
    """Share of the channels, those with the largest norms, that is stored exactly. hyc_lora uses
    0.005 for the inputs of norms unless another value is given."""
    scaling: Scaling = "group"
    """What hyc_lora calibrates. group: means and spreads of the channels, which are subtracted and
    divided by; groups of them are then rotated, and have a scale by token. channel: the scales of
    the channels, as published."""
    level: Level = "intra+inter"
    """Parts of HyC-LoRA beside quantization per channel. intra: the outlier channels of the inputs
    of norms are stored exactly. intra+inter: also, q, k, v, gate and up are stored without the
    adapters' part, which is recomputed exactly, and linear inputs are rebuilt."""
    average_bits: float = 0.0
    """Mean bits of the stored numbers: the bits of each site are chosen by the sensitivity of the
    gradient, which takes memory for two gradients. 0: 4 for gact; other methods then use the same
    bits at every site."""
    adapt_every: int = 1000
    """Steps between two choices of bits. There are further choices before the first step and after
    10 and 100 steps, when sensitivities change quickly."""
    offload: bool = False
    """Keep the stored activations in host memory between the passes; remat keeps the inputs of the
    blocks there."""
    remat: bool = False
    """Store only the input of each block, and compute the rest again in the backward pass. hyc_lora
    stores this input in `--bits`."""
    stagger: bool = False
    """Refresh the subspaces of the layers one after the other within a gap instead of all at
    once."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"`--rank` must be at least 0, got {self.rank}.")
        if self.points < 0:
            raise ValueError(f"`--points` must be at least 0, got {self.points}.")
        if self.points and self.ratio != type(self).ratio:
            raise ValueError(
                f"`--points {self.points}` and `--ratio {self.ratio}` exclude each other: drop one."
            )
        if not 0 <= self.power_iterations <= _MOST_ITERATIONS:
            raise ValueError(
                f"`--power-iterations` must be in [0, {_MOST_ITERATIONS}], got"
                f" {self.power_iterations}: one or two bring the error close to the least."
            )
        if self.gap < 1:
            raise ValueError(f"`--gap` must be at least 1, got {self.gap}.")
        if self.adapt_every < 1:
            raise ValueError(f"`--adapt-every` must be at least 1, got {self.adapt_every}.")
        known = (*KEPT_SITES, "attention_out")
        unknown = [site for site in self.sites if site not in known]
        if unknown:
            raise ValueError(f"`--sites` must be of {', '.join(known)}, got {', '.join(unknown)}.")
        if not (self.average_bits == 0 or 1 <= self.average_bits <= 8):
            raise ValueError(f"`--average-bits` must be 0 or in [1, 8], got {self.average_bits}.")


FULL_WEIGHTS = ("exact", "remat", "pamm", "low_rank", "subspace", "galore", "random_projection",
                "gact", "quantized", "compressed_remat", "lean", "lean_remat",
                "lean_subspace")  # fmt: skip
"""Methods that train all weights."""
ADAPTERS = ("lora", "qlora", "hyc_lora")
"""Methods that train adapters."""
_SUBSPACE = ("subspace", "galore", "random_projection", "lean_subspace")
_CODES = ("gact", "quantized", "compressed_remat", "lean", "lean_remat", "lean_subspace")
_PER_SITE = ("gact", "quantized", "lean", "lean_subspace")
_ADAPTIVE = ("gact", "quantized", "lean")

_OF_A_CODE = ("sites", "group", "rounding", "same_bits", "levels", "rotate",
              "balance", "outlier_fraction")  # fmt: skip
"""Options that say how numbers are quantized, apart from their bits."""

FLAG_METHODS: dict[str, tuple[str, ...]] = {
    "rank": ("low_rank", *_SUBSPACE),
    "ratio": ("pamm",),
    "points": ("pamm",),
    "tolerance": ("pamm",),
    "power_iterations": ("low_rank", "subspace"),
    "gap": _SUBSPACE,
    "scale": _SUBSPACE,
    "moments": _SUBSPACE,
    "stagger": _SUBSPACE,
    "bits": ("subspace", "random_projection", *_CODES, "hyc_lora"),
    "sites": _PER_SITE,
    "group": _CODES,
    "rounding": (*_CODES, "hyc_lora"),
    "same_bits": (*_PER_SITE, "hyc_lora"),
    "levels": (*_CODES, "hyc_lora"),
    "rotate": _CODES,
    "balance": _CODES,
    "outlier_fraction": (*_CODES, "hyc_lora"),
    "scaling": ("hyc_lora",),
    "level": ("hyc_lora",),
    "average_bits": _ADAPTIVE,
    "adapt_every": _ADAPTIVE,
    "offload": ("remat", "pamm", "low_rank", *_CODES, "hyc_lora"),
    "remat": ADAPTERS,
    "in_backward": FULL_WEIGHTS,
    "weight_rounding": FULL_WEIGHTS,
    "lora_rank": ADAPTERS,
    "lora_alpha": ADAPTERS,
    "lora_dropout": ADAPTERS,
    "targets": ADAPTERS,
    "merge": ADAPTERS,
    "calibration_batches": ("hyc_lora",),
    "recalibrate_every": ("hyc_lora",),
}
"""The methods that use a flag. Flags that are not listed are for all methods."""


RENAMED = {"frugal": "lean", "frugal_subspace": "lean_subspace"}
"""Former names of methods. FRUGAL is another, published method (ICML 2025)."""
FORMER_FLAGS = {"--sketch": "sketches are Gaussian: drop it"}
"""Flags of earlier versions, and what to do instead."""
ANY_FULL_RANK = "any full-rank method"
"""Stands for the method in the identity of a run with full-rank optimizer states."""


def flag_name(field: str) -> str:
    """Returns the flag of a field: "--lora-rank" for "lora_rank"."""
    return "--" + field.replace("_", "-")


def given_fields(config: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass that have a default and another value."""
    found = {}
    for field in dataclasses.fields(config):
        default = field.default
        if default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            continue
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if getattr(config, field.name) != default:
            found[field.name] = getattr(config, field.name)
    return found


def check_flags(method: str, *configs: Any) -> None:
    """Checks that a method uses every given flag. A value that equals the default is not given.

    Args:
      method: name of the method.
      *configs: dataclasses with the flags' fields.

    Raises:
      ValueError: a flag that the method does not use, that changes nothing beside others, or two
        that exclude each other.
    """
    for config in configs:
        for field, value in given_fields(config).items():
            methods = FLAG_METHODS.get(field)
            if methods is not None and method not in methods:
                raise ValueError(
                    f"`{shown_flag(field, value)}` has no effect with `--method {method}`: it is"
                    f" for {', '.join(methods)}. Drop it, or choose another method."
                )
            if field == "average_bits" and config.bits:
                raise ValueError(
                    f"`--bits {config.bits}` and `--average-bits {value}` exclude each other: drop"
                    " one."
                )
        if isinstance(config, MethodOptions):
            _check_together(method, config)


def _check_together(method: str, options: MethodOptions) -> None:
    """Raises a `ValueError` for a flag that changes nothing beside the other options."""
    given, bits = given_fields(options), options.bits
    pairs: list[tuple[str, str]] = []
    if method in _CODES and bits == 16:
        pairs += [(field, "`--bits 16`, which quantizes nothing") for field in _OF_A_CODE]
    if options.sites and not MORE_BITS.keys() & set(options.sites):
        pairs.append(("same_bits", f"`--sites {' '.join(options.sites)}`, without q, k and v"))
    if options.level == "none":
        pairs.append(("outlier_fraction", "`--level none`, which stores no channels whole"))
    if options.levels == "normal" and 4 < bits < 16:
        raise ValueError(
            f"`--levels normal` is for up to 4 bits, got `--bits {bits}`: drop one of both."
        )
    for field, other in pairs:
        if field in given:
            raise ValueError(
                f"`{shown_flag(field, given[field])}` has no effect with {other}: drop one of both."
            )


def used_options(method: str, options: MethodOptions) -> MethodOptions:
    """Returns options with the defaults in place of those that a method does not use."""
    given = given_fields(options)
    return MethodOptions(**{k: v for k, v in given.items() if method in FLAG_METHODS[k]})


def shown_flag(field: str, value: Any) -> str:
    """Returns a flag as it was given: "--offload", "--no-balance", "--rank 8"."""
    if isinstance(value, bool):
        return flag_name(field if value else f"no_{field}")
    if isinstance(value, tuple):
        value = " ".join(value)
    return f"{flag_name(field)} {value}"


def near_hint(name: str, known: Iterable[str], cutoff: float = 0.4) -> str:
    """Returns " Did you mean X?" for the nearest known name; "" if none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]}?" if near else ""
