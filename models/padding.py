"""The zeros that feed-forward weights are padded with, from their published to their stored width.

`ModelConfig.stored_ffn_size` tells the stored width. Weights are padded where they are drawn or
read, and cut where they are written. In between the zeros stay zero: the operators of actjax get
the published width (`features`), so gradients of the padding are exactly zero, and `keeps_padding`
sets its updates to zero.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from actjax._core.paths import map_named, named_leaves
from actjax._math.padding import zero_beyond
from models.config import ModelConfig

_AXES = (
    (r"\b(gate|up)\.a$|\bdown\.(b|magnitude)$", None),
    (r"\b(gate|up)\b", -1),
    (r"\bdown\b", -2),
)
"""Regular expressions that are searched in the path of a weight, a factor of an adapter or a
magnitude, and the axis with the width of the feed-forward network; the first that matches
counts."""


def padded_axis(path: str, config: ModelConfig) -> int | None:
    """Returns the axis of a parameter that has padding, from the end; None if it has none.

    Args:
      path: its path in a decoder, such as "layers.mlp.gate", or in adapters ("layers.down.a").
      config: dimensions.
    """
    if config.stored_ffn_size == config.ffn_size:
        return None
    return next((axis for pattern, axis in _AXES if re.search(pattern, path)), None)


def pad(path: str, array: Any, config: ModelConfig) -> Any:
    """Returns a parameter of the published width with zeros up to the stored width.

    Args:
      path: as for `padded_axis`.
      array: the parameter, of all layers or of one: a NumPy or a JAX array. It is returned as it is
        if it has no padding, or already has it.
      config: dimensions.
    """
    axis = padded_axis(path, config)
    if axis is None or array.shape[axis] != config.ffn_size:
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, config.stored_ffn_size - config.ffn_size)
    return (np if isinstance(array, np.ndarray) else jnp).pad(array, widths)


def without_padding(path: str, array: Any, config: ModelConfig) -> np.ndarray:
    """Returns a parameter of the stored width in its published width; the inverse of `pad`.

    Raises:
      ValueError: a number in the padding is not zero.
    """
    array, axis = np.asarray(array), padded_axis(path, config)
    if axis is None or array.shape[axis] != config.stored_ffn_size:
        return array
    kept, padding = np.split(array, [config.ffn_size], axis)
    if np.any(padding != 0):
        raise ValueError(
            f"`{path}` has numbers other than zero beyond its published width {config.ffn_size},"
            f" in the padding to {config.stored_ffn_size}, which the model does not compute with:"
            " set them to zero."
        )
    return kept


def published_shape(path: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    """Returns the shape of a parameter without its padding."""
    axis, sizes = padded_axis(path, config), list(shape)
    if axis is not None:
        sizes[axis] = config.ffn_size
    return tuple(sizes)


def count_parameters(tree: Any, config: ModelConfig) -> int:
    """Returns the number of parameters of a decoder or of adapters, without padding.

    Args:
      tree: the parameters, or their shapes.
      config: dimensions.
    """
    shapes = {
        name: published_shape(name, x.shape, config) for name, x in named_leaves(tree).items()
    }
    return sum(int(np.prod(shape)) for shape in shapes.values())


def keeps_padding(config: ModelConfig) -> optax.GradientTransformation:
    """Returns a transform without a state that sets the updates of the padding to zero.

    Gradients of the padding are zero. The updates of an optimizer in a subspace need not be: the
    rows of a random basis are not.
    """

    def of_padding(path: str, update: jax.Array) -> jax.Array:
        axis = padded_axis(path, config)
        return update if axis is None else zero_beyond(config.ffn_size, update, axis)

    return optax.stateless(lambda updates, _: map_named(of_padding, updates))
