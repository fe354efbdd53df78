"""Reading a decoder from a Hugging Face checkpoint folder."""

import contextlib
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from models import digests
from models.config import ModelConfig
from models.decoder import Decoder
from models.huggingface.config import config_of, fp8_block_of
from models.huggingface.files import INDEX, PICKLES, SINGLE, weight_files
from models.huggingface.fp8 import decode_blocks, read_e4m3
from models.huggingface.names import HEAD, names_in_file
from models.huggingface.table import Row, is_ignored, table
from models.json_files import read_object
from models.padding import pad, published_shape
from models.parameters import Convert, Put, fill, parameter_of

_FLOATS = ("F64", "F32", "F16", "BF16")
_FP8 = "F8_E4M3"
_SCALE = "_scale_inv"
"""Dtypes of tensors in files of safetensors, and the suffix of the scales of an FP8 weight."""
_EMBEDDING = "model.embed_tokens.weight"


def read_config(folder: pathlib.Path | str) -> ModelConfig:
    """Returns the dimensions of the model in a folder.

    Raises:
      FileNotFoundError: there is no such folder, or no `config.json` in it.
      ValueError: an unsupported kind of model.
    """
    return _read_config(folder)[1]


def _read_config(folder: pathlib.Path | str) -> tuple[dict[str, Any], ModelConfig]:
    path = pathlib.Path(folder, "config.json")
    if not path.is_file():
        reason = "no such folder" if not path.parent.exists() else "no config.json in it"
        raise FileNotFoundError(f"the checkpoint '{folder}' cannot be read: {reason}.")
    fields = read_object(path)
    try:
        return fields, config_of(fields)
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

    As in `transformers`, the tensors of `model.safetensors` are read, or else those of all files of
    the index. Their names may have any common prefix. Weights in FP8 with a scale for each block
    are decoded.

    Args:
      folder: with `config.json` and either `model.safetensors` or an index of several files.
      dtype: dtype of the weights. If None, the dtype of each stored tensor, float32 for float64,
        and the dtype that `config.json` names for FP8.
      convert: returns the value to hold in place of an array; called for each layer.
      put: places a value on devices; on the default device if None.

    Raises:
      FileNotFoundError: a missing file.
      ValueError: an unsupported kind of model; a truncated file, one that is not what its digest
        tells (`models.digests`), or a pickle; a tensor without a parameter, a parameter without a
        tensor, or a tensor of another shape or kind.
    """
    fields, config = _read_config(folder)
    model = jax.eval_shape(functools.partial(Decoder, config), jax.random.key(0))
    with contextlib.ExitStack() as stack:
        tensors = _Tensors(pathlib.Path(folder), fields, stack)
        rows = table(config)
        tensors.check_names(config, rows)
        for path in weight_files(pathlib.Path(folder)):
            digests.check_tensors(path)
        for row in rows:
            stored = parameter_of(model, row.parameter).get_value().shape
            shape = published_shape(row.parameter, stored, config)
            if row.stacked:
                layers = (
                    tensors.read(row.tensor.format(layer), shape[1:], row.transposed, dtype)
                    for layer in range(shape[0])
                )
                padded = (pad(row.parameter, layer, config) for layer in layers)
                fill(model, row.parameter, padded, convert, put)
            else:
                array = tensors.read(row.tensor, shape, row.transposed, dtype)
                fill(model, row.parameter, array, convert, put)
            tensors.close()
    return model


def check(folder: pathlib.Path | str) -> None:
    """Raises as `load` does for files that are missing, damaged or of other tensors.

    Reads names, dtypes and shapes alone, so that a program finds these errors before it does other
    work.
    """
    fields, config = _read_config(folder)
    with contextlib.ExitStack() as stack:
        tensors = _Tensors(pathlib.Path(folder), fields, stack)
        tensors.check_names(config, table(config))
        model = jax.eval_shape(functools.partial(Decoder, config), jax.random.key(0))
        for row in table(config):
            stored = parameter_of(model, row.parameter).get_value().shape
            shape = published_shape(row.parameter, stored, config)
            for layer in range(shape[0]) if row.stacked else [0]:
                name = row.tensor.format(layer)
                tensors.check_shape(name, shape[1:] if row.stacked else shape, row.transposed)


class _Tensors:
    """The tensors of a folder, by name. Each is read when asked for."""

    def __init__(
        self, folder: pathlib.Path, fields: Mapping[str, Any], stack: contextlib.ExitStack
    ) -> None:
        self._folder, self._stack = folder, stack
        self._block = fp8_block_of(fields)
        dtype = fields.get("dtype") or fields.get("torch_dtype")
        self._decoded = dtype if dtype in ("float32", "float16") else "bfloat16"
        self._opened: dict[str, Any] = {}
        self._files = self._find()
        try:
            self._names = names_in_file(self._files)
        except ValueError as error:
            raise ValueError(f"'{folder}': {error}") from error

    def _find(self) -> dict[str, str]:
        """Returns the file of each tensor."""
        # `transformers` prefers the single file.
        if (self._folder / SINGLE).exists():
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        if (self._folder / INDEX).is_file():
            return self._read_index()
        pickles = sorted(p.name for p in self._folder.iterdir() if p.suffix in PICKLES)
        if pickles:
            raise ValueError(
                f"'{self._folder}' holds {pickles[0]}, a pickle, and reading a pickle can run any"
                " program: if you trust it, convert it to safetensors (`save_pretrained` of"
                " transformers does)."
            )
        reason = f"'{self._folder}' holds neither {SINGLE} nor {INDEX}"
        others = sorted(p.name for p in self._folder.glob("*.safetensors"))
        if "adapter_model.safetensors" in others:
            reason += ", but an adapter: name the folder of its base model, and the adapter apart"
        elif others:
            reason += f", but {others[0]}: copy the index too, or convert the file to this format"
        raise FileNotFoundError(f"{reason}.")

    def _read_index(self) -> dict[str, str]:
        """Returns the file of each tensor, checked against the files."""
        index = self._folder / INDEX
        files = read_object(index).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(x, str) for x in files.values()):
            raise ValueError(f"{index}: `weight_map` must be an object with a file by tensor.")
        outside = sorted(file for file in files.values() if pathlib.Path(file).name != file)
        if outside:
            raise ValueError(f"{index} names {outside[0]!r}, which is not in this folder.")
        found: dict[str, str] = {}
        for file in sorted(set(files.values())):
            names = set(self._open(file).keys())
            missing = sorted({name for name in files if files[name] == file} - names)
            if missing:
                raise ValueError(
                    f"{self._folder / file} has no {missing[0]!r}, although {INDEX} lists it."
                )
            # `transformers` reads all tensors of all files, and the last of equal names.
            for name in sorted(names & found.keys()):
                if not _equal(self._array(found[name], name), self._array(file, name)):
                    raise ValueError(
                        f"'{self._folder}': {found[name]} and {file} both have {name!r}, and they"
                        " differ: remove one."
                    )
            found |= dict.fromkeys(names, file)
        return found

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            path = self._folder / file
            if not path.exists():
                raise FileNotFoundError(f"{path} does not exist, but {INDEX} names it.")
            if not path.is_file():
                raise ValueError(f"{path} is not a file.")
            try:
                self._opened[file] = self._stack.enter_context(
                    safetensors.safe_open(path, framework="numpy")
                )
            except safetensors.SafetensorError as error:
                raise ValueError(
                    f"{path} cannot be read ({error}): it is truncated or damaged. Copy it again."
                ) from error
        return self._opened[file]

    def close(self) -> None:
        """Closes the files: what was read of a mapped file is in the memory of the process."""
        self._stack.close()
        self._opened.clear()

    def _array(self, file: str, name: str) -> np.ndarray:
        """Returns a tensor of a file as it is stored."""
        path = self._folder / file
        if self._dtype(file, name) == _FP8:
            return read_e4m3(path, name)
        try:
            return self._open(file).get_tensor(name)
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path}: {name!r} is damaged ({error}).") from error

    def _dtype(self, file: str, name: str) -> str:
        """Returns the dtype of a tensor of a file, which is floating point."""
        dtype = self._open(file).get_slice(name).get_dtype()
        if dtype not in (*_FLOATS, _FP8):
            raise ValueError(
                f"{self._folder / file}: {name!r} is {dtype}, but weights must be one of"
                f" {', '.join(_FLOATS)}: use the checkpoint that is not quantized."
            )
        return dtype

    def check_names(self, config: ModelConfig, rows: tuple[Row, ...]) -> None:
        """Raises unless there is a parameter for each tensor and a tensor for each parameter."""
        names = self._names
        if config.tie_embeddings and HEAD in names:
            if _EMBEDDING in names:
                self._check_tied()
            else:
                names[_EMBEDDING] = names[HEAD]
            del names[HEAD]
        scales = {f"{name}{_SCALE}" for name in names} if self._block else set()
        present = {name for name in names if not is_ignored(name)} - scales
        for name in sorted(present):
            self._check_dtype(name)
        if config.num_layers > len(present):
            raise ValueError(
                f"'{self._folder}': config.json describes {config.num_layers} layers, but there are"
                f" only {len(present)} tensors."
            )
        wanted = {}
        for row in rows:
            layers = range(config.num_layers) if row.stacked else [0]
            wanted |= {row.tensor.format(layer): row.parameter for layer in layers}
        unknown = sorted(names[name] for name in present - wanted.keys())
        if unknown:
            raise ValueError(
                f"'{self._folder}': no parameter for the tensor {_first_of(unknown)}: its"
                " config.json describes another model."
            )
        missing = [name for name in wanted if name not in present]
        if missing:
            advice = ""
            if missing == [HEAD]:
                advice = (
                    " The model was saved without its head, or config.json lacks"
                    " `tie_word_embeddings`: true."
                )
            elif (self._folder / SINGLE).exists() and (self._folder / INDEX).exists():
                advice = f" {SINGLE} is read, not the files of {INDEX}: remove one of the two."
            raise ValueError(
                f"'{self._folder}': no tensor for `{wanted[missing[0]]}`: {_first_of(missing)} is"
                f" missing.{advice}"
            )

    def _check_dtype(self, name: str) -> None:
        """Raises unless a tensor has numbers that can be read."""
        stored = self._names[name]
        file = self._files[stored]
        scaled = self._block is not None and f"{name}{_SCALE}" in self._names
        dtype = self._dtype(file, stored)
        if dtype == _FP8 and not scaled:
            raise ValueError(
                f"{self._folder / file}: {stored!r} is {_FP8}, which needs {stored + _SCALE!r} and"
                " a `quantization_config` in config.json: use the checkpoint that is not quantized."
            )
        if scaled and dtype != _FP8:
            raise ValueError(
                f"{self._folder / file}: {stored!r} is {dtype}, but has scales for {_FP8},"
                f" {self._names[name + _SCALE]!r}: the file mixes two checkpoints."
            )

    def check_shape(self, name: str, shape: tuple[int, ...], transposed: bool) -> None:
        """Raises unless a tensor has the shape of a parameter."""
        stored = self._names[name]
        file = self._files[stored]
        found = list(self._open(file).get_slice(stored).get_shape())
        expected = list(shape[::-1] if transposed else shape)
        if found != expected:
            raise ValueError(
                f"{self._folder / file}: {stored!r} has the shape {found}, but config.json requires"
                f" {expected}."
            )

    def _check_tied(self) -> None:
        head, embedding = (
            self._array(self._files[self._names[name]], self._names[name])
            for name in (HEAD, _EMBEDDING)
        )
        if not _equal(head, embedding):
            raise ValueError(
                f"'{self._folder}': config.json ties {self._names[HEAD]} to the embeddings, but the"
                " file has both, and they differ: set `tie_word_embeddings` to false."
            )

    def read(
        self, name: str, shape: tuple[int, ...], transposed: bool, dtype: str | None
    ) -> np.ndarray:
        """Returns a tensor as a parameter of the given shape."""
        stored = self._names[name]
        path = self._folder / self._files[stored]
        self.check_shape(name, shape, transposed)
        array = self._array(path.name, stored)
        if array.dtype == jnp.float8_e4m3fn and self._block is not None:
            scale = self._names[f"{name}{_SCALE}"]
            scales = self._array(self._files[scale], scale)
            try:
                array = decode_blocks(array, scales, self._block)
            except ValueError as error:
                raise ValueError(f"{path}: {scale!r} {error}") from error
            dtype = dtype or self._decoded
        if not _is_finite(array):
            raise ValueError(
                f"{path}: {stored!r} has infinities or NaN: its training diverged, or the file is"
                " damaged."
            )
        if dtype is None and array.dtype == np.float64:
            dtype = "float32"
        if dtype is not None:
            array = _cast(array, jnp.dtype(dtype), f"{path}: {stored!r}")
        return array.T if transposed else array


def _cast(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """Returns finite numbers in another dtype."""
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if jnp.finfo(dtype).max < jnp.finfo(array.dtype).max and not _is_finite(cast):
        raise ValueError(f"{name} has numbers beyond the range of {dtype}: choose another dtype.")
    return cast


def _equal(x: np.ndarray, y: np.ndarray) -> bool:
    return (x.dtype, x.shape) == (y.dtype, y.shape) and x.tobytes() == y.tobytes()


def _is_finite(array: np.ndarray) -> bool:
    if array.dtype != jnp.bfloat16:
        return bool(np.isfinite(array).all())
    # Ten times as fast on the bits.
    exponent = np.uint16(0x7F80)
    return not bool(((array.view(np.uint16) & exponent) == exponent).any())


def _first_of(names: list[str]) -> str:
    remainder = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{names[0]!r}{remainder}"
