"""Tests that notebooks run, and that their committed outputs belong to their text."""

import os
import pathlib
import re

import jupytext
import nbclient
import nbformat
import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "notebooks"
TEXTS = sorted(FOLDER.glob("*.py"))
LARGEST_FILE = 1_000_000
# Absolute paths of a machine; closing tags and relative paths do not match.
ABSOLUTE_PATH = re.compile(r"(?<![\w.<])/(home|root|tmp|usr|Users|opt|mnt|var)/")


def sources(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def executed(text):
    return nbformat.read(text.with_suffix(".ipynb"), as_version=4)


def test_every_notebook_has_its_text():
    assert TEXTS
    assert {p.stem for p in TEXTS} == {p.stem for p in FOLDER.glob("*.ipynb")}


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.stem)
def test_the_executed_notebook_belongs_to_the_text(text):
    notebook = executed(text)
    assert sources(notebook) == sources(jupytext.read(text))
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert notebook.metadata.kernelspec.name == "python3"


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.stem)
def test_the_outputs_are_small_and_contain_no_paths_of_a_machine(text):
    assert text.with_suffix(".ipynb").stat().st_size < LARGEST_FILE
    outputs = [output for cell in executed(text).cells for output in cell.get("outputs", [])]
    assert outputs
    for output in outputs:
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output.text
        printed = output.get("text", "") + output.get("data", {}).get("text/plain", "")
        assert not ABSOLUTE_PATH.search(printed), printed


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.stem)
def test_the_notebook_runs(text):
    client = nbclient.NotebookClient(
        jupytext.read(text),
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
    )
    # As for the committed outputs: on the CPU, with one device.
    client.execute(env={**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"})
