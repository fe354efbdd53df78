"""The table of the models that fit, with peaks that are computed and not compiled."""

from benchmarks import fits
from train.run.gpus import GIB

MODELS = ("llama_9m", "llama_60m")


def test_the_largest_model_comes_first_and_then_the_most_tokens(monkeypatch):
    """A step of `llama_60m` takes 4 GiB and 1 GiB for each sequence, of `llama_9m` half of it."""
    compiled = []

    def peak(recipe, _):
        batch = recipe.config.batch_size
        compiled.append((recipe.config.method, recipe.config.title, batch))
        is_large = recipe.config.model_config.hidden_size == 512
        return (4 + batch) * GIB if is_large else (4 + batch) * GIB // 2

    monkeypatch.setattr(fits, "compiled_peak", peak)
    monkeypatch.setattr(fits, "_least_bytes", lambda title, model: 0)
    monkeypatch.setattr(fits, "COLUMNS", dict([*fits.COLUMNS.items()][:1]))
    rows = fits.table("here", (2, 4, 8, 16, 80), MODELS)
    assert [row["GPU"] for row in rows] == ["2 GiB", "4 GiB", "8 GiB", "16 GiB", "80 GiB"]
    for title in fits.COLUMNS:
        assert [row[title] for row in rows] == [
            "-",  # 1.5 GiB are left.
            "`llama_9m`, 2,048 (3.0)",
            "`llama_60m`, 2,048 (6.0)",
            "`llama_60m`, 8,192 (12.0)",
            "`llama_60m`, 65,536 (68.0)",
        ]
    assert len(compiled) == len(set(compiled))


def test_every_column_is_a_run_that_begins():
    for title in fits.COLUMNS:
        recipe = fits.recipe_of(title, "llama_9m", 2)
        assert recipe.config.batch_size == 2
        assert fits.least_bytes(recipe) > 0
