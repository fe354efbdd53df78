"""The cheapest set of nodes of a graph that separates its start from its end."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

_MOST = 2**30
"""Capacities are 32-bit integers, and so is their sum."""


def cheapest_cut(
    prices: Mapping[Hashable, float],
    edges: Iterable[tuple[Hashable, Hashable]],
    starts: Sequence[Hashable],
    ends: Sequence[Hashable],
) -> set[Hashable]:
    """Returns nodes of the least total price that every path from a start to an end passes.

    If several sets cost the same, it returns the one nearest to the starts.

    Args:
      prices: price of each node; infinite if the cut must not contain it. Starts and ends may be in
        the cut.
      edges: pairs of nodes.
      starts: where paths begin.
      ends: where they end.
    """
    # Node i is an edge from 2 i to 2 i + 1, whose capacity is its price: by Menger's theorem a
    # least cut of edges is one of nodes.
    number = {x: i for i, x in enumerate(prices)}
    first, last = 2 * len(number), 2 * len(number) + 1
    unit = max(sum(x for x in prices.values() if x < math.inf) / _MOST, 1e-300)
    open_end = int(_MOST)
    rows, columns, capacities = [], [], []

    def add(a: int, b: int, capacity: int) -> None:
        rows.append(a)
        columns.append(b)
        capacities.append(capacity)

    for x, i in number.items():
        add(2 * i, 2 * i + 1, max(1, round(min(prices[x] / unit, open_end))))
    for x, y in dict.fromkeys(edges):
        add(2 * number[x] + 1, 2 * number[y], open_end)
    for x in dict.fromkeys(starts):
        add(first, 2 * number[x], open_end)
    for x in dict.fromkeys(ends):
        add(2 * number[x] + 1, last, open_end)
    shape = (last + 1, last + 1)
    graph = sparse.csr_array((np.array(capacities, np.int32), (rows, columns)), shape=shape)
    flow = csgraph.maximum_flow(graph, first, last).flow
    left = (graph - flow).tocsr()
    left.eliminate_zeros()
    reached = csgraph.breadth_first_order(left, first, return_predecessors=False)
    before = set(reached.tolist())
    return {x for x, i in number.items() if 2 * i in before and 2 * i + 1 not in before}
