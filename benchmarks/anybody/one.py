"""Measures one case in this process and saves it: `python -m benchmarks.anybody.one NAME FILE`."""

import json
import pathlib
import sys

from benchmarks.anybody import measure, registry


def main() -> None:
    name, path, steps, device, runs = sys.argv[1:]
    file = pathlib.Path(path)
    measure.measure(
        registry.load(name),
        lambda row: file.write_text(json.dumps(row)),
        steps=int(steps),
        device=device,
        runs=int(runs),
    )


if __name__ == "__main__":
    main()
