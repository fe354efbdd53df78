"""Which arrays a function stores for its backward pass, and with which codecs.

GACT recognises parameters by their address, and stores a tensor that several operators need only
once. Here both follow from the traced program.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.core import AbstractValue
from jax.extend import core

from actjax._core.tags import Tag
from actjax._jaxpr.equations import joined_scopes
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
_MASK = 4096
"""Booleans that are worth packing into bits. Fewer, such as one for each token, are not: each
packing is an operation that is traced and compiled."""
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
        of a `lax.scan` have one scope.
    """

    name: str
    primitive: str
    shape: tuple[int, ...]
    dtype: str
    scope: str = ""

    @property
    def label(self) -> str:
        """Scope and name, which tell apart the layers of an unrolled model that have scopes."""
        return joined_scopes(self.scope, self.name)

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
class Settings:
    """Settings that all loops of a function share.

    Attributes:
      rule: selects the codec of an array.
      rebuild: whether cheap residuals are rebuilt.
      scope: name scopes of the loop that is traced.
    """

    rule: Rule | Codec
    rebuild: bool
    scope: str = ""


@dataclasses.dataclass(frozen=True)
class Kept:
    """An array that is stored, exactly or as a code.

    Attributes:
      var: its variable in the forward program.
      candidate: its description for the rule.
      reason: why it is stored exactly; empty if a codec stores it.
    """

    var: Any
    candidate: Candidate
    reason: str


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


def make_plan(
    run: Callable[..., list[Any]],
    inputs: Sequence[Any],
    names: Sequence[str],
    dies: Sequence[bool],
    settings: Settings,
    one_way: dict[int, str],
) -> Plan:
    """Traces a function with its pullback, and decides what to store for the pullback.

    Args:
      run: from inputs to outputs.
      inputs: arrays.
      names: names of the inputs.
      dies: which inputs are dead after the forward pass.
      settings: what is done with residuals.
      one_way: for the inputs that no gradient may pass, the operation without a derivative.
    """
    traced = _trace(run, inputs)
    jaxpr, count = traced.forward.jaxpr, traced.outputs
    alive = {*jaxpr.constvars}
    alive |= {x for x, dead in zip(jaxpr.invars, dies, strict=True) if not dead}
    graph = Graph(jaxpr, lambda x: 0 if x in alive else _nbytes(x), rebuild=settings.rebuild)
    leaves = jaxpr.outvars[count:]
    kept = graph.choose([x for x in leaves if isinstance(x, core.Var)])
    origins, given = Origins(jaxpr), _given_names(jaxpr, graph)
    found = [
        _describe(jaxpr, origins.of(x), given.get(x, ""), x, names, dies, settings.scope)
        for x in kept
    ]
    codecs, reasons = _decide(found, settings.rule)
    settled = [
        dataclasses.replace(k, reason=reason) for k, reason in zip(found, reasons, strict=True)
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


def _trace(run: Callable[..., list[Any]], inputs: Sequence[Any]) -> _Traced:
    smooth = _smooth(inputs)
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
    open_ones = [k.candidate for k in found if not k.reason]
    if isinstance(rule, Codec):
        codec, largest = rule, max((c.size for c in open_ones), default=0)
        rule = lambda c: codec if c.shape and 0 < largest <= c.size * LARGEST_OVER_SMALL else None  # noqa: E731
    codecs: list[StoredBy | None] = []
    reasons: list[str] = []
    for k in found:
        what, stored, reason = k.candidate, None, k.reason
        if reason == _NOT_FLOATING and what.dtype == "bool" and what.size >= _MASK:
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
    scope: str,
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
    elif origin.is_slices:
        reason = "slices of an argument, alive anyway"
    if not reason and not is_floating(aval):
        reason = _NOT_FLOATING
    scope = joined_scopes(scope, origin.scope)
    return Kept(var, Candidate(name, primitive, tuple(aval.shape), str(aval.dtype), scope), reason)


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
