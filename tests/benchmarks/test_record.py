import dataclasses
import json
import math
import pathlib

from benchmarks import record


@dataclasses.dataclass(frozen=True)
class Config:
    results: pathlib.Path
    tolerance: float = math.inf
    folder: pathlib.Path = pathlib.Path("/of/this/machine")


def test_results_are_json_with_their_environment(tmp_path):
    path = tmp_path / "new" / "figures.json"
    record.write(Config(path), [{"rival": "plain", "seconds": (1.0, math.nan)}], rate=3.0)
    content = json.loads(path.read_text(), parse_constant=lambda name: 1 / 0)
    assert content["settings"] == {"tolerance": "inf", "folder": "machine"}
    assert content["rows"] == [{"rival": "plain", "seconds": [1.0, "nan"]}]
    assert content["rate"] == 3.0
    assert record.read(path) == content
    assert {"commit", "cores", "device", "python", "versions", "xla_flags"} <= set(
        content["environment"]
    )
