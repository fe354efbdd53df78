"""The division of a decoder over the axes of a mesh of devices: one table, and its applications.

Mesh axes, any of which may be missing:

- `data`: each group of devices has all weights, and its own sequences.
- `fsdp`: devices have a part of each weight and their own sequences. The weights of a layer are
  gathered while it runs.
- `tensor`: devices have some heads and some features of the feed-forward network.
- `seq`: devices have a part of each sequence, and a part of each weight as for `fsdp`. For
  attention they exchange tokens for heads.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

import actjax

AXES = ("data", "fsdp", "tensor", "seq")
"""Names of mesh axes."""

Entry = str | tuple[str, ...] | None
"""Mesh axes that an axis of an array is divided over, the slowest first."""

BATCH: Entry = ("data", "fsdp")
"""Axes that divide the sequences of a batch."""

Rules = Sequence[tuple[str, tuple[Entry, ...]]]
"""Regular expressions that are searched in the path of a parameter, such as `layers.attention.q`,
and the mesh axes of its last axes; the first that matches counts. Axes that do not divide a
dimension are left out."""

WEIGHTS = ("fsdp", "seq")
"""Axes that divide weights and states whose devices compute with whole weights: these are gathered
a layer at a time."""
_BOTH: Entry = ("tensor", *WEIGHTS)
"""`tensor` first: gathering the others then leaves a run of rows or features."""
_FIRST, _LAST = r"\b(q|k|v|gate|up)", r"\b(o|down)"
"""Weights whose outputs, or inputs, are divided by `tensor`."""

RULES: Rules = (
    # Bases of inputs [d, r], factors of adapters [d, r] and [r, n].
    (rf"\bbases\b.*{_FIRST}$", (WEIGHTS, None)),
    (rf"{_FIRST}\.a$", (WEIGHTS, None)),
    (rf"{_FIRST}\.b$", (None, "tensor")),
    (rf"{_LAST}\.b$", (None, WEIGHTS)),
    # Weights in four bits: codes [blocks, 32, n], and scales of all blocks and columns in a row.
    (rf"{_FIRST}\.codes$", (WEIGHTS, None, "tensor")),
    (rf"{_LAST}\.codes$", (_BOTH, None, None)),
    (rf"{_FIRST}\.scales$", (WEIGHTS,)),
    (rf"{_LAST}\.scales$", (_BOTH,)),
    # Rows are divided by `WEIGHTS`, so that no block of an optimizer state in 8 bits, which is part
    # of a row, crosses devices.
    (rf"{_FIRST}\b", (WEIGHTS, "tensor")),
    (rf"{_LAST}\b", (_BOTH, None)),
    (r"\bembedding\b", (None, _BOTH)),
    (r"\boutput\b", (_BOTH, None)),
)
"""The default rules."""


def constrain(x: jax.Array, *spec: Entry) -> jax.Array:
    """Returns an array that XLA divides over the mesh of `jax.set_mesh`; unchanged without one.

    Args:
      x: the array.
      *spec: axes that divide each dimension. Axes that the mesh lacks are left out.
    """
    axes = automatic_axes()
    if not axes:
        return x
    entries = [tuple(a for a in axes_of(entry) if a in axes) or None for entry in spec]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))


def automatic_axes() -> dict[str, int]:
    """Returns the sizes above 1 of the axes of `AXES` that XLA divides arrays over."""
    mesh = jax.sharding.get_abstract_mesh()
    return {
        name: size
        for name, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
        if size > 1 and kind == AxisType.Auto and name in AXES
    }


def axes_of(entry: Entry) -> tuple[str, ...]:
    """Returns the mesh axes of an entry as a tuple."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def rule_of(path: str, rules: Rules = RULES) -> tuple[Entry, ...]:
    """Returns the axes of a parameter's last dimensions; empty if no rule matches."""
    return next((axes for pattern, axes in rules if re.search(pattern, path)), ())


def split_residual(x: jax.Array) -> jax.Array:
    """Divides a residual stream, [B, S, d], over sequences and tokens.

    Weights are divided over some of the same axes. XLA could gather activations instead of weights;
    with this constraint it gathers the weights of one layer at a time.
    """
    return constrain(x, BATCH, ("seq", "tensor"), None)


