"""Puts files from outside `docs` on the site; pages link to them as in the repository.

These are raw results and figures, the code of the examples, the notebooks with their outputs, as
pages, and the changelog.
"""

import base64
import json
import os
import pathlib
import re
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = pathlib.Path(__file__).resolve().parents[1]

_FOLDERS = {
    "benchmarks/results/": "results/raw/",
    "examples/": "examples/",
    "notebooks/": "notebooks/",
}
"""Folders of the repository, and where their files are on the site."""
_LINK = re.compile(r"\]\(([^)\s#]+)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the files to the site."""

    def add(uri: str, **source: Any) -> None:
        files.append(File.generated(config, uri, **source))

    for folder, pattern in (
        ("benchmarks/results/", "*.*"),
        ("benchmarks/results/", "quick/*"),
        ("examples/", "*.py"),
    ):
        for path in sorted((ROOT / folder).glob(pattern)):
            inside = path.relative_to(ROOT / folder).as_posix()
            add(_FOLDERS[folder] + inside, abs_src_path=str(path))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text, pictures = notebook_page(path)
        add(f"notebooks/{path.stem}.md", content=text)
        for name, picture in pictures.items():
            add(f"notebooks/{name}", content=picture)
    add("changelog.md", content=(ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    return files


def notebook_page(path: pathlib.Path) -> tuple[str, dict[str, bytes]]:
    """Returns an executed notebook in Markdown, and its pictures by name."""
    parts, pictures = [], {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            text = "".join(output.get("text", data.get("text/plain", "")))
            if "image/png" in data:
                name = f"{path.stem}_{len(pictures) + 1}.png"
                pictures[name] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![{text or 'Figure'}]({name})")
            else:
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Changes the repository's paths into those of the site."""
    uri = page.file.src_uri
    source = "CHANGELOG.md" if uri == "changelog.md" else f"docs/{uri}"
    if uri.startswith("notebooks/"):
        source = uri

    def on_site(match: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join(os.path.dirname(source), match[1]))
        for folder, place in {**_FOLDERS, "docs/": ""}.items():
            if "://" not in match[1] and path.startswith(folder):
                target = (place + path.removeprefix(folder)).replace(".ipynb", ".md")
                return "](" + os.path.relpath(target, os.path.dirname(uri) or ".")
        return match[0]

    return _LINK.sub(on_site, markdown)
