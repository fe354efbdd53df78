"""Checkpoints of every kind that is read: a folder of Hugging Face, or a file of llama2.c."""

import json
import pathlib

import jax

from models import huggingface, llama2c
from models.decoder import Decoder


def load_checkpoint(path: pathlib.Path | str, *, dtype: str | None = None) -> Decoder:
    """Returns the model in a folder of Hugging Face, or in a `.bin` file of llama2.c.

    Args:
      path: the folder or file.
      dtype: of the weights; as they are stored if None.

    Raises:
      FileNotFoundError: there is nothing, or something is missing from it.
      ValueError: another kind of file, or a model that is not supported, or is damaged.
    """
    path = pathlib.Path(path).expanduser()
    if path.is_dir():
        return huggingface.load(path, dtype=dtype)
    if not path.exists():
        raise FileNotFoundError(f"the checkpoint '{path}' cannot be read: there is nothing there.")
    if path.suffix != ".bin":
        raise ValueError(
            f"the checkpoint '{path}' is neither a folder with a config.json nor a .bin file of"
            " llama2.c."
        )
    return jax.tree.map(lambda x: x if dtype is None else x.astype(dtype), llama2c.load(path))


def stop_ids(path: pathlib.Path | str) -> tuple[int, ...]:
    """Returns ids that end a text as the checkpoint says: none if it says nothing.

    Models that chat have several, such as one that ends a turn. `generation_config.json` says
    which, else `config.json`.
    """
    for name in ("generation_config.json", "config.json"):
        file = pathlib.Path(path, name)
        if file.exists():
            ids = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            if ids is not None:
                return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()
