"""The forward and backward pass of a function with compressed residuals."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from actjax._core.coded_call import decode_late
from actjax._core.no_derivative import no_derivative
from actjax._core.reverse_mode import ReverseMode
from actjax._core.tags import encoded_first, name_code, tag_left
from actjax.codecs import Exact
from actjax.residuals.candidates import LEFT, LEFT_BY_RULE, NO_SMALLER
from actjax.residuals.graph.divisors import run_decoded
from actjax.residuals.graph.equations import run_equation
from actjax.residuals.graph.programs import run_inlined
from actjax.residuals.plan import ResidualPlan
from actjax.residuals.residual_codecs import ResidualCodec, may_be_zero

LIFETIME = 32
"""Number of backward equations for which a decoded or rebuilt value is reused; after that it is
decoded again. About the length of one operator."""


@functools.partial(ReverseMode, nondiff_argnums=(0, 1))
def run_compressed(plan: ResidualPlan, run: Any, inputs: Any, codecs: Any, key: Any) -> list[Any]:
    """Returns the outputs of a function; stores codes of its residuals for its backward pass.

    Args:
      plan: which arrays are stored, and how the others are rebuilt.
      run: the function, from inputs to outputs.
      inputs: its inputs.
      codecs: the codec of each stored array; None if it is stored unchanged.
      key: randomness of the encoding, or None.
    """
    del plan, codecs, key
    return run(*inputs)


@jax.tree_util.register_static
class _Narrowed:
    """The plan of the cotangents that are needed, from the forward to the backward pass."""

    def __init__(self, plan: ResidualPlan) -> None:
        self.plan = plan


def _compressed_fwd(plan, run, inputs, codecs, key):
    del run
    for i, name in plan.one_way.items():
        if inputs[i].perturbed:
            raise ValueError(
                "compress_residuals: a gradient would have to pass through"
                f" `{name}`, which has no derivative in reverse mode: use lax.scan for a loop, or"
                " jax.lax.stop_gradient where data enters it."
            )
    plan = plan.narrowed([x.perturbed for x in inputs])
    if plan.used is not None:
        for entry in plan.kept:
            if entry.reason in ("", LEFT_BY_RULE, NO_SMALLER):
                plan.used(entry.candidate)
    inputs, codecs, key = jax.tree.map(lambda x: x.value, (inputs, codecs, key))
    codecs = tuple(codecs[k.number] for k in plan.kept)
    numbers = {k.var: i for i, k in enumerate(plan.kept)}
    made = {}

    def encode(var: core.Var, x: jax.Array) -> jax.Array:
        i = numbers.get(var)
        if i is None or codecs[i] is None:
            return x
        codec = codecs[i]
        value = x if isinstance(codec, Exact) or x.dtype == bool else no_derivative(x)
        code = codec.encode(value, key_of(key, plan, i) if codec.needs_key else None)
        x, made[i] = encoded_first(x, code)
        return x

    def handle(eqn: core.JaxprEqn, eqn_inputs: list[Any]) -> list[Any]:
        return list(map(encode, eqn.outvars, run_equation(eqn, eqn_inputs)))

    results = run_inlined(
        plan.forward, list(map(encode, plan.forward.jaxpr.invars, inputs)), handle
    )
    outputs, values = results[: plan.outputs], results[plan.outputs :]
    # The outputs wait for the codes as well: only the backward pass reads some encoded values.
    outputs, made = jax.lax.optimization_barrier((outputs, made))
    codes = []
    for i, (x, entry, codec) in enumerate(zip(values, plan.kept, codecs, strict=True)):
        what = entry.candidate
        if codec is not None:
            codes.append(name_code(made[i], x, repr(codec), what.primitive, what.label))
        elif entry.reason in LEFT:
            codes.append(tag_left(x, entry.reason, what.primitive, what.label))
        else:
            codes.append(x)
    return outputs, (codes, codecs, _Narrowed(plan))


def _compressed_bwd(plan, run, residuals, cotangents):
    del run
    codes, codecs, narrowed = residuals
    plan = narrowed.plan
    smooth_cotangents = [_written_out(cotangents[i]) for i in plan.smooth_outputs]
    gradients = _run_backward(plan, codes, codecs, smooth_cotangents)
    dinputs: list[Any] = [None] * len(plan.forward.jaxpr.invars)
    for i, dx in zip(plan.smooth_inputs, gradients, strict=True):
        dinputs[i] = dx
    return dinputs, None, None


def _written_out(cotangent: Any) -> jax.Array:
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        zero: Any = cotangent
        return jnp.zeros(zero.shape, zero.dtype)
    return cotangent


def _run_backward(
    plan: ResidualPlan,
    codes: Sequence[Any],
    codecs: Sequence[ResidualCodec | None],
    cotangents: Sequence[Any],
) -> list[Any]:
    """Runs the pullback; decodes or rebuilds each residual just before it is first read.

    Decoding everything at once would bring all floats back. The pullback therefore runs equation by
    equation. Equations that do not depend on a cotangent wait until a dependent equation reads
    them, and a code is decoded once the last cotangent before its use exists.
    """
    jaxpr = plan.backward.jaxpr
    count = len(plan.leaves)
    values = dict(zip(jaxpr.constvars, plan.backward.consts, strict=True))
    values |= zip(jaxpr.invars[count:], cotangents, strict=True)
    leaves = dict(zip(jaxpr.invars[:count], plan.leaves, strict=True))
    downstream, waiting = set(jaxpr.invars[count:]), {}
    store = _Store(plan, codes, codecs, cotangents[0])

    def read(x: core.Var | core.Literal) -> Any:
        if isinstance(x, core.Literal):
            return x.val
        # A loop instead of recursion: a chain of waiting equations can be long.
        needed = [x]
        while needed:
            y = needed[-1]
            if y in values:
                needed.pop()
            elif y in leaves:
                leaf = leaves[y]
                values[y] = leaf.val if isinstance(leaf, core.Literal) else store.rebuild(leaf)
                if isinstance(leaf, core.Var) and leaf in store.decoded:
                    store.decoded[y] = store.decoded[leaf]
            else:
                eqn = waiting[y]
                inputs = [z for z in eqn.invars if isinstance(z, core.Var)]
                missing = [z for z in inputs if z not in values]
                if missing:
                    needed += missing
                    continue
                operands = [z.val if isinstance(z, core.Literal) else values[z] for z in eqn.invars]
                results = run_decoded(eqn, operands, store.decoded)
                values.update(zip(eqn.outvars, results, strict=True))
        return values[x]

    for eqn in jaxpr.eqns:
        # An effect, such as printing, happens although nothing reads its result.
        if eqn.effects or any(x in downstream for x in eqn.invars if isinstance(x, core.Var)):
            downstream.update(eqn.outvars)
            outputs = run_decoded(eqn, [read(x) for x in eqn.invars], store.decoded)
            values |= zip(eqn.outvars, outputs, strict=True)
            if outputs:
                store.advance(outputs[0])
        else:
            waiting |= dict.fromkeys(eqn.outvars, eqn)
    return [read(x) for x in jaxpr.outvars]


class _Store:
    """The codes, and the values recently decoded or rebuilt from them, during a backward pass."""

    def __init__(
        self,
        plan: ResidualPlan,
        codes: Sequence[Any],
        codecs: Sequence[ResidualCodec | None],
        clock: jax.Array,
    ) -> None:
        """Takes the codes of the forward pass and the first cotangent.

        Args:
          plan: describes the codes.
          codes: codes of the stored arrays, in the order of the plan.
          codecs: codecs of the stored arrays.
          clock: the first cotangent; nothing is decoded before it exists.
        """
        self._graph = plan.graph
        self._kept = {
            k.var: (code, codec) for k, code, codec in zip(plan.kept, codes, codecs, strict=True)
        }
        self._clock = clock
        self._time = 0
        self._recent: dict[core.Var, tuple[int, Any]] = {}
        self.decoded: dict[core.Var, bool] = {
            x: may_be_zero(codec) for x, (_, codec) in self._kept.items() if codec is not None
        }
        """As for `run_decoded`."""

    def advance(self, clock: jax.Array) -> None:
        """Takes the latest cotangent."""
        self._clock, self._time = clock, self._time + 1

    def rebuild(self, var: core.Var) -> Any:
        """Returns a residual."""
        rebuilt = self._graph.rebuild(var, self._value, self.decoded)
        for made, x in rebuilt.items():
            # A value that was decoded or reused keeps its age.
            if made not in self._kept:
                self._recent.setdefault(made, (self._time, x))
        return rebuilt[var]

    def _value(self, var: core.Var) -> Any:
        made_at, x = self._recent.get(var, (-LIFETIME, None))
        if self._time - made_at < LIFETIME:
            return x
        self._recent.pop(var, None)
        if var not in self._kept:
            return None
        code, codec = self._kept[var]
        if codec is None:
            return code
        ((x,), _) = decode_late([code], [codec], self._clock)
        self._recent[var] = self._time, x
        return x


# `symbolic_zeros` tells which inputs are differentiated.
run_compressed.defvjp(_compressed_fwd, _compressed_bwd, symbolic_zeros=True)


def key_of(key: Any, plan: ResidualPlan, i: int) -> jax.Array | None:
    """Returns the key for stored array `i`."""
    if not isinstance(key, Mapping):
        return None if key is None else jax.random.fold_in(key, plan.kept[i].number)
    what = plan.kept[i].candidate
    return key.get(what.label, key.get(what.name))
