"""Language models built on actjax."""

from models.checkpoints import load_checkpoint as load
from models.config import LinearRopeScaling, ModelConfig, RopeScaling
from models.decoder import Decoder
from models.presets import PRESETS, preset
from models.storage import CompressedResiduals, Remat, Storage, StorageChoice

__all__ = [
    "PRESETS",
    "CompressedResiduals",
    "Decoder",
    "LinearRopeScaling",
    "ModelConfig",
    "Remat",
    "RopeScaling",
    "Storage",
    "StorageChoice",
    "load",
    "preset",
]
