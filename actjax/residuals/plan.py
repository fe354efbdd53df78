"""Decides which arrays a function stores for its backward pass, and with which codecs.

GACT recognizes parameters by their address, and stores a tensor that several operators need only
once. Here both follow from the traced program.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import AbstractValue
from jax.extend import core
from jax.interpreters import partial_eval

from actjax._core.tags import EXACT_INPUT, Tag
from actjax.residuals.candidates import Candidate, Kept, Settings, decide, describe
from actjax.residuals.graph.foreign import Reads, reads_of_rules
from actjax.residuals.graph.products import PRODUCTS
from actjax.residuals.graph.programs import inlined, merged
from actjax.residuals.graph.rebuilding import Graph, is_cheap
from actjax.residuals.graph.storing import choose
from actjax.residuals.graph.variables import has_floats, nbytes
from actjax.residuals.residual_codecs import ResidualCodec

_CODES_PER_ARRAY = 4
"""Codes of most rules take a quarter of an array or less."""


@dataclasses.dataclass(frozen=True, eq=False)
class ResidualPlan:
    """The arrays that a function stores for its backward pass. Made before the function runs.

    Attributes:
      forward: from inputs to outputs and stored arrays, in the order of `kept`.
      outputs: number of outputs.
      kept: the stored arrays.
      leaves: for each leaf of the pullback its variable in the forward program, or a literal.
      graph: how the leaves are rebuilt from the stored arrays.
      backward: the pullback, from its leaves and the cotangents of the smooth outputs to the
        cotangents of the smooth inputs.
      smooth_inputs: positions of the inputs that can be differentiated.
      one_way: for inputs that no gradient may pass, the operation without a derivative.
      smooth_outputs: positions of the outputs that can be differentiated.
      used: as in `Settings`.
    """

    forward: core.ClosedJaxpr
    outputs: int
    kept: tuple[Kept, ...]
    leaves: tuple[core.Var | core.Literal, ...]
    graph: Graph
    backward: core.ClosedJaxpr
    smooth_inputs: tuple[int, ...]
    one_way: dict[int, str]
    smooth_outputs: tuple[int, ...]
    used: Callable[[Candidate], None] | None = None

    def narrowed(self, wanted: Sequence[bool]) -> "ResidualPlan":
        """Returns the plan of a pullback to some inputs, which needs fewer arrays.

        Args:
          wanted: for each input, whether its cotangent is needed.
        """
        chosen = [i for i, x in enumerate(self.smooth_inputs) if wanted[x]]
        if len(chosen) == len(self.smooth_inputs):
            return self
        kept = [i in chosen for i in range(len(self.smooth_inputs))]
        # Within loops too: their bodies compute all cotangents that may be needed.
        jaxpr, _ = partial_eval.dce_jaxpr(self.backward.jaxpr, kept, instantiate=True)
        read = {x for eqn in jaxpr.eqns for x in eqn.invars if isinstance(x, core.Var)}
        read |= {x for x in jaxpr.outvars if isinstance(x, core.Var)}
        pairs = zip(jaxpr.invars[: len(self.leaves)], self.leaves, strict=True)
        leaves = [leaf for x, leaf in pairs if x in read and isinstance(leaf, core.Var)]
        stored = self.graph.needed(leaves, {k.var for k in self.kept})
        places = [i for i, k in enumerate(self.kept) if k.var in stored]
        outputs = self.forward.jaxpr.outvars[: self.outputs]
        forward = _with_outputs(self.forward.jaxpr, [*outputs, *(self.kept[i].var for i in places)])
        return dataclasses.replace(
            self,
            forward=core.ClosedJaxpr(forward, self.forward.consts),
            kept=tuple(self.kept[i] for i in places),
            backward=core.ClosedJaxpr(jaxpr, self.backward.consts),
            smooth_inputs=tuple(self.smooth_inputs[i] for i in chosen),
        )


def _integer_products(jaxpr: core.Jaxpr) -> set[core.Var]:
    """Returns integers that a product of quantized numbers computes.

    A code of the number that they are scaled to is smaller.
    """
    products = (eqn for eqn in jaxpr.eqns if eqn.primitive.name in PRODUCTS)
    return {x for eqn in products for x in eqn.outvars if not has_floats(x)}


def _inputs_of_segments(jaxpr: core.Jaxpr, leaves: Sequence[Any]) -> dict[core.Var, None]:
    """Returns the residuals that segments must be computed again from exactly."""
    tagged: set[Any] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            tag = Tag.decode(eqn.params["name"])
            if tag is not None and tag.left == EXACT_INPUT:
                tagged |= set(eqn.outvars)
    return {x: None for x in leaves if isinstance(x, core.Var) and x in tagged}


def make_plan(
    traced: "Traced",
    names: Sequence[str],
    dies: Sequence[bool],
    settings: Settings,
    one_way: dict[int, str],
) -> tuple[ResidualPlan, list[ResidualCodec | None]]:
    """Decides what to store for the pullback of a function.

    Returns the plan, and the codec of each stored array; None if it is stored exactly. A codec may
    hold arrays, which are arguments of what the plan is a static part of.

    Args:
      traced: the function and its pullback.
      names: names of its inputs.
      dies: which inputs are dead after the forward pass.
      settings: the rule, and whether residuals are rebuilt.
      one_way: for the inputs that no gradient may pass, the operation without a derivative.
    """
    jaxpr, count = traced.forward.jaxpr, traced.outputs
    alive = {*jaxpr.constvars}
    alive |= {x for x, dead in zip(jaxpr.invars, dies, strict=True) if not dead}
    leaves = jaxpr.outvars[count:]
    backward = traced.backward.jaxpr
    foreign = dict.fromkeys([*traced.reads.exact, *traced.reads.fitting])
    foreign |= _inputs_of_segments(jaxpr, leaves)
    free = {*alive, *foreign}
    integers = _integer_products(jaxpr)

    def price(x: core.Var) -> int:
        return 0 if x in free else nbytes(x) * (_CODES_PER_ARRAY if x in integers else 1)

    graph = Graph(jaxpr, price, rebuild=settings.rebuild)
    residuals = [x for x in leaves if isinstance(x, core.Var) and x not in foreign]
    forms = choose(graph, residuals, backward, leaves)
    to_store = list(dict.fromkeys([*foreign, *forms]))
    described = describe(jaxpr, graph, to_store, foreign, names, dies, settings)
    codecs, reasons = decide(described, settings.rule, forms)
    settled = [
        dataclasses.replace(k, reason=reason, number=i)
        for i, (k, reason) in enumerate(zip(described, reasons, strict=True))
    ]
    shortened = _with_outputs(jaxpr, [*jaxpr.outvars[:count], *to_store])
    plan = ResidualPlan(
        forward=core.ClosedJaxpr(shortened, traced.forward.consts),
        outputs=count,
        kept=tuple(settled),
        leaves=tuple(leaves),
        graph=graph,
        backward=traced.backward,
        smooth_inputs=traced.smooth_inputs,
        one_way=one_way,
        smooth_outputs=traced.smooth_outputs,
        used=settings.used,
    )
    return plan, codecs


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function and its pullback as programs.

    Attributes:
      forward: from inputs to outputs and the leaves of the pullback.
      outputs: number of outputs.
      backward: from the leaves and the cotangents of the smooth outputs to those of the smooth
        inputs.
      smooth_inputs: positions of the inputs that can be differentiated.
      smooth_outputs: positions of the outputs that can be differentiated.
      reads: the leaves that other people's custom rules cannot read as codes.
    """

    forward: core.ClosedJaxpr
    outputs: int
    backward: core.ClosedJaxpr
    smooth_inputs: tuple[int, ...]
    smooth_outputs: tuple[int, ...]
    reads: Reads


def trace(run: Callable[..., list[Any]], inputs: Sequence[Any], fixed: Sequence[bool]) -> Traced:
    """Traces a function with its pullback.

    Args:
      run: from inputs to outputs.
      inputs: arrays.
      fixed: which inputs cannot be differentiated.
    """
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

    # Functions of other libraries compute the same sine twice: it is stored once.
    program = merged(_inlined(forward, inputs), is_cheap)
    (count, smooth_outputs), treedef = structures[-2:]
    avals = [x.aval for x in program.jaxpr.outvars]
    backward = _inlined(
        lambda leaves, cotangents: jax.tree.unflatten(treedef, leaves)(cotangents),
        (avals[count:], [avals[i] for i in smooth_outputs]),
    )
    reads = reads_of_rules(program.jaxpr, smooth, backward.jaxpr, program.jaxpr.outvars[count:])
    return Traced(program, count, backward, smooth, smooth_outputs, reads)


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


def _with_outputs(jaxpr: core.Jaxpr, outvars: list[Any]) -> core.Jaxpr:
    return jaxpr.replace(outvars=outvars, debug_info=jaxpr.debug_info.with_unknown_names())
