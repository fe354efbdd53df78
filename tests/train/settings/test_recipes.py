"""Tests of the files of `recipes/` against their programs and their result. No test compiles."""

import pytest

from benchmarks import recipes, record
from benchmarks.tables import markdown
from train.run.gpus import GIB

RESULT = record.read(record.RESULTS / "recipes.json")
ROWS = {row["recipe"]: row for row in RESULT["rows"]}
MODELS = ("smollm2_135m", "llama3_1b", "qwen3_0_6b", "qwen3_4b", "qwen3_8b")


def test_every_model_has_every_kind_of_recipe():
    kinds = ("full", "qlora", "hyc_lora", "dpo")
    names = {f"{model}_{kind}" for model in MODELS for kind in kinds}
    assert set(recipes.RECIPES) == names | {"llama_60m", "llama_1b"}
    assert set(ROWS) == set(recipes.RECIPES)


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_recipe_is_read_without_a_warning_and_has_the_memory_of_its_result(name):
    config = recipes.recipe_of(name).config  # Exits for an unknown setting.
    assert config.warnings == []
    row, gib = ROWS[name], recipes.smallest_gpu(ROWS[name]["peak"])
    # `python -m benchmarks.recipes --only NAME --add` compiles it again.
    assert row["settings"] == recipes.settings_of(name)
    head = recipes.RECIPES[name].read_text(encoding="utf-8").partition("\n\n")[0]
    text = " ".join(head.replace("#", "").split())
    assert f"Memory: {row['peak'] / GIB:.2f} GiB, compiled for an H100 and not run" in text
    assert f"fits a GPU of {gib} GiB." in text
    program = "finetune" if config.pretrained else "pretrain"
    assert f"python -m train.{program} --config recipes/{name}.yaml --data " in text
    is_above_default = row["peak"] > 0.75 * gib * GIB
    assert ("XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python" in text) == is_above_default


def test_the_page_has_the_table_of_the_result():
    page = (record.RESULTS.parents[1] / "docs/guides/recipes.md").read_text(encoding="utf-8")
    assert markdown(recipes.table(RESULT["rows"])) in page  # `python -m benchmarks.render`


def test_a_peak_above_seven_eighths_of_a_gpu_does_not_fit_it():
    assert [recipes.smallest_gpu(int(x * GIB)) for x in (7, 7.1, 21, 22)] == [8, 12, 24, 40]
    with pytest.raises(ValueError, match=r"71\.00 GiB fit no GPU"):
        recipes.smallest_gpu(71 * GIB)
