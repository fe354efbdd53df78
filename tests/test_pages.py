"""Tests that the Python code of the documentation runs where it needs more than the library.

`.ci/wheel.py` runs the code of the other pages, in an environment that has the library alone.
"""

import pathlib
import runpy

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SNIPPETS = runpy.run_path(str(ROOT / ".ci" / "snippets.py"))
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}
WITH_EXTRAS = [name for name, path in PAGES.items() if SNIPPETS["needs_extras"](path)]
# Packages that the extra `test` does not bring, and the extra that does.
OPTIONAL = {}


def test_pages_that_need_the_library_alone_are_told_apart():
    assert "docs/guides/own-model.md" in WITH_EXTRAS
    assert set(OPTIONAL) < set(WITH_EXTRAS)
    assert "README.md" not in WITH_EXTRAS
    assert "docs/guides/write-a-codec.md" not in WITH_EXTRAS


def test_every_context_belongs_to_a_page():
    contexts = {path.stem for path in (ROOT / ".ci" / "contexts").glob("*.py")}
    assert contexts <= {path.stem for path in PAGES.values()}


# A page that trains models several ways takes about a minute and a half of processor time.
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if "own-model" in n else n for n in WITH_EXTRAS],
)
def test_the_code_of_a_page_runs(name):
    if name in OPTIONAL:
        package, extra = OPTIONAL[name]
        reason = f"{package} is not installed: pip install '.[{extra}]'"
        pytest.importorskip(package, reason=reason, exc_type=ImportError)
    assert SNIPPETS["run"](PAGES[name]) > 0
