"""The cheapest cut is that of an exhaustive search."""

import itertools
import math
import random

import pytest

from actjax.residuals.graph.cuts import cheapest_cut


def is_cut(chosen, edges, starts, ends) -> bool:
    """Returns whether every path from a start to an end passes a chosen node."""
    reached = {x for x in starts if x not in chosen}
    waiting = list(reached)
    while waiting:
        x = waiting.pop()
        for a, b in edges:
            if a == x and b not in chosen and b not in reached:
                reached.add(b)
                waiting.append(b)
    return not reached & set(ends)


@pytest.mark.parametrize("seed", range(40))
def test_the_price_is_the_least_of_all_cuts(seed):
    draw = random.Random(seed)
    count = draw.randint(2, 8)
    prices = {i: draw.choice([1.0, 2.0, 3.5, 8.0, math.inf]) for i in range(count)}
    prices[0] = prices[count - 1] = 9.0
    edges = [(i, j) for i in range(count) for j in range(i + 1, count) if draw.random() < 0.5]
    starts, ends = [0], [count - 1]
    got = cheapest_cut(prices, edges, starts, ends)
    assert is_cut(got, edges, starts, ends)
    subsets = itertools.chain.from_iterable(
        itertools.combinations(prices, n) for n in range(count + 1)
    )
    least = min(sum(prices[x] for x in s) for s in subsets if is_cut(s, edges, starts, ends))
    assert sum(prices[x] for x in got) == pytest.approx(least)


def test_of_equal_cuts_it_is_the_first():
    chain = [("a", "b"), ("b", "c")]
    assert cheapest_cut(dict.fromkeys("abc", 1.0), chain, ["a"], ["c"]) == {"a"}
    assert cheapest_cut({"a": 1.1, "b": 1.0, "c": 1.0}, chain, ["a"], ["c"]) == {"b"}
