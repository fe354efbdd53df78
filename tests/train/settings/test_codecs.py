"""Texts of `--codec`: what they mean, and what is refused."""

import math

import pytest

from actjax import Exact, Offloaded, PointApproximation, Quantized, RandomizedSVD
from models import CompressedResiduals, Remat, Storage
from models.storage import LINEAR_INPUTS
from train.settings.codecs import CodecText, read_codecs
from train.settings.methods import KEPT_SITES, coordinate_bits, method
from train.settings.options import MethodOptions

FOUR = Quantized(4, levels="normal", rotate=True, balance=True)
FIVE, SIX = (Quantized(n, rotate=True, balance=True) for n in (5, 6))
LEAN = dict.fromkeys(KEPT_SITES, FOUR) | {"q": FIVE, "k": SIX, "v": FIVE}


@pytest.mark.parametrize(
    ("text", "site", "kind", "fields"),
    [
        ("Quantized(4)", "", "Quantized", {"bits": 4}),
        (" q = Quantized( bits = 6 ) ", "q", "Quantized", {"bits": 6}),
        ("Quantized(4, 64, rounding='dither')", "", "Quantized",
         {"bits": 4, "group": 64, "rounding": "dither"}),
        ("Exact()", "", "Exact", {}),
        ("PointApproximation(0.5, tolerance=inf)", "", "PointApproximation",
         {"ratio": 0.5, "tolerance": math.inf}),
        ("gate=Offloaded(Exact())", "gate", "Offloaded", {"codec": CodecText("Exact", ())}),
    ],
)  # fmt: skip
def test_a_text_names_a_codec_and_a_site(text, site, kind, fields):
    codecs = read_codecs((text,))
    assert list(codecs) == [site]
    assert (codecs[site].kind, codecs[site].given) == (kind, fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Quantised(4)", "is no codec. Did you mean Quantized?"),
        ("Quantized(7)", r"`bits` of Quantized must be one of \(1, 2, 3, 4, 5, 6, 8\), got 7"),
        ("Quantized(True)", "`bits` of Quantized must be one of"),
        ("Quantized(-4)", "got -4"),
        ("Quantized(4, bitz=3)", "Quantized has no field 'bitz'. Did you mean bits?"),
        ("Quantized(4, bits=3)", "gives `bits` twice"),
        ("Quantized(1,2,3,4,5,6,7,8,9,10)", "Quantized has the fields bits, group"),
        ("Quantized(8, levels='normal')", "'normal' for up to 4 bits"),
        ("Quantized", "is no codec. Its parentheses are missing"),
        ("Quantized(4", "is no codec"),
        ("Quantized([4])", "A field takes a number, a quoted word"),
        ("Quantized(bits=print)", "A field takes a number, a quoted word"),
        ("Quantized(4).bits", "is no codec"),
        ("Quantized(**{})", "Quantized has no field None"),
        ("__import__('os')", r"\"__import__\('os'\)\" is no codec"),
        ("__import__('os').system('true')", "is no codec"),
        ("q=k=Quantized(4)", "is no codec"),
        ("Calibrated(4)", "is no codec"),
        ("Offloaded(Offloaded(Exact()))", "must be an actjax.Codec that stays on the device"),
        ("PointApproximation(2.0)", r"`ratio` of PointApproximation must be in \(0, 1\]"),
        ("RandomizedSVD(0)", "`rank` of RandomizedSVD must be an integer >= 1, got 0"),
        ("Quantized(4" + " " * 300 + ")", "It has 312 characters"),
        ("(" * 150, "is no codec"),
        ("\0(", "is no codec"),
        ("", "is no codec"),
    ],
    ids=lambda x: x[:40],
)
def test_a_text_that_is_no_codec_is_refused(text, message):
    with pytest.raises(ValueError, match=f"(?s)^`--codec`.*{message}"):
        MethodOptions(codec=(text,))


def test_two_codecs_for_a_site_are_refused():
    for texts, where in (
        (("Quantized(4)", "Quantized(3)"), "all sites"),
        (("q=Exact()", "q=Quantized(3)"), "site q"),
    ):
        with pytest.raises(ValueError, match=f"names two codecs for {where}"):
            MethodOptions(codec=texts)


def test_fields_that_are_left_out_are_those_of_the_method():
    lean = method("lean").storage
    assert lean(MethodOptions()).codecs == LEAN
    assert lean(MethodOptions(codec=("Quantized(4)",))) == lean(MethodOptions())
    three = lean(MethodOptions(codec=("Quantized(3)",))).codecs
    assert [three[site].bits for site in ("gate", "q", "k", "v")] == [3, 4, 5, 4]
    assert three["gate"] == Quantized(3, levels="normal", rotate=True, balance=True)
    dithered = lean(MethodOptions(codec=("Quantized(rounding='dither')",))).codecs
    assert dithered["up"] == Quantized(4, rounding="dither", rotate=True, balance=True)
    flat = lean(MethodOptions(codec=("Quantized(3, rotate=False, balance=False)",))).codecs
    assert flat["up"] == Quantized(3)


def test_a_codec_of_a_site_is_for_this_site_alone():
    lean = method("lean").storage
    one = lean(MethodOptions(codec=("q=Quantized(3)",))).codecs
    assert one == LEAN | {"q": Quantized(3, levels="normal", rotate=True, balance=True)}
    mlp = lean(MethodOptions(codec=("Exact()", "gate=Quantized(4)"))).codecs
    assert mlp == {site: FOUR if site == "gate" else Exact() for site in KEPT_SITES}
    away = lean(MethodOptions(codec=("gate=Offloaded(Quantized(4))",))).codecs
    assert away == LEAN | {"gate": Offloaded(FOUR)}
    everywhere = lean(MethodOptions(codec=("gate=Offloaded(Quantized(4))",), offload=True)).codecs
    assert everywhere == {site: Offloaded(codec) for site, codec in LEAN.items()}


def test_what_is_printed_can_be_passed():
    for codec in (FOUR, FIVE, Quantized(2, 32, "stochastic", 0.25, rotate=True, balance=True)):
        given = method("lean_remat").storage(MethodOptions(codec=(str(codec),)))
        assert given == Remat(codec=codec)


@pytest.mark.parametrize(
    ("name", "text", "storage"),
    [
        ("pamm", "PointApproximation(points=3)",
         Storage(attention_in=PointApproximation(points=3))),
        ("pamm", "PointApproximation(tolerance=0.5)",
         Storage(attention_in=PointApproximation(1 / 512, tolerance=0.5))),
        ("low_rank", "RandomizedSVD(power_iterations=1)",
         Storage(**dict.fromkeys(LINEAR_INPUTS, RandomizedSVD(7, 1)))),
        ("gact", "Exact()", CompressedResiduals()),
        ("lean_remat", "block=Exact()", Remat()),
    ],
)  # fmt: skip
def test_codecs_of_other_methods(name, text, storage):
    assert method(name).storage(MethodOptions(codec=(text,), rank=7)) == storage


def test_coordinates_in_a_subspace_have_four_eight_or_all_bits():
    for text, bits in (("Quantized(8)", 8), ("Quantized(4)", 4), ("Exact()", 16)):
        assert coordinate_bits(MethodOptions(codec=(text,))) == bits
    assert coordinate_bits(MethodOptions()) == 16
    for text in ("Quantized(3)", "Quantized(4, group=32)", "RandomizedSVD(4)"):
        with pytest.raises(ValueError, match="coordinates in a subspace are stored as"):
            coordinate_bits(MethodOptions(codec=(text,)))
