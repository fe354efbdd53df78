"""Methods with options, by name."""

import dataclasses
from typing import Any, TypeVar

from actjax.formats.code import Rounding
from models import preset
from train.settings.config import FinetuneConfig, OptimizerConfig, PretrainConfig, WeightDtype
from train.settings.options import MethodOptions, given_fields

Settings = TypeVar("Settings", bound=PretrainConfig | FinetuneConfig)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A method with its options."""

    method: str
    width_over_rank: int = 0
    """The width of the model divided by the rank; 0 for the rank of `options`."""
    options: MethodOptions = dataclasses.field(default_factory=MethodOptions)
    optimizer: OptimizerConfig = OptimizerConfig()
    """Settings of the optimizer that differ from those of the run."""
    in_backward: bool | None = None
    """Whether the optimizer runs in the backward pass; None for the default of the method."""
    weight_dtype: WeightDtype | None = None
    """Dtype of the weights; None for that of the run, where auto stands for float32, so that
    methods are compared with the same weights."""

    def configure(self, train: Settings) -> Settings:
        """Returns the settings of a run with this variant."""
        options = self.options
        of_run = "float32" if train.weight_dtype == "auto" else train.weight_dtype
        if self.width_over_rank and isinstance(train, PretrainConfig):
            rank = preset(train.model).hidden_size // self.width_over_rank
            options = dataclasses.replace(options, rank=rank)
        return dataclasses.replace(
            train,
            method=self.method,
            options=options,
            optimizer=dataclasses.replace(train.optimizer, **given_fields(self.optimizer)),
            in_backward=self.in_backward,
            weight_dtype=self.weight_dtype or of_run,
        )


def codec(*texts: str, **others: Any) -> MethodOptions:
    """Returns the options of a method with the values of `--codec`."""
    return MethodOptions(codec=texts, **others)


EIGHT_BIT = OptimizerConfig(moment_dtype="8bit")
_FOUR_BIT = OptimizerConfig(moment_dtype="4bit")
_FACTORED = OptimizerConfig(moment_dtype="4bit-factored")
_FLOAT32 = OptimizerConfig(moment_dtype="float32")
_ROUNDINGS: dict[Rounding, str] = {
    "nearest": "",
    "stochastic": ", stochastic rounding",
    "dither": ", dither",
}


def _quantized(*codecs: str, method: str = "lean", **options: Any) -> Variant:
    """Returns a method with codes, where moments are in float32 and updated after the gradient."""
    chosen = codec(*codecs, **options)
    return Variant(method, options=chosen, optimizer=_FLOAT32, in_backward=False)


VARIANTS = {
    "exact": Variant("exact"),
    "exact, float32 weights": Variant("exact", weight_dtype="float32"),
    "exact, 8-bit states": Variant("exact", optimizer=EIGHT_BIT),
    "exact, 8-bit states, in backward": Variant("exact", optimizer=EIGHT_BIT, in_backward=True),
    "exact, 4-bit states": Variant("exact", optimizer=_FOUR_BIT),
    "exact, 4-bit and factored": Variant("exact", optimizer=_FACTORED),
    "exact, factored": Variant("exact", optimizer=OptimizerConfig(moment_dtype="float32-factored")),
    **{
        f"exact, {name}": Variant("exact", optimizer=OptimizerConfig(optimizer=name))
        for name in ("adafactor", "lion", "muon")
    },
    "exact, fira d/4": Variant("exact", 4, optimizer=OptimizerConfig(optimizer="fira")),
    "remat": Variant("remat"),
    "remat, 8-bit states, in backward": Variant("remat", optimizer=EIGHT_BIT, in_backward=True),
    "pamm": Variant("pamm", options=codec("PointApproximation(0.015625)")),
    "pamm 1/512": Variant("pamm", options=codec("PointApproximation(0.001953125)")),
    "low_rank 32": Variant("low_rank", options=MethodOptions(rank=32)),
    "galore d/4": Variant("galore", 4),
    "galore d/16": Variant("galore", 16),
    "subspace d/4": Variant("subspace", 4),
    "subspace d/4, 8-bit states": Variant("subspace", 4, optimizer=EIGHT_BIT),
    "subspace d/4, 8-bit states and inputs": Variant(
        "subspace", 4, options=codec("Quantized(8)"), optimizer=EIGHT_BIT
    ),
    "subspace d/8": Variant("subspace", 8),
    "subspace d/16": Variant("subspace", 16),
    "subspace d/16, in backward": Variant("subspace", 16, in_backward=True),
    **{
        f"gact, {bits} bits": Variant("gact", options=MethodOptions(average_bits=bits))
        for bits in (8, 4, 3, 2)
    },
    **{
        f"quantized, {bits} bits{suffix}": _quantized(f"Quantized({bits}, rounding='{rounding}')")
        for bits in (4, 3, 2)
        for rounding, suffix in _ROUNDINGS.items()
    },
    **{
        f"quantized, {bits} bits allocated{suffix}": _quantized(
            f"Quantized(rounding='{rounding}')", average_bits=bits
        )
        for bits in (3, 2)
        for rounding, suffix in _ROUNDINGS.items()
    },
    "quantized, 4 bits, in backward": Variant("lean", optimizer=_FLOAT32),
    "compressed_remat": _quantized(method="lean_remat"),
    "compressed_remat, offloaded": _quantized(method="lean_remat", offload=True),
    "quantized, 4 bits, offloaded": _quantized(offload=True),
    "lean": Variant("lean"),
    "lean, 4-bit states": Variant("lean", optimizer=_FOUR_BIT),
    "lean, 4-bit and factored": Variant("lean", optimizer=_FACTORED),
    "lean, states on the host": Variant("lean", optimizer=OptimizerConfig(offload_states=True)),
    "lean, 3 bits": Variant("lean", options=codec("Quantized(3)")),
    "lean, 2 bits": Variant("lean", options=codec("Quantized(2)")),
    "lean_subspace d/4": Variant("lean_subspace", 4),
    "lean_subspace d/16": Variant("lean_subspace", 16),
    **{
        f"{method} d/4, equal rates": Variant(method, 4, options=MethodOptions(scale=1.0))
        for method in ("subspace", "lean_subspace")
    },
    "random_projection d/4": Variant("random_projection", 4),
}


def check_names(names: tuple[str, ...], known: tuple[str, ...], flag: str = "") -> None:
    """Raises a `ValueError` that names the flag if one of `names` is not known."""
    unknown = sorted(set(names) - set(known))
    if unknown:
        of_flag = f"`{flag}`: " if flag else ""
        raise ValueError(f"{of_flag}unknown {unknown}. There are: {', '.join(known)}.")
