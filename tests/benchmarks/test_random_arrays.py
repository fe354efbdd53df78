"""Tests of benchmarks/random_arrays: codecs keep what they document, and faults are found."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import actjax
from benchmarks.random_arrays.__main__ import Config, measure, show
from benchmarks.random_arrays.codecs import Entry, entries
from benchmarks.random_arrays.contents import CONTENTS


def faults(codec: actjax.Codec, **changes) -> dict[str, list[str]]:
    """Returns the faults of a codec by content, on one shape."""
    rows = measure(Config(**{"count": 44, **changes}), [Entry(codec)])
    found = {row["content"]: row["faults"] for row in rows}
    return {content: [one["fault"] for one in every] for content, every in found.items()}


def test_codecs_keep_what_they_document(capsys):
    """Takes 10 s of processor time, most of it to compile a program for each codec."""
    known = [
        Entry(actjax.Exact()),
        Entry(actjax.Quantized(3, group=4, rounding="dither")),
        Entry(actjax.RandomizedSVD(2, 1)),
        Entry(actjax.PointApproximation(points=4, tolerance=0.8)),
    ]
    rows = measure(Config(count=4 * 44), known)
    assert sum(row["arrays"] for row in rows) == 4 * 44
    assert {row["content"] for row in rows} == {*CONTENTS}
    assert [row for row in rows if row["faults"]] == []
    show(rows)
    assert "arrays by kind" in capsys.readouterr().out


@dataclasses.dataclass(frozen=True, repr=False)
class ReturnsNaN(actjax.Exact):
    def decode(self, code):
        return jnp.where(code > 3, jnp.nan, code)


@dataclasses.dataclass(frozen=True, repr=False)
class HidesNaN(actjax.Exact):
    def decode(self, code):
        return jnp.nan_to_num(code)


@dataclasses.dataclass(frozen=True, repr=False)
class IsFourfold(actjax.Quantized):
    def decode(self, code):
        return super().decode(code) * 4


@dataclasses.dataclass(frozen=True, repr=False)
class Understates(actjax.Exact):
    def stored_bytes(self, shape, dtype):
        return super().stored_bytes(shape, dtype) - 1


@dataclasses.dataclass(frozen=True, repr=False)
class ForgetsDtype(actjax.Exact):
    def decode(self, code):
        return code.astype("bfloat16" if code.dtype == "float32" else "float32")


@pytest.mark.parametrize(
    ("codec", "content", "fault"),
    [
        (ReturnsNaN(), "integers", "decodes finite numbers to nan"),
        (HidesNaN(), "one NaN", "changes numbers"),
        (IsFourfold(8, group=4), "huge", "decodes finite numbers to"),
        (IsFourfold(8, group=4), "normal", "an error above"),
        (Understates(), "normal", "bytes, and states"),
        (ForgetsDtype(), "normal", "decodes to"),
    ],
)
def test_planted_faults_are_found(codec, content, fault):
    """Takes 2 s of processor time."""
    assert any(fault in one for one in faults(codec)[content])


def test_every_two_options_of_quantized_come_together():
    known = entries(np.random.default_rng(0), 48)
    options = [entry.codec for entry in known if isinstance(entry.codec, actjax.Quantized)]
    assert {codec.bits for codec in options} == {1, 2, 3, 4, 5, 6, 8}
    assert any(codec.rotate and codec.balance for codec in options)
    assert any(codec.outlier_fraction and codec.rounding == "dither" for codec in options)
    assert {"Calibrated", "Offloaded", "PointApproximation"} <= {entry.kind for entry in known}
    # Equal seeds give equal codecs, so that the number of a program names one.
    again = entries(np.random.default_rng(0), 48)
    assert [entry.name for entry in known] == [entry.name for entry in again]


@pytest.mark.parametrize("name", ["count", "together", "quantized"])
def test_wrong_settings_are_named(name):
    with pytest.raises(ValueError, match=f"`--{name}` must be at least .*, got 0"):
        Config(**{name: 0})
