"""Functions that each device computes on its own part of the arrays.

XLA partitions a program over devices one operation at a time. It cannot see into a kernel, and it
cuts a loop over chunks of tokens so that each chunk crosses devices. Such a function says here
which axes may be split, and XLA calls it with the parts that a device holds.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import (
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from actjax._explicit import explicit_spec


@dataclasses.dataclass(frozen=True)
class Dims:
    """Names of the axes of an array. Axes of one name are split alike.

    They may differ in size, such as the features of an activation and its scales, one for each 32
    features: then each size must be a multiple of the next smaller one.

    Attributes:
      names: of the axes; None for an axis that every device needs whole.
      summed: whether each part gives one term of the result, so that the terms are added up.
    """

    names: tuple[str | None, ...]
    summed: bool = False

    @classmethod
    def whole(cls, x: Any) -> "Dims":
        """Returns the names of an array that every device needs whole."""
        return cls((None,) * x.ndim)


@dataclasses.dataclass(frozen=True)
class Sum:
    """A summed result.

    Attributes:
      value: of this device.
      finish: applied after the sums of all devices are added up.
    """

    value: jax.Array
    finish: Callable[[jax.Array], jax.Array]

    def whole(self) -> jax.Array:
        """Returns the result on one device."""
        return self.finish(self.value)


@dataclasses.dataclass(frozen=True)
class InPieces:
    """A summed result that is computed some rows at a time, and never whole on any device.

    Attributes:
      of: from the numbers of rows, [m], to these rows, [m, ...].
      rows: number of rows.
      finish: applied to rows after the sums of all devices are added up.
      pieces: number of pieces, if it divides the rows of each device.
    """

    of: Callable[[jax.Array], jax.Array]
    rows: int
    finish: Callable[[jax.Array], jax.Array]
    pieces: int

    def whole(self) -> jax.Array:
        """Returns all rows, on one device."""
        return self.add_up(1, lambda x: x)

    def add_up(self, count: int, add: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Returns the rows of this device, of which each device has one of `count` equal parts.

        Args:
          count: number of parts of the rows.
          add: from rows of all parts, part after part, to the sums of the rows of this device.
        """
        local_rows = self.rows // count
        size = math.gcd(local_rows, -(-local_rows // self.pieces))
        first = np.arange(count)[:, None] * local_rows + np.arange(size)

        def piece(k: jax.Array) -> jax.Array:
            return self.finish(add(self.of(jnp.asarray(first).reshape(-1) + k * size)))

        pieces = jax.lax.map(piece, jnp.arange(local_rows // size))
        return pieces.reshape(-1, *pieces.shape[2:])


def is_partitioned(args: Any) -> bool:
    """Returns whether XLA, and not the program, distributes arrays over devices.

    A mesh is visible here if an array was placed on it before the call, or if `jax.set_mesh` set
    it. A mesh that is named only in `in_shardings` of `jax.jit` is not visible.
    """
    return any(kind != AxisType.Manual for kind in _kinds(args))


def _kinds(args: Any) -> set[AxisType]:
    """Returns the kinds of the mesh axes of several devices."""
    return {
        kind
        for mesh in _meshes(args)
        for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
        if size > 1
    }


def _meshes(args: Any) -> list[AbstractMesh]:
    """Returns the mesh that is set, and the meshes of arrays."""
    shardings = (getattr(jax.typeof(x), "sharding", None) for x in jax.tree.leaves(args))
    meshes = [jax.sharding.get_abstract_mesh(), *(s.mesh for s in shardings if s is not None)]
    return [mesh for mesh in meshes if not mesh.empty]


def can_split(args: Any) -> bool:
    """Returns whether `on_shards` computes on parts: if XLA distributes over all mesh axes.

    Not on TPUs, whose compiler has no `custom_partitioning`: it partitions whole functions there.
    """
    return _kinds(args) == {AxisType.Auto} and jax.default_backend() != "tpu"


def gathered(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Returns an array that every device has whole along some axes.

    The others stay as they are.
    """
    spec = explicit_spec(x, whole=axes)
    if spec is not None:
        return jax.sharding.reshard(x, spec)
    if _kinds((x,)) != {AxisType.Auto} or jax.sharding.get_abstract_mesh().empty:
        return x
    entries = (None if i in axes else PartitionSpec.UNCONSTRAINED for i in range(x.ndim))
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))


def on_shards(
    function: Callable[..., Any], args: Sequence[Any], inputs: Sequence[Any], outputs: Any
) -> Any:
    """Returns `function(*args)`, computed on the parts of the arrays that each device holds.

    Args:
      function: from pytrees of arrays to a pytree of arrays. It is called with whole arrays and
        with parts. A summed result may be a `Sum` or an `InPieces`.
      args: its arguments.
      inputs: `Dims` of each array in `args`, in its structure.
      outputs: `Dims` of each result, in their structure.

    Where XLA does not distribute over all mesh axes, `function` is called with whole arrays.
    """
    if not can_split(args):
        return jax.tree.map(
            _finished, function(*args), is_leaf=lambda x: isinstance(x, Sum | InPieces)
        )
    leaves, treedef = jax.tree.flatten(tuple(args))
    names_in, names_out = treedef.flatten_up_to(tuple(inputs)), jax.tree.leaves(outputs)

    def flat(*leaves: jax.Array) -> tuple[Any, ...]:
        return tuple(jax.tree.leaves(function(*jax.tree.unflatten(treedef, leaves))))

    results = _split(flat, names_in, names_out, leaves)(*leaves)
    return jax.tree.unflatten(jax.tree.structure(outputs), results)


def _split(
    flat: Callable[..., tuple[Any, ...]],
    inputs: Sequence[Dims],
    outputs: Sequence[Dims],
    leaves: Sequence[jax.Array],
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the function with a rule for XLA's partitioner."""
    traced = jax.make_jaxpr(functools.partial(_unsplit, flat))(*leaves)
    arrays = [*zip(inputs, leaves, strict=True), *zip(outputs, traced.out_avals, strict=True)]
    sizes = _sizes(arrays)
    # `custom_partitioning` takes no function with constants.
    constants = traced.consts

    def unsplit(*args: jax.Array) -> tuple[jax.Array, ...]:
        leaf_args, constant_args = args[: len(leaves)], list(args[len(leaves) :])
        return tuple(core.jaxpr_as_fun(core.ClosedJaxpr(traced.jaxpr, constant_args))(*leaf_args))

    apart = custom_partitioning(unsplit)
    inputs = [*inputs, *(Dims((None,) * np.ndim(x)) for x in constants)]
    args = [*leaves, *constants]
    apart.def_partition(
        partition=functools.partial(
            _partition, flat, len(leaves), inputs, outputs, sizes, _meshes(leaves)[0]
        ),
        # JAX cannot decode a sharding over part of a mesh axis. `_entries` can.
        decode_shardings=False,
        sharding_rule=_rule(inputs, outputs, args, traced.out_avals, sizes),
    )
    # JAX has no rule for the axis of a `vmap` here: XLA then partitions the function as it can.
    split = jax.custom_batching.custom_vmap(lambda *leaves: tuple(apart(*leaves, *constants)))
    split.def_vmap(functools.partial(_batched, functools.partial(_unsplit, flat)))
    return split


def _unsplit(flat: Callable[..., tuple[Any, ...]], *leaves: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(map(_finished, flat(*leaves)))


def _finished(x: Any) -> jax.Array:
    return x.whole() if isinstance(x, Sum | InPieces) else x


def _batched(flat: Callable, size: int, batched: Sequence[bool], *leaves: jax.Array) -> Any:
    in_axes = tuple(0 if is_batched else None for is_batched in batched)
    result = jax.vmap(flat, in_axes, axis_size=size)(*leaves)
    return result, (True,) * len(result)


def _is_split(name: str | None, sizes: Mapping[str, tuple[int, ...]]) -> TypeGuard[str]:
    return name in sizes


def _sizes(arrays: Iterable[tuple[Dims, Any]]) -> dict[str, tuple[int, ...]]:
    """Returns the sizes of each axis, the largest first, without axes that cannot be split."""
    sizes_of: dict[str, set[int]] = {}
    for dims, x in arrays:
        for name, size in zip(dims.names, x.shape, strict=True):
            if name is not None:
                sizes_of.setdefault(name, set()).add(size)
    sizes = {name: tuple(sorted(of_name, reverse=True)) for name, of_name in sizes_of.items()}
    return {
        name: chain
        for name, chain in sizes.items()
        if chain[-1] > 1 and not any(a % b for a, b in itertools.pairwise(chain))
    }


def _rule(inputs, outputs, args, results, sizes: Mapping[str, tuple[int, ...]]) -> SdyShardingRule:
    """Returns the rule by which XLA propagates shardings through the function."""
    factors: dict[str, int] = {}
    unsplit = itertools.count()

    def factor_of(name: str | None, size: int) -> Any:
        if not _is_split(name, sizes):
            return f"whole{next(unsplit)}"
        # Axes of 64 features and of 2 groups of these are 2 * 32 and 2: they share a factor.
        chain = sizes[name][::-1]
        used = [f"{name}_{i}" for i in range(chain.index(size) + 1)]
        factors.update({used[i]: chain[i] // chain[i - 1] for i in range(1, len(used))})
        return used[0] if len(used) == 1 else CompoundFactor(*used)

    def mapping(dims: Dims, x: Any) -> Any:
        return tuple(map(factor_of, dims.names, np.shape(x)))

    mappings = tuple(map(mapping, inputs, args)), tuple(map(mapping, outputs, results))
    factor_sizes: Any = factors
    return SdyShardingRule(*mappings, **factor_sizes)


def _partition(
    flat, count, inputs, outputs, sizes, traced_mesh, mesh, arg_shapes, result_shapes
) -> Any:
    """Returns the function of the parts, and how arguments and results are split.

    Arguments after the first `count` are constants, which `flat` has already.
    """
    suggested = [*arg_shapes, *result_shapes]
    if mesh.empty:
        # JAX names no mesh if all arguments of the program are on one device.
        devices = list(suggested[0].sharding.devices_indices_map(suggested[0].shape))
        devices = np.array(devices).reshape(traced_mesh.axis_sizes)
        mesh = Mesh(devices, traced_mesh.axis_names, axis_types=traced_mesh.axis_types)
    axes = _axes_of_names((*inputs, *outputs), suggested, sizes, mesh)
    sums = [_sum_over(dims, axes, x, mesh) for dims, x in zip(outputs, result_shapes, strict=True)]

    def of_parts(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(add(x) for (add, _), x in zip(sums, flat(*leaves[:count]), strict=True))

    def sharding(dims: Dims) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(axes.get(name) or None for name in dims.names)))

    in_shardings = tuple(map(sharding, inputs))
    out_shardings = tuple(
        sharding(dims) if scattered is None else NamedSharding(mesh, scattered)
        for dims, (_, scattered) in zip(outputs, sums, strict=True)
    )
    return mesh, of_parts, out_shardings, in_shardings


def _axes_of_names(dims, arrays, sizes, mesh) -> dict[str | None, tuple[str, ...]]:
    """Returns the mesh axes that each named axis is split over in the first array that is split."""
    axes: dict[str | None, tuple[str, ...]] = {}
    for names_of, x in zip(dims, arrays, strict=True):
        for name, entry in zip(names_of.names, _entries(x, mesh), strict=True):
            if name not in sizes or axes.get(name):
                continue
            used = set(itertools.chain(*axes.values()))
            free_axes = [axis for axis in entry if axis not in used]
            while free_axes and sizes[name][-1] % math.prod(mesh.shape[axis] for axis in free_axes):
                free_axes.pop()
            axes[name] = tuple(free_axes)
    return axes


def _entries(x: Any, mesh: Mesh) -> list[tuple[str, ...]]:
    """Returns the mesh axes that each axis of an array is split over.

    None for an axis that is split unevenly, or over a part of a mesh axis.
    """
    if x.sharding.is_fully_replicated:
        return [()] * x.ndim
    try:
        indices = x.sharding.devices_indices_map(x.shape)
    except ValueError:  # An uneven split.
        return [()] * x.ndim
    return [_axes_of([indices[d][i].start or 0 for d in mesh.devices.flat], mesh)
            for i in range(x.ndim)]  # fmt: skip


def _axes_of(starts: list[int], mesh: Mesh) -> tuple[str, ...]:
    """Returns the mesh axes along which parts begin elsewhere, the slowest first."""
    places = np.reshape(starts, mesh.devices.shape)
    steps = {}
    for i, axis in enumerate(mesh.axis_names):
        differences = np.diff(places, axis=i)
        if differences.any():
            steps[axis] = int(np.abs(differences).max())
    axes = tuple(sorted(steps, key=lambda axis: -steps[axis]))
    is_whole = len(set(starts)) == math.prod(mesh.shape[axis] for axis in axes)
    return axes if is_whole else ()


def _sum_over(dims: Dims, axes, suggested, mesh) -> tuple[Callable, PartitionSpec | None]:
    """Returns a function that adds up the results of the parts, and how the sum is split.

    A sum that XLA wants split over the same devices is split at once, which moves half the bytes.
    """
    over = tuple(
        dict.fromkeys(a for name, of in axes.items() if name not in dims.names for a in of)
    )
    if not dims.summed or not over:
        return _finished, None
    spec: list[Any] = [axes.get(name) or None for name in dims.names]
    left: list[str] = list(over)
    scatter: tuple[int, tuple[str, ...]] | None = None
    for i, entry in enumerate(_entries(suggested, mesh)):
        taken = tuple(axis for axis in entry if axis in left)
        count = math.prod(mesh.shape[axis] for axis in taken)
        if taken and spec[i] is None and not suggested.shape[i] % count:
            spec[i], scatter = taken, (i, taken)
            left = [axis for axis in left if axis not in taken]
            break

    def add(x: jax.Array) -> jax.Array:
        if scatter is not None:
            x = jax.lax.psum_scatter(x, scatter[1], scatter_dimension=scatter[0], tiled=True)
        return jax.lax.psum(x, tuple(left)) if left else x

    def add_up(x: Any) -> jax.Array:
        if isinstance(x, Sum):
            return x.finish(add(x.value))
        if not isinstance(x, InPieces):
            return add(x)
        if scatter is None or scatter[0] > 0:
            return x.add_up(1, add)
        return x.add_up(math.prod(mesh.shape[axis] for axis in scatter[1]), add)

    return add_up, PartitionSpec(*spec)


def is_bound(args: Any) -> bool:
    """Returns whether arrays are bound to devices in a way that primitives here do not declare.

    Explicit shardings bind arrays. So does a `jax.shard_map` with `check_vma`, in which primitives
    would have to declare how their results vary over devices.
    """
    if is_partitioned(args):
        return not can_split(args)
    context = jax.sharding.get_abstract_mesh()
    kinds = zip(context.axis_names, context.axis_types, strict=True)
    manual = next((name for name, kind in kinds if kind == AxisType.Manual), None)
    if manual is None:
        return False
    # The index varies along the axis; its type says so only if `check_vma` is set.
    index = jax.typeof(jax.lax.axis_index(manual))
    kind = getattr(index, "manual_axis_type", None)
    return bool(kind.varying if kind is not None else getattr(index, "vma", ()))
