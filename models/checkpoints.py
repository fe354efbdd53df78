"""Checkpoints of every kind that is read: a folder of Hugging Face, or a file of llama2.c."""

import json
import pathlib

from models import huggingface, llama2c
from models.config import ModelConfig
from models.decoder import Decoder


def load_checkpoint(
    path: pathlib.Path | str,
    *,
    dtype: str | None = None,
    convert: huggingface.Convert | None = None,
    put: huggingface.Put | None = None,
) -> Decoder:
    """Returns the model in a folder of Hugging Face, or in a `.bin` file of llama2.c.

    Args:
      path: the folder or file.
      dtype: of the weights; as they are stored if None.
      convert: as for `models.huggingface.load`.
      put: likewise.

    Raises:
      FileNotFoundError: there is nothing, or something is missing from it.
      ValueError: another kind of file, or a model that is not supported, or is damaged.
    """
    path = _check(path)
    read = huggingface.load if path.is_dir() else llama2c.load
    return read(path, dtype=dtype, convert=convert, put=put)


def read_dimensions(path: pathlib.Path | str) -> tuple[ModelConfig, str]:
    """Returns the dimensions of the model in a checkpoint, and the dtype of its weights.

    Raises:
      FileNotFoundError: as for `load_checkpoint`.
      ValueError: likewise.
    """
    path = _check(path)
    if not path.is_dir():
        return llama2c.read_config(path), "float32"
    config = huggingface.read_config(path)
    fields = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return config, str(fields.get("dtype") or fields.get("torch_dtype") or "float32")


def _check(path: pathlib.Path | str) -> pathlib.Path:
    path = pathlib.Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"the checkpoint '{path}' cannot be read: there is nothing there.")
    if not path.is_dir() and path.suffix != ".bin":
        raise ValueError(
            f"the checkpoint '{path}' is neither a folder with a config.json nor a .bin file of"
            " llama2.c."
        )
    return path


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
