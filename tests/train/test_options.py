"""Flags and the methods that use them."""

import dataclasses

import pytest

from models import preset
from train.config import AdapterConfig, PretrainConfig
from train.methods import METHODS
from train.options import (
    ADAPTERS,
    FLAG_METHODS,
    FULL_WEIGHTS,
    MethodOptions,
    check_flags,
    given_fields,
    used_options,
)

MODEL = preset("llama_60m")
OTHER = {
    "rank": 7, "ratio": 0.25, "points": 3, "tolerance": 0.5, "power_iterations": 2,
    "gap": 9, "scale": 0.5, "moments": "reset", "bits": 3, "sites": ("gate",),
    "group": 32, "rounding": "dither", "same_bits": True, "levels": "normal",
    "rotate": True, "balance": False, "outlier_fraction": 0.25, "scaling": "channel",
    "level": "none",
    "average_bits": 3.0, "adapt_every": 5, "offload": True, "remat": True, "stagger": True,
}  # fmt: skip
"""A value of each option that is not its default."""
NOT_IN_STORAGE = ("gap", "scale", "moments", "stagger", "average_bits", "adapt_every")


def test_every_option_and_method_is_in_the_table():
    options = [field.name for field in dataclasses.fields(MethodOptions)]
    adapters = [field.name for field in dataclasses.fields(AdapterConfig)]
    assert set(FLAG_METHODS) == {*options, *adapters, "in_backward", "weight_rounding"}
    assert list(OTHER) == options
    assert (*FULL_WEIGHTS, *ADAPTERS) == tuple(METHODS)
    assert [name for name, one in METHODS.items() if one.adapters] == list(ADAPTERS)


def test_the_table_names_the_methods_whose_storage_an_option_changes():
    for name, method in METHODS.items():
        # With 4 bits and uniform levels, so that options of the quantizer have an effect.
        default = method.resolve(MethodOptions(bits=4, levels="uniform"), MODEL)
        for option in OTHER.keys() - NOT_IN_STORAGE:
            changed = dataclasses.replace(default, **{option: OTHER[option]})
            has_effect = method.storage(changed) != method.storage(default)
            # The rank of a subspace, and bits of its coordinates, are the optimizer's.
            of_optimizer = method.subspace is not None and option in ("rank", "bits")
            # Coordinates are shared by operators and are not offloaded.
            shared = name in ("subspace", "random_projection") and option == "offload"
            if not (of_optimizer or shared):
                assert has_effect == (name in FLAG_METHODS[option]), (name, option)


def test_options_of_subspaces_are_for_the_methods_with_one():
    with_subspace = [name for name, one in METHODS.items() if one.subspace is not None]
    for option in ("gap", "scale", "moments", "stagger"):
        assert list(FLAG_METHODS[option]) == with_subspace
    assert set(FLAG_METHODS["rank"]) == {"low_rank", *with_subspace}
    adaptive = [name for name, one in METHODS.items() if one.adaptive]
    assert list(FLAG_METHODS["average_bits"]) == list(FLAG_METHODS["adapt_every"]) == adaptive


@pytest.mark.parametrize(
    ("method", "config", "message"),
    [
        ("qlora", MethodOptions(offload=True), "`--offload` has no effect with `--method qlora`"),
        ("exact", MethodOptions(remat=True), "`--remat` has no effect .* for lora, qlora, hyc_l"),
        ("exact", MethodOptions(rank=8), "`--rank 8` has no effect .* is for low_rank, subspace"),
        ("quantized", MethodOptions(gap=5), "`--gap 5` .* for subspace, galore, random_projec"),
        ("galore", MethodOptions(bits=8), "`--bits 8` has no effect with `--method galore`"),
        ("remat", MethodOptions(average_bits=3), "`--average-bits 3` .* for gact, quantized, lean"),
        ("remat", MethodOptions(sites=("q", "k")), "`--sites q k` has no effect"),
        ("exact", AdapterConfig(lora_rank=4), "`--lora-rank 4` .* for lora, qlora, hyc_lora"),
        ("qlora", AdapterConfig(calibration_batches=2), "`--calibration-batches 2` .* hyc_lora"),
        ("lora", PretrainConfig(in_backward=True), "`--in-backward` has no effect .* for exact"),
    ],
    ids=str,
)
def test_a_flag_that_the_method_does_not_use_is_refused(method, config, message):
    with pytest.raises(ValueError, match=message):
        check_flags(method, config)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("lean", {"bits": 16, "group": 32}, "`--group 32` .* with `--bits 16`, which quantizes"),
        ("gact", {"bits": 16, "balance": False}, "`--no-balance` has no effect with `--bits 16`"),
        (
            "lean",
            {"bits": 8, "levels": "normal"},
            "`--levels normal` is for up to 4 bits, got `--bits 8`",
        ),
        ("gact", {"sites": ("up",), "same_bits": True}, "`--same-bits` .* `--sites up`, without q"),
        (
            "hyc_lora",
            {"level": "none", "outlier_fraction": 0.2},
            "-fraction 0.2` .* `--level none`",
        ),
    ],
    ids=str,
)
def test_a_flag_that_changes_nothing_beside_others_is_refused(method, options, message):
    with pytest.raises(ValueError, match=message):
        check_flags(method, MethodOptions(**options))
    for option in options:
        # Each is fine without the other.
        check_flags(method, MethodOptions(**{option: options[option]}))


@pytest.mark.parametrize("count", [-1, 101, 2**31])
def test_power_iterations_that_no_step_could_hold_are_refused(count):
    with pytest.raises(
        ValueError, match=rf"`--power-iterations` must be in \[0, 100\], got {count}"
    ):
        MethodOptions(power_iterations=count)


def test_a_default_value_counts_as_not_given():
    given = MethodOptions(gap=200, group=128)
    assert given_fields(given) == {}
    check_flags("exact", given, AdapterConfig(lora_rank=16), PretrainConfig())


def test_bits_and_average_bits_exclude_each_other():
    with pytest.raises(ValueError, match=r"`--bits 4` and `--average-bits 3` exclude each other"):
        check_flags("gact", MethodOptions(bits=4, average_bits=3))


def test_used_options_are_those_of_the_method():
    given = MethodOptions(gap=5, bits=8, group=64)
    assert used_options("subspace", given) == MethodOptions(gap=5, bits=8)
    assert used_options("exact", given) == MethodOptions()


def test_options_out_of_range_are_refused():
    for changes, message in (
        ({"average_bits": 9}, r"`--average-bits` must be 0 or in \[1, 8\], got 9"),
        ({"adapt_every": 0}, "`--adapt-every` must be at least 1, got 0"),
        ({"rank": -1}, "`--rank` must be at least 0, got -1"),
        ({"gap": 0}, "`--gap` must be at least 1, got 0"),
        ({"points": -1}, "`--points` must be at least 0, got -1"),
        ({"points": 2, "ratio": 0.5}, "`--points 2` and `--ratio 0.5` exclude each other"),
        ({"sites": ("nose",)}, "`--sites` must be of .*, got nose"),
    ):
        with pytest.raises(ValueError, match=message):
            MethodOptions(**changes)
