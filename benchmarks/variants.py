"""Methods with options, by name."""

import dataclasses
from typing import Literal

from actjax.kernels.format import Rounding
from models import preset
from train.config import MomentDtype, PretrainConfig, WeightDtype
from train.options import MethodOptions


@dataclasses.dataclass(frozen=True)
class Variant:
    """A method with its options.

    Attributes:
      method: name of the method, as for `--method`.
      width_over_rank: the width of the model divided by the rank; 0 for the rank of `options`.
      options: options of the method.
      moment_dtype: dtype of the optimizer's moments.
      in_backward: whether the optimizer runs in the backward pass.
      weight_dtype: dtype of the weights; None for that of the run, where auto stands for float32,
        so that methods are compared with the same weights.
    """

    method: str
    width_over_rank: int = 0
    options: MethodOptions = dataclasses.field(default_factory=MethodOptions)
    moment_dtype: MomentDtype = "auto"
    in_backward: bool = False
    weight_dtype: WeightDtype | None = None

    def configure(self, train: PretrainConfig) -> PretrainConfig:
        """Returns the settings of a run with this variant."""
        options = self.options
        of_run = "float32" if train.weight_dtype == "auto" else train.weight_dtype
        if self.width_over_rank:
            rank = preset(train.model).hidden_size // self.width_over_rank
            options = dataclasses.replace(options, rank=rank)
        return dataclasses.replace(
            train,
            method=self.method,
            options=options,
            optimizer=dataclasses.replace(train.optimizer, moment_dtype=self.moment_dtype),
            in_backward=self.in_backward,
            weight_dtype=self.weight_dtype or of_run,
        )


_FEW_BITS: tuple[Literal[4, 3, 2], ...] = (4, 3, 2)
_ROUNDINGS: dict[Rounding, str] = {
    "nearest": "",
    "stochastic": ", stochastic rounding",
    "dither": ", dither",
}

VARIANTS = {
    "exact": Variant("exact"),
    "exact, float32 weights": Variant("exact", weight_dtype="float32"),
    "exact, 8-bit states": Variant("exact", moment_dtype="8bit"),
    "exact, 8-bit states, in backward": Variant("exact", moment_dtype="8bit", in_backward=True),
    "remat": Variant("remat"),
    "remat, 8-bit states, in backward": Variant("remat", moment_dtype="8bit", in_backward=True),
    "pamm": Variant("pamm", options=MethodOptions(ratio=1 / 64)),
    "pamm 1/512": Variant("pamm", options=MethodOptions(ratio=1 / 512)),
    "low_rank 32": Variant("low_rank", options=MethodOptions(rank=32)),
    "galore d/4": Variant("galore", 4),
    "galore d/16": Variant("galore", 16),
    "subspace d/4": Variant("subspace", 4),
    "subspace d/4, power iteration": Variant(
        "subspace", 4, options=MethodOptions(power_iterations=1)
    ),
    "subspace d/4, rotate": Variant("subspace", 4, options=MethodOptions(moments="rotate")),
    "subspace d/4, staggered": Variant("subspace", 4, options=MethodOptions(stagger=True)),
    "subspace d/4, 8-bit states": Variant("subspace", 4, moment_dtype="8bit"),
    "subspace d/4, 8-bit states and inputs": Variant(
        "subspace", 4, options=MethodOptions(bits=8), moment_dtype="8bit"
    ),
    "subspace d/8": Variant("subspace", 8),
    "subspace d/16": Variant("subspace", 16),
    "subspace d/16, in backward": Variant("subspace", 16, in_backward=True),
    **{
        f"gact, {bits} bits": Variant("gact", options=MethodOptions(average_bits=bits))
        for bits in (8, 4, 3, 2)
    },
    **{
        f"quantized, {bits} bits{suffix}": Variant(
            "quantized", options=MethodOptions(bits=bits, rounding=rounding)
        )
        for bits in _FEW_BITS
        for rounding, suffix in _ROUNDINGS.items()
    },
    **{
        f"quantized, {bits} bits allocated{suffix}": Variant(
            "quantized", options=MethodOptions(average_bits=bits, rounding=rounding)
        )
        for bits in (3, 2)
        for rounding, suffix in _ROUNDINGS.items()
    },
    "compressed_remat": Variant("compressed_remat"),
    "compressed_remat, offloaded": Variant("compressed_remat", options=MethodOptions(offload=True)),
    "quantized, 4 bits, offloaded": Variant("quantized", options=MethodOptions(offload=True)),
    "lean": Variant("lean"),
    "lean, 3 bits": Variant("lean", options=MethodOptions(bits=3)),
    "lean, 2 bits": Variant("lean", options=MethodOptions(bits=2)),
    "lean_subspace d/4": Variant("lean_subspace", 4),
    "lean_subspace d/16": Variant("lean_subspace", 16),
    "random_projection d/4": Variant("random_projection", 4),
}


def check_names(names: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Raises a `ValueError` if one of `names` is not known."""
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"unknown {unknown}. There are: {', '.join(known)}.")
