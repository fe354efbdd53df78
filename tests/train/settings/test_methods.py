"""Storage and subspace of each method."""

import dataclasses
import functools

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
from models.storage import LINEAR_INPUTS, REBUILT, SITES
from train.settings.codecs import check_sites
from train.settings.methods import METHODS, Subspace, method
from train.settings.options import MethodOptions

SVD, PROJECTION = RandomizedSVD(7), RandomProjection(7)
CODE = Quantized(3, group=32, rounding="dither", rotate=True, balance=True)
FEW = "Quantized(3, group=32, rounding='dither')"
NORMAL = functools.partial(Quantized, levels="normal", rotate=True, balance=True)
CHANNEL = "Quantized(4, scaling='channel')"
AWAY = {"offload": True}
REBUILT_MLP = {"mlp_in": None, "mlp_out": None}


@pytest.mark.parametrize(
    ("name", "text", "options", "storage"),
    [
        ("exact", "", {}, REBUILT),
        ("remat", "", {}, Remat()),
        ("remat", "", AWAY, Remat(codec=Offloaded(Exact()))),
        ("pamm", "", {}, Storage(PointApproximation(1 / 512), **REBUILT_MLP)),
        ("pamm", "PointApproximation(points=3)", {},
         Storage(PointApproximation(points=3), **REBUILT_MLP)),
        ("pamm", "PointApproximation(tolerance=0.5)", {},
         Storage(PointApproximation(1 / 512, tolerance=0.5), **REBUILT_MLP)),
        ("low_rank", "", {}, Storage(SVD, SVD, SVD, SVD)),
        ("low_rank", "RandomizedSVD(power_iterations=1)", {}, Storage(*4 * [RandomizedSVD(7, 1)])),
        ("subspace", "", {}, Storage(SVD, SVD, SVD, SVD)),
        ("galore", "", {}, REBUILT),
        ("random_projection", "", {}, Storage(*4 * [PROJECTION])),
        ("gact", "Exact()", {}, CompressedResiduals()),
        ("lean_remat", "block=Exact()", {}, Remat()),
        ("lean_remat", FEW, {}, Remat(codec=CODE)),
        ("lean_remat", FEW, AWAY, Remat(codec=Offloaded(CODE))),
        # Levels follow from bits and rounding.
        ("lean_remat", "Quantized(2)", {}, Remat(codec=NORMAL(2))),
        ("lean_remat", "Quantized(4)", {}, Remat(codec=NORMAL(4))),
        ("lean_remat", "Quantized(5)", {}, Remat(codec=Quantized(5, rotate=True, balance=True))),
        ("lean_remat", "Quantized(2, rounding='stochastic')", {},
         Remat(codec=Quantized(2, rounding="stochastic", rotate=True, balance=True))),
        # Adapters with rematerialization store the input of a block.
        ("lora", "Quantized(4)", {"remat": True}, Remat()),
        ("qlora", "Quantized(4)", {"remat": True}, Remat()),
        ("hyc_lora", "Quantized(4)", {"remat": True},
         Remat(codec=NORMAL(4, outlier_fraction=0.005))),
        ("hyc_lora", CHANNEL, {"remat": True, "level": "none", **AWAY},
         Remat(codec=Offloaded(Quantized(4, scaling="channel")))),
    ],
)  # fmt: skip
def test_storage_of_a_method(name, text, options, storage):
    codec = (text,) if text else ()
    assert method(name).storage(MethodOptions(codec=codec, rank=7, **options)) == storage


def test_subspaces_of_the_methods():
    assert {name: one.subspace for name, one in METHODS.items() if one.subspace is not None} == {
        "subspace": Subspace("gradient", "input"),
        "galore": Subspace("gradient", "smaller"),
        "random_projection": Subspace("random", "input"),
        "lean_subspace": METHODS["lean_subspace"].subspace,
    }
    assert all(one.summary for one in METHODS.values())


def test_ranks_have_the_defaults_of_their_papers():
    model = preset("llama_60m")
    assert method("low_rank").rank(model) == 32
    assert method("subspace").rank(model) == method("galore").rank(model) == 128
    assert method("subspace").resolve(MethodOptions(), model).rank == 128
    assert method("subspace").resolve(MethodOptions(rank=9), model).rank == 9


def test_lean_stores_one_code_per_value_and_rebuilds_linear_inputs():
    few = MethodOptions(codec=(FEW,))
    storage = method("lean").storage(few)
    more = {"q": 4, "k": 5, "v": 4}
    assert {site: getattr(storage, site) for site in SITES} == {
        **dict.fromkeys(LINEAR_INPUTS),
        **dict.fromkeys(("attention_norm", "mlp_norm", "gate", "up"), CODE),
        **{site: dataclasses.replace(CODE, bits=bits) for site, bits in more.items()},
    }
    assert method("lean_subspace").storage(few) == storage
    check_sites(("Quantized(4)", "gate=Exact()"), "lean", method("lean").sites(MethodOptions()))


def test_hyc_lora_is_as_published_by_channel_and_has_more_bits_for_queries_keys_and_values():
    def codecs(*texts):
        return method("hyc_lora").storage(MethodOptions(codec=texts)).codecs

    plain = Quantized(2, scaling="channel")
    norm = dataclasses.replace(plain, outlier_fraction=0.005)
    bits = {"attention_norm": 2, "q": 3, "k": 4, "v": 3, "mlp_norm": 2, "gate": 2, "up": 2}
    assert codecs("Quantized(2, scaling='channel')") == {
        site: norm if site.endswith("norm") else plain for site in bits
    }
    assert {site: codec.bits for site, codec in codecs().items()} == bits
    assert all(codec.balance for codec in codecs().values())


def test_offloaded_codes_of_hyc_lora_are_those_of_its_sites():
    for level in ("none", "intra", "intra+inter"):
        here = method("hyc_lora").storage(MethodOptions(level=level))
        away = method("hyc_lora").storage(MethodOptions(level=level, offload=True))
        assert away.codecs == {site: Offloaded(codec) for site, codec in here.codecs.items()}


def test_bits_of_some_sites_can_be_given():
    text = "Quantized(group=32, levels='normal', rotate=False)"
    options = MethodOptions(codec=(text,), average_bits=4, offload=True)
    storage = method("gact").storage_of(options, {"q": 2, "gate": 8})
    # Normal levels exist for up to four bits.
    assert storage.codecs["gate"] == Offloaded(Quantized(8, group=32, balance=True))
    normal = Quantized(2, group=32, levels="normal", balance=True)
    assert storage.codecs["q"] == Offloaded(normal)
    assert isinstance(storage, CompressedResiduals)


@pytest.mark.parametrize(
    ("text", "bits"),
    [("", 4), ("Quantized(group=64)", 4), ("Exact()", 0), ("Quantized(2)", 0)],
)
def test_gact_chooses_bits_unless_they_are_given(text, bits):
    options = MethodOptions(codec=(text,) if text else ())
    assert method("gact").resolve(options, preset("llama_60m")).average_bits == bits
