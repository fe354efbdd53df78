"""Storing the residuals of any function in a smaller form, without rewriting it.

GACT (Liu et al., 2022): what a function keeps for its backward pass is a list of tensors, whatever
its operators are, and any of them may be stored as a code. In JAX the leaves of what `jax.vjp`
returns *are* that list. GACT recognises parameters by their address and saves a tensor that three
operators keep once; here both are read from the traced program.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend import core

from actjax._core.coded_call import decode_late
from actjax._core.tags import Tag, encoded_first, name_code, tag_left
from actjax._jaxpr.equations import run_equation, scan_counts
from actjax._jaxpr.one_way import ONE_WAY, passing_one_way
from actjax._jaxpr.origins import origin_of
from actjax._jaxpr.programs import close, run_inlined
from actjax._jaxpr.rebuilding import Graph
from actjax.codecs import Codec, Exact
from actjax.kernels.packing import pack, unpack
from actjax.transforms.checks import check_function, check_positions, positions_of

LARGEST_OVER_SMALL = 32
"""Arrays that are so many times smaller than the largest are left alone where the rule is a codec:
statistics and log-sum-exps, of which nothing is gained and much may depend."""
LEFT_BY_RULE = "left by the rule"
_NOT_FLOATING = "no floating point numbers"
_FIRST_LOOP = 2**30
"""What keys of loops are folded with, apart from the numbers of arrays."""
AT_HAND = 32
"""Equations of a backward pass within which a decoded or rebuilt value is read again rather than
made again: about one operator's."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An array that a function keeps for its backward pass, for a rule to decide on.

    Attributes:
      name: its `jax.ad_checkpoint.checkpoint_name` if it has one; else the path of the argument
        that it is, or the line of the program that made it.
      primitive: the JAX primitive that made it; "argument" if it was given.
      shape: its shape; within a loop that of one iteration.
      dtype: its dtype, as text.
    """

    name: str
    primitive: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of it as it is."""
        return self.size * jnp.dtype(self.dtype).itemsize


Rule = Callable[[Candidate], Codec | Literal["leave"] | None]
"""From a candidate to what stores it; None or "leave" to keep it as it is."""


