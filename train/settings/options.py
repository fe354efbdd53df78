"""Flags of the methods, and the methods that each flag is for."""

import dataclasses
from collections.abc import Collection
from typing import Any, Literal

from train.settings.codecs import read_codecs


@dataclasses.dataclass(frozen=True)
class MethodOptions:
    """Options of the methods. A flag that the chosen method does not use is an error.

    Raises:
      ValueError: an option is out of range.
    """

    codec: tuple[str, ...] = ()
    """Codecs of the stored activations, written as in the table at the start of a run: for all
    sites of the method, such as "Quantized(3)", or SITE=CODEC for one, such as q="Quantized(6)".
    Fields that are left out have the values of the method. A codec for all sites gives q, k and v
    1, 2 and 1 more bits."""
    rank: int = 0
    """Rank of the factors or of the subspace, also of `--optimizer fira`. 0: 32 for low_rank, a
    quarter of the model's width for the others; galore has the ranks of its paper, 128 for a width
    of 256 and 256 for 768."""
    gap: int = 200
    """Steps between two refreshes of the subspace."""
    scale: float = 0.25
    """Factor of the updates from the subspace (GaLore's alpha)."""
    level: Literal["none", "intra", "intra+inter"] = "intra+inter"
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
    stores this input in few bits."""

    def __post_init__(self) -> None:
        read_codecs(self.codec)  # Raises for text that is no codec.
        check_at_least(0, rank=self.rank)
        check_at_least(1, gap=self.gap, adapt_every=self.adapt_every)
        if not (self.average_bits == 0 or 1 <= self.average_bits <= 8):
            raise ValueError(f"`--average-bits` must be 0 or in [1, 8], got {self.average_bits}.")


FULL_WEIGHTS = ("exact", "remat", "pamm", "low_rank", "subspace", "galore", "random_projection",
                "gact", "lean", "lean_remat", "lean_subspace")  # fmt: skip
"""Methods that train all weights."""
ADAPTERS = ("lora", "qlora", "hyc_lora")
"""Methods that train adapters."""
_SUBSPACE = ("subspace", "galore", "random_projection", "lean_subspace")
_CODES = ("gact", "lean", "lean_remat", "lean_subspace")
_ADAPTIVE = ("gact", "lean")

FLAG_METHODS: dict[str, tuple[str, ...]] = {
    "codec": ("pamm", "low_rank", "subspace", "random_projection", *_CODES, "hyc_lora"),
    "rank": ("low_rank", *_SUBSPACE),
    "gap": _SUBSPACE,
    "scale": _SUBSPACE,
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

SEARCHED = ("codec", "rank", "level", "offload", "remat", "in_backward", "accumulate",
            "moment_dtype", "offload_states")  # fmt: skip
"""Settings that the search of `--budget` chooses: they decide memory and time of a step. It takes
all values of a switch or of a list of choices, `codec` in each number of bits, ranks of a quarter
to a 32nd of the width, and micro-batches in powers of two."""

_DENSE = "--no-in-backward --moment-dtype float32 --weight-dtype float32"
RENAMED = {
    "frugal": "lean",
    "frugal_subspace": "lean_subspace",
    "quantized": f"lean {_DENSE}",
    "compressed_remat": f"lean_remat {_DENSE}",
}
"""Former names of methods, and the flags that do the same."""
FORMER_FLAGS = {
    "--bits": '`--codec "Quantized({value})"`',
    "--group": '`--codec "Quantized(group={value})"`',
    "--rounding": "`--codec \"Quantized(rounding='{value}')\"`",
    "--levels": "`--codec \"Quantized(levels='{value}', rotate=False)\"`",
    "--rotate": '`--codec "Quantized(rotate=True)"`',
    "--no-rotate": '`--codec "Quantized(rotate=False)"`',
    "--balance": '`--codec "Quantized(balance=True)"`',
    "--no-balance": '`--codec "Quantized(balance=False)"`',
    "--outlier-fraction": '`--codec "Quantized(outlier_fraction={value})"`',
    "--scaling": "`--codec \"Quantized(scaling='{value}')\"`",
    "--same-bits": '`--codec "Quantized(4)" q="Quantized(4)" k="Quantized(4)" v="Quantized(4)"`',
    "--sites": '`--codec "Exact()" {value}="Quantized(4)"`, and so on for each site',
    "--ratio": '`--codec "PointApproximation({value})"`',
    "--points": '`--codec "PointApproximation(points={value})"`',
    "--tolerance": '`--codec "PointApproximation(tolerance={value})"`',
    "--factored-second-moment": "part of `--moment-dtype`, such as 4bit-factored",
    "--projection-rank": "`--rank {value}`",
    "--projection-gap": "`--gap {value}`",
    "--projection-scale": "`scale: {value}` in a `--config` file",
    "--table": "`python -m benchmarks.fits`",
    "--devices-table": "`python -m benchmarks.devices`",
    "--power-iterations": '`--codec "RandomizedSVD(power_iterations={value})"`',
}
"""Former flags, and what to pass instead of a flag with its value."""
REMOVED_FLAGS = {
    "--moments": "a refresh keeps the moments, as `--moments keep` did. Drop it.",
    "--stagger": "the subspaces of all layers are refreshed in the same step. Drop it.",
    "--final-learning-rate": "the learning rate ends at a tenth of `--learning-rate`. Drop it.",
    "--readers": "text is one stream. Drop it.",
    "--sketch": "sketches are Gaussian. Drop it.",
}
"""By flag that was removed: what holds now."""
FORMER_CHOICES = {
    "--optimizer": dict.fromkeys(
        ("apollo", "apollo_mini", "frugal_signs"), "it was never measured. Choose fira."
    ),
    "--weight-rounding": {
        "compensated": "it came 69% of the way of float32 weights, and stochastic 100%. Choose"
        " stochastic."
    },
}
"""By flag and value that were removed: what to choose."""
RARE = frozenset({
    "beta1", "beta2", "z_loss", "adapt_every", "scale", "keep", "eval_batches",
    "calibration_batches", "recalibrate_every", "count_prompts", "label_smoothing",
    "length_normalization",
})  # fmt: skip
"""Settings that a `--config` file takes and the command line does not, which keeps it short."""
ANY_FULL_RANK = "any full-rank method"
"""Stands for the method in the identity of a run with full-rank optimizer states."""
_OF_A_PROJECTION = ("rank", "gap", "scale")
"""Options that `--optimizer fira` uses with any method."""


def flag_name(field: str, rare: Collection[str] = RARE) -> str:
    """Returns how messages name a field: "--lora-rank", but "beta1" for a setting of `RARE`."""
    return field if field in rare else "--" + field.replace("_", "-")


def check_at_least(least: int, **values: float | None) -> None:
    """Raises a `ValueError` that names the flag of the first value below `least`, unless None."""
    for field, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"`{flag_name(field)}` must be at least {least}, got {value}.")


def check_range(config: Any, end: float, *fields: str, low: int = 0) -> None:
    """Raises a `ValueError` unless `low <= value < end` for the values of all fields."""
    for field in fields:
        if not low <= (value := getattr(config, field)) < end:
            raise ValueError(f"`{flag_name(field)}` must be in [{low}, {end}), got {value}.")


def given_fields(config: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass that have a default and another value."""
    return {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if default_of(field) not in (dataclasses.MISSING, getattr(config, field.name))
    }


