"""What fits where, with peaks that are computed and not compiled."""

import pytest

from benchmarks import fits
from train.planning.gpus import GIB

MODELS = ("llama_9m", "llama_60m")


@pytest.fixture
def peaks(monkeypatch):
    """Makes a step of `llama_60m` take 4 GiB and 1 GiB for each sequence, of `llama_9m` a half."""
    compiled = []

    def peak(recipe, _):
        batch = recipe.config.batch_size
        compiled.append((recipe.config.title, batch))
        large = recipe.model_config.hidden_size == 512
        return (4 + batch) * GIB if large else (4 + batch) * GIB // 2

    monkeypatch.setattr(fits, "compiled_peak", peak)
    return compiled


def test_the_largest_model_comes_first_and_then_the_most_tokens(peaks):
    ways = fits.WAYS[:1]
    ((way, found),) = fits.fits("here", ways, (2, 4, 8, 16, 80), MODELS)
    assert way is ways[0]
    assert [(one.model, one.tokens // 1024) for one in found] == [
        ("", 0),  # 1.5 GiB are left.
        ("llama_9m", 2),
        ("llama_60m", 2),
        ("llama_60m", 8),
        ("llama_60m", 64),
    ]
    assert [one.peak / GIB for one in found[1:]] == [3, 6, 12, 68]
    # Nothing is compiled twice.
    assert len(peaks) == len(set(peaks))


def test_the_table_has_a_line_for_each_gpu_and_the_flags(peaks):
    found = list(fits.fits("here", fits.WAYS, (2, 8), MODELS))
    lines = fits.markdown(found, (2, 8)).splitlines()
    assert lines[0] == (
        "| GPU | every weight | in a subspace of a quarter of the width | QLoRA | HyC-LoRA |"
    )
    assert lines[2] == "| 2 GiB | - | - | - | - |"
    assert lines[3].startswith("| 8 GiB | `llama_60m`, 2,048 (6.0) |")
    assert "QLoRA: `--method qlora --remat`" in lines[-1]


def test_every_way_is_a_run_that_begins():
    for way in fits.WAYS:
        recipe = way.recipe("llama_9m", 2)
        assert recipe.config.batch_size == 2
        assert fits.least_bytes(recipe) > 0
