"""Checkpoint folders of Hugging Face, in and out: `config.json` and safetensors.

Which tensor is which parameter is one table. Tensors are read one after the other into the stacked
array they are a layer of, and written one file at a time, so that no second copy of a model is ever
in memory. Pickle files are refused: to read one is to run it.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from models.config import ModelConfig
from models.decoder import Decoder
from models.folders import written_whole
from models.huggingface_config import config_of, fields_of

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_SHARD_BYTES = 2_000_000_000

Convert = Callable[[str, np.ndarray], Any]
"""From the path of a parameter and its array, of one layer, to what the model is to hold."""
Put = Callable[[str, Any], Any]
"""From the path of a parameter and its stacked arrays on the host to arrays on devices."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
      tensor: name in the file, with {} for the number of the layer.
      parameter: path in the `Decoder`.
      transposed: whether the file has [out, in] where the parameter is [in, out].
    """

    tensor: str
    parameter: str
    transposed: bool = False

    @property
    def stacked(self) -> bool:
        """Whether the parameter has a leading axis of layers."""
        return self.parameter.startswith("layers.")


def table(config: ModelConfig) -> tuple[Row, ...]:
    """Returns which tensor is which parameter, in the order in which they are written."""
    rows = [Row("model.embed_tokens.weight", "embedding")]
    layer = [("input_layernorm.weight", "attention_norm", False)]
    for name in "qkvo":
        layer.append((f"self_attn.{name}_proj.weight", f"attention.{name}", True))
    if config.attention_bias:
        for name in "qkv":
            layer.append((f"self_attn.{name}_proj.bias", f"attention.{name}_bias", False))
    if config.qk_norm:
        for name in "qk":
            layer.append((f"self_attn.{name}_norm.weight", f"attention.{name}_norm", False))
    layer.append(("post_attention_layernorm.weight", "mlp_norm", False))
    for name in ("gate", "up", "down"):
        layer.append((f"mlp.{name}_proj.weight", f"mlp.{name}", True))
    rows += [Row(f"model.layers.{{}}.{t}", f"layers.{p}", flipped) for t, p, flipped in layer]
    rows.append(Row("model.norm.weight", "norm"))
    if not config.tie_embeddings:
        rows.append(Row("lm_head.weight", "output", True))
    return tuple(rows)


def _is_made_anew(tensor: str) -> bool:
    """Returns whether a tensor holds no parameter: old files keep the frequencies of RoPE."""
    return tensor.endswith(".rotary_emb.inv_freq")


def read_config(folder: pathlib.Path | str) -> ModelConfig:
    """Returns the dimensions of the model in a folder.

    Raises:
      FileNotFoundError: there is no such folder, or no `config.json` in it.
      ValueError: a kind of model that is not supported.
    """
    path = pathlib.Path(folder, "config.json")
    if not path.exists():
        there = "no such folder" if not path.parent.exists() else "no config.json in it"
        raise FileNotFoundError(f"the checkpoint '{folder}' cannot be read: {there}.")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(fields, dict):
            raise ValueError(f"it holds {type(fields).__name__}, and no JSON object.")
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
      dtype: of the weights; that of each tensor if None.
      convert: what to hold of a parameter in place of its array, called for each layer.
      put: where to hold it; on the default device if None.

    Raises:
      FileNotFoundError: a file that is not there.
      ValueError: a kind of model that is not supported; a file that is cut off, or a pickle; a
        tensor that no parameter takes, a parameter that no tensor fills, or one of another shape.
    """
    config = read_config(folder)
    model = jax.eval_shape(functools.partial(Decoder, config), jax.random.key(0))
    with contextlib.ExitStack() as stack:
        tensors = _Tensors(pathlib.Path(folder), stack)
        rows = table(config)
        tensors.check_names(config, rows)
        for row in rows:
            shape = parameter_of(model, row.parameter).get_value().shape
            layers = (
                tensors.read(row.tensor.format(layer), shape[1:], row.transposed, dtype)
                for layer in range(shape[0])
            )
            if row.stacked:
                fill(model, row.parameter, layers, convert, put)
            else:
                whole = tensors.read(row.tensor, shape, row.transposed, dtype)
                fill(model, row.parameter, whole, convert, put)
    return model


