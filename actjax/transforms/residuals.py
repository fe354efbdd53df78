"""Storing the residuals of any function in a smaller form, without rewriting it.

GACT (Liu et al., 2022): what a function keeps for its backward pass is a list of tensors, whatever
its operators are, and any of them may be stored as a code. In JAX the leaves of what `jax.vjp`
returns *are* that list. GACT recognises parameters by their address and saves a tensor that three
operators keep once; here both are read from the traced program.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend import core

from actjax._jaxpr.equations import run_equation, scan_counts
from actjax._jaxpr.one_way import ONE_WAY, passing_one_way
from actjax._jaxpr.programs import close, run_inlined
from actjax.codecs import Codec
from actjax.transforms.checks import check_function, check_positions, positions_of
from actjax.transforms.residual_passes import key_of, run_compressed
from actjax.transforms.residual_plan import Rule, Settings, is_floating, make_plan

_FIRST_LOOP = 2**30
"""What keys of loops are folded with, apart from the numbers of arrays."""


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
            Settings(rule, rebuild),
            key,
            passing_one_way(closed.jaxpr),
        )
        return closed.unflatten(outputs)

    return compressed


def _compress(
    program: core.ClosedJaxpr,
    arguments: Sequence[Any],
    names: Sequence[str],
    dies: Sequence[bool],
    settings: Settings,
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

    plan = make_plan(run, inputs, names, dies, settings, one_way)
    if not plan.kept:
        return run(*inputs)
    for i, codec in enumerate(plan.codecs):
        if isinstance(codec, Codec) and codec.needs_key:
            _check_key(key, plan.kept[i].candidate.name)
            codec.required_key(key_of(key, plan, i))
    return run_compressed(plan, run, inputs, plan.codecs, key)


def _compress_loop(
    settings: Settings,
    key: Any,
    numbers: Iterator[int],
    eqn: core.JaxprEqn,
    inputs: list[Any],
) -> list[Any] | None:
    """Runs a `lax.scan` with the residuals of its body compressed; None for another equation."""
    if eqn.primitive.name != "scan" or not any(is_floating(x.aval) for x in eqn.outvars):
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


def _check_key(key: Any, name: str) -> None:
    """Raises unless there is a key for what is kept under this name."""
    if isinstance(key, Mapping) and name not in key:
        raise ValueError(
            f"`key` of compress_residuals has no entry for {name!r}, whose codec draws random"
            f" numbers: it has {sorted(key)}."
        )