def default_of(field: dataclasses.Field) -> Any:
    """Returns the default of a field, or `dataclasses.MISSING`."""
    make = field.default_factory
    return field.default if make is dataclasses.MISSING else make()


def check_flags(method: str, *configs: Any) -> None:
    """Checks that a method uses every given flag. A value that equals the default is not given.

    Args:
      method: name of the method.
      *configs: dataclasses with the flags' fields.

    Raises:
      ValueError: a flag that the method does not use.
    """
    optimizers = (getattr(config, "optimizer", None) for config in configs)
    projects = any(getattr(optimizer, "projects", False) for optimizer in optimizers)
    for config in configs:
        for field, value in given_fields(config).items():
            methods = FLAG_METHODS.get(field, (method,))
            if method not in methods and not (projects and field in _OF_A_PROJECTION):
                raise ValueError(
                    f"`{shown_flag(field, value)}` has no effect with `--method {method}`: it is"
                    f" for {', '.join(methods)}. Drop it, or choose another method."
                )


def used_options(method: str, options: MethodOptions) -> MethodOptions:
    """Returns options with the defaults in place of those that a method does not use."""
    changed = given_fields(options)
    return MethodOptions(**{k: v for k, v in changed.items() if method in FLAG_METHODS[k]})


def shown_flag(field: str, value: Any, rare: Collection[str] = RARE) -> str:
    """Returns a flag as it was given: "--offload", "--no-balance", "--rank 8".

    A setting of `RARE` is shown as the line of a `--config` file: "beta1: 0.8".
    """
    if field in rare:
        return f"{field}: {str(value).lower()}"
    if isinstance(value, bool):
        return flag_name(field if value else f"no_{field}")
    if isinstance(value, tuple):
        value = " ".join(value)
    return f"{flag_name(field, rare)} {value}"
