"""`python -m benchmarks.anybody [names...] [--out FILE]`: models of other libraries, compressed.

Each case runs in a subprocess. A case whose library is not installed, or that fails, is a row with
the reason. Rows of cases that did not run now are kept in the file, so that cases of libraries that
cannot share an environment are measured one after the other into the same file.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.anybody import registry, table

_HERE = pathlib.Path(__file__).parent
_RESULTS = _HERE.parent / "results" / "anybody.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"cases: {', '.join(registry.CASES)}")
    parser.add_argument("--out", type=pathlib.Path, default=_RESULTS, help="file of results")
    parser.add_argument("--steps", type=int, default=50, help="steps of Adam; 0 measures no loss")
    parser.add_argument("--device", default="h100", help="GPU to compile for; '' for none")
    parser.add_argument("--runs", type=int, default=2, help="compilations; the shortest counts")
    parser.add_argument("--limit", type=float, default=540, help="seconds for each case")
    parser.add_argument("--show", action="store_true", help="only print the table of the file")
    given = parser.parse_args()
    unknown = set(given.names) - set(registry.CASES)
    if unknown:
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}")
    for name in () if given.show else given.names or registry.CASES:
        print(f"== {name}", flush=True)
        _write(given.out, name, _run(name, given))
    text = table.markdown(_read(given.out), given.device or "h100")
    given.out.with_suffix(".md").write_text(text)
    print(text)


def _read(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _write(path: pathlib.Path, name: str, row: dict[str, Any]) -> None:
    """Puts a row into the file, in the order of the cases."""
    rows = _read(path) | {name: row}
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = {known: rows[known] for known in registry.CASES if known in rows}
    path.write_text(json.dumps(ordered, indent=1) + "\n")


def _run(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Runs a case in a process, and returns what it saved and why it ended."""
    with tempfile.TemporaryDirectory() as folder:
        saved, log = pathlib.Path(folder, "row.json"), pathlib.Path(folder, "log")
        command = [sys.executable, "-m", "benchmarks.anybody.one", name, str(saved)]
        command += [str(given.steps), given.device, str(given.runs)]
        with log.open("w") as file:
            try:
                code = subprocess.run(
                    command,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=given.limit,
                    # XLA compiles for a GPU that is not there only if no GPU is looked for.
                    env=os.environ | {"JAX_PLATFORMS": "cpu"},
                    check=False,
                ).returncode
                ended = f"exit status {code}" if code else ""
            except subprocess.TimeoutExpired:
                ended = f"not done after {given.limit:g} s"
        row = json.loads(saved.read_text()) if saved.exists() else {"case": name}
        if ended:
            lines = [line for line in log.read_text().splitlines() if line.strip()] or [""]
            row["reason"] = f"{ended}: {lines[-1][:300]}"
            print("\n".join(lines[-60:]))
        for failure in row.get("failures", ()):
            print("failed:", failure)
    return row


if __name__ == "__main__":
    main()
