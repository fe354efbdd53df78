"""GPUs that are not there."""

import importlib.util
import re
import types

import jax
import jax.numpy as jnp
import pytest

from actjax import _gpu as gpu
from actjax.kernels import dispatch
from actjax.ops.attention import _function_of
from actjax.ops.attention_implementations import IMPLEMENTATIONS
from train.planning import devices
from train.planning.devices import (
    DEVICES,
    GPUS,
    HERE,
    TPUS,
    check_dtype,
    compile_for,
    find_device,
)


def test_descriptions_have_the_properties_of_the_devices():
    for name, device in GPUS.items():
        text = GPUS[name].describe()
        assert f"device_memory_size: {device.memory}" in text
        assert f"core_count: {device.cores}" in text
        assert text.count("{") == text.count("}")
    assert "shared_memory_per_block_optin: 65536" in GPUS["t4"].describe()
    assert find_device(HERE) is None
    assert {23, 39, 79} <= {device.memory >> 30 for device in GPUS.values()}


def test_unknown_devices_and_topologies_are_refused():
    for call, message in (
        (lambda: find_device("h1000"),
         "unknown device 'h1000'. There are: here, b200, h100,"),
        (lambda: check_dtype("t4", "bfloat16"),
         "`--device t4` has no matrix products of bfloat16: pass `--compute-dtype float16` or"),
        (lambda: TPUS["v5e"].topology(6), "chips come in powers of two, and `--mesh` has 6"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def test_products_of_float16_are_for_every_device():
    for name in (HERE, *DEVICES):
        check_dtype(name, "float16")
    assert [name for name, gpu in GPUS.items() if not gpu.has_bfloat16] == ["t4"]


def test_a_gpu_before_ampere_gets_neither_cudnn_nor_triton():
    dtype = jnp.dtype("float16")
    for name, attention, reason in (
        ("t4", "blockwise", "needs an NVIDIA GPU from Ampere on"),
        ("h100", "cudnn", ""),
    ):
        with devices._tracing_on(GPUS[name]):
            assert _function_of(None, dtype) is IMPLEMENTATIONS[attention]
            assert (dispatch._lacks("triton") or "").startswith(reason)


@pytest.mark.parametrize(
    ("text", "capability"), [("7.5", (7, 5)), ("12.0", (12, 0)), ("gfx90a", None), (None, None)]
)
def test_the_compute_capability_is_that_of_the_first_gpu(text, capability, monkeypatch):
    assert gpu.compute_capability() is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    device = (
        types.SimpleNamespace() if text is None else types.SimpleNamespace(compute_capability=text)
    )
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert gpu.compute_capability() == capability
    assert gpu.is_before_ampere() == (capability == (7, 5))


def test_topologies_of_tpus_are_near_to_cubes():
    names = {name: [TPUS[name].topology(n) for n in (1, 2, 8, 64)] for name in ("v5e", "v5p")}
    assert names["v5e"] == ["v5e:1x1", "v5e:1x2", "v5e:2x4", "v5e:8x8"]
    assert names["v5p"] == ["v5p:1x1x1", "v5p:1x1x2", "v5p:2x2x2", "v5p:4x4x4"]


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs the extra tpu")
@pytest.mark.parametrize("name", TPUS)
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_a_topology_has_the_chips_that_are_asked_for(name, count):
    assert len(devices._tpus(TPUS[name], count).devices) == count


def test_this_machine_needs_no_description():
    with compile_for(None) as place:
        assert place({"a": 1}) == {"a": 1}


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is not None, reason="the compiler is installed"
)
def test_a_missing_compiler_is_named():
    with (
        pytest.raises(ValueError, match=re.escape("pip install 'jax[cuda12]'")),
        compile_for(find_device("h100")),
    ):
        pass


def test_a_compiler_that_jax_dropped_is_named(monkeypatch):
    def dropped(**settings):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(devices.topologies, "get_topology_desc", dropped)
    with (
        pytest.raises(ValueError, match="JAX_PLATFORMS=cpu before the program starts"),
        compile_for(find_device("h100")),
    ):
        pass


def test_the_replaced_functions_of_jax_exist_and_a_missing_one_is_named(monkeypatch):
    with devices._tracing_on(GPUS["h100"]):
        assert jax.default_backend() == "gpu"
    assert jax.default_backend() != "gpu"
    with devices._tracing_on(TPUS["v5e"]):
        assert jax.default_backend() == "tpu"
    monkeypatch.setattr(devices, "_REPLACED", (("jax", "no_such_function", None),))
    message = re.escape(f"JAX {jax.__version__} has no `jax.no_such_function`")
    with pytest.raises(RuntimeError, match=message), devices._tracing_on(GPUS["h100"]):
        pass