def compress_residuals(
    fun: Callable[..., Any],
    rule: Rule | Codec,
    *,
    activations: int | Sequence[int] = (),
    rebuild: bool = True,
    key: jax.Array | Mapping[str, jax.Array] | None = None,
) -> Callable[..., Any]:
    """Returns `fun`, of which the backward pass keeps residuals as codes.

    The value is exact. The gradient is that of `fun` with the decoded residuals in its backward
    pass, so its error depends on what reads them (see `actjax.explain` and `actjax.sensitivity`).

        fun = actjax.compress_residuals(model.apply, actjax.Quantized(4))
        gradient = jax.grad(lambda params: loss(fun(params, x), y))(params)

    What is decided on are floating point arrays that `fun` computes. Not decided on, and kept as
    they are: arguments and what `fun` closes over, since these stay alive anyway (weights, a
    batch), integers, and what is a code already. Booleans, such as the mask of a ReLU or of
    dropout, are kept in a bit each. An array that several operators keep is stored once, and so is
    one of which another is a view: a transposed, reshaped, broadcast or wider copy.

    What an operator keeps beside an array may hold for the exact values alone. Attention that keeps
    a log-sum-exp is such a one: where scores are large, weights made of codes of q and k and of
    that are off by orders of magnitude. Use `actjax.attention(..., recompute=True)`, or one that
    keeps its weights, as `jax.nn.dot_product_attention` does without cuDNN.

    A `lax.scan` in `fun` is entered: what one iteration keeps, its carry among it, is encoded
    within the loop, so that no stack of floats ever exists. Works under `jit`, `vmap`, `lax.scan`,
    with `jax.checkpoint` inside (what it saves is decided on) or outside, and with data that is
    sharded over devices by the compiler, not by `jax.shard_map` or with explicit axes. In reverse
    mode only, and once: second derivatives of codes are refused.

    Args:
      fun: any function of JAX that can be differentiated in reverse mode. Its positional arguments
        are traced; what is passed by name may be static, and its arrays are closed over.
      rule: what stores an array, a function of a `Candidate`; or a codec for all but those that
        are small (32 times smaller than the largest).
      activations: positions of arguments that are decided on too, because they die with the forward
        pass: the input of a layer, such as what `jax.checkpoint(layer)` keeps.
      rebuild: whether to compute cheap residuals again from the decoded values they follow from.
      key: randomness of the encoding, or a mapping from the name of an array to its own; consumed.
        Needed if a codec draws.

    Raises:
      TypeError: `fun` is no function, `rule` is neither, or returned something else, or `key` is
        none; when called: an argument that is no array.
      ValueError: when called: a position that is not there, a missing key, a codec that does not
        fit an array.
    """
    check_function(fun, "compress_residuals")
    if not isinstance(rule, Codec) and not callable(rule):
        raise TypeError(
            "`rule` of compress_residuals must be an actjax.Codec, or a function from a Candidate"
            f" to one (or None to leave it), got {rule!r}."
        )
    if not (key is None or isinstance(key, Mapping) or hasattr(key, "dtype")):
        raise TypeError(
            "`key` of compress_residuals must be a jax.random key, or a mapping from names to keys,"
            f" got {key!r}."
        )
    positions = positions_of(activations, "compress_residuals")

    @functools.wraps(fun)
    def compressed(*args: Any, **kwargs: Any) -> Any:
        check_positions(positions, args, "compress_residuals")
        closed = close(functools.partial(fun, **kwargs), args)
        paths = jax.tree_util.tree_flatten_with_path(args)[0]
        names = [*("",) * len(closed.constants), *(jax.tree_util.keystr(path) for path, _ in paths)]
        dies = [path[0].idx in positions for path, _ in paths]
        outputs = _compress(
            core.ClosedJaxpr(closed.jaxpr, closed.constants),
            closed.arguments,
            names,
            [False] * len(closed.constants) + dies,
            _Settings(rule, rebuild),
            key,
            passing_one_way(closed.jaxpr),
        )
        return closed.unflatten(outputs)

    return compressed


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What holds in all loops of a function.

    Attributes:
      rule: what stores an array.
      rebuild: whether cheap residuals are rebuilt.
    """

    rule: Rule | Codec
    rebuild: bool


def _compress(
    program: core.ClosedJaxpr,
    arguments: Sequence[Any],
    names: Sequence[str],
    dies: Sequence[bool],
    settings: _Settings,
    key: Any,
    one_way: dict[int, str],
) -> list[Any]:
    """Runs a program with its residuals compressed.

    Args:
      program: what to run.
      arguments: its arguments.
      names: of its constants and arguments.
      dies: which of these are dead after the forward pass.
      settings: what is done with residuals.
      key: randomness of the encoding, or None.
      one_way: for constants and arguments that no gradient may be asked for, the operation without
        a derivative that they pass through.
    """
    words, treedef = jax.tree.flatten(key)
    inputs = [*program.consts, *arguments, *words]
    names = [*names, *("",) * len(words)]
    dies = [*dies, *(False,) * len(words)]
    first, last = len(program.consts), len(inputs) - len(words)

    # All that it reads is given to it: it is traced again where it is differentiated, which may be
    # outside of the loop that a key is of.
    def run(*inputs: Any) -> list[Any]:
        given = core.ClosedJaxpr(program.jaxpr, list(inputs[:first]))
        own_key = jax.tree.unflatten(treedef, inputs[last:])
        # Each loop has a key of its own, the same however often the function is traced.
        numbers = itertools.count()

        def handle(eqn: core.JaxprEqn, x: list[Any]) -> list[Any] | None:
            if eqn.primitive.name in ONE_WAY:
                return run_equation(eqn, [jax.lax.stop_gradient(y) for y in x])
            return _compress_loop(settings, own_key, numbers, eqn, x)

        return run_inlined(given, inputs[first:last], handle)

    plan = _make_plan(run, inputs, names, dies, settings, one_way)
    if not plan.kept:
        return run(*inputs)
    for i, codec in enumerate(plan.codecs):
        if isinstance(codec, Codec) and codec.needs_key:
            _check_key(key, plan.kept[i].candidate.name)
            codec.required_key(_key_of(key, plan, i))
    return _compressed(plan, run, inputs, plan.codecs, key)


def _compress_loop(
    settings: _Settings,
    key: Any,
    numbers: Iterator[int],
    eqn: core.JaxprEqn,
    inputs: list[Any],
) -> list[Any] | None:
    """Runs a `lax.scan` with the residuals of its body compressed; None for another equation."""
    if eqn.primitive.name != "scan" or not any(_is_floating(x.aval) for x in eqn.outvars):
        return None
    body, params = eqn.params["jaxpr"], eqn.params
    first, carried = scan_counts(eqn)
    last = first + carried
    constants, start, stacked = inputs[:first], inputs[first:last], inputs[last:]
    names = [""] * (len(body.consts) + len(inputs))
    # The carry is another array in the next iteration: nothing else keeps it alive.
    dies = [False] * len(names)
    for i in range(len(start)):
        position = len(body.consts) + first + i
        names[position], dies[position] = f"carry {i}" if len(start) > 1 else "carry", True
    length = params["length"]
    number = _FIRST_LOOP + next(numbers)
    keys = jax.tree.map(lambda k: jax.random.split(jax.random.fold_in(k, number), length), key)

    def step(carry: Any, slices: Any) -> Any:
        own, own_key = slices
        # Whoever differentiates the whole has been told of what may not be.
        outputs = _compress(body, [*constants, *carry, *own], names, dies, settings, own_key, {})
        return outputs[: len(start)], outputs[len(start) :]

    carry, ys = jax.lax.scan(
        step, start, (stacked, keys), length, reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*carry, *ys]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Mask:
    """Stores booleans [..., d] in a bit each: exactly, so no rule is asked.

    Attributes:
      features: d.
    """

    features: int
    needs_key = False

    def __repr__(self) -> str:
        return "a bit each"

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> tuple[jax.Array, ...]:
        del key
        return pack(x.astype(jnp.uint8), 1)

    def decode(self, code: tuple[jax.Array, ...]) -> jax.Array:
        return unpack(code, 1, self.features).astype(bool)


_Storage = Codec | _Mask


@dataclasses.dataclass(frozen=True)
class _Kept:
    """An array that is kept, as it is or as a code.

    Attributes:
      var: its variable in the forward program.
      candidate: what the rule was told.
      reason: why it is left as it is; empty if a codec stores it.
    """

    var: Any
    candidate: Candidate
    reason: str


@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    """What a function keeps, decided on before it runs.

    Attributes:
      forward: from inputs to outputs and what is kept, in the order of `kept`.
      outputs: how many outputs there are.
      kept: what is kept.
      codecs: what stores it; None for as it is.
      leaves: for each leaf of the pullback its variable in the forward program, or a literal.
      graph: how they are rebuilt from what is kept.
      backward: the pullback, from its leaves and the cotangents of the smooth outputs to those of
        the smooth inputs.
      smooth_inputs: which inputs can be differentiated.
      one_way: names of the operations without a derivative that an input passes through, for these
        inputs.
      smooth_outputs: which outputs are.
    """

    forward: core.ClosedJaxpr
    outputs: int
    kept: tuple[_Kept, ...]
    codecs: tuple[_Storage | None, ...]
    leaves: tuple[core.Var | core.Literal, ...]
    graph: Graph
    backward: core.ClosedJaxpr
    smooth_inputs: tuple[int, ...]
    one_way: dict[int, str]
    smooth_outputs: tuple[int, ...]


def _make_plan(
    run: Callable[..., list[Any]],
    inputs: Sequence[Any],
    names: Sequence[str],
    dies: Sequence[bool],
    settings: _Settings,
    one_way: dict[int, str],
) -> _Plan:
    """Traces a function with its pullback, and decides on what the pullback keeps."""
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
    leaves = program.jaxpr.outvars[count:]
    alive = {*program.jaxpr.constvars}
    alive |= {x for x, dead in zip(program.jaxpr.invars, dies, strict=True) if not dead}
    graph = Graph(
        program.jaxpr, lambda x: 0 if x in alive else _nbytes(x), rebuild=settings.rebuild
    )
    kept = graph.choose([x for x in leaves if isinstance(x, core.Var)])
    found = [_describe(program.jaxpr, graph, var, names, dies) for var in kept]
    codecs = _decide(found, settings.rule)
    settled = [
        dataclasses.replace(k, reason="" if codec is not None else k.reason or LEFT_BY_RULE)
        for k, codec in zip(found, codecs, strict=True)
    ]
    outvars = [*program.jaxpr.outvars[:count], *kept]
    shortened = core.ClosedJaxpr(_with_outputs(program.jaxpr, outvars), program.consts)
    return _Plan(
        shortened,
        count,
        tuple(settled),
        tuple(codecs),
        tuple(leaves),
        graph,
        backward,
        smooth,
        one_way,
        smooth_outputs,
    )


def _smooth(values: Sequence[Any]) -> tuple[int, ...]:
    """Returns the positions of arrays that can be differentiated: floating point and complex."""
    inexact = (jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact) for x in values)
    return tuple(i for i, yes in enumerate(inexact) if yes)


def _inlined(fun: Callable[..., Any], args: Sequence[Any]) -> core.ClosedJaxpr:
    """Returns the program of a function of arrays, or of their shapes, without calls."""
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), list(args))
    traced = jax.make_jaxpr(fun)(*structs)
    leaves = jax.tree.leaves(structs)
    return jax.make_jaxpr(lambda *x: run_inlined(traced, x, custom=True))(*leaves)


def _decide(found: list[_Kept], rule: Rule | Codec) -> list[_Storage | None]:
    """Returns what stores each array."""
    open_ones = [k.candidate for k in found if not k.reason]
    if isinstance(rule, Codec):
        codec, largest = rule, max((c.size for c in open_ones), default=0)
        rule = lambda c: codec if c.shape and 0 < largest <= c.size * LARGEST_OVER_SMALL else None  # noqa: E731
    codecs: list[_Storage | None] = []
    for k in found:
        if k.reason == _NOT_FLOATING and k.candidate.dtype == "bool" and k.candidate.shape:
            codecs.append(_Mask(k.candidate.shape[-1]))
            continue
        chosen = None if k.reason else rule(k.candidate)
        leave = chosen is None or (isinstance(chosen, str) and chosen == "leave")
        if not leave and not isinstance(chosen, Codec):
            raise TypeError(
                f"`rule` returned {chosen!r} for {k.candidate}: return an actjax.Codec, or None to"
                " leave it as it is."
            )
        codecs.append(chosen if isinstance(chosen, Codec) else None)
    return codecs


def _describe(
    jaxpr: core.Jaxpr, graph: Graph, var: core.Var, names: Sequence[str], dies: Sequence[bool]
) -> _Kept:
    """Returns what is known of an array that is kept."""
    aval: Any = var.aval
    origin, reason = origin_of(jaxpr, var), ""
    name, primitive = _given_name(jaxpr, graph, var) or origin.name, origin.operator
    if var in jaxpr.invars:
        position = jaxpr.invars.index(var)
        name, primitive = name or names[position], "argument"
        reason = "" if dies[position] else "an argument, alive anyway"
    elif var in jaxpr.constvars:
        reason = "a constant, alive anyway"
    elif origin.tag is not None and origin.tag.is_code:
        reason = "stored by an actjax operator"
    elif origin.tag is not None and origin.tag.left:
        reason = "decided on in its loop"
    elif origin.is_slices:
        reason = "slices of an argument, alive anyway"
    if not reason and not _is_floating(aval):
        reason = _NOT_FLOATING
    return _Kept(var, Candidate(name, primitive, tuple(aval.shape), str(aval.dtype)), reason)


def _given_name(jaxpr: core.Jaxpr, graph: Graph, var: core.Var) -> str:
    """Returns the name of an array, or of a view of it: a user's, or else that of an operator."""
    known = ""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name" and graph.is_view(eqn.outvars[0], var):
            tag = Tag.decode(eqn.params["name"])
            if tag is None:
                return eqn.params["name"]
            known = known or tag.name
    return known


