"""Pretrained checkpoints by path or name: dimensions, weights and the ids that end a text."""

import pathlib

from models import hub, huggingface
from models.config import ModelConfig
from models.decoder import Decoder
from models.huggingface.config import ids_of
from models.json_files import read_object


def find_checkpoint(
    path: pathlib.Path | str, download: bool = False, *, weights: bool = True
) -> pathlib.Path:
    """Returns the folder of a checkpoint.

    Args:
      path: a Hugging Face folder; a run of `train.pretrain` or `train.finetune`, whose model it is;
        or a repository of the Hugging Face Hub such as "Qwen/Qwen3-0.6B", which is
        looked up in the local cache. A folder of this name goes first.
      download: whether to download what the cache lacks.
      weights: whether the weights are needed, and not only dimensions and tokenizer.

    Raises:
      FileNotFoundError: the path does not exist, or the cache has no such repository or a part.
      OSError: the repository cannot be downloaded.
      ValueError: the path is a file, or a run that has no model yet.
    """
    folder, name = pathlib.Path(path).expanduser(), str(path)
    if not hub.is_remote(name):
        return _folder(folder)
    found = hub.download(name, weights) if download else hub.cached(name)
    advice = f"add `--download`, or run `hf download {name}`."
    if found is None:
        raise FileNotFoundError(
            f"'{name}' is no folder and is not in the Hugging Face cache ({hub.cache_folder()}):"
            f" {advice}"
        )
    missing = hub.missing_file(found, weights)
    if missing is not None and download:
        raise FileNotFoundError(
            f"the repository '{name}' has no {missing}. Weights must be safetensors: pickles are"
            " never read, and `save_pretrained` of transformers converts them."
        )
    if missing is not None:
        raise FileNotFoundError(f"'{name}' is incomplete: {found} has no {missing}: {advice}")
    return found


def load_checkpoint(
    path: pathlib.Path | str,
    *,
    dtype: str | None = None,
    convert: huggingface.Convert | None = None,
    put: huggingface.Put | None = None,
) -> Decoder:
    """Returns the model in a Hugging Face folder.

    Args:
      path: the folder, or a repository as for `find_checkpoint`.
      dtype: dtype of the weights; the dtype of each stored tensor if None.
      convert: as for `models.huggingface.load`.
      put: as for `models.huggingface.load`.

    Raises:
      FileNotFoundError: the path does not exist, or a file of the checkpoint is missing.
      ValueError: the path is a file, the kind of model is not supported, or a file is damaged.
    """
    return huggingface.load(find_checkpoint(path), dtype=dtype, convert=convert, put=put)


def read_dimensions(path: pathlib.Path | str) -> tuple[ModelConfig, str]:
    """Returns the dimensions of the model in a checkpoint, and the dtype of its weights.

    Raises:
      FileNotFoundError: as for `load_checkpoint`.
      ValueError: as for `load_checkpoint`.
    """
    folder = find_checkpoint(path, weights=False)
    config = huggingface.read_config(folder)
    return config, _dtype_of_weights(folder / "config.json")


def _dtype_of_weights(path: pathlib.Path) -> str:
    """Returns the dtype that a config.json names; float32 for float64, and if it names none."""
    fields = read_object(path)
    for name in ("dtype", "torch_dtype"):
        dtype = fields.get(name)
        if dtype in ("float64", "float32", "float16", "bfloat16"):
            return "float32" if dtype == "float64" else dtype
        if dtype is not None:
            raise ValueError(
                f"{path}: `{name}` must be float32, float16, bfloat16 or float64, got {dtype!r}:"
                " correct it."
            )
    return "float32"


def _folder(folder: pathlib.Path) -> pathlib.Path:
    if not folder.exists():
        raise FileNotFoundError(
            f"the checkpoint '{folder}' cannot be read: no such file or folder."
        )
    if not folder.is_dir():
        advice = "name the folder that has a config.json and safetensors."
        if folder.suffix == ".bin":
            advice += (
                " A .bin file of llama2.c is no longer read: write it as a folder with actjax"
                " 0.2.0, `models.huggingface.save(models.llama2c.load(FILE), FOLDER)`."
            )
        raise ValueError(f"the checkpoint '{folder}' is a file: {advice}")
    if (folder / "checkpoints").is_dir():
        return _of_run(folder)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ValueError(
            f"'{folder}' is an adapter of {_base_of(folder)}, and no model: pass that checkpoint."
            f" train.evaluate takes the adapter as `--adapter {folder}`; train.finetune needs both"
            " merged (`--merge` of the run that trained it)."
        )
    return folder


def _base_of(adapter: pathlib.Path) -> str:
    """Returns the name of the checkpoint that an adapter belongs to."""
    return repr(read_object(adapter / "adapter_config.json").get("base_model_name_or_path"))


def _of_run(folder: pathlib.Path) -> pathlib.Path:
    """Returns the model in the folder of a run, which `train.pretrain` and `train.finetune` make.

    Raises:
      ValueError: there is none yet.
    """
    if (folder / "config.json").is_file():
        return folder
    if (folder / "model").is_dir():
        return folder / "model"
    if (folder / "adapter").is_dir():
        raise ValueError(
            f"'{folder}' is a run that trained an adapter, which belongs to"
            f" {_base_of(folder / 'adapter')}. Merge both first: repeat the command of the run with"
            " `--resume --merge`."
        )
    raise ValueError(
        f"'{folder}' is a run without an exported model, which its end writes: finish it, or make"
        f" one of its last checkpoint with `--out {folder} --export DIR` of the program that trains"
        " it."
    )


def stop_ids(path: pathlib.Path | str) -> tuple[int, ...]:
    """Returns the ids that end a text, from `generation_config.json` or else `config.json`.

    Chat models have several, such as one that ends a turn. Without either file there are none.
    """
    for name in ("generation_config.json", "config.json"):
        file = pathlib.Path(path, name)
        if file.exists():
            fields = read_object(file)
            try:
                ids = ids_of(fields, "eos_token_id")
            except ValueError as error:
                raise ValueError(f"{file}: {error}") from error
            if ids:
                return ids
    return ()
