"""Compressed residuals for any function, without rewriting it.

GACT (Liu et al., 2022): any function stores a list of tensors for its backward pass, and each of
them may be replaced by a code. In JAX the leaves of the pullback of `jax.vjp` are this list.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core

from actjax._core.tags import tag_exact
from actjax.codecs import Codec
from actjax.residuals.arrays_alone import open_function
from actjax.residuals.candidates import Candidate, Recompute, Rule, Settings
from actjax.residuals.checks import check_function, check_positions, positions_of
from actjax.residuals.graph.divisors import quotients_read
from actjax.residuals.graph.equations import (
    CUSTOM_VJP,
    is_foreign_rule,
    joined_scopes,
    scan_counts,
    scope_of,
)
from actjax.residuals.graph.one_way import ONE_WAY, passing_one_way, without_derivative
from actjax.residuals.graph.programs import Handler, Search, close, inlined, run_inlined
from actjax.residuals.graph.segments import chosen_by, cut, pieces
from actjax.residuals.graph.variables import is_floating
from actjax.residuals.passes import key_of, run_compressed
from actjax.residuals.plan import make_plan, trace
from actjax.residuals.residual_codecs import BitMask
from actjax.residuals.special import run_special

_FIRST_LOOP = 2**30
"""First number that the keys of loops are folded with. Arrays use smaller numbers."""


def compress_residuals(
    fun: Callable[..., Any],
    rule: Rule | Codec,
    *,
    activations: int | Sequence[int] = (),
    rebuild: bool = True,
    key: jax.Array | Mapping[str, jax.Array] | None = None,
) -> Callable[..., Any]:
    """Returns `fun` with a backward pass that stores its residuals as codes.

    The value is exact. The backward pass of `fun` reads decoded residuals, so the error of the
    gradient depends on the operations that read them (see `actjax.explain` and
    `actjax.sensitivity`).

        fun = actjax.compress_residuals(model.apply, actjax.Quantized(4))
        gradient = jax.grad(lambda params: loss(fun(params, x), y))(params)

    The rule decides on the floating point arrays that `fun` computes. Arguments and closed-over
    arrays (weights, a batch) stay alive anyway and are stored unchanged, and so are integers and
    arrays that are already codes. Booleans, such as the mask of a ReLU or of dropout, take one bit
    each. An array that several operators need is stored once, together with its views: transposed,
    reshaped, broadcast or wider copies.

    `fun` may write into Flax nnx modules among its positional arguments: statistics of a batch
    norm, the number of dropout masks drawn, settings.

    Residuals of a `custom_vjp` of others are coded if its backward pass is continuous in them, and
    stay exact if it compares, rounds or sorts them. Attention with a stored log-sum-exp is run
    again from decoded inputs in the backward pass: where scores are large, weights computed from
    decoded q and k and the exact log-sum-exp would be wrong by orders of magnitude. That is not so
    for `actjax.attention`: use its `recompute=True` where scores are large.

    A `lax.scan` in `fun` is transformed as well: the residuals of an iteration, including its
    carry, are encoded within the loop, so that no stack of floats exists. Works under `jit`,
    `vmap` and `lax.scan`, with `jax.checkpoint` inside (the rule decides on what it saves) or
    outside, with data that the compiler shards over devices, with explicit axes, and with
    `jax.shard_map` inside or outside. Reverse mode only, and first derivatives only: second
    derivatives of codes raise.

    Args:
      fun: any JAX function that can be differentiated in reverse mode. Leaves that are not arrays,
        such as a Python number or a function in a module of Equinox, are static. Arrays in keyword
        arguments are closed over.
      rule: a function from a `Candidate` to its codec; or one codec for all arrays except small
        ones (32 times smaller than the largest).
      activations: positions of arguments that the rule decides on too, because they are dead after
        the forward pass, such as the input of a layer.
      rebuild: whether to recompute cheap residuals from the decoded values that they follow from.
      key: randomness of the encoding, or a mapping from the label or the name of an array to its
        key; consumed. Required if a codec draws random numbers.

    Raises:
      TypeError: `fun` is not a function, `rule` is neither a codec nor a function or returned
        something else, or `key` is not a key.
      ValueError: when called: a position without an argument, a missing key, or a codec that does
        not fit an array.
    """
    check_function(fun, "compress_residuals")
    if isinstance(rule, type) or not (isinstance(rule, Codec) or callable(rule)):
        raise TypeError(
            "`rule` of compress_residuals must be an actjax.Codec, such as actjax.Quantized(4), or"
            f" a function from a Candidate to a codec or None, got {rule!r}."
        )
    if not (key is None or isinstance(key, Mapping) or hasattr(key, "dtype")):
        raise TypeError(
            "`key` of compress_residuals must be a jax.random key, or a mapping from names to keys,"
            f" got {key!r}."
        )
    positions = positions_of(activations, "compress_residuals")

    return compressed_function(fun, Settings(rule, rebuild), positions, key)


def compressed_function(
    fun: Callable[..., Any],
    settings: Settings,
    positions: frozenset[int] = frozenset(),
    key: Any = None,
) -> Callable[..., Any]:
    """As `compress_residuals`, for checked arguments.

    Args:
      fun: the function.
      settings: how residuals are stored or computed again.
      positions: of arguments that are dead after the forward pass.
      key: randomness of the encoding, or None.
    """

    @functools.wraps(fun)
    def compressed(*args: Any, **kwargs: Any) -> Any:
        check_positions(positions, args, "compress_residuals")
        opened = open_function(functools.partial(fun, **kwargs), args, "compress_residuals")
        closed = close(opened.fun, opened.args)
        paths = jax.tree_util.tree_flatten_with_path(opened.args)[0]
        names = [*("",) * len(closed.constants), *(jax.tree_util.keystr(path) for path, _ in paths)]
        dies = [path[0].idx in positions for path, _ in paths]
        outputs = _compress(
            core.ClosedJaxpr(closed.jaxpr, closed.constants),
            closed.arguments,
            names,
            [False] * len(closed.constants) + dies,
            settings,
            key,
            passing_one_way(closed.jaxpr),
        )
        return opened.finish(closed.unflatten(outputs))

    return compressed


def _compress(
    program: core.ClosedJaxpr,
    arguments: Sequence[Any],
    names: Sequence[str],
    dies: Sequence[bool],
    settings: Settings,
    key: Any,
    one_way: dict[int, str],
    fixed: Sequence[bool] | None = None,
) -> list[Any]:
    """Runs a program with its residuals compressed.

    Args:
      program: the program.
      arguments: its arguments.
      names: names of its constants and arguments.
      dies: which of these are dead after the forward pass.
      settings: settings of the whole function.
      key: randomness of the encoding, or None.
      one_way: for constants and arguments that no gradient may pass, the operation without a
        derivative.
      fixed: which constants and arguments are not differentiated; None for those without a trace,
        such as data and times that a function closes over.
    """
    words, treedef = jax.tree.flatten(key)
    inputs = [*program.consts, *arguments, *words]
    data = [not isinstance(x, Tracer) for x in inputs]
    if fixed is not None:
        data = [*fixed, *(True,) * len(words)]
    names = [*names, *("",) * len(words)]
    dies = [*dies, *(False,) * len(words)]
    first, last = len(program.consts), len(inputs) - len(words)

    # All arrays that `run` reads are inputs: it is traced again where it is differentiated, perhaps
    # outside of the loop that a key belongs to.
    def run(data: Sequence[bool], again: Collection[int], *inputs: Any) -> list[Any]:
        closed = core.ClosedJaxpr(program.jaxpr, list(inputs[:first]))
        run_key = jax.tree.unflatten(treedef, inputs[last:])
        if settings.remat is None:
            return _run_once(closed, inputs[first:last], settings, run_key, again)
        return _run_segments(
            closed, inputs[first:last], dies[:last], data[:last], settings, settings.remat, run_key
        )

    if all(data):
        return run(data, (), *inputs)
    # The choice must not depend on whether a batch is closed over, or a step is jitted.
    known = [*(fixed or (False,) * last), *data[last:]]
    try:
        traced = trace(functools.partial(run, known, ()), inputs, known)
    except Exception:
        if known == data:
            raise
        # The custom rules of some libraries refuse to be differentiated in their data.
        known = data
        traced = trace(functools.partial(run, known, ()), inputs, known)
    fitted_run = functools.partial(run, known, traced.reads.rules)
    if traced.reads.rules and settings.remat is None:
        traced = trace(fitted_run, inputs, known)
    plan, codecs = make_plan(traced, names, dies, settings, one_way)
    if not plan.kept and not (one_way and plan.smooth_outputs):
        return run(known, (), *inputs)
    for i, codec in enumerate(codecs):
        if codec is not None and not isinstance(codec, BitMask) and codec.needs_key:
            _check_key(key, plan.kept[i].candidate)
            codec.required_key(key_of(key, plan, i))
    return run_compressed(plan, fitted_run, inputs, codecs, key)


def _run_once(
    program: core.ClosedJaxpr,
    arguments: Sequence[Any],
    settings: Settings,
    key: Any,
    again: Collection[int] = (),
) -> list[Any]:
    """Runs a program without computing any of it again; its loops are compressed.

    Args:
      program: the program.
      arguments: its arguments.
      settings: settings of the whole function.
      key: randomness of the encoding, or None.
      again: numbers of the custom rules that are run again in the backward pass.
    """
    # Other calls are differentiated as calls: JAX differentiates equal ones once.
    has_special = Search({"scan", "cond", *CUSTOM_VJP, *ONE_WAY})
    into = lambda jaxpr: has_special(jaxpr) or bool(quotients_read(jaxpr))  # noqa: E731
    handle = _handler(settings, key, quotients_read(program.jaxpr), again)
    return run_inlined(program, arguments, handle, into=into)


def _handler(
    settings: Settings, key: Any, quotients: Collection[Any], again: Collection[int] = ()
) -> Handler:
    """Returns the handler of loops, and of equations without a derivative or with a custom one."""
    # Each loop has its own key, the same each time the function is traced. So do custom rules.
    loops, rules = itertools.count(), itertools.count()

    def handle(eqn: core.JaxprEqn, x: list[Any]) -> list[Any] | None:
        outputs = run_special(eqn, x, rules, again, quotients)
        return _compress_loop(settings, key, loops, eqn, x) if outputs is None else outputs

    return handle


def _run_segments(
    program: core.ClosedJaxpr,
    arguments: Sequence[Any],
    dies: Sequence[bool],
    fixed: Sequence[bool],
    settings: Settings,
    remat: Recompute,
    key: Any,
) -> list[Any]:
    """Runs a program whose backward pass computes its segments again.

    Args:
      program: the program.
      arguments: its arguments.
      dies: which of its constants and arguments are dead after the forward pass.
      fixed: which of these are not differentiated.
      settings: settings of the whole function.
      remat: how segments are computed again.
      key: randomness of the encoding, or None.
    """
    known = (*program.jaxpr.constvars, *program.jaxpr.invars)
    program = inlined(program)
    jaxpr = program.jaxpr
    dying = {x for x, dead in zip(known, dies, strict=True) if dead}
    dead = [x in dying for x in (*jaxpr.constvars, *jaxpr.invars)]
    # Constants of called functions existed before anything was differentiated.
    data = {x for x in jaxpr.constvars if x not in known}
    data = without_derivative(jaxpr, data | {x for x, yes in zip(known, fixed, strict=True) if yes})
    segments = cut(jaxpr, settings.layers, dead, _is_apart, remat.share)
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, program.consts, strict=True))
    values |= zip(jaxpr.invars, arguments, strict=True)
    once = dataclasses.replace(settings, remat=None)
    handle = _handler(settings, key, quotients_read(jaxpr))
    bodies = pieces(program, segments, dead)
    exact: set[Any] = set()
    if remat.codes:
        again_bodies = [b for s, (b, _) in zip(segments, bodies, strict=True) if s.again]
        exact = {x for b in again_bodies for x in chosen_by(b, is_foreign_rule)}
    values |= {x: tag_exact(values[x]) for x in jaxpr.invars if x in exact and x in dying}
    for i, (segment, (body, invars)) in enumerate(zip(segments, bodies, strict=True)):
        closed, body_inputs = core.ClosedJaxpr(body, []), [values[x] for x in invars]
        if not segment.again:
            outputs = run_inlined(closed, body_inputs, handle)
        elif remat.codes:
            segment_key = jax.tree.map(lambda k, i=i: jax.random.fold_in(k, i), key)
            scope = joined_scopes(settings.scope, f"segment {i}")
            scoped = dataclasses.replace(once, scope=scope)
            again = functools.partial(
                _compress_segment, closed, scoped, segment_key, [x in data for x in invars]
            )
            outputs = jax.checkpoint(again)(*body_inputs)
        else:
            again = functools.partial(run_inlined, closed, handle=run_special)
            outputs = jax.checkpoint(lambda *x, again=again: again(x))(*body_inputs)
        made = zip(body.outvars, outputs, strict=True)
        values |= {x: tag_exact(y) if x in exact else y for x, y in made}
    return [x.val if isinstance(x, core.Literal) else values[x] for x in jaxpr.outvars]


def _compress_segment(
    program: core.ClosedJaxpr,
    settings: Settings,
    key: Any,
    fixed: Sequence[bool],
    *arguments: Any,
) -> list[Any]:
    """Runs a segment that is computed again, and stores the residuals of that run as codes."""
    count = len(arguments)
    return _compress(program, arguments, [""] * count, [False] * count, settings, key, {}, fixed)


def _is_apart(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation is not computed again.

    Loops are compressed by themselves, and an effect, such as printing, happens once.
    """
    return eqn.primitive.name == "scan" or bool(eqn.effects)


