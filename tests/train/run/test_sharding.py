"""Meshes and shardings."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiny import decoder

from actjax._shards import Dims, on_shards
from actjax.formats.blockwise import blockwise_zeros
from models.sharding import RULES
from train.run import sharding
from train.run.program import run_program
from train.run.sharding import (
    allow_simulated_devices,
    formats_of,
    make_mesh,
    reformatted,
    state_shardings,
)

SHAPES = {"scalar": (), "odd": (3, 5), "tall": (12, 4), "wide": (6, 16), "both": (8, 16)}


def specs_of(tree, mesh, **options):
    """Returns the specification of each array by path."""
    shardings = state_shardings(tree, make_mesh(mesh), **options)
    leaves, _ = jax.tree_util.tree_flatten_with_path(shardings)
    return {jax.tree_util.keystr(path, simple=True, separator="."): s.spec for path, s in leaves}


def test_an_array_without_a_rule_is_divided_along_its_first_axis_that_can_be():
    arrays = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in SHAPES.items()}
    assert specs_of(arrays, "fsdp=4") == {
        "scalar": P(), "odd": P(), "tall": P("fsdp"), "wide": P(None, "fsdp"), "both": P("fsdp"),
    }  # fmt: skip


def test_weights_are_divided_by_the_table():
    specs = specs_of(decoder(), "fsdp=2,tensor=2")
    assert specs["layers.attention.q.value"] == P(None, "fsdp", "tensor")
    assert specs["layers.attention.o.value"] == P(None, ("tensor", "fsdp"))
    assert specs["embedding.value"] == P(None, ("tensor", "fsdp"))
    # The vocabulary of 61 cannot be divided, and the axis of stacked layers never is.
    assert specs["output.value"] == P(("tensor", "fsdp"))
    assert specs["layers.mlp_norm.value"] == P(None, "fsdp")


def test_a_user_may_replace_the_table():
    rules = ((r"\bq\b", (None, "fsdp")), *RULES)
    specs = specs_of(decoder(), "fsdp=2", rules=rules)
    assert specs["layers.attention.q.value"] == P(None, None, "fsdp")


def test_no_block_of_an_eight_bit_array_crosses_devices():
    cut = blockwise_zeros((8, 512), "float32", unsigned=False)
    straddling = blockwise_zeros((6, 512), "float32", unsigned=False)
    tree = {"embedding": cut, "output": straddling}
    specs = specs_of(tree, "fsdp=4")
    # The table divides the features of the embedding, of which a device would have half a block.
    assert specs["embedding.codes"] == specs["embedding.scales"] == P("fsdp")
    assert specs["output.codes"] == specs["output.scales"] == P()
    assert specs_of(tree, "fsdp=2")["embedding.codes"] == P(None, "fsdp")


def test_one_device_shards_nothing():
    assert set(jax.tree.leaves(state_shardings(decoder(), make_mesh("")))) == {
        jax.sharding.NamedSharding(make_mesh(""), P())
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fsdp", "`--mesh` 'fsdp': 'fsdp' is not AXIS=SIZE"),
        (" ,", "`--mesh` ' ,' names no axis"),
        ("fsdp=0", "'fsdp=0' is not AXIS=SIZE"),
        ("rows=2", "'rows=2' is not AXIS=SIZE with axis data, fsdp, tensor, seq"),
        ("fsdp=2,fsdp=2", "names fsdp twice"),
        ("fsdp=64", r"asks for 64 devices, but there are \d+ .*host_platform_device_count=64"),
    ],
)
def test_a_malformed_mesh_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(text)


@pytest.mark.parametrize(
    ("flags", "given", "expected"),
    [
        ("--xla_force_host_platform_device_count=8", None, "32"),
        ("--xla_force_host_platform_device_count=8", "5", "5"),
        ("--xla_other=1", None, None),
    ],
)
def test_simulated_devices_get_threads_to_wait_in(monkeypatch, flags, given, expected):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.delenv("NPROC", raising=False)
    if given:
        monkeypatch.setenv("NPROC", given)
    allow_simulated_devices()
    assert os.environ.get("NPROC") == expected


def test_options_of_products_leave_those_of_the_user(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    chosen = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
    assert sharding.product_options() == chosen
    assert sharding.compiler_options(sharding.make_mesh("")) == {}  # No GPU.
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
    del chosen["xla_gpu_enable_triton_gemm"]
    assert sharding.product_options() == chosen


def test_functions_on_shards_are_not_confused_in_the_compilation_cache():
    # Their bodies are not in the module that JAX hashes, but for an address. An option of JAX takes
    # the address out of the hash too.
    mesh, rows = make_mesh("fsdp=2"), Dims(("rows", None))
    x = jax.device_put(np.ones((8, 128), np.float32), NamedSharding(mesh, P("fsdp")))
    results = []

    def compute() -> None:
        for function in (jnp.sin, jnp.cos):
            with jax.set_mesh(mesh):
                on_parts = jax.jit(lambda x: on_shards(function, (x,), (rows,), rows))
                results.append(on_parts(x))

    run_program(compute)
    for result, want in zip(results, (np.sin(1), np.cos(1)), strict=True):
        np.testing.assert_allclose(result, want, rtol=1e-6)


def test_a_device_that_prefers_row_major_arrays_gets_them(monkeypatch):
    monkeypatch.setattr(sharding, "_prefers_row_major", lambda _: True)
    place = NamedSharding(make_mesh("fsdp=2"), P("fsdp"))
    shapes = {"matrix": (4, 128), "scales": (4, 6), "vector": (4,)}
    tree = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    tree = jax.device_put(tree, place)
    formats = formats_of(tree)
    assert formats["vector"] == formats["scales"] == place
    assert formats["matrix"].layout == Layout((0, 1))
    columns = jax.device_put(tree["matrix"], Format(Layout((1, 0)), place))
    again = reformatted({"matrix": columns})["matrix"]
    assert again.format.layout.major_to_minor == (0, 1)
    assert again.sharding == place
