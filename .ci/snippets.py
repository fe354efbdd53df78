"""Runs the Python blocks of Markdown files: `python .ci/snippets.py README.md docs/*.md`.

The blocks of a file share a namespace. `.ci/preamble.py` runs before the first one and defines the
arrays and functions that the text takes for granted.
"""

import contextlib
import io
import pathlib
import re
import runpy
import sys
import time

PREAMBLE = pathlib.Path(__file__).with_name("preamble.py")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run(page: pathlib.Path) -> int:
    """Runs the Python blocks of a page and returns how many there are."""
    text = page.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    namespace = runpy.run_path(str(PREAMBLE)) if blocks else {}
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
