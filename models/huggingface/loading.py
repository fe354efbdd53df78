"""Reading a decoder from a Hugging Face checkpoint folder."""

import contextlib
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from models.config import ModelConfig
from models.decoder import Decoder
from models.huggingface.config import config_of
from models.huggingface.files import INDEX, PICKLES, SINGLE
from models.huggingface.table import Row, is_ignored, table
from models.json_files import read_object
from models.parameters import Convert, Put, fill, parameter_of


def read_config(folder: pathlib.Path | str) -> ModelConfig:
    """Returns the dimensions of the model in a folder.

    Raises:
      FileNotFoundError: there is no such folder, or no `config.json` in it.
      ValueError: an unsupported kind of model.
    """
    path = pathlib.Path(folder, "config.json")
    if not path.exists():
        reason = "no such folder" if not path.parent.exists() else "no config.json in it"
        raise FileNotFoundError(f"the checkpoint '{folder}' cannot be read: {reason}.")
    fields = read_object(path)
    try:
        return config_of(fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def load(
    folder: pathlib.Path | str,
    *,
    dtype: str | None = None,
    convert: Convert | None = None,
    put: Put | None = None,
) -> Decoder:
    """Returns the model in a folder.

    Args:
      folder: with `config.json` and either `model.safetensors` or an index of several files.
      dtype: dtype of the weights; the dtype of each stored tensor if None.
      convert: returns the value to hold in place of an array; called for each layer.
      put: places a value on devices; on the default device if None.

    Raises:
      FileNotFoundError: a missing file.
      ValueError: an unsupported kind of model; a truncated file, or a pickle; a tensor without a
        parameter, a parameter without a tensor, or a tensor of another shape.
    """
    config = read_config(folder)
    model = jax.eval_shape(functools.partial(Decoder, config), jax.random.key(0))
    with contextlib.ExitStack() as stack:
        tensors = _Tensors(pathlib.Path(folder), stack)
        rows = table(config)
        tensors.check_names(config, rows)
        for row in rows:
            shape = parameter_of(model, row.parameter).get_value().shape
            if row.stacked:
                layers = (
                    tensors.read(row.tensor.format(layer), shape[1:], row.transposed, dtype)
                    for layer in range(shape[0])
                )
                fill(model, row.parameter, layers, convert, put)
            else:
                array = tensors.read(row.tensor, shape, row.transposed, dtype)
                fill(model, row.parameter, array, convert, put)
    return model


class _Tensors:
    """The tensors of a folder, by name. Each is read when asked for."""

    def __init__(self, folder: pathlib.Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._opened: dict[str, Any] = {}
        self._files = self._find()

    def _find(self) -> dict[str, str]:
        """Returns the file of each tensor."""
        if (self._folder / INDEX).exists():
            return self._read_index()
        if (self._folder / SINGLE).exists():
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        pickles = sorted(p.name for p in self._folder.iterdir() if p.suffix in PICKLES)
        if pickles:
            raise ValueError(
                f"'{self._folder}' holds {pickles[0]}, a pickle, and reading a pickle can run any"
                " program: if you trust it, convert it to safetensors (`save_pretrained` of"
                " transformers does)."
            )
        raise FileNotFoundError(f"'{self._folder}' holds neither {SINGLE} nor {INDEX}.")

    def _read_index(self) -> dict[str, str]:
        """Returns the file of each tensor, checked against the files."""
        index = self._folder / INDEX
        files = read_object(index).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(x, str) for x in files.values()):
            raise ValueError(f"{index}: `weight_map` must be an object with a file by tensor.")
        outside = sorted(file for file in files.values() if pathlib.Path(file).name != file)
        if outside:
            raise ValueError(f"{index} names {outside[0]!r}, which is not in this folder.")
        for file in sorted(set(files.values())):
            listed = {name for name in files if files[name] == file}
            missing = sorted(listed - set(self._open(file).keys()))
            if missing:
                raise ValueError(
                    f"{self._folder / file} has no {missing[0]!r}, although {INDEX} lists it."
                )
        return files

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            path = self._folder / file
            if not path.exists():
                raise FileNotFoundError(f"{path} does not exist, but {INDEX} names it.")
            try:
                self._opened[file] = self._stack.enter_context(
                    safetensors.safe_open(path, framework="numpy")
                )
            except safetensors.SafetensorError as error:
                raise ValueError(
                    f"{path} cannot be read ({error}): it is truncated or damaged. Copy it again."
                ) from error
        return self._opened[file]

    def check_names(self, config: ModelConfig, rows: tuple[Row, ...]) -> None:
        """Raises unless there is a parameter for each tensor and a tensor for each parameter."""
        wanted = {}
        for row in rows:
            layers = range(config.num_layers) if row.stacked else [0]
            wanted |= {row.tensor.format(layer): row.parameter for layer in layers}
        present = {name for name in self._files if not is_ignored(name)}
        if config.tie_embeddings and "lm_head.weight" in present:
            self._check_tied()
            present.discard("lm_head.weight")
        unknown = sorted(present - wanted.keys())
        if unknown:
            raise ValueError(
                f"'{self._folder}': no parameter for the tensor {_first_of(unknown)}: its"
                " config.json describes another model."
            )
        missing = [name for name in wanted if name not in present]
        if missing:
            raise ValueError(
                f"'{self._folder}': no tensor for `{wanted[missing[0]]}`: {_first_of(missing)} is"
                " missing."
            )

    def _check_tied(self) -> None:
        names = "lm_head.weight", "model.embed_tokens.weight"
        head, embedding = (self._open(self._files[name]).get_tensor(name) for name in names)
        if head.tobytes() != embedding.tobytes():
            raise ValueError(
                f"'{self._folder}': config.json ties lm_head.weight to the embeddings, but the file"
                " has both, and they differ: set `tie_word_embeddings` to false."
            )

    def read(
        self, name: str, shape: tuple[int, ...], transposed: bool, dtype: str | None
    ) -> np.ndarray:
        """Returns a tensor as a parameter of the given shape."""
        path = self._folder / self._files[name]
        try:
            array = self._open(self._files[name]).get_tensor(name)
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path}: {name!r} is damaged ({error}).") from error
        expected = shape[::-1] if transposed else shape
        if array.shape != expected:
            raise ValueError(
                f"{path}: {name!r} has the shape {list(array.shape)}, but config.json requires"
                f" {list(expected)}."
            )
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{path}: {name!r} must be floating point, got {array.dtype}.")
        if not _is_finite(array):
            raise ValueError(
                f"{path}: {name!r} has infinities or NaN: its training diverged, or the file is"
                " damaged."
            )
        array = array if dtype is None else array.astype(jnp.dtype(dtype))
        return array.T if transposed else array


def _is_finite(array: np.ndarray) -> bool:
    if array.dtype != jnp.bfloat16:
        return bool(np.isfinite(array).all())
    # Ten times as fast on the bits.
    exponent = np.uint16(0x7F80)
    return not bool(((array.view(np.uint16) & exponent) == exponent).any())


def _first_of(names: list[str]) -> str:
    remainder = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{names[0]!r}{remainder}"
