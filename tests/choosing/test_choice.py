"""Tests of actjax/choosing/choice.py: the chooser of bits, without programs."""

import math

from actjax import allocate_bits
from actjax.choosing.choice import Chooser

SIZES = {"a": 10, "b": 10}


def chooser(**options):
    """Returns a chooser whose measurement is its argument, with 3 bits on average."""
    return Chooser(lambda measured: measured, lambda c: allocate_bits(c, SIZES, 3), **options)


def test_it_measures_allocates_and_remembers():
    bits = chooser()
    assert bits.choose({"a": 1.0, "b": 100.0})
    assert bits.sensitivity == {"a": 1.0, "b": 100.0}
    assert bits.bits == {"a": 2, "b": 4}
    assert bits.choose({"a": 1.0, "b": 1.0})
    assert bits.bits == {"a": 3, "b": 3}


def test_a_sensitivity_that_is_not_finite_changes_nothing():
    bits = chooser()
    assert bits.choose({"a": 1.0, "b": 100.0})
    for bad in (math.nan, math.inf):
        assert not bits.choose({"a": 1.0, "b": bad})
        assert (bits.sensitivity["b"], bits.bits["b"]) == (100, 4)


def test_bits_are_kept_if_others_gain_little():
    bits = chooser(gain=1.1)
    bits.bits = {"a": 2, "b": 4}
    # The variance of 3 and 3 bits is lower by a factor of 1.05.
    bits.choose({"a": 1.0, "b": 5.3})
    assert bits.bits == {"a": 2, "b": 4}
    bits.choose({"a": 1.0, "b": 1.0})
    assert bits.bits == {"a": 3, "b": 3}


def test_when_a_choice_is_due():
    often = chooser(every=5, early=(10, 100))
    assert [step for step in range(103) if often.is_due(step)] == [*range(0, 101, 5)]
    seldom = chooser(every=50, early=(10, 100))
    assert [step for step in range(103) if seldom.is_due(step)] == [0, 10, 50, 100]
    # A gradient for each of two arrays and one more, a hundred times.
    default = chooser()
    default.choose({"a": 1.0, "b": 1.0})
    assert default.every == 300
