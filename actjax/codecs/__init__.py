"""Codecs: what is stored of an activation between the forward and the backward pass."""

from actjax.codecs.base import Codec
from actjax.codecs.calibrated import Calibrated, ChannelRange
from actjax.codecs.exact import Exact
from actjax.codecs.low_rank import RandomizedSVD, RandomProjection
from actjax.codecs.offloaded import Offloaded
from actjax.codecs.point import PointApproximation
from actjax.codecs.quantized import Quantized

__all__ = [
    "Calibrated",
    "ChannelRange",
    "Codec",
    "Exact",
    "Offloaded",
    "PointApproximation",
    "Quantized",
    "RandomProjection",
    "RandomizedSVD",
]
