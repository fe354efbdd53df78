"""Language models built on actjax."""

from models.config import ModelConfig, RopeScaling, Storage
from models.decoder import Decoder
from models.presets import PRESETS, preset

__all__ = ["PRESETS", "Decoder", "ModelConfig", "RopeScaling", "Storage", "preset"]
