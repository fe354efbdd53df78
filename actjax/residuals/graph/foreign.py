"""Residuals of other people's custom rules: which of them may be stored as codes.

A custom rule may save anything: activations, but also the times of a solver, or the inputs of a
comparison. This module follows each residual through the backward function of its rule. A residual
may be a code if it only reaches continuous operations: cheap ones, products, and loops and Pallas
kernels of these, as in a quantized matrix product. Comparisons, roundings, orders, solvers and
unknown operations need its exact value.

Attention that stores a log-sum-exp computes `exp(q k - logsumexp)`, and a softmax `exp(x -
logsumexp)`. With decoded q and k and the exact log-sum-exp, weights no longer add up to one, and an
error of a large score is a factor. Such a rule is to be run again from decoded inputs, which gives
a log-sum-exp that fits them.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core

from actjax.residuals.graph.equations import body_of, branches_of, mark_of, scan_counts
from actjax.residuals.graph.products import PRODUCTS
from actjax.residuals.graph.rebuilding import STEEP, is_cheap, jumps

_CONTINUOUS = frozenset({
    "addupdate", "all_gather", "all_to_all", "broadcast_to", "cumlogsumexp", "cummax", "cummin",
    "cumprod", "cumsum", "dynamic_slice", "dynamic_update_slice", "gather", "get", "masked_load",
    "masked_swap", "ppermute", "psum", "psum_invariant", "reduce_prod", "reduce_scatter",
    "reduce_window_sum", "scatter", "scatter-add", "scatter_add", "swap",
})  # fmt: skip
"""Continuous operations that are neither cheap nor products."""
_KERNELS = frozenset({"dot_product_attention_bwd"})
"""Backward passes of attention, in cuDNN for example."""


class _Origin(NamedTuple):
    """The origin of a value of the backward pass.

    Attributes:
      residuals: positions of the residuals that it follows from; empty for gradients, which a rule
        may clip or round as it likes.
      products: those of them that a product, or a sum of several, reads on the way.
      is_gradient: whether it follows from a cotangent.
    """

    residuals: frozenset[int] = frozenset()
    products: frozenset[int] = frozenset()
    is_gradient: bool = False


_GRADIENT = _Origin(is_gradient=True)
_Origins = dict[Any, _Origin]


class Reads(NamedTuple):
    """The residuals that custom rules of others cannot read as codes.

    Attributes:
      exact: those whose exact values a rule needs.
      fitting: those that must fit another residual of their rule.
      rules: numbers of the rules of the latter.
    """

    exact: list[Any]
    fitting: list[Any]
    rules: frozenset[int]


def reads_of_rules(
    forward: core.Jaxpr, smooth_inputs: Sequence[int], backward: core.Jaxpr, leaves: Sequence[Any]
) -> Reads:
    """Returns the residuals that other people's custom rules cannot read as codes.

    Args:
      forward: the program that computes the residuals.
      smooth_inputs: positions of its inputs that can be differentiated.
      backward: the pullback, without calls.
      leaves: its residuals, its first inputs, as variables of the forward program.
    """
    count = len(leaves)
    origins: _Origins = {x: _Origin(frozenset({i})) for i, x in enumerate(backward.invars[:count])}
    origins |= dict.fromkeys(backward.invars[count:], _GRADIENT)
    read: frozenset[int] = frozenset()
    needs = _Needs(set(), set())
    rules = set()
    for eqn in backward.eqns:
        rule = mark_of(eqn)
        if rule is not None:
            read |= _residuals(eqn, origins)
            new = _follow(eqn, origins, in_kernel=False)
            needs.add(new)
            rules |= {rule} if new.fitting else set()
        else:
            origins |= dict.fromkeys(eqn.outvars, _GRADIENT)
    if read:
        # Others are times, seeds or tables.
        activations = _following_from(forward, [forward.invars[i] for i in smooth_inputs])
        needs.exact.update(i for i in read if leaves[i] not in activations)
    exact, fitting = (
        [leaves[i] for i in sorted(x) if isinstance(leaves[i], core.Var)] for x in needs
    )
    return Reads(exact, fitting, frozenset(rules))


class _Needs(NamedTuple):
    """Positions of residuals, as in `Reads`."""

    exact: set[int]
    fitting: set[int]

    def add(self, other: "_Needs") -> None:
        self.exact.update(other.exact)
        self.fitting.update(other.fitting)


def _following_from(jaxpr: core.Jaxpr, inputs: Sequence[core.Var]) -> set[Any]:
    """Returns the variables of a program that follow from some of its inputs, and these."""
    result: set[Any] = set(inputs)
    for eqn in jaxpr.eqns:
        reached = [isinstance(x, core.Var) and x in result for x in eqn.invars]
        if not any(reached):
            continue
        outvars: set[core.Var] = set(eqn.outvars)
        if branches := branches_of(eqn):
            outvars.clear()
            for body in (branch.jaxpr for branch in branches):
                found = _following_from(body, list(itertools.compress(body.invars, reached[1:])))
                pairs = zip(eqn.outvars, body.outvars, strict=True)
                outvars |= {out for out, x in pairs if isinstance(x, core.Var) and x in found}
        result |= outvars
    return result


def _follow(eqn: core.JaxprEqn, origins: _Origins, in_kernel: bool) -> _Needs:
    """Adds the origins of the results of an equation. Returns what it needs."""
    name = eqn.primitive.name
    inputs = [_origin(x, origins) for x in eqn.invars]
    result = _join(inputs)
    read = set(_residuals(eqn, origins))
    bodies = _bodies(eqn)
    if not bodies:
        terms = {x.residuals for x in inputs if x.residuals}
        if name in PRODUCTS or (name in ("add", "sub") and len(terms) > 1):
            result = result._replace(products=result.residuals)
        # A kernel writes to a buffer that it got.
        written = [x for x in eqn.invars if _is_buffer(x)]
        origins |= dict.fromkeys([*eqn.outvars, *written], result)
        if name in _KERNELS:
            return _Needs(set(), read)
        is_continuous = (is_cheap(eqn) and not jumps(eqn)) or name in _CONTINUOUS | PRODUCTS
        steep = inputs[1:] if name == "div" else inputs if name in STEEP else []
        fitting: set[int] = set().union(*(x.products for x in steep))
        return _Needs(set() if is_continuous else read, fitting)
    if name == "while" and not in_kernel:  # The length of a solver's loop depends on its values.
        origins |= dict.fromkeys(eqn.outvars, result)
        return _Needs(read, set())
    needs = _Needs(set(), set())
    in_kernel = in_kernel or name == "pallas_call"
    outputs = [_Origin()] * len(eqn.outvars)
    for body, operands, carried in bodies:
        found, after, new = _run(body, [inputs[i] for i in operands], carried, in_kernel)
        needs.add(new)
        for i, x in zip(operands, after, strict=False):
            if _is_buffer(eqn.invars[i]):
                origins[eqn.invars[i]] = _join([inputs[i], x])
        if len(found) == len(outputs):
            outputs = [_join(pair) for pair in zip(outputs, found, strict=True)]
    if name == "pallas_call":  # Its results are buffers too.
        outputs = [result] * len(eqn.outvars)
    if name == "cond":
        needs.exact.update(inputs[0].residuals)
    origins |= zip(eqn.outvars, outputs, strict=True)
    return needs


def _run(
    jaxpr: core.Jaxpr,
    inputs: Sequence[_Origin],
    carried: Sequence[tuple[int, int]],
    in_kernel: bool,
) -> tuple[list[_Origin], list[_Origin], _Needs]:
    """Follows residuals through the body of an equation until the carry of a loop is known.

    Args:
      jaxpr: the body.
      inputs: origins of its first inputs.
      carried: positions of outputs, and of the inputs of the next iteration that they are.
      in_kernel: whether it belongs to a kernel.

    Returns:
      Origins of its outputs and of its inputs after it ran, and what it needs.
    """
    before = [*inputs, *[_Origin()] * (len(jaxpr.invars) - len(inputs))]
    while True:
        origins: _Origins = dict(zip(jaxpr.invars, before, strict=False))
        needs = _Needs(set(), set())
        for eqn in jaxpr.eqns:
            needs.add(_follow(eqn, origins, in_kernel))
        outputs = [_origin(x, origins) for x in jaxpr.outvars]
        after = [origins[x] for x in jaxpr.invars]
        for out, place in carried:
            after[place] = _join([after[place], outputs[out]])
        after = [_join(pair) for pair in zip(before, after, strict=False)]
        if after == before:
            return outputs, after, needs
        before = after


def _bodies(eqn: core.JaxprEqn) -> list[tuple[core.Jaxpr, list[int], list[tuple[int, int]]]]:
    """Returns the programs that an equation runs, each with its inputs and what it carries.

    Inputs are positions of operands of the equation; `carried` is as in `_run`.
    """
    count, params = len(eqn.invars), eqn.params
    if branches := branches_of(eqn):
        return [(b.jaxpr, list(range(1, count)), []) for b in branches]
    if eqn.primitive.name == "while":
        skipped, constants = params["cond_nconsts"], params["body_nconsts"]
        carried = list(range(skipped + constants, count))
        test = params["cond_jaxpr"].jaxpr
        body = params["body_jaxpr"].jaxpr
        pairs = [(i, constants + i) for i in range(len(carried))]
        return [(test, [*range(skipped), *carried], []), (body, list(range(skipped, count)), pairs)]
    if eqn.primitive.name == "custom_partitioning":
        return [(params["call"].jaxpr, list(range(count)), [])]
    program = body_of(eqn)
    if program is None:
        return []
    carried = []
    if eqn.primitive.name == "scan":
        constants, carry = scan_counts(eqn)
        carried = [(i, constants + i) for i in range(carry)]
    return [(program.jaxpr, list(range(count)), carried)]


def _residuals(eqn: core.JaxprEqn, origins: _Origins) -> frozenset[int]:
    """Returns the residuals that an equation reads."""
    return frozenset().union(*(_origin(x, origins).residuals for x in eqn.invars))


def _origin(x: Any, origins: _Origins) -> _Origin:
    return origins.get(x, _Origin()) if isinstance(x, core.Var) else _Origin()


def _join(origins: Sequence[_Origin]) -> _Origin:
    """Returns the origin of a function of values with some origins."""
    if any(x.is_gradient for x in origins):
        return _GRADIENT
    residuals = frozenset[int]().union(*(x.residuals for x in origins))
    return _Origin(residuals, frozenset[int]().union(*(x.products for x in origins)))


def _is_buffer(x: Any) -> bool:
    """Returns whether a variable is a buffer of a kernel."""
    return isinstance(x, core.Var) and "Ref" in type(x.aval).__name__