def fill(
    model: Decoder,
    path: str,
    arrays: np.ndarray | Iterator[np.ndarray],
    convert: Convert | None,
    put: Put | None,
) -> None:
    """Sets a parameter of a decoder from arrays on the host.

    Args:
      model: the decoder.
      path: of the parameter.
      arrays: its array; or those of its layers, made one after the other.
      convert: as for `load`.
      put: likewise.
    """
    convert = convert or (lambda _, array: array)
    if isinstance(arrays, np.ndarray):
        value = convert(path, arrays)
    else:
        value = _stack(path, (convert(path, array) for array in arrays), model.config.num_layers)
    put = put or (lambda _, value: jax.tree.map(jnp.asarray, value))
    parameter_of(model, path).set_value(put(path, value))


def _stack(path: str, layers: Iterator[Any], count: int) -> Any:
    """Returns the layers of a parameter in arrays with a leading axis."""
    stacked: Any = None
    for layer, one in enumerate(layers):
        if stacked is None:
            stacked = jax.tree.map(lambda x: np.empty((count, *x.shape), x.dtype), one)
        for whole, part in zip(jax.tree.leaves(stacked), jax.tree.leaves(one), strict=True):
            if whole.dtype != part.dtype:
                raise ValueError(
                    f"`{path}` is {part.dtype} in layer {layer}, and {whole.dtype} in layer 0: name"
                    " the `dtype` to read both in, or write the file again in one."
                )
            whole[layer] = part
    return stacked


def parameter_of(model: Decoder, path: str) -> Any:
    """Returns the parameter at a path, such as "layers.attention.q"."""
    return functools.reduce(getattr, path.split("."), model)


