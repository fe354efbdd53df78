"""Pretrained checkpoints of every supported kind: Hugging Face folders and llama2.c files."""

import pathlib

from models import huggingface, llama2c
from models.config import ModelConfig
from models.decoder import Decoder
from models.json_files import read_object


def load_checkpoint(
    path: pathlib.Path | str,
    *,
    dtype: str | None = None,
    convert: huggingface.Convert | None = None,
    put: huggingface.Put | None = None,
) -> Decoder:
    """Returns the model in a Hugging Face folder, or in a `.bin` file of llama2.c.

    Args:
      path: the folder or file.
      dtype: dtype of the weights; that of the stored weights if None.
      convert: as for `models.huggingface.load`.
      put: as for `models.huggingface.load`.

    Raises:
      FileNotFoundError: the path does not exist, or a file of the checkpoint is missing.
      ValueError: an unsupported kind of file or model, or a damaged file.
    """
    path = _existing(path)
    read = huggingface.load if path.is_dir() else llama2c.load
    return read(path, dtype=dtype, convert=convert, put=put)


def read_dimensions(path: pathlib.Path | str) -> tuple[ModelConfig, str]:
    """Returns the dimensions of the model in a checkpoint, and the dtype of its weights.

    Raises:
      FileNotFoundError: as for `load_checkpoint`.
      ValueError: as for `load_checkpoint`.
    """
    path = _existing(path)
    if not path.is_dir():
        return llama2c.read_config(path), "float32"
    config = huggingface.read_config(path)
    fields = read_object(path / "config.json")
    return config, str(fields.get("dtype") or fields.get("torch_dtype") or "float32")


def _existing(path: pathlib.Path | str) -> pathlib.Path:
    path = pathlib.Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"the checkpoint '{path}' cannot be read: no such file or folder.")
    if not path.is_dir() and path.suffix != ".bin":
        raise ValueError(
            f"the checkpoint '{path}' is neither a folder with a config.json nor a .bin file of"
            " llama2.c."
        )
    return path


def stop_ids(path: pathlib.Path | str) -> tuple[int, ...]:
    """Returns the ids that end a text, from `generation_config.json` or else `config.json`.

    Chat models have several, such as one that ends a turn. Without either file there are none.
    """
    for name in ("generation_config.json", "config.json"):
        file = pathlib.Path(path, name)
        if file.exists():
            found = read_object(file).get("eos_token_id")
            if found is not None:
                ids = tuple(found) if isinstance(found, list) else (found,)
                if not all(isinstance(one, int) for one in ids):
                    raise ValueError(
                        f"{file}: `eos_token_id` must be an id or a list of ids, got {found!r}."
                    )
                return ids
    return ()
