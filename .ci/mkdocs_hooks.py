"""Puts `benchmarks/results` and `examples` on the site: pages link to them as in the repository."""

import pathlib
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).resolve().parents[1]

_PATHS = {
    "../benchmarks/results/": "results/",
    "../../benchmarks/results/": "../results/",
    "../../examples/": "",
}
"""Beginnings of links: in the repository, and on the site."""


def on_files(files: Files, config: Any) -> Files:
    """Adds the results, raw JSON and figures, and the code of the examples to the site."""
    for path in sorted((ROOT / "benchmarks" / "results").iterdir()):
        uri = f"results/{path.name}"
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    for path in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Changes the repository's paths into those of the site."""
    for path, on_site in _PATHS.items():
        markdown = markdown.replace(f"]({path}", f"]({on_site}")
    return markdown
