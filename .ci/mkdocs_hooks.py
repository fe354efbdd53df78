"""Puts `benchmarks/results` on the site: pages link to it as they do in the repository."""

import pathlib
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).resolve().parents[1]


def on_files(files: Files, config: Any) -> Files:
    """Adds the results, raw JSON and figures, to the site."""
    for path in sorted((ROOT / "benchmarks" / "results").iterdir()):
        uri = f"results/{path.name}"
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Changes the repository's paths into those of the site."""
    return markdown.replace("](../benchmarks/results/", "](results/")
