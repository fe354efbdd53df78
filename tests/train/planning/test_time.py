"""The prediction of a step's time."""

import pytest

from train.planning.time import (
    ATTENTION_SHARE,
    BANDWIDTH_SHARE,
    KERNEL_SECONDS,
    PRODUCTS_SHARE,
    UNALIGNED_SHARE,
    Speed,
    Work,
    predicted_seconds,
    work_of,
)
from train.planning.traffic import ATTENTION, PRODUCTS, Kernel
from train.run.gpus import GPUS, gpu_of_kind


def kernel(operator, moved=0.0, flops=0.0, is_aligned=True):
    return Kernel(moved, 3, operator, "forward", "k", "f32[1]", flops, is_aligned)


def test_bytes_of_products_and_of_attention_are_not_counted_as_moved():
    kernels = [
        kernel(PRODUCTS, 5.0, 7.0),
        kernel(PRODUCTS, 5.0, 11.0, is_aligned=False),
        kernel(ATTENTION, 5.0, 13.0),
        kernel("actjax_quantize", 17.0),
        kernel("other", 19.0),
    ]
    assert work_of(kernels, bus=2.0) == Work(7.0, 11.0, 13.0, 36.0, 15, 2.0)


def test_each_part_of_the_work_takes_its_share_of_a_peak():
    speed = Speed(flops=100.0, bandwidth=10.0, bus=5.0)
    for work, seconds in (
        (Work(products=100.0), 1 / PRODUCTS_SHARE),
        (Work(unaligned=100.0), 1 / UNALIGNED_SHARE),
        (Work(attention=100.0), 1 / ATTENTION_SHARE),
        (Work(moved=10.0), 1 / BANDWIDTH_SHARE),
        (Work(kernels=2), 2 * KERNEL_SECONDS),
        (Work(bus=10.0), 2.0),
    ):
        assert predicted_seconds(work, speed) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("gpu", "work", "measured"),
    [
        # Compiled from commit b619dc0 for `llama_1b`, 8 x 1024 tokens: exact and lean in cuBLAS,
        # exact with products in Triton on an H200; the last on an H100 too.
        ("h200", Work(62.6e12, 0, 2.9e12, 228.3e9, 4040), 0.1731),
        ("h200", Work(62.6e12, 0, 3.7e12, 298.6e9, 9554), 0.2342),
        ("h200", Work(23.0e12, 39.6e12, 2.9e12, 202.9e9, 3944), 0.2590),
        ("h100", Work(23.0e12, 39.6e12, 2.9e12, 202.9e9, 3944), 0.2875),
    ],
)
def test_predictions_are_within_a_few_percent_of_measured_steps(gpu, work, measured):
    assert predicted_seconds(work, GPUS[gpu]) == pytest.approx(measured, rel=0.07)


def test_a_gpu_is_known_by_the_name_that_jax_gives_it():
    assert gpu_of_kind("NVIDIA H200") is GPUS["h200"]
    assert gpu_of_kind("cpu") is None