def _with_outputs(jaxpr: core.Jaxpr, outvars: list[Any]) -> core.Jaxpr:
    return jaxpr.replace(outvars=outvars, debug_info=jaxpr.debug_info.with_unknown_names())


def _nbytes(var: Any) -> int:
    return var.aval.size * var.aval.dtype.itemsize


def _is_floating(aval: Any) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.floating)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _compressed(plan: _Plan, run: Any, inputs: Any, codecs: Any, key: Any) -> list[Any]:
    del plan, codecs, key
    return run(*inputs)


def _compressed_fwd(plan, run, inputs, codecs, key):
    del run
    for i, name in plan.one_way.items():
        if inputs[i].perturbed:
            raise ValueError(
                "compress_residuals: a gradient would have to pass through"
                f" `{name}`, which has no derivative in reverse mode: use lax.scan, or"
                " jax.lax.stop_gradient where data enters it."
            )
    inputs, codecs, key = jax.tree.map(lambda x: x.value, (inputs, codecs, key))
    numbers = {k.var: i for i, k in enumerate(plan.kept)}
    made = {}

    def encode(var: core.Var, x: jax.Array) -> jax.Array:
        i = numbers.get(var)
        if i is None or codecs[i] is None:
            return x
        codec = codecs[i]
        value = x if isinstance(codec, Exact | _Mask) else _differentiated_once(x)
        code = codec.encode(value, _key_of(key, plan, i) if codec.needs_key else None)
        x, made[i] = encoded_first(x, code)
        return x

    def handle(eqn: core.JaxprEqn, given: list[Any]) -> list[Any]:
        return list(map(encode, eqn.outvars, run_equation(eqn, given)))

    results = run_inlined(
        plan.forward, list(map(encode, plan.forward.jaxpr.invars, inputs)), handle
    )
    outputs, values = results[: plan.outputs], results[plan.outputs :]
    # So do the outputs: some of what is kept may be read by the backward pass alone.
    outputs, made = jax.lax.optimization_barrier((outputs, made))
    codes = []
    for i, (x, kept, codec) in enumerate(zip(values, plan.kept, codecs, strict=True)):
        what = kept.candidate
        if codec is not None:
            codes.append(name_code(made[i], x, repr(codec), what.primitive, what.name))
        elif kept.reason == LEFT_BY_RULE:
            codes.append(tag_left(x, kept.reason, what.primitive, what.name))
        else:
            codes.append(x)
    return outputs, (codes, codecs)


