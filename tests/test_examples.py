"""Every example runs, and the page of examples names what exists."""

import pathlib
import re
import typing

import jax
import numpy as np
import pytest
from test_docs import flags

pytest.importorskip("sklearn", reason="the examples need scikit-learn: pip install '.[examples]'")

from flax import nnx

import actjax
from examples import bert, compare, resnet, unet, vit

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
TINY: dict[str, typing.Any] = {"steps": 2, "batch_size": 8, "rounds": 1, "device": "here"}


def measured(module, **settings):
    """The rows of an example, by method, after a check of what each row has."""
    config = module.Config(**(TINY | settings))
    _, rows = module.run(config)
    for row in rows:
        assert all(np.isfinite(row["held_out"]["loss"])), row["method"]
        assert row["step_ms"] > 0
        assert set(row["kept"]) == set(row["temporaries"]["here"])
    compare.show(config, "tiny", rows)
    return {row["method"]: row for row in rows}


def test_vit(capsys):
    rows = measured(vit, depth=2, width=16, patch=4, methods=("4 bits",))
    assert 0 < rows["4 bits"]["kept"]["scan"] < rows["4 bits"]["temporaries"]["here"]["scan"]
    shown = capsys.readouterr().out
    assert "CPU, scan, MiB" in shown
    assert "4 bits" in shown


def test_unet():
    rows = measured(unet, width=8, methods=("exact",))
    assert list(rows["exact"]["held_out"]) == ["loss"]


def test_a_graph():
    pytest.importorskip("jraph", reason="jraph is not installed: pip install '.[examples]'")
    from examples import graph

    rows = measured(graph, layer="gat", depth=2, width=8, neighbors=2, methods=("4 bits",))
    assert rows["4 bits"]["held_out"]["accuracy"][0] > 0


def test_bert(tmp_path):
    data = tmp_path / "data.jsonl"
    lines = [f'{{"text": "{word} number {i} of many", "label": "{word}"}}'
             for word in ("first", "second") for i in range(60)]  # fmt: skip
    data.write_text("\n".join(lines))
    rows = measured(
        bert, data=data, pretraining_steps=0, depth=2, width=32, tokens=4, vocabulary=64, rank=2,
        subspace_rank=4, methods=("subspace", "hyc_lora, 2 bits"),
    )  # fmt: skip
    assert set(rows) == {"subspace", "hyc_lora, 2 bits"}


def test_lines_of_the_standard_library_have_three_labels():
    lines = list(zip(range(500), bert.standard_library(), strict=False))
    assert {line.label for _, line in lines} == {"code", "comment", "docstring"}


def test_statistics_of_batch_norms_move_as_without_codes():
    config = resnet.Config(**TINY, width=8, blocks=2)
    batch = next(resnet.load_digits().batches(8, 0))
    optimizer = compare.adamw(config)
    small = actjax.compress_residuals(resnet.loss, actjax.Quantized(4))
    states, start = [], None
    for loss in (resnet.loss, small):
        method = compare.Method(loss, optimizer)
        start = method.init(resnet.ResNet(config, nnx.Rngs(0)))
        # Before the step, which takes the arrays of the state.
        start_rest = jax.tree.map(np.array, start.rest)
        states.append(method.step(start, batch)[0])
    exact, coded = (jax.tree.leaves(state.rest) for state in states)
    for before, one, other in zip(jax.tree.leaves(start_rest), exact, coded, strict=True):
        assert not np.array_equal(before, one)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="`steps` must be at least 1, got 0"):
        vit.Config(steps=0)
    with pytest.raises(ValueError, match="unknown device 'h10'"):
        vit.Config(device="h10")
    with pytest.raises(ValueError, match="`methods` names none"):
        measured(vit, methods=("3 bits",))


def test_the_page_describes_every_example():
    names = {path.stem for path in (ROOT / "examples").glob("*.py")}
    commands = set(re.findall(r"python -m examples\.(\w+)", PAGE))
    assert commands == names - {"__init__", "compare", "digits"}


def test_flags_that_the_page_names_exist():
    known = {"--layer"} | flags(vit.Config) | flags(bert.Config) | {"--json"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", PAGE)) <= known
