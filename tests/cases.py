"""The table of codecs that `tests/codecs/test_contract.py` tests.

A new codec is one line here.
"""

from actjax import (
    Exact,
    Offloaded,
    PointApproximation,
    Quantized,
    RandomizedSVD,
    RandomProjection,
)

CODECS = {
    "exact": Exact(),
    "random projection": RandomProjection(3),
    "randomized SVD": RandomizedSVD(3),
    "randomized SVD, a power iteration": RandomizedSVD(3, power_iterations=1),
    "points, by ratio": PointApproximation(1 / 4),
    "points, one": PointApproximation(points=1),
    "points, by tolerance": PointApproximation(points=4, tolerance=0.8),
    "four bits, ragged groups": Quantized(4, group=3),
    "three bits, stochastic, rotated": Quantized(3, group=4, rounding="stochastic", rotate=True),
    "four bits, normal levels, rotated, balanced": Quantized(
        4, group=4, levels="normal", rotate=True, balance=True
    ),
    "two bits by channel, an outlier": Quantized(2, scaling="channel", outlier_fraction=0.1),
    "offloaded": Offloaded(Quantized(4, group=4)),
}

SHAPES = [(24, 8), (2, 12, 8), (2, 3, 4, 8)]
"""24 tokens of 8 features, in one, two and three leading dimensions."""

DTYPES = ("float32", "bfloat16")
"""Dtypes of activations."""