@jax.custom_jvp
def _differentiated_once(x: jax.Array) -> jax.Array:
    """Is where a derivative of the code of `x` would begin: rounding has none."""
    return x


@_differentiated_once.defjvp
def _(primals, tangents):
    raise NotImplementedError(
        "compress_residuals: its gradient is made of codes, and has no derivative of its own. Take"
        " second derivatives of the function as it is, or with a rule that leaves everything."
    )


def _check_key(key: Any, name: str) -> None:
    """Raises unless there is a key for what is kept under this name."""
    if isinstance(key, Mapping) and name not in key:
        raise ValueError(
            f"`key` of compress_residuals has no entry for {name!r}, whose codec draws random"
            f" numbers: it has {sorted(key)}."
        )


def _key_of(key: Any, plan: _Plan, i: int) -> jax.Array | None:
    """Returns the key of what is kept as number `i`."""
    if key is None or isinstance(key, Mapping):
        return None if key is None else key.get(plan.kept[i].candidate.name)
    return jax.random.fold_in(key, i)


def _compressed_bwd(plan, run, residuals, cotangents):
    del run
    codes, codecs = residuals
    given = [_written_out(cotangents[i]) for i in plan.smooth_outputs]
    gradients = _run_backward(plan, codes, codecs, given)
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
    plan: _Plan, codes: Sequence[Any], codecs: Sequence[_Storage | None], cotangents: Sequence[Any]
) -> list[Any]:
    """Runs the pullback, and decodes and rebuilds each residual where it is first read.

    Decoded all at once, the floats would be back. So the pullback is run an equation at a time:
    those that do not depend on a cotangent wait until one that does reads them, and a code is let
    through when the last cotangent before its use is there.
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
        # No recursion: a chain of equations that wait may be long.
        needed = [x]
        while needed:
            y = needed[-1]
            if y in values:
                needed.pop()
            elif y in leaves:
                leaf = leaves[y]
                values[y] = leaf.val if isinstance(leaf, core.Literal) else store.rebuild(leaf)
            else:
                eqn = waiting[y]
                inputs = [z for z in eqn.invars if isinstance(z, core.Var)]
                missing = [z for z in inputs if z not in values]
                if missing:
                    needed += missing
                    continue
                given = [z.val if isinstance(z, core.Literal) else values[z] for z in eqn.invars]
                values.update(zip(eqn.outvars, run_equation(eqn, given), strict=True))
        return values[x]

    for eqn in jaxpr.eqns:
        # What has an effect, such as printing, happens though nothing reads it.
        if eqn.effects or any(x in downstream for x in eqn.invars if isinstance(x, core.Var)):
            downstream.update(eqn.outvars)
            outputs = run_equation(eqn, [read(x) for x in eqn.invars])
            values |= zip(eqn.outvars, outputs, strict=True)
            if outputs:
                store.advance(outputs[0])
        else:
            waiting |= dict.fromkeys(eqn.outvars, eqn)
    return [read(x) for x in jaxpr.outvars]


class _Store:
    """What is kept, and values lately made of it, in the course of a backward pass."""

    def __init__(
        self, plan: _Plan, codes: Sequence[Any], codecs: Sequence[_Storage | None], clock: jax.Array
    ) -> None:
        """Takes what the forward pass kept, and the first cotangent.

        Args:
          plan: what is what.
          codes: of what is kept, in its order.
          codecs: likewise.
          clock: before it is there, nothing is decoded.
        """
        self._graph = plan.graph
        self._kept = {
            k.var: (code, codec) for k, code, codec in zip(plan.kept, codes, codecs, strict=True)
        }
        self._clock = clock
        self._time = 0
        self._at_hand: dict[core.Var, tuple[int, Any]] = {}

    def advance(self, clock: jax.Array) -> None:
        """Takes the latest cotangent."""
        self._clock, self._time = clock, self._time + 1

    def rebuild(self, var: core.Var) -> Any:
        """Returns a residual."""
        rebuilt = self._graph.rebuild(var, self._value)
        for made, x in rebuilt.items():
            # What is decoded, or was at hand, is as old as it was.
            if made not in self._kept:
                self._at_hand.setdefault(made, (self._time, x))
        return rebuilt[var]

    def _value(self, var: core.Var) -> Any:
        made_at, x = self._at_hand.get(var, (-AT_HAND, None))
        if self._time - made_at < AT_HAND:
            return x
        self._at_hand.pop(var, None)
        if var not in self._kept:
            return None
        code, codec = self._kept[var]
        if codec is None:
            return code
        ((x,), _) = decode_late([code], [codec], self._clock)
        self._at_hand[var] = self._time, x
        return x


# Which inputs are differentiated is known with `symbolic_zeros` only.
_compressed.defvjp(_compressed_fwd, _compressed_bwd, symbolic_zeros=True)
