"""Moments in 4 bits that are rounded to the nearest level, so that programs can be compared.

Stochastic rounding takes its random bits from the last bits of a float32. An oracle in float64 does
not have them, and two programs that XLA fuses differently may not agree on them.
"""

import dataclasses
from typing import Any

import jax
import optax

from actjax.formats.four_bit import RankOneFourBit, SignedFourBit


def nearest(tree: Any) -> Any:
    """Returns a tree whose moments in 4 bits are rounded to nearest from now on."""
    is_code = lambda x: isinstance(x, SignedFourBit | RankOneFourBit)  # noqa: E731
    return jax.tree.map(
        lambda x: dataclasses.replace(x, stochastic=False) if is_code(x) else x,
        tree,
        is_leaf=is_code,
    )


def to_nearest(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns a transform whose moments in 4 bits are rounded to nearest."""
    return optax.GradientTransformationExtraArgs(lambda params: nearest(tx.init(params)), tx.update)
