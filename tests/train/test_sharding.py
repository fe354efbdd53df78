"""Meshes and shardings."""

import jax
import pytest
from jax.sharding import PartitionSpec as P
from tiny import decoder

from train.sharding import make_mesh, state_shardings

SHAPES = {"scalar": (), "odd": (3, 5), "tall": (12, 4), "wide": (8, 16)}


def test_an_array_is_sharded_along_its_largest_divisible_axis():
    arrays = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in SHAPES.items()}
    specs = {n: s.spec for n, s in state_shardings(arrays, make_mesh("fsdp=4")).items()}
    assert specs == {"scalar": P(), "odd": P(), "tall": P("fsdp"), "wide": P(None, "fsdp")}


def test_the_axis_of_stacked_layers_is_never_sharded():
    layers = state_shardings(decoder(), make_mesh("fsdp=3")).layers
    assert {s.spec for s in jax.tree.leaves(layers.attention.q)} == {P(None, "fsdp")}
    assert {s.spec for s in jax.tree.leaves(layers.mlp_norm)} == {P(None, "fsdp")}


def test_one_device_shards_nothing():
    assert set(jax.tree.leaves(state_shardings(decoder(), make_mesh("")))) == {
        jax.sharding.NamedSharding(make_mesh(""), P())
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fsdp", "`--mesh` 'fsdp': 'fsdp' is not AXIS=SIZE"),
        ("fsdp=0", "'fsdp=0' is not AXIS=SIZE"),
        ("rows=2", "'rows=2' is not AXIS=SIZE with axis fsdp"),
        ("fsdp=64", r"asks for 64 devices, but there are \d+ .*host_platform_device_count=64"),
    ],
)
def test_a_malformed_mesh_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(text)
