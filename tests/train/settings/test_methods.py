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
from train.settings.codecs import check_sites
from train.settings.methods import METHODS, Subspace, method
from train.settings.options import MethodOptions

OPTIONS = MethodOptions(rank=7)
SVD, PROJECTION = RandomizedSVD(7), RandomProjection(7)


@pytest.mark.parametrize(
    ("name", "storage", "subspace"),
    [
        ("exact", Storage(), None),
        ("remat", Remat(), None),
        ("pamm", Storage(PointApproximation(1 / 512)), None),
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


CODE = Quantized(3, group=32, rounding="dither", rotate=True, balance=True)
FEW = MethodOptions(codec=("Quantized(3, group=32, rounding='dither')",))


def test_lean_stores_one_code_per_value_and_rebuilds_linear_inputs():
    storage = method("lean").storage(FEW)
    assert {site: getattr(storage, site) for site in SITES} == {
        **dict.fromkeys(LINEAR_INPUTS),
        **dict.fromkeys(("attention_norm", "mlp_norm", "gate", "up"), CODE),
        **{
            site: dataclasses.replace(CODE, bits=bits)
            for site, bits in (("q", 4), ("k", 5), ("v", 4))
        },
    }
    assert method("lean_subspace").storage(FEW) == storage


def test_adapters_with_rematerialization_store_the_input_of_a_block():
    options = MethodOptions(remat=True, codec=("Quantized(4)",))
    assert method("lora").storage(options) == method("qlora").storage(options) == Remat()
    code = Quantized(4, levels="normal", rotate=True, balance=True, outlier_fraction=0.005)
    assert method("hyc_lora").storage(options) == Remat(codec=code)
    away = MethodOptions(
        remat=True, offload=True, level="none", codec=("Quantized(4, scaling='channel')",)
    )
    plain = Quantized(4, scaling="channel")
    assert method("hyc_lora").storage(away) == Remat(codec=Offloaded(plain))


def test_rematerialization_stores_no_sites_that_hyc_lora_could_treat_apart():
    with pytest.raises(ValueError, match=r"`--level intra` has no effect"):
        method("hyc_lora").storage(MethodOptions(remat=True, level="intra"))


def test_hyc_lora_by_channel_with_the_same_bits_is_as_published():
    text = "Quantized(2, scaling='channel')"
    options = MethodOptions(codec=(text,))
    found = method("hyc_lora").storage(options).codecs
    plain = Quantized(2, scaling="channel")
    norm = dataclasses.replace(plain, outlier_fraction=0.005)
    assert found == {
        site: norm if site.endswith("norm") else plain
        for site in ("attention_norm", "q", "k", "v", "mlp_norm", "gate", "up")
    }


def test_hyc_lora_gives_queries_keys_and_values_more_bits():
    found = method("hyc_lora").storage(MethodOptions()).codecs
    bits = {"attention_norm": 2, "q": 3, "k": 4, "v": 3, "mlp_norm": 2, "gate": 2, "up": 2}
    assert {site: codec.bits for site, codec in found.items()} == bits
    assert all(codec.balance for codec in found.values())


def test_offloaded_codes_of_hyc_lora_are_those_of_its_sites():
    for level in ("none", "intra", "intra+inter"):
        here = method("hyc_lora").storage(MethodOptions(level=level))
        away = method("hyc_lora").storage(MethodOptions(level=level, offload=True))
        assert away.codecs == {site: Offloaded(codec) for site, codec in here.codecs.items()}


def test_lean_remat_stores_the_input_of_a_block():
    assert method("lean_remat").storage(FEW) == Remat(codec=CODE)
    away = dataclasses.replace(FEW, offload=True)
    assert method("lean_remat").storage(away).codecs["codec"] == Offloaded(CODE)
    assert method("remat").storage(away).codecs["codec"] == Offloaded(Exact())


def test_sites_that_a_method_does_not_encode_are_refused():
    known = method("lean").sites(MethodOptions())
    check_sites(("Quantized(4)", "gate=Exact()"), "lean", known)
    for site, hint in (("attention_out", " Did you mean attention_norm"), ("nose", " It encodes")):
        with pytest.raises(ValueError, match=rf"`--codec {site}=\.\.\.` names no site.*{hint}"):
            check_sites((f"{site}=Quantized(4)",), "lean", known)
    for name, options in (("subspace", MethodOptions()), ("hyc_lora", MethodOptions(remat=True))):
        with pytest.raises(ValueError, match=r"`--codec q=\.\.\.` names no site"):
            check_sites(("q=Exact()",), name, method(name).sites(options))


def test_bits_of_some_sites_can_be_given():
    text = "Quantized(group=32, levels='normal', rotate=False)"
    options = MethodOptions(codec=(text,), average_bits=4, offload=True)
    storage = method("gact").storage_of(options, {"q": 2, "gate": 8})
    # Normal levels exist for up to four bits.
    assert storage.codecs["gate"] == Offloaded(Quantized(8, group=32, balance=True))
    normal = Quantized(2, group=32, levels="normal", balance=True)
    assert storage.codecs["q"] == Offloaded(normal)
    assert isinstance(storage, CompressedResiduals)


def test_given_bits_and_average_bits_exclude_each_other():
    model = preset("llama_60m")
    given = MethodOptions(average_bits=3, codec=("q=Quantized(4)",))
    with pytest.raises(ValueError, match=r"`--average-bits 3` and the bits in `--codec q=Quant"):
        method("gact").resolve(given, model)
    assert method("gact").resolve(MethodOptions(), model).average_bits == 4
    assert method("gact").resolve(MethodOptions(codec=("Exact()",)), model).average_bits == 0
    group = MethodOptions(codec=("Quantized(group=64)",))
    assert method("gact").resolve(group, model).average_bits == 4


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
    text = f"Quantized({bits}, rounding='{rounding}')"
    storage = method("lean_remat").storage(MethodOptions(codec=(text,)))
    assert storage == Remat(codec=Quantized(bits, balance=True, **want))


def test_unknown_and_former_names_are_refused():
    with pytest.raises(ValueError, match=r"unknown `--method` 'lowrank'\. Did you mean low_rank\?"):
        method("lowrank")
    dense = "--no-in-backward --moment-dtype float32 --weight-dtype float32"
    for former, now in (
        ("frugal", "lean"),
        ("frugal_subspace", "lean_subspace"),
        ("quantized", f"lean {dense}"),
        ("compressed_remat", f"lean_remat {dense}"),
    ):
        with pytest.raises(ValueError, match=f"`--method {former}` is now `--method {now}`"):
            method(former)
