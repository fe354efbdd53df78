"""Running a function again in the backward pass, from a code of what it was given.

`jax.checkpoint` keeps the arguments of a function and recomputes the rest. Kept as a code, an
argument takes a fraction of that; the recomputation then starts from the decoded argument, as GACT
(Liu et al., 2022, section 5.5) does with checkpointed segments. Where a function is cheap up to the
products whose outputs its backward pass does not read, nothing but the cheap part is recomputed:
that is how a linear operator's input is rebuilt from what the operator before it keeps.
"""

import functools
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from actjax._core.tags import keep
from actjax._jaxpr.programs import close
from actjax.codecs import Codec, Quantized
from actjax.codecs.base import Code
from actjax.kernels.format import QuantizedCode
from actjax.weights.tapped import hold_weights, tap_again


def checkpoint(
    fun: Callable[..., Any],
    codec: Codec = Quantized(4),
    *,
    activations: int | Sequence[int] = 0,
    key: jax.Array | None = None,
    name: str = "checkpoint",
) -> Callable[..., Any]:
    """Returns `fun`, of which the backward pass keeps a code of its input and nothing else.

    As `jax.checkpoint(fun)`, but that its activations are stored by `codec` and decoded again. The
    value is exact. The gradient is that of `fun` at the decoded activations, in the accumulation of
    JAX: an error of the codec reaches what `fun` was fed by, unlike that of a linear operator.

        def layer(x, weights): ...
        x = actjax.checkpoint(layer, Quantized(4))(x, weights)

    Works under `jit`, `lax.scan` and `vmap`, may close over arrays, and may be nested.

    Args:
      fun: a function of arrays and pytrees of them. What is passed by name may be static, and its
        arrays are closed over.
      codec: what is stored of each activation. `Exact()` gives what `jax.checkpoint` does.
      activations: positions of the arguments of which all floating point arrays, but for scalars,
        are stored as a code. Other arguments, and what `fun` closes over, are kept as they are:
        weights that stay alive anyway cost nothing.
      key: randomness of the encoding; consumed. Needed if `codec.needs_key`.
      name: what `actjax.explain` calls the stored activations.

    Raises:
      TypeError: `fun` is no function, `codec` no codec, `activations` are no positions; when
        called: an argument that is no array.
      ValueError: when called: a position that is not there, a missing key.
    """
    check_function(fun, "checkpoint")
    if not isinstance(codec, Codec):
        raise TypeError(f"`codec` of checkpoint must be an actjax.Codec, got {codec!r}.")
    positions = positions_of(activations, "checkpoint")

    @functools.wraps(fun)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        check_positions(positions, args, "checkpoint")
        closed = close(functools.partial(fun, **kwargs), args)
        owners = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
        coded = [
            i
            for i, (owner, leaf) in enumerate(zip(owners, closed.arguments, strict=True))
            if owner in positions and _can_be_coded(leaf)
        ]
        given = [closed.arguments[i] for i in coded]
        rest = [None if i in coded else x for i, x in enumerate(closed.arguments)]

        def run(activations: Any, others: Any) -> Any:
            constants, rest = others
            filled = iter(activations)
            return closed.run(constants, [next(filled) if x is None else x for x in rest])

        names = [name if len(coded) == 1 else f"{name} {i}" for i in range(len(coded))]
        outputs = coded_call(
            run, given, (closed.constants, rest), [codec] * len(coded), key, "checkpoint", names
        )
        return closed.unflatten(outputs)

    return checkpointed


def _can_be_coded(x: Any) -> bool:
    """Returns whether `x` is an array of floating point numbers with features, and not empty."""
    return jnp.ndim(x) > 0 and jnp.size(x) > 0 and jnp.issubdtype(jnp.result_type(x), jnp.floating)


def check_function(fun: Any, caller: str) -> None:
    """Raises a `TypeError` unless `fun` is a function."""
    if not callable(fun):
        raise TypeError(f"`fun` of {caller} must be a function, got {fun!r}.")


def positions_of(argnums: int | Sequence[int], caller: str) -> frozenset[int]:
    """Returns positions of arguments as a set, or raises a `TypeError`."""
    numbers = list(argnums) if isinstance(argnums, Sequence) else [argnums]
    if not all(isinstance(i, Integral) and not isinstance(i, bool) and i >= 0 for i in numbers):
        raise TypeError(
            f"`activations` of {caller} must be positions of arguments, 0 or above: {argnums!r}."
        )
    return frozenset(int(i) for i in numbers)


def check_positions(positions: frozenset[int], args: Sequence[Any], caller: str) -> None:
    """Raises a `ValueError` unless all positions are there."""
    if max(positions, default=-1) >= len(args):
        raise ValueError(
            f"`activations` of {caller} has position {max(positions)}, but the function was called"
            f" with {len(args)} positional arguments."
        )


def coded_call(
    fun: Callable[[Any, Any], Any],
    activations: Sequence[jax.Array],
    others: Any,
    codecs: Sequence[Codec],
    key: Any,
    operator: str,
    names: Sequence[str],
) -> Any:
    """Returns `fun(activations, others)`, and holds codes of the activations and `others`.

    The backward pass differentiates `fun` at the decoded activations. `fun` closes over no arrays.

    Args:
      fun: what is computed; a pytree of arrays.
      activations: floating point arrays.
      others: a pytree of what else `fun` reads.
      codecs: one for each activation.
      key: randomness, folded with the number of the activation, or a tuple of a key for each; None
        if no codec draws.
      operator: what `actjax.explain` calls this.
      names: one for each activation.

    Raises:
      ValueError: a codec draws random numbers and there is no key.
    """
    for i, codec in enumerate(codecs):
        if codec.needs_key:
            codec.required_key(key[i] if isinstance(key, tuple | list) else key)
    return _coded_call(fun, operator, tuple(names), tuple(activations), others, tuple(codecs), key)


