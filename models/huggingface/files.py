"""Names of the files in a Hugging Face checkpoint folder."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
"""Suffixes of files that are refused."""