class _Tensors:
    """The tensors of a folder, by name, read when asked for."""

    def __init__(self, folder: pathlib.Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._opened: dict[str, Any] = {}
        self._files = self._find()

    def _find(self) -> dict[str, str]:
        """Returns the file of each tensor."""
        index = self._folder / _INDEX
        if index.exists():
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            outside = sorted(file for file in files.values() if pathlib.Path(file).name != file)
            if outside:
                raise ValueError(f"{index} names {outside[0]!r}, which is not in this folder.")
            for file in sorted(set(files.values())):
                absent = [name for name in files if files[name] == file]
                absent = sorted(set(absent) - set(self._open(file).keys()))
                if absent:
                    raise ValueError(
                        f"{self._folder / file} has no {absent[0]!r}, as {_INDEX} says."
                    )
            return files
        if (self._folder / _SINGLE).exists():
            return dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)
        pickles = sorted(p.name for p in self._folder.iterdir() if p.suffix in _PICKLES)
        if pickles:
            raise ValueError(
                f"'{self._folder}' holds {pickles[0]}, a pickle, and to read one is to run it:"
                " convert it to safetensors where you trust it (`save_pretrained` of transformers"
                " does)."
            )
        raise FileNotFoundError(f"'{self._folder}' holds neither {_SINGLE} nor {_INDEX}.")

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            path = self._folder / file
            if not path.exists():
                raise FileNotFoundError(f"{path} is not there, but {_INDEX} names it.")
            try:
                self._opened[file] = self._stack.enter_context(
                    safetensors.safe_open(path, framework="numpy")
                )
            except safetensors.SafetensorError as error:
                raise ValueError(
                    f"{path} cannot be read ({error}): it is cut off or damaged. Copy it again."
                ) from error
        return self._opened[file]

    def check_names(self, config: ModelConfig, rows: tuple[Row, ...]) -> None:
        """Raises unless there is a parameter for each tensor and a tensor for each parameter."""
        wanted = {}
        for row in rows:
            layers = range(config.num_layers) if row.stacked else [0]
            wanted |= {row.tensor.format(layer): row.parameter for layer in layers}
        given = {name for name in self._files if not _is_made_anew(name)}
        if config.tie_embeddings and "lm_head.weight" in given:
            self._check_tied()
            given.discard("lm_head.weight")
        strange = sorted(given - wanted.keys())
        if strange:
            raise ValueError(
                f"'{self._folder}': no parameter takes the tensor {_some(strange)}: its config.json"
                " describes another model."
            )
        absent = [name for name in wanted if name not in given]
        if absent:
            raise ValueError(
                f"'{self._folder}': no tensor fills `{wanted[absent[0]]}`: {_some(absent)} is not"
                " there."
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
        """Returns a tensor as a parameter of a shape."""
        file = self._files[name]
        try:
            array = self._open(file).get_tensor(name)
        except safetensors.SafetensorError as error:
            raise ValueError(f"{self._folder / file}: {name!r} is damaged ({error}).") from error
        expected = shape[::-1] if transposed else shape
        if array.shape != expected:
            raise ValueError(
                f"{self._folder / file}: {name!r} is {list(array.shape)}, but config.json makes it"
                f" {list(expected)}."
            )
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(
                f"{self._folder / file}: {name!r} is {array.dtype}, and no floating point numbers."
            )
        if not _is_finite(array):
            raise ValueError(
                f"{self._folder / file}: {name!r} has numbers that are infinite or NaN: training"
                " that went wrong, or a damaged file."
            )
        array = array if dtype is None else array.astype(jnp.dtype(dtype))
        return array.T if transposed else array


def _is_finite(array: np.ndarray) -> bool:
    if array.dtype != jnp.bfloat16:
        return bool(np.isfinite(array).all())
    # By its bits: ten times as fast.
    exponent = np.uint16(0x7F80)
    return not bool(((array.view(np.uint16) & exponent) == exponent).any())


def _some(names: list[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{names[0]!r}{more}"


def save(
    model: Decoder,
    folder: pathlib.Path | str,
    *,
    like: pathlib.Path | str | None = None,
    max_shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Writes a model as a folder that `transformers` reads.

    The folder appears when all of it is written.

    Args:
      model: a decoder of plain arrays.
      folder: to be made.
      like: folder of the checkpoint that it was made of: its `config.json`, tokenizer and all else
        but its weights are taken over.
      max_shard_bytes: of a file. There is an index if there are several.

    Raises:
      FileExistsError: there is such a folder, and something in it.
      TypeError: a parameter that is no array: merge adapters before.
    """
    folder = pathlib.Path(folder)
    with written_whole(folder) as scratch:
        config = _write_beside(model, scratch, None if like is None else pathlib.Path(like))
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _write_tensors(model, scratch, max_shard_bytes)


def _write_beside(model: Decoder, scratch: pathlib.Path, like: pathlib.Path | None) -> Any:
    """Copies what belongs to a checkpoint beside its weights, and returns its configuration."""
    dtype = str(model.embedding.get_value().dtype)
    if like is None:
        return fields_of(model.config, dtype)
    for path in sorted(like.iterdir()):
        weights = path.suffix in (".safetensors", ".gguf", *_PICKLES)
        weights = weights or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name != "config.json":
            shutil.copyfile(path, scratch / path.name)
    config = json.loads((like / "config.json").read_text(encoding="utf-8"))
    name = "dtype" if "dtype" in config else "torch_dtype"
    return {**config, name: dtype, "tie_word_embeddings": model.config.tie_embeddings}


def _write_tensors(model: Decoder, scratch: pathlib.Path, max_shard_bytes: int) -> None:
    shards = list(_shards(model, max_shard_bytes))
    weight_map, total = {}, 0
    for number, shard in enumerate(shards, 1):
        several = f"model-{number:05}-of-{len(shards):05}.safetensors"
        file = _SINGLE if len(shards) == 1 else several
        tensors = {name: _tensor(model, row, layer) for name, (row, layer) in shard.items()}
        total += sum(x.nbytes for x in tensors.values())
        safetensors.numpy.save_file(tensors, scratch / file, metadata={"format": "pt"})
        (scratch / file).chmod(0o644)
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (scratch / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(model: Decoder, max_bytes: int) -> Iterator[Mapping[str, tuple[Row, int]]]:
    """Yields which tensors stand in one file."""
    shard: dict[str, tuple[Row, int]] = {}
    size = 0
    for row, layer in _in_order(model.config):
        value = parameter_of(model, row.parameter).get_value()
        if not hasattr(value, "dtype") or not hasattr(value, "nbytes"):
            raise TypeError(
                f"`{row.parameter}` is {value!r} and no array: merge adapters, and decode quantized"
                " weights, before they are saved."
            )
        own = value.nbytes // (model.config.num_layers if row.stacked else 1)
        if shard and size + own > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[row.tensor.format(layer)] = row, layer
        size += own
    yield shard


def _in_order(config: ModelConfig) -> Iterator[tuple[Row, int]]:
    """Yields every tensor: the embeddings, layer after layer, the rest."""
    rows = table(config)
    first = next(i for i, row in enumerate(rows) if row.stacked)
    last = len(rows) - next(i for i, row in enumerate(reversed(rows)) if row.stacked)
    yield from ((row, 0) for row in rows[:first])
    for layer in range(config.num_layers):
        yield from ((row, layer) for row in rows[first:last])
    yield from ((row, 0) for row in rows[last:])


def _tensor(model: Decoder, row: Row, layer: int) -> np.ndarray:
    value = parameter_of(model, row.parameter).get_value()
    array = np.asarray(jax.device_get(value[layer] if row.stacked else value))
    return np.ascontiguousarray(array.T if row.transposed else array)
