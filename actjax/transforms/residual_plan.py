"""Which arrays a function stores for its backward pass, and with which codecs.

GACT recognises parameters by their address, and stores a tensor that several operators need only
once. Here both follow from the traced program.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.core import AbstractValue
from jax.extend import core

from actjax._core.tags import Tag
from actjax._jaxpr.equations import is_marked, joined_scopes
from actjax._jaxpr.origins import Origin, Origins
from actjax._jaxpr.programs import inlined
from actjax._jaxpr.rebuilding import Graph
from actjax.codecs import Codec
from actjax.transforms.stored_by import StoredBy, fitted, in_bits

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
_NOT_FLOATING = "not floating point"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An array that a function stores for its backward pass; the input of a rule.

    Attributes:
      name: its `jax.ad_checkpoint.checkpoint_name` if it has one; otherwise the path of the
        argument that it is, or the line of the program that made it.
      primitive: the JAX primitive that made it; "argument" for an argument.
      shape: its shape; within a loop the shape in one iteration.
      dtype: its dtype, as text.
      scope: the `jax.named_scope`s that it was made in, such as "transformer/h/0/mlp": modules of
        Flax linen, Haiku and Equinox (`eqx.nn`) open one each. Empty if there are none. All layers
        of a `lax.scan` have one scope; loops of one scope are told apart by "loop 1" and so on.
      layers: iterations of the loops that it is made in, which all store one; 1 outside of loops.
      occurrence: how many arrays with the same scope and name come before it.
    """

    name: str
    primitive: str
    shape: tuple[int, ...]
    dtype: str
    scope: str = ""
    layers: int = 1
    occurrence: int = 0

    @property
    def label(self) -> str:
        """Scope and name, and "#1" and so on after the first array that has both."""
        label = joined_scopes(self.scope, self.name)
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
class Remat:
    """What is computed again in the backward pass.

    Attributes:
      codes: whether the arrays that are computed again are stored as codes, too, until the backward
        pass of their segment reads them (GACT's level CB1).
    """

    codes: bool = False


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that all loops of a function share.

    Attributes:
      rule: selects the codec of an array.
      rebuild: whether cheap residuals are rebuilt.
      remat: what is computed again in the backward pass; by default nothing but what is cheap.
      scope: name scopes of the loop that is traced.
      layers: iterations of the loops around it.
    """

    rule: Rule | Codec
    rebuild: bool = True
    remat: Remat | None = None
    scope: str = ""
    layers: int = 1


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


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What a function stores for its backward pass. Made before the function runs.

    Attributes:
      forward: from inputs to outputs and stored arrays, in the order of `kept`.
      outputs: number of outputs.
      kept: the stored arrays.
      codecs: the codec of each stored array; None if it is stored exactly.
      leaves: for each leaf of the pullback its variable in the forward program, or a literal.
      graph: how the leaves are rebuilt from the stored arrays.
      backward: the pullback, from its leaves and the cotangents of the smooth outputs to the
        cotangents of the smooth inputs.
      smooth_inputs: positions of the inputs that can be differentiated.
      one_way: for inputs that no gradient may pass, the operation without a derivative.
      smooth_outputs: positions of the outputs that can be differentiated.
    """

    forward: core.ClosedJaxpr
    outputs: int
    kept: tuple[Kept, ...]
    codecs: tuple[StoredBy | None, ...]
    leaves: tuple[core.Var | core.Literal, ...]
    graph: Graph
    backward: core.ClosedJaxpr
    smooth_inputs: tuple[int, ...]
    one_way: dict[int, str]
    smooth_outputs: tuple[int, ...]

    def narrowed(self, wanted: Sequence[bool]) -> "Plan":
        """Returns the plan of a pullback to some inputs, which needs fewer arrays.

        Args:
          wanted: for each input, whether its cotangent is needed.
        """
        chosen = [i for i, x in enumerate(self.smooth_inputs) if wanted[x]]
        if len(chosen) == len(self.smooth_inputs):
            return self
        jaxpr = self.backward.jaxpr
        outvars = [jaxpr.outvars[i] for i in chosen]
        eqns, read = _needed(jaxpr, outvars)
        pairs = zip(jaxpr.invars[: len(self.leaves)], self.leaves, strict=True)
        leaves = [leaf for x, leaf in pairs if x in read and isinstance(leaf, core.Var)]
        stored = self.graph.needed(leaves, {k.var for k in self.kept})
        kept = [i for i, k in enumerate(self.kept) if k.var in stored]
        outputs = self.forward.jaxpr.outvars[: self.outputs]
        forward = _with_outputs(self.forward.jaxpr, [*outputs, *(self.kept[i].var for i in kept)])
        backward = _with_outputs(jaxpr.replace(eqns=eqns), outvars)
        return dataclasses.replace(
            self,
            forward=core.ClosedJaxpr(forward, self.forward.consts),
            kept=tuple(self.kept[i] for i in kept),
            codecs=tuple(self.codecs[i] for i in kept),
            backward=core.ClosedJaxpr(backward, self.backward.consts),
            smooth_inputs=tuple(self.smooth_inputs[i] for i in chosen),
        )


