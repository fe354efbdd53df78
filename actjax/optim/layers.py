"""Parameters split into stacked layers and the rest, with an optimizer state for each layer.

A transform that runs on one layer at a time gets a tree with the structure of all parameters and
`None` in the place of the others. So paths stay the same, and a mask that is a function of the
parameters is called with such a tree.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from actjax._core.paths import named_leaves
from actjax._host import is_on_host
from actjax._math.precision import row_major
from actjax._shards import is_partitioned
from actjax.factored.low_rank import LowRank, is_low_rank


class LayerwiseState(NamedTuple):
    """State of a transform that is applied one layer at a time.

    Attributes:
      layers: states of the layers; every array, counters included, has a leading axis of layers.
      rest: state of all other parameters.
      pieces: states of large matrices outside the layers, by path, with a leading axis of pieces
        (`actjax.optim.stepping.pieces`).
    """

    layers: Any
    rest: Any
    pieces: dict[str, Any] = {}  # noqa: RUF012


_PLAIN = (
    "differentiate with `jax.value_and_grad`, and use `tx.init`, `tx.update` and"
    " `optax.apply_updates`."
)
"""Advice for a model without stacked layers."""


def layers_of(params: Any) -> Any:
    """Returns the stacked layers of `params`: its attribute or entry `layers`.

    Raises:
      ValueError: it has neither, or it holds one tree for each layer instead of a stack.
    """
    entry = _entry(params)
    if entry is None:
        raise ValueError(
            f"{type(params).__name__} has no `layers`: pass `layers`, a function from the"
            " parameters to the subtree whose arrays have a leading axis of layers. Without such"
            f" arrays {_PLAIN}"
        )
    if _is_list_of_trees(entry):
        raise ValueError(
            f"`layers` of {type(params).__name__} holds {len(entry)} trees, one per layer: stack"
            " them, `jax.tree.map(lambda *x: jnp.stack(x), *layers)`, and run them by lax.scan."
        )
    return entry


def default_layers(params: Any) -> Callable[[Any], Any]:
    """Returns `layers_of`, or a function that returns nothing if `params` has no stacked layers.

    The arrays of `layers` are a stack if they share their leading axis, and are not those of one
    tree for each layer.
    """
    entry = _entry(params)
    lengths = {jnp.shape(x)[:1] for x in jax.tree.leaves(entry)}
    is_stack = len(lengths) == 1 and lengths != {()} and not _is_list_of_trees(entry)
    return layers_of if is_stack else no_layers


def no_layers(params: Any) -> Any:
    """Returns the stacked layers of parameters that have none."""
    del params
    return ()


def _entry(params: Any) -> Any:
    if isinstance(params, Mapping) and "layers" in params:
        return params["layers"]
    return getattr(params, "layers", None)


def _is_list_of_trees(tree: Any) -> bool:
    if isinstance(tree, Mapping):
        # The keys of a list of Flax modules are its indices, or these as text.
        return bool(tree) and all(isinstance(key, int) or key.isdecimal() for key in tree)
    if not isinstance(tree, Sequence) or hasattr(tree, "_fields"):
        return False
    return not jax.tree_util.all_leaves(list(tree))


def split(
    tree: Any, layers: Callable[[Any], Any], leaves: list[Any] | None = None
) -> tuple[Any, Any]:
    """Returns the layers and the rest of a tree of parameters, each with `None` for the other part.

    Args:
      tree: the parameters.
      layers: from the parameters to the subtree of stacked layers.
      leaves: leaves to use instead of those of `tree`, in their order.
    """
    arrays, treedef = jax.tree.flatten(tree)
    leaves = arrays if leaves is None else leaves
    stacked = set(jax.tree.leaves(layers(jax.tree.unflatten(treedef, range(len(leaves))))))
    return (
        jax.tree.unflatten(treedef, [x if i in stacked else None for i, x in enumerate(leaves)]),
        jax.tree.unflatten(treedef, [None if i in stacked else x for i, x in enumerate(leaves)]),
    )


def split_gradient(gradient: Any, params: Any, layers: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Splits a gradient, whose leaves may be `LowRank`, as `split` splits the parameters.

    Raises:
      ValueError: its structure, or the shape of one of its arrays, differs from the parameters.
    """
    leaves, treedef = jax.tree.flatten(gradient, is_leaf=is_low_rank)
    expected = jax.tree.structure(params)
    if treedef != expected:
        raise ValueError(
            f"`grads` must have the structure of `params`: got {treedef}, expected {expected}."
        )
    for (name, weight), g in zip(named_leaves(params).items(), leaves, strict=True):
        shape = g.shape if is_low_rank(g) else jnp.shape(g)
        if shape != jnp.shape(weight):
            raise ValueError(
                f"the gradient of `{name}` in `grads` must have the shape of the parameter,"
                f" {jnp.shape(weight)}, got {shape}."
            )
    return split(params, layers, leaves)


