"""The weights of the checkpoint that a run begins with."""

import hashlib
import pathlib
from typing import Any

import jax

from models import Decoder, huggingface
from models.checkpoints import load_checkpoint
from models.lora import quantize
from train.run import hosts
from train.run.recipe import Recipe
from train.settings.messages import naming_flag


def read_model(checkpoint: pathlib.Path, recipe: Recipe, places: Any) -> Decoder:
    """Returns the decoder of a checkpoint, in 4 bits if the method holds it so.

    Args:
      checkpoint: folder or file.
      recipe: the run.
      places: the decoder with a sharding in place of each array.
    """

    def put(path: str, value: Any) -> Any:
        shardings = huggingface.parameter_of(places, path).get_value()
        return jax.tree.map(hosts.place, value, shardings)

    with naming_flag("--checkpoint"):
        return load_checkpoint(
            checkpoint,
            dtype=recipe.config.weight_dtype,
            convert=quantize if recipe.method.four_bit else None,
            put=put,
        )


def fingerprint(checkpoint: pathlib.Path) -> str:
    """Returns a hexadecimal hash that tells checkpoints apart. Reads a part of each file."""
    digest = hashlib.sha256()
    for file in sorted([*checkpoint.glob("*.safetensors"), checkpoint / "config.json"]):
        with file.open("rb") as opened:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            # Headers, and numbers of the first and last tensors.
            digest.update(opened.read(2**20))
            opened.seek(max(0, size - 2**20))
            digest.update(opened.read())
    return digest.hexdigest()
