import importlib.util
import re

import pytest

from train.devices import GPUS, HERE, compile_for, description_of, gpu


def test_a_description_has_what_the_device_has():
    for name, device in GPUS.items():
        text = description_of(name)
        assert f"device_memory_size: {device.memory}" in text
        assert f"core_count: {device.cores}" in text
        assert text.count("{") == text.count("}")
    assert description_of(HERE) is None


def test_cards_of_several_sizes():
    sizes = {device.memory >> 30 for device in GPUS.values()}
    assert {23, 39, 79} <= sizes


def test_an_unknown_device_gets_the_nearest():
    message = "unknown device 'h1000'. Did you mean h100? There are: here, h100,"
    with pytest.raises(ValueError, match=re.escape(message)):
        gpu("h1000")


def test_this_machine_needs_no_description():
    with compile_for(None) as place:
        assert place({"a": 1}) == {"a": 1}


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is not None, reason="the compiler is there"
)
def test_what_is_missing_to_compile_for_a_gpu_is_named():
    with (
        pytest.raises(ValueError, match=re.escape("pip install 'jax[cuda12]'")),
        compile_for(description_of("h100")),
    ):
        pass
