"""Meshes of devices, and how the arrays of a training state are divided over them."""

import math
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import actjax
from actjax.optim.states.stored import is_code
from models.sharding import (
    AXES,
    BATCH,
    RULES,
    WEIGHTS,
    Entry,
    Rules,
    axes_of,
    head_repeats,
    rule_of,
)
from train.settings.resolve import ResolvedConfig

_THREADS = 4
"""Collectives of one simulated device that can be under way at once, each on a thread."""


def allow_simulated_devices() -> None:
    """Gives simulated devices enough threads. To be called before JAX uses a device.

    A collective keeps its thread until the other devices come, and XLA starts independent ones at
    once, in an order that differs. With a thread for each device they can wait for ever.
    """
    flag = r"--xla_force_host_platform_device_count=(\d+)"
    if counts := re.findall(flag, os.environ.get("XLA_FLAGS", "")):
        os.environ.setdefault("NPROC", str(_THREADS * int(counts[-1])))


def make_mesh(text: str) -> Mesh:
    """Returns the mesh of a description such as "fsdp=4".

    An empty description means one device, or `fsdp` over all devices of several processes.

    Raises:
      ValueError: a malformed description, an unknown axis, more devices than there are, or fewer
        than those of all processes.
    """
    devices, processes = jax.devices(), jax.process_count()
    sizes = mesh_sizes(text if text or processes == 1 else f"fsdp={len(devices)}")
    count = math.prod(sizes.values())
    if count > len(devices):
        simulated = (
            " To simulate them on a CPU, set"
            f" XLA_FLAGS=--xla_force_host_platform_device_count={count}."
        )
        raise ValueError(
            f"`--mesh` {text!r} asks for {count} devices, but there are {len(devices)}"
            f" ({devices[0].platform})."
            + (simulated if processes == 1 else f" They are those of {processes} processes.")
        )
    if processes > 1 and count < len(devices):
        raise ValueError(
            f"`--mesh` {text!r} has {count} of the {len(devices)} devices of {processes} processes:"
            f" name all, for example fsdp={len(devices)}, or start fewer processes."
        )
    return mesh_of(sizes, devices[:count])


def mesh_of(sizes: dict[str, int], devices: Any) -> Mesh:
    """Returns the mesh of some devices, with all axes. The last axes join neighbors."""
    return Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes))


def mesh_sizes(text: str) -> dict[str, int]:
    """Returns the size of every axis of a description such as "fsdp=4,tensor=2".

    Raises:
      ValueError: a malformed description, an unknown axis, or one that is named twice.
    """
    if text.strip() and not text.strip(" ,"):
        raise ValueError(f"`--mesh` {text!r} names no axis: for example fsdp=4.")
    sizes: dict[str, int] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        axis, _, size = part.partition("=")
        if axis not in AXES or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"`--mesh` {text!r}: {part!r} is not AXIS=SIZE with axis {', '.join(AXES)} and a"
                " size of at least 1, for example fsdp=4."
            )
        if axis in sizes:
            raise ValueError(f"`--mesh` {text!r} names {axis} twice: give each axis once.")
        sizes[axis] = int(size)
    return {axis: sizes.get(axis, 1) for axis in AXES}