def _compress_loop(
    settings: Settings,
    key: Any,
    numbers: Iterator[int],
    eqn: core.JaxprEqn,
    inputs: list[Any],
) -> list[Any] | None:
    """Runs a `lax.scan` with the residuals of its body compressed; returns None for the rest."""
    if eqn.primitive.name != "scan" or not any(is_floating(x.aval) for x in eqn.outvars):
        return None
    body, params = eqn.params["jaxpr"], eqn.params
    first, carried = scan_counts(eqn)
    last = first + carried
    constants, start, stacked = inputs[:first], inputs[first:last], inputs[last:]
    names = [""] * (len(body.consts) + len(inputs))
    number = next(numbers)
    loop_scope = joined_scopes(settings.scope, scope_of(eqn), f"loop {number}" if number else "")
    settings = dataclasses.replace(
        settings, scope=loop_scope, layers=settings.layers * params["length"]
    )
    # The next iteration has another carry, so this one is not alive otherwise.
    dies = [False] * len(names)
    for i in range(len(start)):
        position = len(body.consts) + first + i
        names[position], dies[position] = f"carry {i}" if len(start) > 1 else "carry", True
    length = params["length"]
    fold = _FIRST_LOOP + number
    keys = jax.tree.map(lambda k: jax.random.split(jax.random.fold_in(k, fold), length), key)

    def step(carry: Any, slices: Any) -> Any:
        xs, step_key = slices
        # The outer call already checked for operations without a derivative.
        outputs = _compress(body, [*constants, *carry, *xs], names, dies, settings, step_key, {})
        return outputs[: len(start)], outputs[len(start) :]

    carry, ys = jax.lax.scan(
        step, start, (stacked, keys), length, reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*carry, *ys]


def _check_key(key: Any, what: Candidate) -> None:
    """Raises unless there is a key for an array."""
    if isinstance(key, Mapping) and what.label not in key and what.name not in key:
        raise ValueError(
            f"`key` of compress_residuals has no entry for {what.label!r}, whose codec draws random"
            f" numbers: it has {sorted(key)}."
        )
