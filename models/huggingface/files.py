"""The files in a Hugging Face checkpoint folder."""

import pathlib

from models.json_files import read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
"""Suffixes of files that are refused."""


def weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of weights that `load` reads. The folder has been checked."""
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    return [folder / name for name in sorted({*read_object(folder / INDEX)["weight_map"].values()})]
