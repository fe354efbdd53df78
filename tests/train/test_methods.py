"""What the methods store."""

import dataclasses

import pytest

from actjax import (
    Exact,
    Offloaded,
    PointApproximation,
    Quantized,
    RandomizedSVD,
    RandomProjection,
)
from models import CompressedResiduals, Remat, Storage
from models.presets import preset
from models.storage import LINEAR_INPUTS, SITES
from train.methods import METHODS, Subspace, method
from train.options import MethodOptions

OPTIONS = MethodOptions(rank=7, ratio=0.25, tolerance=0.5, power_iterations=2)
SVD, PROJECTION = RandomizedSVD(7, 2), RandomProjection(7)


@pytest.mark.parametrize(
    ("name", "storage", "subspace"),
    [
        ("exact", Storage(), None),
        ("remat", Remat(), None),
        ("pamm", Storage(PointApproximation(0.25, tolerance=0.5), Exact(), Exact(), Exact()), None),
        ("low_rank", Storage(SVD, SVD, SVD, SVD), None),
        ("subspace", Storage(SVD, SVD, SVD, SVD), Subspace("gradient", "input")),
        ("galore", Storage(), Subspace("gradient", "smaller")),
        (
            "random_projection",
            Storage(PROJECTION, PROJECTION, PROJECTION, PROJECTION),
            Subspace("random", "input"),
        ),
    ],
)
def test_storage_and_subspace_of_a_method(name, storage, subspace):
    assert method(name).storage(OPTIONS) == storage
    assert method(name).subspace == subspace


def test_every_method_has_a_summary():
    assert all(one.summary for one in METHODS.values())


def test_ranks_have_the_defaults_of_their_papers():
    model = preset("llama_60m")
    assert method("low_rank").rank(model) == 32
    assert method("subspace").rank(model) == method("galore").rank(model) == 128
    assert method("subspace").resolve(MethodOptions(), model).rank == 128
    assert method("subspace").resolve(MethodOptions(rank=9), model).rank == 9


def test_bits_have_the_defaults_of_their_methods():
    model = preset("llama_60m")
    for name, bits in (("subspace", 16), ("quantized", 4), ("lean_subspace", 4)):
        assert method(name).resolve(MethodOptions(), model).bits == bits
        assert method(name).resolve(MethodOptions(bits=8), model).bits == 8


CODE = Quantized(3, group=32, rounding="dither", rotate=True, balance=True)
FEW = MethodOptions(bits=3, group=32, rounding="dither")


def test_quantized_stores_one_code_per_value_and_rebuilds_linear_inputs():
    storage = method("quantized").storage(FEW)
    assert {site: getattr(storage, site) for site in SITES} == {
        **dict.fromkeys(LINEAR_INPUTS),
        **dict.fromkeys(("attention_norm", "mlp_norm", "gate", "up"), CODE),
        **{
            site: dataclasses.replace(CODE, bits=bits)
            for site, bits in (("q", 4), ("k", 5), ("v", 4))
        },
    }
    same = method("quantized").storage(dataclasses.replace(FEW, same_bits=True))
    assert set(same.codecs.values()) == {CODE}
    assert method("lean").storage(FEW) == method("lean_subspace").storage(FEW) == storage
    some = method("quantized").storage(dataclasses.replace(FEW, sites=("gate",)))
    assert some.codecs["gate"] == CODE
    assert some.codecs["up"] == Exact()
    assert "mlp_out" not in some.codecs
    whole = method("quantized").storage(dataclasses.replace(FEW, bits=16))
    assert set(whole.codecs.values()) == {Exact()}


def test_points_are_given_by_their_number_or_their_share():
    codec = method("pamm").storage(MethodOptions(points=3)).codecs["attention_in"]
    assert codec == PointApproximation(points=3)
    codec = method("pamm").storage(MethodOptions()).codecs["attention_in"]
    assert codec == PointApproximation(1 / 512)


def test_adapters_with_rematerialization_store_the_input_of_a_block():
    options = MethodOptions(remat=True, bits=4)
    assert method("lora").storage(options) == method("qlora").storage(options) == Remat()
    code = Quantized(4, levels="normal", rotate=True, balance=True, outlier_fraction=0.005)
    assert method("hyc_lora").storage(options) == Remat(codec=code)
    away = dataclasses.replace(options, offload=True, level="none", scaling="channel")
    plain = Quantized(4, scaling="channel")
    assert method("hyc_lora").storage(away) == Remat(codec=Offloaded(plain))


