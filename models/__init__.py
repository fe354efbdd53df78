"""Language models built on actjax."""

from models.config import LinearRopeScaling, ModelConfig, RopeScaling, Storage
from models.decoder import Decoder
from models.presets import PRESETS, preset

__all__ = [
    "PRESETS",
    "Decoder",
    "LinearRopeScaling",
    "ModelConfig",
    "RopeScaling",
    "Storage",
    "preset",
]