def merge(stacked: Any, rest: Any, params: Any) -> Any:
    """Inverse of `split`, in the structure of `params`."""
    trees = stacked, rest, params
    columns = (jax.tree.leaves(x, is_leaf=lambda y: y is None or is_low_rank(y)) for x in trees)
    # A parameter that is `None`, such as an absent bias, is not a leaf of `params`.
    leaves = [a if b is None else b for a, b, w in zip(*columns, strict=True) if w is not None]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def count_layers(stacked: Any) -> int:
    """Returns the length of the leading axis that all arrays of `stacked` share.

    Raises:
      ValueError: there are no arrays, or their lengths differ.
    """
    lengths = {x.shape[0] if x.ndim else "a scalar's" for x in jax.tree.leaves(stacked)}
    if not lengths:
        raise ValueError(f"`layers` holds no arrays: without stacked layers {_PLAIN}")
    count = next(iter(lengths))
    if len(lengths) != 1 or not isinstance(count, int) or count < 1:
        raise ValueError(
            "the arrays of `layers` must share a leading axis of one or more layers: lengths are"
            f" {', '.join(sorted(map(str, lengths)))}."
        )
    return count


def take(tree: Any, i: jax.typing.ArrayLike, axis: int = 0) -> Any:
    """Returns layer `i` of a tree of stacked arrays. An array in two places is sliced once."""
    # Numbers in the order of the tree, not `id`: the program must be the same in each process, or a
    # compilation cache never finds it.
    numbers: dict[int, int] = {}
    stacks = {numbers.setdefault(id(x), len(numbers)): x for x in jax.tree.leaves(tree)}
    on_host = {name: x for name, x in stacks.items() if is_on_host(x)}
    on_device = {name: x for name, x in stacks.items() if name not in on_host}
    slice_now = functools.partial(_slice, axis=axis)
    slice_apart = functools.partial(_slice_apart, axis=axis)
    slices = jax.lax.platform_dependent(on_device, i, cpu=slice_apart, default=slice_now)
    slices |= slice_now(on_host, i)
    return jax.tree.map(lambda x: slices[numbers[id(x)]], tree)


def _slice(stacks: Any, i: jax.typing.ArrayLike, axis: int) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, axis, keepdims=False), stacks)


def _slice_apart(stacks: Any, i: jax.Array, axis: int) -> Any:
    """Like `_slice`, in a separate computation, so that no slice is fused into its readers.

    Otherwise XLA for CPUs reads the stack once for each reader, some of them after `put` has
    written the layer, and copies the whole stack for every layer to preserve what they read.
    """
    shapes = jax.eval_shape(lambda x: _slice(x, 0, axis), stacks)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.cond(i >= 0, lambda: _slice(stacks, i, axis), lambda: zeros)


def put(tree: Any, layer: Any, i: jax.typing.ArrayLike, axis: int = 0) -> Any:
    """Returns a tree of stacked arrays with layer `i` replaced; in place in a loop under jit."""

    def write(stack: jax.Array, y: jax.Array) -> jax.Array:
        # Converted on the device, then moved to where the stack is.
        y = y.astype(stack.dtype)
        y = jax.device_put(y, jax.memory.Space.Host) if is_on_host(stack) else y
        written = jax.lax.dynamic_update_index_in_dim(stack, y, i, axis)
        # XLA's partitioner replicates the operand of a layout constraint: each device would gather
        # each stack whole, once for each layer. On one device it avoids copies of the stacks.
        return written if is_partitioned(stack) else row_major(written)

    return jax.tree.map(write, tree, layer)


def densify(gradient: Any) -> Any:
    """Returns a gradient with every `LowRank` multiplied out."""
    return jax.tree.map(
        lambda g: g.dense() if isinstance(g, LowRank) else g, gradient, is_leaf=is_low_rank
    )
