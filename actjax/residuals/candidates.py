"""The arrays that a function stores, as the input of rules, and what rules decide on them."""

import collections
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
from jax.extend import core

from actjax._core.tags import EXACT_INPUT, Tag
from actjax.codecs import Codec
from actjax.residuals.graph.equations import body_of, joined_scopes
from actjax.residuals.graph.origins import Origin, Origins
from actjax.residuals.graph.rebuilding import Graph, is_cheap
from actjax.residuals.graph.storing import Form
from actjax.residuals.graph.variables import is_floating, is_on_host
from actjax.residuals.residual_codecs import ResidualCodec, fitted, in_bits

LARGEST_OVER_SMALL = 32
"""If the rule is a codec, arrays smaller than the largest by more than this factor stay exact:
statistics and log-sum-exps, for example, which take few bytes and must be accurate."""
LEFT_BY_RULE = "not encoded by the rule"
NO_SMALLER = "its code would be larger"
_FOREIGN = "read by a custom backward pass"
_LOOP = "the result of a while loop"
_FACTOR = "a factor of a matrix"
LEFT = (LEFT_BY_RULE, NO_SMALLER, _FOREIGN, _LOOP, _FACTOR)
"""Why floating point arrays that the function computes are stored exactly."""
_FACTORS = frozenset({
    "cholesky", "custom_linear_solve", "eig", "eigh", "geqrf", "householder_product", "lu", "qr",
    "schur", "svd", "triangular_solve", "tridiagonal_solve",
})  # fmt: skip
"""A small error of a factor of a badly conditioned matrix is a large one of the solution."""
ON_HOST = "in the memory of the host"
"""Where a policy of `jax.checkpoint` put it."""
_NOT_FLOATING = "not floating point"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An array that a function stores for its backward pass; the input of a rule.

    Attributes:
      name: its `jax.ad_checkpoint.checkpoint_name` if it has one, or that of the value that it is
        stored for; otherwise the path of the argument that it is, or the line of the program that
        made it.
      primitive: the JAX primitive that made it; "argument" for an argument.
      shape: its shape; within a loop the shape in one iteration.
      dtype: its dtype, as text.
      scope: the `jax.named_scope`s that it was made in, such as "transformer/h/0/mlp": modules of
        Flax linen, Haiku and Equinox (`eqx.nn`) open one each. Empty if there are none. All layers
        of a `lax.scan` have one scope; loops of one scope are told apart by "loop 1" and so on.
      layers: iterations of the loops that it is made in, which all store one; 1 outside of loops.
      occurrence: how many results of the program with the same scope and name (and operation, if
        it is named after its line) come before it.
      has_line: whether its name is the line of the program that made it.
    """

    name: str
    primitive: str
    shape: tuple[int, ...]
    dtype: str
    scope: str = ""
    layers: int = 1
    occurrence: int = 0
    has_line: bool = False

    @property
    def label(self) -> str:
        """Scope, name, and the operation if the name is that of a line; "#1" and so on after that.

        It does not depend on which arrays are stored, and so not on which arguments are traced.
        """
        label = joined_scopes(self.scope, self.name)
        label = f"{label} {self.primitive}" if self.has_line else label
        return f"{label}#{self.occurrence}" if self.occurrence else label

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes without encoding."""
        return self.size * jnp.dtype(self.dtype).itemsize


Rule = Callable[[Candidate], Codec | Literal["leave"] | None]
"""From a candidate to its codec; None or "leave" stores the array exactly."""