def encode_all(
    activations: Sequence[jax.Array],
    codecs: Sequence[Codec],
    key: Any,
    operator: str,
    names: Sequence[str],
) -> tuple[tuple[jax.Array, ...], tuple[Code, ...]]:
    """Returns activations to compute with, and their codes, named for `actjax.explain`."""
    pairs = []
    for i, (x, codec, name) in enumerate(zip(activations, codecs, names, strict=True)):
        pairs.append(keep(x, codec, key_of(key, i), operator, name))
    return tuple(x for x, _ in pairs), tuple(code for _, code in pairs)


def key_of(key: Any, i: int) -> jax.Array | None:
    """Returns the key of the i-th input: of a sequence of keys its own, else a folded one."""
    if key is None or isinstance(key, tuple | list):
        return None if key is None else key[i]
    return jax.random.fold_in(key, i)


class Decodes(Protocol):
    """What makes an array of a code: a codec, above all."""

    def decode(self, code: Code) -> jax.Array:
        """As `Codec.decode`."""
        ...


def decode_late(
    codes: Sequence[Code], codecs: Sequence[Decodes], cotangent: Any
) -> tuple[tuple[jax.Array, ...], Any]:
    """Returns decoded activations, not before the cotangent is there, and the cotangent."""
    codes, cotangent = _late(codes, cotangent)
    return tuple(c.decode(code) for c, code in zip(codecs, codes, strict=True)), cotangent


def _late(codes: Sequence[Code], cotangent: Any) -> tuple[tuple[Code, ...], Any]:
    # Without the barrier XLA could decode early, or, where a code is the activation itself, merge
    # this pass with the forward pass and keep all that it computed.
    return jax.lax.optimization_barrier((tuple(codes), cotangent))


@runtime_checkable
class FromCodes(Protocol):
    """A function whose backward pass can read codes, decoded in no memory."""

    def __call__(self, activations: Any, others: Any) -> Any:
        """Returns the value."""
        ...

    def from_codes(
        self, codes: tuple[QuantizedCode, ...], others: Any, cotangent: Any, with_value: bool
    ) -> Any:
        """Returns the value, and the cotangents of activations and others, at what codes stand for.

        Args:
          codes: of the activations.
          others: the other arguments.
          cotangent: of the value.
          with_value: whether the value is wanted, else it is None.
        """
        ...


def differentiate(
    fun: Callable[[Any, Any], Any],
    codes: Sequence[Code],
    codecs: Sequence[Decodes],
    others: Any,
    cotangent: Any,
    with_value: bool,
) -> tuple[Any, Any, Any]:
    """Returns `fun(activations, others)` and its cotangents, at what codes stand for.

    Not before the cotangent is there.

    Args:
      fun: a function, which may be `FromCodes`.
      codes: one for each activation.
      codecs: likewise.
      others: a pytree of arrays; of those without derivatives, such as integers, the cotangent is
        None.
      cotangent: of the value.
      with_value: whether the value is wanted.
    """
    if isinstance(fun, FromCodes) and all(isinstance(codec, Quantized) for codec in codecs):
        codes, cotangent = _late(codes, cotangent)
        return fun.from_codes(codes, others, cotangent, with_value)
    decoded, cotangent = decode_late(codes, codecs, cotangent)
    smooth, merge = _split_smooth(others)
    run = lambda activations, floats: fun(activations, merge(floats))  # noqa: E731
    value, pullback = jax.vjp(run, decoded, smooth)
    dactivations, dfloats = pullback(cotangent)
    return value, dactivations, merge(dfloats, rest=None)


def _split_smooth(tree: Any) -> tuple[list[jax.Array], Callable[..., Any]]:
    """Returns what of a tree has derivatives, and how to put it, or its like, back in its place."""
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def merge(floats: Sequence[Any], rest: Any = leaves) -> Any:
        merged = [None] * len(leaves) if rest is None else list(rest)
        for i, x in zip(places, floats, strict=True):
            merged[i] = x
        return jax.tree.unflatten(treedef, merged)

    return [leaves[i] for i in places], merge


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _coded_call(fun, operator, names, activations, others, codecs, key):
    del operator, names, codecs, key
    return fun(activations, others)


def _coded_call_fwd(fun, operator, names, activations, others, codecs, key):
    with jax.named_scope(f"actjax.{operator}"):
        activations, codes = encode_all(activations, codecs, key, operator, names)
        return fun(activations, others), (codes, hold_weights(others), codecs)


def _coded_call_bwd(fun, operator, names, residuals, cotangent):
    del names
    codes, others, codecs = residuals
    with jax.named_scope(f"actjax.{operator}"):
        _, dactivations, dothers = differentiate(
            fun, codes, codecs, tap_again(others), cotangent, with_value=False
        )
    return dactivations, dothers, None, None


_coded_call.defvjp(_coded_call_fwd, _coded_call_bwd)