def check_sizes(config: ResolvedConfig, mesh: Mesh) -> None:
    """Raises a `ValueError` unless batches, sequences and heads divide over the devices."""
    rows, groups = config.batch_size // config.accumulate, mesh.shape["data"] * mesh.shape["fsdp"]
    if rows % groups:
        shown = ",".join(f"{axis}={n}" for axis, n in mesh.shape.items() if n > 1)
        raise ValueError(
            f"{rows} sequences of a micro-batch (`--batch-size` {config.batch_size} /"
            f" `--accumulate` {config.accumulate}) do not divide over the {groups} parts of"
            f" `--mesh` {shown}: make `--batch-size` a multiple of"
            f" {groups * config.accumulate}, or choose another mesh."
        )
    tensor, seq = mesh.shape["tensor"], mesh.shape["seq"]
    model = config.model_config
    if model.num_kv_heads % tensor:
        raise ValueError(
            f"`--mesh` tensor={tensor} does not divide the {model.num_kv_heads} heads of keys and"
            f" values of {config.title}: choose a divisor."
        )
    repeated = model.num_kv_heads * head_repeats(model.num_kv_heads, tensor * seq)
    if model.num_heads % repeated:
        raise ValueError(
            f"`--mesh` tensor={tensor},seq={seq} does not divide the {model.num_heads} heads of"
            f" {config.title} over the {tensor * seq} devices that share a sequence: choose"
            " divisors of the heads."
        )
    if config.seq_len % (tensor * seq):
        raise ValueError(
            f"`--seq-len` {config.seq_len} does not divide over the {tensor * seq} devices of"
            f" `--mesh` tensor={tensor},seq={seq} that share a sequence: make it a multiple."
        )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch [B, S] over its sequences, and each sequence over `seq`."""
    return NamedSharding(mesh, PartitionSpec(_present(BATCH, mesh), _present("seq", mesh)))


def rows_of_process(mesh: Mesh, batch_size: int) -> tuple[int, int]:
    """Returns which part of the sequences of a batch this process reads, of how many equal parts.

    Processes that divide sequences or layers among them, by `seq` or `tensor`, read the same part.

    Raises:
      ValueError: the sequences of a process do not follow each other.
    """
    parts: dict[int, set[tuple[int, int]]] = {}
    indices = batch_sharding(mesh).devices_indices_map((batch_size, mesh.shape["seq"]))
    for device, index in indices.items():
        parts.setdefault(device.process_index, set()).add(index[0].indices(batch_size)[:2])
    ranges = {process: (min(rows)[0], max(rows)[1]) for process, rows in parts.items()}
    distinct = sorted(set(ranges.values()))
    if [start for start, _ in distinct] != [0, *(stop for _, stop in distinct[:-1])]:
        raise ValueError(
            f"`--mesh`: the processes read sequences {distinct} of a batch of {batch_size}, which"
            " overlap. Make `tensor` times `seq` a divisor or a multiple of the devices of a"
            " process."
        )
    return distinct.index(ranges[jax.process_index()]), len(distinct)


def state_shardings(state: Any, mesh: Mesh, rules: Rules = RULES) -> Any:
    """Returns a sharding for each array of a training state (or of its shapes).

    Weights are divided as `rules` say, and so are optimizer states, whose paths contain those of
    the weights. An array that no rule places on `WEIGHTS` is divided over them along the first axis
    of a size that is a multiple, but not along that of stacked layers: every device needs a part of
    each layer. Arrays without such an axis, such as scalars, are replicated.

    Args:
      state: arrays or shapes.
      mesh: the devices.
      rules: how weights are divided.
    """

    def sharding(path: tuple, leaf: Any) -> Any:
        names = [str(getattr(key, "name", getattr(key, "key", ""))) for key in path]
        rule, stacked = rule_of(".".join(names), rules), bool({"layers", "pieces"} & set(names))
        if not is_code(leaf):
            return NamedSharding(mesh, _spec(leaf.shape, rule, mesh, stacked))
        # Codes and scales are divided alike, and no block crosses devices.
        spec = _spec(leaf.shape_of_blocks, rule, mesh, stacked)

        def place(x: Any) -> NamedSharding:
            # An axis of one scale for all is on every device.
            pairs = zip(spec, x.shape, strict=False)
            return NamedSharding(
                mesh, PartitionSpec(*(a if size > 1 else None for a, size in pairs))
            )

        return jax.tree.map(place, leaf)

    return jax.tree_util.tree_map_with_path(sharding, state, is_leaf=is_code)


def formats_of(tree: Any) -> Any:
    """Returns how a program should take and return arrays: their shardings, and on TPUs a layout.

    A TPU would order the axes of a stack of odd matrices so that little of a tile is empty, for
    example with layers and rows last for 5461 columns, and copy whole stacks to compute with them.

    Args:
      tree: arrays, or shapes with shardings.
    """

    def format_of(x: Any) -> Any:
        if x.sharding is None or not _prefers_row_major(x.sharding):
            return x.sharding
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        # Rows of a few scales would take 128 lanes each.
        if is_key or x.ndim < 2 or x.shape[-1] < _LANES:
            return x.sharding
        return Format(Layout(tuple(range(x.ndim))), x.sharding)

    return jax.tree.map(format_of, tree)


_LANES = 128


def _prefers_row_major(sharding: Any) -> bool:
    if isinstance(sharding.mesh, AbstractMesh):  # Of states on the host.
        return False
    return sharding.mesh.devices.flat[0].platform == "tpu"


def with_sharding(x: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    """Returns a shape with a sharding or a format."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def moments_on_host(optimizer: Any) -> Any:
    """Returns the shapes of an optimizer state with moments in the memory of the host.

    Raises:
      ValueError: the device has no such memory.
    """
    here = SingleDeviceSharding(jax.devices()[0])
    placed = jax.tree.map(lambda x: with_sharding(x, here) if x.sharding is None else x, optimizer)
    try:
        return actjax.optim.to_host(placed)
    except ValueError as error:
        raise ValueError(f"`--offload-states`: {error}") from error