@dataclasses.dataclass(frozen=True)
class Recompute:
    """The part of a function that is computed again in the backward pass.

    Attributes:
      codes: whether the arrays that are computed again are stored as codes, too, until the backward
        pass of their segment reads them (GACT's level CB1).
      share: how much of what the function computes is computed again, from its start.
    """

    codes: bool = False
    share: float = 1.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that all loops of a function share.

    Attributes:
      rule: selects the codec of an array.
      rebuild: whether cheap residuals are rebuilt.
      remat: what is computed again in the backward pass; by default nothing but what is cheap.
      scope: name scopes of the loop that is traced.
      layers: iterations of the loops around it.
      used: called with each array that the rule decides on and that the gradient needs.
    """

    rule: Rule | Codec
    rebuild: bool = True
    remat: Recompute | None = None
    scope: str = ""
    layers: int = 1
    used: Callable[[Candidate], None] | None = None


@dataclasses.dataclass(frozen=True)
class Kept:
    """An array that is stored, exactly or as a code.

    Attributes:
      var: its variable in the forward program.
      candidate: its description for the rule.
      reason: why it is stored exactly; empty if a codec stores it.
      number: its number in the whole function, which its key is folded with.
    """

    var: Any
    candidate: Candidate
    reason: str
    number: int = 0


def describe(
    jaxpr: core.Jaxpr,
    graph: Graph,
    kept: Sequence[core.Var],
    foreign: Collection[core.Var],
    names: Sequence[str],
    dies: Sequence[bool],
    settings: Settings,
) -> list[Kept]:
    """Returns the descriptions of stored arrays.

    Args:
      jaxpr: the forward program.
      graph: how its values follow from each other.
      kept: the stored arrays.
      foreign: those that other people's custom backward passes read.
      names: names of the inputs of the program.
      dies: which inputs are dead after the forward pass.
      settings: settings of the whole function.
    """
    origins, tagged = Origins(jaxpr), _tagged_names(jaxpr, graph)
    arrays = []
    for var in kept:
        array = _describe(jaxpr, origins.of(var), tagged.get(var, ""), var, names, dies, settings)
        if var in foreign and not array.reason:
            array = dataclasses.replace(array, reason=_FOREIGN)
        arrays.append(array)
    return _told_apart(arrays, jaxpr, origins, settings)


def decide(
    arrays: list[Kept], rule: Rule | Codec, forms: Mapping[core.Var, Form]
) -> tuple[list[ResidualCodec | None], list[str]]:
    """Returns what stores each array, and for those that are stored exactly the reason.

    Args:
      arrays: the arrays.
      rule: selects codecs.
      forms: in which arrays are encoded.
    """
    largest = max((k.candidate.size for k in arrays if not k.reason), default=0)
    is_small = lambda c: not c.shape or c.size * LARGEST_OVER_SMALL < largest  # noqa: E731
    if isinstance(rule, Codec):
        codec = rule
        rule = lambda c: None if is_small(c) or not largest else codec  # noqa: E731
    codecs: list[ResidualCodec | None] = []
    reasons: list[str] = []
    for k in arrays:
        what, stored, reason = k.candidate, None, k.reason
        # Few booleans, one for each token for example, are not worth the operations.
        if reason == _NOT_FLOATING and what.dtype == "bool" and not is_small(what):
            stored = in_bits(what.shape)
        elif not reason:
            chosen = rule(what)
            if isinstance(chosen, Codec):
                form = forms.get(k.var, Form())
                stored, reason = fitted(chosen, what.shape, what.dtype, form), NO_SMALLER
            elif chosen is None or (isinstance(chosen, str) and chosen == "leave"):
                reason = LEFT_BY_RULE
            else:
                raise TypeError(
                    f"`rule` returned {chosen!r} for {what}: return an actjax.Codec, or None to"
                    " store it unchanged."
                )
        codecs.append(stored)
        reasons.append("" if stored is not None else reason)
    return codecs, reasons


def _describe(
    jaxpr: core.Jaxpr,
    origin: Origin,
    tagged: str,
    var: core.Var,
    names: Sequence[str],
    dies: Sequence[bool],
    settings: Settings,
) -> Kept:
    """Returns the description of a stored array."""
    aval: Any = var.aval
    name, primitive, reason = tagged or origin.name, origin.operator, ""
    if var in jaxpr.invars:
        position = jaxpr.invars.index(var)
        name, primitive = name or names[position], "argument"
        reason = "" if dies[position] else "an argument, alive anyway"
    elif var in jaxpr.constvars:
        reason = "a constant, alive anyway"
    elif origin.tag is not None and origin.tag.is_code:
        reason = "stored by an actjax operator"
    elif origin.tag is not None and origin.tag.left:
        reason = EXACT_INPUT if origin.tag.left == EXACT_INPUT else "handled inside its loop"
    elif is_on_host(aval):
        reason = ON_HOST
    elif origin.operator == "while":
        reason = _LOOP
    elif origin.operator in _FACTORS:
        reason = _FACTOR
    elif origin.is_slices:
        reason = "slices of an argument, alive anyway"
    if not reason and not is_floating(aval):
        reason = _NOT_FLOATING
    has_line = not tagged and primitive not in ("argument", "constant")
    what = Candidate(
        name,
        primitive,
        tuple(aval.shape),
        str(aval.dtype),
        joined_scopes(settings.scope, origin.scope),
        settings.layers,
        has_line=has_line,
    )
    return Kept(var, what, reason)


def _told_apart(
    arrays: Sequence[Kept], jaxpr: core.Jaxpr, origins: Origins, settings: Settings
) -> list[Kept]:
    """Returns the same arrays, with numbers where several have one scope and name."""
    places = _places(arrays, jaxpr, origins, settings)
    count: collections.Counter[tuple[str, str]] = collections.Counter()
    result = []
    for array in arrays:
        what = array.candidate
        if not array.reason and what.has_line:
            what = dataclasses.replace(what, occurrence=places[array.var])
        elif not array.reason:
            what = dataclasses.replace(what, occurrence=count[what.scope, what.name])
            count[what.scope, what.name] += 1
        result.append(dataclasses.replace(array, candidate=what))
    return result


def _places(
    arrays: Sequence[Kept], jaxpr: core.Jaxpr, origins: Origins, settings: Settings
) -> dict[Any, int]:
    """Returns how many results of the same operation in the same line come before each result."""
    wanted = {array.candidate.primitive for array in arrays if array.candidate.has_line}
    count: collections.Counter[tuple[str, str, str]] = collections.Counter()
    places = {}
    for eqn in jaxpr.eqns:
        is_passed = eqn.primitive.name == "optimization_barrier" or body_of(eqn) is not None
        if eqn.primitive.name not in wanted and not is_passed:
            continue
        for var in eqn.outvars:
            origin = origins.of(var)
            if origin.operator in wanted:
                key = joined_scopes(settings.scope, origin.scope), origin.name, origin.operator
                places[var] = count[key]
                count[key] += 1
    return places


def _tagged_names(jaxpr: core.Jaxpr, graph: Graph) -> dict[core.Var, str]:
    """Returns the names that the user, or else an operator, gave arrays.

    The user's name of a value is also that of the array that is stored instead of it: one that is
    a view of it, a cast, or another elementwise function of it alone, or that it is one of.
    """
    users: dict[Any, str] = {}
    makes: dict[Any, str] = {}
    operators: dict[Any, str] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            (var,), name = eqn.outvars, eqn.params["name"]
            tag = Tag.decode(name)
            if tag is not None:
                for x in graph.viewed(var):
                    operators.setdefault(x, tag.name)
                continue
            for x in graph.viewed(var):
                users.setdefault(x, name)
            root = graph.only_root(var)
            if root is not None:
                makes.setdefault(root, name)
        else:
            inputs: list[Any] = [x for x in eqn.invars if isinstance(x, core.Var)]
            if is_cheap(eqn) and len(inputs) == 1 and inputs[0] in users:
                outputs: list[Any] = eqn.outvars
                same = [x for x in outputs if x.aval.shape == inputs[0].aval.shape]
                users |= dict.fromkeys(same, users[inputs[0]])
    # Arrays computed from an array before it was named.
    for eqn in jaxpr.eqns:
        inputs = [x for x in eqn.invars if isinstance(x, core.Var)]
        if eqn.primitive.name != "name" and is_cheap(eqn) and len(inputs) == 1:
            outputs: list[Any] = eqn.outvars
            source: Any = inputs[0]
            for x in outputs:
                if source in users and x.aval.shape == source.aval.shape:
                    users.setdefault(x, users[source])
    return operators | makes | users
