"""Flags and the methods that use them."""

import dataclasses
import re

from models import preset
from train.settings.config import AdapterConfig, FinetuneConfig, PretrainConfig
from train.settings.flags import flags_of
from train.settings.methods import METHODS
from train.settings.options import (
    ADAPTERS,
    FLAG_METHODS,
    FORMER_FLAGS,
    FULL_WEIGHTS,
    RARE,
    MethodOptions,
    check_flags,
    given_fields,
    used_options,
)

MODEL = preset("llama_60m")
OTHER = {
    "codec": ("Quantized(3)",), "rank": 7, "gap": 9, "scale": 0.5,
    "level": "none", "average_bits": 3.0, "adapt_every": 5, "offload": True, "remat": True,
}  # fmt: skip
"""A value of each option that is not its default."""
NOT_IN_STORAGE = ("gap", "scale", "average_bits", "adapt_every")
CODECS = {"pamm": "PointApproximation(0.5)", "low_rank": "RandomizedSVD(3)"}
"""Texts of `--codec`, by method; for the others Quantized(3)."""


def test_every_option_and_method_is_in_the_table():
    options = [field.name for field in dataclasses.fields(MethodOptions)]
    adapters = [field.name for field in dataclasses.fields(AdapterConfig)]
    assert set(FLAG_METHODS) == {*options, *adapters, "in_backward", "weight_rounding"}
    assert list(OTHER) == options
    assert (*FULL_WEIGHTS, *ADAPTERS) == tuple(METHODS)
    assert [name for name, one in METHODS.items() if one.adapters] == list(ADAPTERS)


def test_the_table_names_the_methods_whose_storage_an_option_changes():
    for name, method in METHODS.items():
        default = method.resolve(MethodOptions(), MODEL)
        for option in OTHER.keys() - NOT_IN_STORAGE:
            value = (CODECS.get(name, "Quantized(3)"),) if option == "codec" else OTHER[option]
            changed = dataclasses.replace(default, **{option: value})
            has_effect = method.storage(changed) != method.storage(default)
            # The rank of a subspace, and bits of its coordinates, are the optimizer's.
            of_optimizer = method.subspace is not None and option in ("rank", "codec")
            # Coordinates are shared by operators and are not offloaded.
            shared = name in ("subspace", "random_projection") and option == "offload"
            if not (of_optimizer or shared):
                assert has_effect == (name in FLAG_METHODS[option]), (name, option)


def test_every_method_with_sites_takes_codecs():
    named = {name for name, one in METHODS.items() if one.sites(MethodOptions())}
    assert named == set(FLAG_METHODS["codec"]) - {"subspace", "random_projection"}


def test_former_flags_answer_with_one_that_exists():
    every = [flag for config in (PretrainConfig, FinetuneConfig) for flag in flags_of(config)]
    assert {flag.key for flag in every if flag.is_rare} == RARE
    flags = {flag.name for flag in every if not flag.is_rare} | {"--config"}
    for former, text in FORMER_FLAGS.items():
        assert former not in flags
        named = set(re.findall(r"--[a-z][a-z-]+", text))
        value = "0.5" if former in ("--ratio", "--outlier-fraction") else "3"
        assert named <= flags, former
        for codec in re.findall(r'"(\w+\(.*?\))"', text.format(value=value)):
            if "'3'" not in codec:
                MethodOptions(codec=(codec,))  # Raises for text that is no codec.


def test_options_of_subspaces_are_for_the_methods_with_one():
    with_subspace = [name for name, one in METHODS.items() if one.subspace is not None]
    for option in ("gap", "scale"):
        assert list(FLAG_METHODS[option]) == with_subspace
    assert set(FLAG_METHODS["rank"]) == {"low_rank", *with_subspace}
    adaptive = [name for name, one in METHODS.items() if one.adaptive]
    assert list(FLAG_METHODS["average_bits"]) == list(FLAG_METHODS["adapt_every"]) == adaptive


def test_a_default_value_counts_as_not_given():
    given = MethodOptions(gap=200, level="intra+inter")
    assert given_fields(given) == {}
    check_flags("exact", given, AdapterConfig(lora_rank=16), PretrainConfig())


def test_used_options_are_those_of_the_method():
    given = MethodOptions(gap=5, codec=("Quantized(8)",), level="none")
    assert used_options("subspace", given) == MethodOptions(gap=5, codec=("Quantized(8)",))
    assert used_options("exact", given) == MethodOptions()
