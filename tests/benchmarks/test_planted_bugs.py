"""Tests of the table of planted bugs: every bug can still be planted, and its tests exist."""

import collections
import pathlib

from benchmarks.planted_bugs import find, read_table

ROOT = pathlib.Path(__file__).parents[2]


def test_every_bug_can_be_planted_in_the_sources():
    bugs, areas = read_table()
    for bug in bugs:
        assert find(bug, ROOT).read_text().count(bug.old) == 1, bug.name
    assert min(collections.Counter(bug.area for bug in bugs).values()) >= 10
    assert {bug.area for bug in bugs} == set(areas)


def test_the_tests_of_every_bug_exist():
    bugs, areas = read_table()
    for target in {target for bug in bugs for target in bug.tests} | {
        target for targets in areas.values() for target in targets
    }:
        file, _, test = target.partition("::")
        assert (ROOT / file).exists(), target
        name = test.split("[")[0]
        assert f"def {name}(" in (ROOT / file).read_text() if name else True, target
