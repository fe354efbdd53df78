"""Notebooks run, and what is committed as executed is what stands in their text."""

import pathlib

import jupytext
import nbclient
import nbformat
import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"
TEXTS = sorted(FOLDER.glob("*.py"))


def sources(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def test_every_notebook_has_its_text():
    assert TEXTS
    assert {p.stem for p in TEXTS} == {p.stem for p in FOLDER.glob("*.ipynb")}


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.stem)
def test_the_executed_notebook_is_that_of_the_text(text):
    executed = nbformat.read(text.with_suffix(".ipynb"), as_version=4)
    assert sources(executed) == sources(jupytext.read(text))
    counts = [cell.execution_count for cell in executed.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.stem)
def test_the_notebook_runs(text):
    client = nbclient.NotebookClient(
        jupytext.read(text),
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
    )
    client.execute()
