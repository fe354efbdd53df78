"""Finds the operation that makes a variable of a program, and the operators that store it."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jax.extend import core, source_info_util

from actjax._core.tags import Tag
from actjax.residuals.graph.equations import body_of, joined_scopes, scan_counts, scope_of


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of a residual.

    Attributes:
      operator: the primitive that made it; "constant" or "argument" if none did.
      name: the line of the user's program, as far as JAX knows it.
      tag: its tag, if an actjax operator made it to store it.
      readers: tags of the actjax operators that read it and store it exactly.
      outer: the variable of the whole program that it equals, if it is passed through unchanged.
      is_slices: whether it consists of the slices of an argument that a loop runs over, stacked
        again.
      scope: its name scopes, such as "transformer/h/0/mlp"; empty if there are none.
    """

    operator: str
    name: str
    tag: Tag | None
    readers: tuple[Tag, ...]
    outer: core.Var | None
    is_slices: bool = False
    scope: str = ""


class Origins:
    """Finds the origins of the variables of a program, which it goes through once."""

    def __init__(self, jaxpr: core.Jaxpr) -> None:
        """Takes the program."""
        self._jaxpr = jaxpr
        self._makers = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
        self._reads: dict[Any, list[tuple[core.JaxprEqn, int]]] = {}
        for eqn in jaxpr.eqns:
            for position, x in enumerate(eqn.invars):
                if isinstance(x, core.Var):
                    self._reads.setdefault(x, []).append((eqn, position))
        self._bodies: dict[int, Origins] = {}

    def of(self, var: core.Var) -> Origin:
        """Follows a variable to the operation that made it, into the bodies of calls and loops."""
        readers = tuple(self._readers(var))
        eqn = self._makers.get(var)
        if eqn is None:
            known = "constant" if var in self._jaxpr.constvars else "argument"
            return Origin(known, "", None, readers, var)
        if eqn.primitive.name == "optimization_barrier":
            passed = eqn.invars[eqn.outvars.index(var)]
            if isinstance(passed, core.Var):
                origin = self.of(passed)
                return dataclasses.replace(origin, readers=(*readers, *origin.readers))
        body = _body(eqn)
        inner = body.outvars[eqn.outvars.index(var)] if body is not None else None
        if body is None or not isinstance(inner, core.Var):
            tag = Tag.decode(eqn.params["name"]) if eqn.primitive.name == "name" else None
            return Origin(eqn.primitive.name, _where(eqn), tag, readers, None, scope=scope_of(eqn))
        origin = self._within(body).of(inner)
        origin = dataclasses.replace(origin, scope=joined_scopes(scope_of(eqn), origin.scope))
        readers = (*readers, *origin.readers)
        if origin.outer not in body.invars:
            return dataclasses.replace(origin, readers=readers, outer=None)
        outside = eqn.invars[body.invars.index(origin.outer)]
        # The stack of the carries of a loop is not the array that the loop was given.
        if isinstance(outside, core.Var) and _shape(outside) == _shape(var):
            return dataclasses.replace(self.of(outside), readers=readers)
        position = body.invars.index(origin.outer)
        is_slices = eqn.primitive.name == "scan" and position >= sum(scan_counts(eqn))
        return Origin(
            eqn.primitive.name, _where(eqn), None, readers, None, is_slices, scope_of(eqn)
        )

    def _readers(self, var: core.Var) -> Iterator[Tag]:
        """Yields the tags under which `var` is read, also inside calls."""
        for eqn, position in self._reads.get(var, ()):
            body = _body(eqn)
            if eqn.primitive.name == "name":
                tag = Tag.decode(eqn.params["name"])
                if tag is not None:
                    yield tag
            elif body is not None and eqn.primitive.name != "scan":
                yield from self._within(body)._readers(body.invars[position])

    def _within(self, body: core.Jaxpr) -> "Origins":
        if id(body) not in self._bodies:
            self._bodies[id(body)] = Origins(body)
        return self._bodies[id(body)]


def _body(eqn: core.JaxprEqn) -> core.Jaxpr | None:
    """Returns the body of a call or scan if it has as many inputs and outputs as the equation."""
    body = body_of(eqn)
    if body is None or len(body.jaxpr.outvars) != len(eqn.outvars):
        return None
    return body.jaxpr if len(body.jaxpr.invars) == len(eqn.invars) else None


def _where(eqn: core.JaxprEqn) -> str:
    """Returns the line of the user's program that an equation comes from, without its folder."""
    return source_info_util.summarize(eqn.source_info).rsplit("/", 1)[-1]


def _shape(var: core.Var) -> tuple[int, ...]:
    aval: Any = var.aval
    return tuple(aval.shape)