@pytest.mark.parametrize("given", [{"same_bits": True}, {"level": "intra"}], ids=str)
def test_rematerialization_stores_no_sites_that_hyc_lora_could_treat_apart(given):
    with pytest.raises(ValueError, match=r"`--(same-bits|level intra)` has no effect"):
        method("hyc_lora").storage(MethodOptions(bits=2, remat=True, **given))


def test_hyc_lora_by_channel_with_the_same_bits_is_as_published():
    options = MethodOptions(bits=2, scaling="channel", same_bits=True)
    found = method("hyc_lora").storage(options).codecs
    plain = Quantized(2, scaling="channel")
    norm = dataclasses.replace(plain, outlier_fraction=0.005)
    assert found == {
        site: norm if site.endswith("norm") else plain
        for site in ("attention_norm", "q", "k", "v", "mlp_norm", "gate", "up")
    }


@pytest.mark.parametrize("scaling", ["group", "channel"])
def test_hyc_lora_gives_queries_keys_and_values_more_bits(scaling):
    found = method("hyc_lora").storage(MethodOptions(bits=2, scaling=scaling)).codecs
    bits = {"attention_norm": 2, "q": 3, "k": 4, "v": 3, "mlp_norm": 2, "gate": 2, "up": 2}
    assert {site: codec.bits for site, codec in found.items()} == bits
    assert {codec.balance for codec in found.values()} == {scaling == "group"}


def test_offloaded_codes_of_hyc_lora_are_those_of_its_sites():
    for level in ("none", "intra", "intra+inter"):
        here = method("hyc_lora").storage(MethodOptions(bits=4, level=level))
        away = method("hyc_lora").storage(MethodOptions(bits=4, level=level, offload=True))
        assert away.codecs == {site: Offloaded(codec) for site, codec in here.codecs.items()}


def test_compressed_remat_stores_the_input_of_a_block():
    assert method("compressed_remat").storage(FEW) == Remat(codec=CODE)
    away = dataclasses.replace(FEW, offload=True)
    assert method("compressed_remat").storage(away).codecs["codec"] == Offloaded(CODE)
    assert method("remat").storage(away).codecs["codec"] == Offloaded(Exact())


@pytest.mark.parametrize("name", ["quantized", "lean", "lean_subspace"])
def test_the_rebuilt_input_of_the_output_projection_is_not_a_site(name):
    with pytest.raises(ValueError, match="`--sites attention_out` is for gact"):
        method(name).storage(dataclasses.replace(FEW, sites=("attention_out",)))


def test_bits_of_some_sites_can_be_given():
    options = dataclasses.replace(FEW, rounding="nearest", levels="normal", offload=True)
    storage = method("gact").storage_of(options, {"q": 2, "gate": 8})
    # Normal levels exist for up to four bits.
    assert storage.codecs["gate"] == Offloaded(Quantized(8, group=32, balance=True))
    normal = Quantized(2, group=32, levels="normal", balance=True)
    assert storage.codecs["q"] == Offloaded(normal)
    assert isinstance(storage, CompressedResiduals)


@pytest.mark.parametrize(
    ("bits", "rounding", "want"),
    [
        (2, "nearest", {"levels": "normal", "rotate": True}),
        (4, "nearest", {"levels": "normal", "rotate": True}),
        (5, "nearest", {"rotate": True}),
        (2, "stochastic", {"rounding": "stochastic", "rotate": True}),
    ],
)
def test_levels_follow_from_bits_and_rounding(bits, rounding, want):
    storage = method("compressed_remat").storage(MethodOptions(bits=bits, rounding=rounding))
    assert storage == Remat(codec=Quantized(bits, balance=True, **want))


def test_unknown_and_former_names_are_refused():
    with pytest.raises(ValueError, match=r"unknown `--method` 'lowrank'\. Did you mean low_rank\?"):
        method("lowrank")
    for former, now in (("frugal", "lean"), ("frugal_subspace", "lean_subspace")):
        with pytest.raises(ValueError, match=f"`--method {former}` is now `--method {now}`"):
            method(former)
