"""GPUs that are not there."""

import importlib.util
import re

import jax
import pytest

from train import devices
from train.devices import GPUS, HERE, compile_for, description_of, gpu


def test_descriptions_have_the_properties_of_the_devices():
    for name, device in GPUS.items():
        text = description_of(name)
        assert f"device_memory_size: {device.memory}" in text
        assert f"core_count: {device.cores}" in text
        assert text.count("{") == text.count("}")
    assert description_of(HERE) is None


def test_gpus_have_several_sizes():
    sizes = {device.memory >> 30 for device in GPUS.values()}
    assert {23, 39, 79} <= sizes


def test_an_unknown_device_is_refused_with_the_nearest_name():
    message = "unknown device 'h1000'. Did you mean h100? There are: here, h100,"
    with pytest.raises(ValueError, match=re.escape(message)):
        gpu("h1000")


def test_this_machine_needs_no_description():
    with compile_for(None) as place:
        assert place({"a": 1}) == {"a": 1}


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is not None, reason="the compiler is installed"
)
def test_a_missing_compiler_is_named():
    with (
        pytest.raises(ValueError, match=re.escape("pip install 'jax[cuda12]'")),
        compile_for(description_of("h100")),
    ):
        pass


def test_a_compiler_that_jax_dropped_is_named(monkeypatch):
    def dropped(**settings):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(devices.topologies, "get_topology_desc", dropped)
    with (
        pytest.raises(ValueError, match="JAX_PLATFORMS=cpu before the program starts"),
        compile_for(description_of("h100")),
    ):
        pass


def test_the_replaced_functions_of_jax_exist_and_a_missing_one_is_named(monkeypatch):
    with devices._tracing_as_on_a_gpu():
        assert jax.default_backend() == "gpu"
    assert jax.default_backend() != "gpu"
    monkeypatch.setattr(devices, "_REPLACED", (("jax", "no_such_function", None),))
    message = re.escape(f"JAX {jax.__version__} has no `jax.no_such_function`")
    with pytest.raises(RuntimeError, match=message), devices._tracing_as_on_a_gpu():
        pass
