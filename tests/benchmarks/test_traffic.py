"""The tables of traffic, from rows that are written by hand. Nothing is compiled."""

import pytest

from benchmarks.traffic import PREDICTED, Config, _by_operator, _least, by_operator, table
from benchmarks.training_steps import ON_DEVICE
from train.planning.traffic import PRODUCTS, Kernel
from train.settings.config import PretrainConfig

KERNELS = [
    Kernel(3e9, 4, "linear", "forward", "a", "f32[1]"),
    Kernel(1e9, 2, "linear", "forward", "b", "f32[1]"),
    Kernel(2e9, 1, PRODUCTS, "backward", "c", "f32[1]", 5e12),
]
ROW = {
    "rival": "exact",
    "moved": 4e9,
    "flops": 5e12,
    "kernels": 7.0,
    "by_operator": _by_operator(KERNELS),
    "least": {"forward": 1e9, "update": 5e8},
    "milliseconds": dict.fromkeys(PREDICTED, 12.0),
}


def test_bytes_and_kernels_are_added_by_pass_and_operator():
    assert ROW["by_operator"]["forward"] == {"linear": {"moved": 4e9, "kernels": 6}}
    lines = by_operator([ROW])
    assert lines[0] == {"pass": "forward", "operator": "linear", "exact": "4.0 in 6"}
    assert [line["operator"] for line in lines] == ["linear", PRODUCTS]


def test_products_are_no_traffic_and_the_least_stands_beside_it():
    (line,) = table([ROW])
    assert (line["forward"], line["backward"], line["GB"]) == ("4.0", "0.0", "4.0")
    assert (line["least"], line["TFLOP"], line["h100, ms"]) == ("1.5", "5.0", "12")


@pytest.mark.parametrize("name", ["plain", "jax.checkpoint, full", "exact", "lean", "subspace d/4"])
def test_every_kind_of_step_has_a_least(name):
    config = Config(PretrainConfig(model="llama_3m", weight_dtype="bfloat16"))
    assert name in ON_DEVICE
    least = _least(name, config)
    assert set(least) == {"forward", "backward", "update", "loss"}
    assert all(size > 0 for size in least.values())
    rematerialized = _least("jax.checkpoint, full", config)
    assert rematerialized["backward"] >= _least("plain", config)["backward"]


def test_unknown_steps_and_devices_are_refused():
    with pytest.raises(ValueError, match="unknown \\['none'\\]"):
        Config(only=("none",))
    with pytest.raises(ValueError, match="GPU"):
        Config(device="v5e")