def _read_by_foreign_rules(jaxpr: core.Jaxpr, leaves: Sequence[Any]) -> dict[core.Var, None]:
    """Returns the residuals that other people's custom backward passes read.

    They may fit exact values only, or be no activations at all: the statistics of a softmax, the
    times of a solver, indices.

    Args:
      jaxpr: the pullback.
      leaves: its residuals, its first inputs.
    """
    read = {
        x for eqn in jaxpr.eqns if is_marked(eqn) for x in eqn.invars if isinstance(x, core.Var)
    }
    pairs = zip(jaxpr.invars, leaves, strict=False)
    return {leaf: None for x, leaf in pairs if x in read and isinstance(leaf, core.Var)}


def _needed(jaxpr: core.Jaxpr, outvars: Sequence[Any]) -> tuple[list[core.JaxprEqn], set[core.Var]]:
    """Returns the equations that outputs need, or that have an effect, and what these read."""
    read = {x for x in outvars if isinstance(x, core.Var)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(x in read for x in eqn.outvars):
            eqns.append(eqn)
            read |= {x for x in eqn.invars if isinstance(x, core.Var)}
    return eqns[::-1], read


def make_plan(
    run: Callable[..., list[Any]],
    inputs: Sequence[Any],
    names: Sequence[str],
    dies: Sequence[bool],
    fixed: Sequence[bool],
    settings: Settings,
    one_way: dict[int, str],
) -> Plan:
    """Traces a function with its pullback, and decides what to store for the pullback.

    Args:
      run: from inputs to outputs.
      inputs: arrays.
      names: names of the inputs.
      dies: which inputs are dead after the forward pass.
      fixed: which inputs cannot be differentiated.
      settings: what is done with residuals.
      one_way: for the inputs that no gradient may pass, the operation without a derivative.
    """
    traced = _trace(run, inputs, fixed)
    jaxpr, count = traced.forward.jaxpr, traced.outputs
    alive = {*jaxpr.constvars}
    alive |= {x for x, dead in zip(jaxpr.invars, dies, strict=True) if not dead}
    leaves = jaxpr.outvars[count:]
    foreign = _read_by_foreign_rules(traced.backward.jaxpr, leaves)
    free = {*alive, *foreign}
    graph = Graph(jaxpr, lambda x: 0 if x in free else _nbytes(x), rebuild=settings.rebuild)
    chosen = graph.choose([x for x in leaves if isinstance(x, core.Var) and x not in foreign])
    kept = list(dict.fromkeys([*foreign, *chosen]))
    origins, given = Origins(jaxpr), _given_names(jaxpr, graph)
    found = [
        _describe(jaxpr, origins.of(x), given.get(x, ""), x, names, dies, settings) for x in kept
    ]
    found = [
        dataclasses.replace(k, reason=_FOREIGN) if k.var in foreign and not k.reason else k
        for k in found
    ]
    found = _told_apart(found)
    codecs, reasons = _decide(found, settings.rule)
    settled = [
        dataclasses.replace(k, reason=reason, number=i)
        for i, (k, reason) in enumerate(zip(found, reasons, strict=True))
    ]
    shortened = _with_outputs(jaxpr, [*jaxpr.outvars[:count], *kept])
    return Plan(
        forward=core.ClosedJaxpr(shortened, traced.forward.consts),
        outputs=count,
        kept=tuple(settled),
        codecs=tuple(codecs),
        leaves=tuple(leaves),
        graph=graph,
        backward=traced.backward,
        smooth_inputs=traced.smooth_inputs,
        one_way=one_way,
        smooth_outputs=traced.smooth_outputs,
    )


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A function and its pullback as programs.

    Attributes:
      forward: from inputs to outputs and the leaves of the pullback.
      outputs: number of outputs.
      backward: from the leaves and the cotangents of the smooth outputs to those of the smooth
        inputs.
      smooth_inputs: positions of the inputs that can be differentiated.
      smooth_outputs: positions of the outputs that can be differentiated.
    """

    forward: core.ClosedJaxpr
    outputs: int
    backward: core.ClosedJaxpr
    smooth_inputs: tuple[int, ...]
    smooth_outputs: tuple[int, ...]


def _trace(run: Callable[..., list[Any]], inputs: Sequence[Any], fixed: Sequence[bool]) -> _Traced:
    smooth = tuple(i for i in _smooth(inputs) if not fixed[i])
    structures: list[Any] = []

    def forward(*inputs: Any) -> list[Any]:
        def of_smooth(*floats: Any) -> Any:
            merged = list(inputs)
            for i, x in zip(smooth, floats, strict=True):
                merged[i] = x
            outputs = run(*merged)
            chosen = _smooth(outputs)
            structures.append((len(outputs), chosen))
            return [outputs[i] for i in chosen], outputs

        floats = [inputs[i] for i in smooth]
        _, pullback, outputs = jax.vjp(of_smooth, *floats, has_aux=True)
        leaves, treedef = jax.tree.flatten(pullback)
        structures.append(treedef)
        return [*outputs, *leaves]

    program = _inlined(forward, inputs)
    (count, smooth_outputs), treedef = structures[-2:]
    avals = [x.aval for x in program.jaxpr.outvars]
    backward = _inlined(
        lambda leaves, cotangents: jax.tree.unflatten(treedef, leaves)(cotangents),
        (avals[count:], [avals[i] for i in smooth_outputs]),
    )
    return _Traced(program, count, backward, smooth, smooth_outputs)


def _smooth(values: Sequence[Any]) -> tuple[int, ...]:
    """Returns the positions of the arrays that can be differentiated: floating point or complex."""
    inexact = (jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact) for x in values)
    return tuple(i for i, yes in enumerate(inexact) if yes)


def _inlined(fun: Callable[..., Any], args: Sequence[Any]) -> core.ClosedJaxpr:
    """Returns the program of a function of arrays (or shapes) with all calls inlined."""
    structs = jax.tree.map(_typed, list(args))
    return inlined(jax.make_jaxpr(fun)(*structs), custom=True)


def _typed(x: Any) -> Any:
    """Returns the abstract value of an array, with its mesh axes and without a weak type."""
    aval: Any = x if isinstance(x, AbstractValue) else jax.typeof(x)
    return aval.strip_weak_type()


def _decide(found: list[Kept], rule: Rule | Codec) -> tuple[list[StoredBy | None], list[str]]:
    """Returns what stores each array, and for those that are stored exactly the reason."""
    largest = max((k.candidate.size for k in found if not k.reason), default=0)
    is_small = lambda c: not c.shape or c.size * LARGEST_OVER_SMALL < largest  # noqa: E731
    if isinstance(rule, Codec):
        codec = rule
        rule = lambda c: None if is_small(c) or not largest else codec  # noqa: E731
    codecs: list[StoredBy | None] = []
    reasons: list[str] = []
    for k in found:
        what, stored, reason = k.candidate, None, k.reason
        # Few booleans, one for each token for example, are not worth the operations.
        if reason == _NOT_FLOATING and what.dtype == "bool" and not is_small(what):
            stored = in_bits(what.shape)
        elif not reason:
            chosen = rule(what)
            if isinstance(chosen, Codec):
                stored, reason = fitted(chosen, what.shape, what.dtype), NO_SMALLER
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
    given: str,
    var: core.Var,
    names: Sequence[str],
    dies: Sequence[bool],
    settings: Settings,
) -> Kept:
    """Returns the description of a stored array."""
    aval: Any = var.aval
    name, primitive, reason = given or origin.name, origin.operator, ""
    if var in jaxpr.invars:
        position = jaxpr.invars.index(var)
        name, primitive = name or names[position], "argument"
        reason = "" if dies[position] else "an argument, alive anyway"
    elif var in jaxpr.constvars:
        reason = "a constant, alive anyway"
    elif origin.tag is not None and origin.tag.is_code:
        reason = "stored by an actjax operator"
    elif origin.tag is not None and origin.tag.left:
        reason = "handled inside its loop"
    elif origin.operator == "while":
        reason = _LOOP
    elif origin.operator in _FACTORS:
        reason = _FACTOR
    elif origin.is_slices:
        reason = "slices of an argument, alive anyway"
    if not reason and not is_floating(aval):
        reason = _NOT_FLOATING
    scope = joined_scopes(settings.scope, origin.scope)
    shape, dtype = tuple(aval.shape), str(aval.dtype)
    return Kept(var, Candidate(name, primitive, shape, dtype, scope, settings.layers), reason)


def _told_apart(found: Sequence[Kept]) -> list[Kept]:
    """Returns the same arrays, with numbers where several have one scope and name."""
    count: collections.Counter[tuple[str, str]] = collections.Counter()
    result = []
    for kept in found:
        what = kept.candidate
        if not kept.reason:
            what = dataclasses.replace(what, occurrence=count[what.scope, what.name])
            count[what.scope, what.name] += 1
        result.append(dataclasses.replace(kept, candidate=what))
    return result


def _given_names(jaxpr: core.Jaxpr, graph: Graph) -> dict[core.Var, str]:
    """Returns the names that the user, or else an operator, gave arrays or views of them."""
    users: dict[core.Var, str] = {}
    operators: dict[core.Var, str] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            tag = Tag.decode(eqn.params["name"])
            for var in graph.viewed(eqn.outvars[0]):
                if tag is None:
                    users.setdefault(var, eqn.params["name"])
                else:
                    operators.setdefault(var, tag.name)
    return operators | users


def _with_outputs(jaxpr: core.Jaxpr, outvars: list[Any]) -> core.Jaxpr:
    return jaxpr.replace(outvars=outvars, debug_info=jaxpr.debug_info.with_unknown_names())


def _nbytes(var: Any) -> int:
    return var.aval.size * var.aval.dtype.itemsize


def is_floating(aval: Any) -> bool:
    """Returns whether an abstract value has floating point numbers."""
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.floating)
