"""Moments in 4 bits that are rounded to the nearest level, so that programs can be compared.

Stochastic rounding takes its random bits from the last bits of a float32. An oracle in float64 does
not have them, and two programs that XLA fuses differently may not agree on them.
"""

import optax

from benchmarks.kernel_check import nearest

__all__ = ["nearest", "to_nearest"]


def to_nearest(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns a transform whose moments in 4 bits are rounded to nearest."""
    return optax.GradientTransformationExtraArgs(lambda params: nearest(tx.init(params)), tx.update)