def reformatted(tree: Any) -> Any:
    """Returns arrays as `formats_of` says; deletes those that are not."""
    formats = formats_of(tree)
    if not any(isinstance(x, Format) for x in jax.tree.leaves(formats)):
        return tree
    return jax.jit(lambda tree: tree, donate_argnums=0, out_shardings=formats)(tree)


def _spec(shape: tuple[int, ...], rule: tuple[Entry, ...], mesh: Mesh, stacked: bool) -> Any:
    """Returns how an array is divided by a rule, as far as its axes can be divided.

    Mesh axes that do not divide the axis of the rule divide another, and so do `WEIGHTS` without a
    rule.
    """
    entries: list[tuple[str, ...]] = [()] * len(shape)
    first = int(stacked)
    for i, entry in zip(reversed(range(first, len(shape))), reversed(rule), strict=False):
        entries[i] = _dividing(shape[i], axes_of(entry), mesh)
    wanted = dict.fromkeys((*(axis for entry in rule for axis in axes_of(entry)), *WEIGHTS))
    placed = {axis for entry in entries for axis in entry}
    left = tuple(a for a in wanted if mesh.shape.get(a, 1) > 1 and a not in placed)
    for axes in (left, tuple(a for a in left if a in WEIGHTS)):
        # An axis that nothing divides, or else one that other axes divide already.
        with_axes = [(*entry, *axes) for entry in entries]
        possible = [
            i
            for i in range(first, len(shape))
            if axes and _dividing(shape[i], with_axes[i], mesh) == with_axes[i]
        ]
        if possible:
            i = next((i for i in possible if not entries[i]), possible[0])
            entries[i] = with_axes[i]
            break
    while entries and not entries[-1]:
        entries.pop()
    return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))


def _dividing(size: int, axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...]:
    """Returns the axes whose product divides a size, without axes of one device."""
    dividing: tuple[str, ...] = ()
    for axis in axes:
        count = math.prod(mesh.shape[a] for a in (*dividing, axis))
        if mesh.shape.get(axis, 1) > 1 and size % count == 0:
            dividing += (axis,)
    return dividing


def _present(entry: Entry, mesh: Mesh) -> Any:
    axes = tuple(axis for axis in axes_of(entry) if mesh.shape.get(axis, 1) > 1)
    return axes[0] if len(axes) == 1 else axes or None


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """Returns options for compiling a step for a mesh.

    GPUs gather a layer's weights ahead. Gradients of weights are not scattered together, or they
    would all exist at once, in float32: 0.13 GiB of `lean` for `llama_7b` on 8 devices.
    """
    if mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return {}
    if mesh.size == 1:
        return product_options()
    return {
        "xla_gpu_enable_pipelined_all_gather": True,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**20,
        **product_options(),
    }


def product_options() -> dict[str, Any]:
    """Returns options for matrix products on a GPU; none that `XLA_FLAGS` names.

    XLA would choose between cuBLAS and products that it writes in Triton, which are slow where rows
    of 16-bit numbers do not begin at multiples of 16 bytes, and choosing takes minutes: a step of
    `llama_1b` without codes takes 259 ms in Triton on an H200 and 171 with cuBLAS, 5461 wide; and
    166 and 163, 5504 wide (`benchmarks/results/gpu_queue.json`).

    It would also join small products that share an operand, and copy operands together and results
    apart: 13 GB in a step of `lean_subspace` for `llama_1b`, 6 in one of `lora`.
    """
    options = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
    given = os.environ.get("XLA_FLAGS", "")
    return {flag: value for flag, value in options.items() if flag not in given}
