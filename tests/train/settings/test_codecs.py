"""Texts of `--codec`: what they mean, and what is refused."""

import math

import pytest

from actjax import Exact, Offloaded, Quantized
from models import Remat
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


def test_coordinates_in_a_subspace_have_four_eight_or_all_bits():
    for text, bits in (("Quantized(8)", 8), ("Quantized(4)", 4), ("Exact()", 16)):
        assert coordinate_bits(MethodOptions(codec=(text,))) == bits
    assert coordinate_bits(MethodOptions()) == 16
