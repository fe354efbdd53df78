"""Bytes that data-parallel devices exchange in a step, read from the compiled program.

`python -m benchmarks.all_reduce` compiles steps for simulated devices, each with a copy of the
weights and a share of the batch, and adds up the sizes of all all-reduced arrays. An all-reduce in
a loop counts once for each iteration. Dense gradients are as large as the weights; factored
gradients are smaller.
"""

import dataclasses
import functools
import os
import pathlib

# Before JAX is imported.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import command, record
from benchmarks.rivals import ON_DEVICE, rival
from benchmarks.tables import print_table
from benchmarks.variants import check_names
from train.planning.collectives import collectives
from train.run.loss import batch_shapes
from train.settings.config import PretrainConfig


@dataclasses.dataclass(frozen=True)
class Config:
    """What to measure."""

    train: PretrainConfig = dataclasses.field(
        default_factory=lambda: PretrainConfig(model="llama_130m", compute_dtype="float32")
    )
    """Model, batch and dtypes. This program sets the method."""
    only: tuple[str, ...] = (
        "plain",
        "exact",
        "low_rank 32",
        "subspace d/4",
        "subspace d/16",
        "random_projection d/4",
    )
    """Rivals to measure, from `benchmarks.rivals`."""
    results: pathlib.Path = record.RESULTS / "all_reduce.json"

    def __post_init__(self) -> None:
        check_names(self.only, ON_DEVICE)


def measure(config: Config) -> list[dict]:
    """Returns one row for each rival."""
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, cut = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    rows = []
    for name in config.only:
        one = rival(name, config.train)
        place = functools.partial(jax.tree.map, lambda x, s: _with_sharding(x, s))
        state = jax.eval_shape(one.init)
        state = place(state, jax.tree.map(lambda _: whole, state))
        batch = batch_shapes(config.train)
        batch = place(batch, jax.tree.map(lambda _: cut, batch))
        step = jax.jit(one.step, donate_argnums=0, out_shardings=(whole, whole))
        with jax.set_mesh(mesh):
            text = step.lower(state, batch).compile().as_text() or ""
        found = [dataclasses.asdict(c) for c in collectives(text)]
        rows.append({"rival": name, "collectives": found})
    return rows


def _with_sharding(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def show(config: Config, rows: list[dict]) -> None:
    """Prints the all-reduced bytes, their part in the loop over layers, and other collectives."""
    train = config.train
    title = f"{train.model}, {train.batch_size} x {train.seq_len} over {len(jax.devices())} devices"
    headers = ("rival", "all-reduced MiB", "/ first", "in the layers", "/ first", "others MiB")
    cells = []
    for row in rows:
        total, first = _all_reduced(row), _all_reduced(rows[0])
        others = sum(c["bytes"] * c["times"] for c in row["collectives"]) - total[0]
        cells.append(
            (
                row["rival"],
                f"{total[0] / 2**20:,.1f}",
                f"{total[0] / first[0]:.3f}",
                f"{total[1] / 2**20:,.1f}",
                f"{total[1] / first[1]:.3f}",
                f"{others / 2**20:,.1f}",
            )
        )
    print_table(title, headers, cells)


def _all_reduced(row: dict) -> tuple[int, int]:
    """Returns all-reduced bytes: all, and those in a loop."""
    found = [c for c in row["collectives"] if c["kind"] == "all-reduce"]
    return (
        sum(c["bytes"] * c["times"] for c in found),
        sum(c["bytes"] * c["times"] for c in found if c["times"] > 1),
    )


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
