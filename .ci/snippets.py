"""Runs the Python blocks of Markdown files: `python .ci/snippets.py README.md docs/*.md`.

The blocks of a file share a namespace. `.ci/preamble.py` runs before the first one and defines the
arrays and functions that the text takes for granted. A page that shows parts of a larger program
has one more such file, `.ci/contexts/<name of the page>.py`.
"""

import ast
import contextlib
import io
import pathlib
import re
import runpy
import sys
import time
from typing import Any

PREAMBLE = pathlib.Path(__file__).with_name("preamble.py")
CONTEXTS = pathlib.Path(__file__).with_name("contexts")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LIBRARY = {"actjax", "jax", "numpy", "optax", "rich", *sys.stdlib_module_names}


def context(page: pathlib.Path) -> pathlib.Path:
    """Returns the file that runs before the blocks of a page, after the preamble."""
    return CONTEXTS / f"{page.stem}.py"


def needs_extras(page: pathlib.Path) -> bool:
    """Returns whether the code of a page imports more than the library and what it needs."""
    code = [block[1] for block in BLOCK.finditer(page.read_text(encoding="utf-8"))]
    if code and context(page).exists():
        code.append(context(page).read_text(encoding="utf-8"))
    names = set()
    for node in (node for text in code for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    optional = {"actjax.flax", "actjax.equinox"}
    return bool(names & optional or {name.split(".")[0] for name in names} - LIBRARY)


def run(page: pathlib.Path) -> int:
    """Runs the Python blocks of a page and returns how many there are."""
    text = page.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    namespace: dict[str, Any] = {}
    for path in (PREAMBLE, context(page)):
        if blocks and path.exists():
            namespace = runpy.run_path(str(path), namespace)
    for block in blocks:
        # Empty lines in front, so that a traceback names the line of the page.
        lines = text.count("\n", 0, block.start(1))
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile("\n" * lines + block[1], str(page), "exec"), namespace)
    return len(blocks)


def main() -> None:
    """Runs the pages that the command line names."""
    for name in sys.argv[1:]:
        start = time.monotonic()
        count = run(pathlib.Path(name))
        if count:
            print(f"{name}: {count} blocks in {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