def split_features(x: Any) -> Any:
    """Divides the output of a linear map, [B, S, n], such as queries, over tokens and features."""
    if isinstance(x, actjax.LowRankSum):
        left = constrain(x.left, BATCH, "seq", None)
        return dataclasses.replace(x, base=split_features(x.base), left=left)
    return constrain(x, BATCH, "seq", "tensor")


def _all_axes() -> set[str]:
    """Returns the names of all mesh axes. A kernel for TPUs must be alone on its device."""
    return set(jax.sharding.get_abstract_mesh().axis_names)


def attend_by_heads(
    attend: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, segments: Any
) -> jax.Array:
    """Returns `attend(q, k, v, segments)`, [B, S, H * D]; each device has some heads, all tokens.

    Keys and values are repeated if they have fewer heads than devices share a sequence.

    Args:
      attend: attention.
      q: [B, S, H, D].
      k: [B, S, G, D].
      v: [B, S, G, D].
      segments: [B, S], or None.
    """
    axes = automatic_axes()
    repeats = head_repeats(k.shape[2], axes.get("tensor", 1) * axes.get("seq", 1))
    if not axes or q.shape[2] % (k.shape[2] * repeats):
        return attend(q, k, v, segments)
    if repeats > 1:
        k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
    if jax.default_backend() == "tpu":
        # XLA cannot divide kernels for TPUs.
        rows, heads = (
            tuple(a for a in axes_of(e) if a in axes) or None for e in (BATCH, ("tensor", "seq"))
        )
        spec, by_row = PartitionSpec(rows, None, heads), PartitionSpec(rows)
        out = jax.shard_map(
            attend,
            in_specs=(spec, spec, spec, None if segments is None else by_row),
            out_specs=spec,
            axis_names=_all_axes(),
            check_vma=False,
        )(q, k, v, segments)
        return split_features(out)
    q, k, v = (constrain(x, BATCH, None, ("tensor", "seq"), None) for x in (q, k, v))
    return split_features(attend(q, k, v, segments))


def head_repeats(heads: int, devices: int) -> int:
    """Returns how often keys and values must be repeated for devices that share a sequence."""
    return devices // math.gcd(heads, devices)


def mean_over_devices(
    loss: Callable[..., jax.Array], hidden: jax.Array, head: jax.Array, *by_token: jax.Array
) -> jax.Array:
    """Returns a weighted mean over tokens; several TPUs add up the means over their own tokens.

    actjax's operators compute on the part of each device themselves, but not on TPUs, whose
    compiler would gather hidden states for each chunk of tokens.

    Args:
      loss: from these arrays to a weighted mean over tokens.
      hidden: [B, S, d], divided over tokens.
      head: [d, V].
      *by_token: targets and their weights, [B, S] each.
    """
    axes = automatic_axes()
    if not axes or jax.default_backend() != "tpu":
        return loss(hidden, head, *by_token)
    rows, tokens = (tuple(a for a in axes_of(e) if a in axes) for e in (BATCH, ("seq", "tensor")))
    spec = PartitionSpec(rows or None, tokens or None)

    def of_device(hidden: jax.Array, head: jax.Array, *by_token: jax.Array) -> jax.Array:
        weight = jnp.sum(by_token[-1], dtype=jnp.float32)
        total = jax.lax.psum(weight, tuple(axes))
        share = loss(hidden, head, *by_token) * weight / jnp.where(total > 0, total, 1)
        return jax.lax.psum(share, tuple(axes))

    specs = (spec, PartitionSpec(), *(spec for _ in by_token))
    mapped = jax.shard_map(
        of_device,
        in_specs=specs,
        out_specs=PartitionSpec(),
        axis_names=_all_axes(),
        check_vma=False,
    )
    return mapped(hidden, head, *by_token)


_FIRST_IN_BACKWARD = r"\bdown\b"


def fetch_first(layer: Any) -> Any:
    """Returns the weights that the backward pass of a layer reads first, gathered; else None.

    For `actjax.optim.in_backward`: while these few weights are read, the others can be gathered.

    Args:
      layer: the parameters of one layer.
    """
    is_divided = any(axis in automatic_axes() for axis in WEIGHTS)

    def fetched(path: tuple, x: jax.Array) -> jax.Array | None:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if not is_divided or not re.search(_FIRST_IN_BACKWARD, name):
            return None
        axes = rule_of(name)
        return constrain(x, *(tuple(a for a in axes_of(e) if a not in WEIGHTS) for e in axes))

    return jax.tree_util.tree_map_with_path(fetched, layer)
