"""Parameters of a decoder by their paths, and setting them from arrays on the host."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from models.decoder import Decoder

Convert = Callable[[str, np.ndarray], Any]
"""From the path of a parameter and the array of one layer to the value that the model holds."""
Put = Callable[[str, Any], Any]
"""From the path of a parameter and its stacked arrays on the host to arrays on devices."""


def parameter_of(model: Decoder, path: str) -> Any:
    """Returns the parameter at a path, such as "layers.attention.q"."""
    return functools.reduce(getattr, path.split("."), model)


def fill(
    model: Decoder,
    path: str,
    arrays: np.ndarray | Iterator[np.ndarray],
    convert: Convert | None,
    put: Put | None,
) -> None:
    """Sets a parameter of a decoder from arrays on the host.

    Args:
      model: the decoder; changed.
      path: path of the parameter.
      arrays: the array of the parameter, or an iterator over the arrays of its layers.
      convert: returns the value to hold in place of an array, called for each layer; the array
        itself if None.
      put: places a value on devices; on the default device if None.
    """
    convert = convert or (lambda _, array: array)
    if isinstance(arrays, np.ndarray):
        value = convert(path, arrays)
    else:
        value = _stack(path, (convert(path, array) for array in arrays), model.config.num_layers)
    put = put or (lambda _, value: jax.device_put(value))
    parameter_of(model, path).set_value(put(path, value))


def _stack(path: str, layers: Iterator[Any], count: int) -> Any:
    """Returns the layers of a parameter in arrays with a leading axis."""
    stacked: Any = None
    for layer, values in enumerate(layers):
        if stacked is None:
            stacked = jax.tree.map(lambda x: np.empty((count, *x.shape), x.dtype), values)
        for stack, part in zip(jax.tree.leaves(stacked), jax.tree.leaves(values), strict=True):
            if stack.dtype != part.dtype:
                raise ValueError(
                    f"`{path}` is {part.dtype} in layer {layer} and {stack.dtype} in layer 0: pass"
                    " `dtype` to read both as one dtype."
                )
            stack[layer] = part
    return stacked


def fetch(x: Any) -> np.ndarray:
    """Returns the numbers of an array, in every process if several share it.

    All processes then call it together, for one array after the other.
    """
    if getattr(x, "is_fully_addressable", True):
        return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)
