import dataclasses
import json
import math
import pathlib

from benchmarks import record


@dataclasses.dataclass(frozen=True)
class Config:
    results: pathlib.Path
    tolerance: float = math.inf


def test_results_are_json_with_where_they_come_from(tmp_path):
    path = tmp_path / "new" / "figures.json"
    record.write(Config(path), [{"rival": "plain", "seconds": (1.0, math.nan)}], rate=3.0)
    content = json.loads(path.read_text(), parse_constant=lambda name: 1 / 0)
    assert content["settings"] == {"tolerance": "inf"}
    assert content["rows"] == [{"rival": "plain", "seconds": [1.0, "nan"]}]
    assert content["rate"] == 3.0
    assert {"commit", "cores", "device", "python", "versions"} <= set(content["environment"])
