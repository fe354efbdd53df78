"""The `custom_vjp` of all operators that store codes between the passes.

`coded_call` runs a function of activations, stores codes of these activations, and differentiates
the function at the decoded activations in the backward pass. An `Operator` replaces single steps of
this: a linear operator, for example, never decodes.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp

from actjax._core.no_derivative import no_derivative
from actjax._core.reverse_mode import ReverseMode
from actjax._core.tags import encoded_first, keep, name_code
from actjax.codecs import Codec, Exact, Quantized
from actjax.codecs.base import Code
from actjax.formats.code import Format, QuantizedCode, QuantizeInputs


class Holdable:
    """A pytree node that is stored between the passes in another form, such as a tapped weight."""

    def hold(self) -> Any:
        """Returns the form to store."""
        raise NotImplementedError


class Held:
    """The stored form of a `Holdable`."""

    def restore(self) -> Any:
        """Returns the `Holdable`."""
        raise NotImplementedError


def hold(tree: Any) -> Any:
    """Returns a pytree with every `Holdable` replaced by its stored form."""
    return _map_nodes(Holdable, lambda x: x.hold(), tree)


def restore(tree: Any) -> Any:
    """Inverse of `hold`."""
    return _map_nodes(Held, lambda x: x.restore(), tree)


def _map_nodes(kind: type, fun: Callable[[Any], Any], tree: Any) -> Any:
    is_kind = lambda x: isinstance(x, kind)  # noqa: E731
    return jax.tree.map(lambda x: fun(x) if is_kind(x) else x, tree, is_leaf=is_kind)


def encode_all(
    activations: Sequence[jax.Array],
    codecs: Sequence[Codec],
    key: Any,
    operator: str,
    names: Sequence[str],
) -> tuple[tuple[jax.Array, ...], tuple[Code, ...]]:
    """Returns the activations to compute with, and their codes with tags for `actjax.explain`."""
    pairs = []
    for i, (x, codec, name) in enumerate(zip(activations, codecs, names, strict=True)):
        pairs.append(keep(x, codec, key_of(key, i), operator, name))
    return tuple(x for x, _ in pairs), tuple(code for _, code in pairs)


def key_of(key: Any, i: int) -> jax.Array | None:
    """Returns the key of activation `i`: entry `i` of a sequence, or one key folded with `i`."""
    if key is None or isinstance(key, tuple | list):
        return None if key is None else key[i]
    return jax.random.fold_in(key, i)


class Decodes(Protocol):
    """An object that decodes, such as a codec."""

    def decode(self, code: Code) -> jax.Array:
        """Returns the decoded activation, like `Codec.decode`."""
        ...


def decode_late(
    codes: Sequence[Code], codecs: Sequence[Decodes], cotangent: Any
) -> tuple[tuple[jax.Array, ...], Any]:
    """Returns the cotangent, and activations that are decoded once the cotangent exists."""
    codes, cotangent = wait_for(codes, cotangent)
    return tuple(c.decode(code) for c, code in zip(codecs, codes, strict=True)), cotangent


def wait_for(codes: Sequence[Code], cotangent: Any) -> tuple[tuple[Code, ...], Any]:
    """Returns codes and cotangent; operations that read the codes wait for the cotangent."""
    # Without the barrier XLA could decode early. Where a code is the activation itself, it could
    # merge the backward pass with the forward pass and store all intermediate values.
    return jax.lax.optimization_barrier((tuple(codes), cotangent))


@runtime_checkable
class FromCodes(Protocol):
    """A function whose backward pass reads codes directly, so that no decoded array exists."""

    @property
    def reads_arrays(self) -> bool:
        """Whether it also reads arrays that are stored exactly."""
        ...

    def __call__(self, activations: Any, others: Any) -> Any:
        """Returns the value."""
        ...

    def from_codes(
        self, codes: tuple[Any, ...], others: Any, cotangent: Any, with_value: bool
    ) -> Any:
        """Returns the value and the cotangents of activations and others, at the decoded codes.

        Args:
          codes: codes of the activations.
          others: the other arguments.
          cotangent: cotangent of the value.
          with_value: whether to compute the value; it is None otherwise.
        """
        ...


@runtime_checkable
class WritesCodes(Protocol):
    """A function that can encode its activations in few bits while it reads them."""

    def __call__(self, activations: Any, others: Any) -> Any:
        """Returns the value."""
        ...

    def with_codes(
        self, inputs: Sequence[QuantizeInputs], formats: Sequence[Format], others: Any
    ) -> tuple[Any, Sequence[QuantizedCode]]:
        """Returns the value, and the codes of the activations.

        Args:
          inputs: the activations, and what their formats need.
          formats: how each is stored.
          others: the other arguments.
        """
        ...


def value_and_codes(
    fun: Callable[[Any, Any], Any],
    activations: Sequence[jax.Array],
    others: Any,
    codecs: Sequence[Codec],
    key: Any,
    operator: str,
    names: Sequence[str],
) -> tuple[Any, Sequence[Code]]:
    """Returns `fun(activations, others)`, and codes of the activations with tags.

    The arguments are those of `coded_call`; `fun` may be `WritesCodes`.
    """
    if not (isinstance(fun, WritesCodes) and _are_in_groups(codecs)):
        activations, codes = encode_all(activations, codecs, key, operator, names)
        return fun(activations, others), codes
    quantized = cast(Sequence[Quantized], codecs)
    inputs = [
        codec.inputs_of(no_derivative(x), key_of(key, i))
        for i, (x, codec) in enumerate(zip(activations, quantized, strict=True))
    ]
    formats = [c.format_of(x.shape[-1]) for c, x in zip(quantized, activations, strict=True)]
    value, codes = fun.with_codes(inputs, formats, others)
    held = map(Quantized.with_statistics, codes, inputs)
    value, held = encoded_first(value, tuple(held))
    return value, tuple(
        name_code(code, x, repr(codec), operator, name)
        for code, x, codec, name in zip(held, activations, codecs, names, strict=True)
    )


def differentiate(
    fun: Callable[[Any, Any], Any],
    codes: Sequence[Code],
    codecs: Sequence[Decodes],
    others: Any,
    cotangent: Any,
    with_value: bool,
) -> tuple[Any, Any, Any]:
    """Returns `fun(activations, others)` and its cotangents, at the decoded activations.

    Codes are decoded once the cotangent exists.

    Args:
      fun: a function, possibly `FromCodes`.
      codes: codes of the activations.
      codecs: codecs of the activations.
      others: a pytree of arrays. Arrays without derivatives, such as integers, get None.
      cotangent: cotangent of the value.
      with_value: whether the caller reads the value.
    """
    if isinstance(fun, FromCodes) and _reads(fun, codecs):
        codes, cotangent = wait_for(codes, cotangent)
        return fun.from_codes(codes, others, cotangent, with_value)
    decoded, cotangent = decode_late(codes, codecs, cotangent)
    smooth, merge = split_smooth(others)
    run = lambda activations, floats: fun(activations, merge(floats))  # noqa: E731
    value, pullback = jax.vjp(run, decoded, smooth)
    dactivations, dfloats = pullback(cotangent)
    return value, dactivations, merge(dfloats, constants=None)


def _reads(fun: FromCodes, codecs: Sequence[Decodes]) -> bool:
    """Returns whether the backward pass of `fun` reads the codes of these codecs."""
    if fun.reads_arrays and all(isinstance(codec, Exact) for codec in codecs):
        return True
    return _are_in_groups(codecs)


def _are_in_groups(codecs: Sequence[Any]) -> bool:
    """Returns whether all codecs are `Quantized`, with scales of groups.

    A subclass may encode and decode in its own way.
    """
    return all(type(codec) is Quantized and codec.scaling == "group" for codec in codecs)


def split_smooth(tree: Any) -> tuple[list[jax.Array], Callable[..., Any]]:
    """Returns the leaves that have derivatives, and a function that puts others in their place."""
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def merge(floats: Sequence[Any], constants: Any = leaves) -> Any:
        merged = [None] * len(leaves) if constants is None else list(constants)
        for i, x in zip(places, floats, strict=True):
            merged[i] = x
        return jax.tree.unflatten(treedef, merged)

    return [leaves[i] for i in places], merge


class Operator:
    """A function for `coded_call` that may replace the steps of its two passes.

    Subclasses are hashable and hold no arrays.
    """

    def __call__(self, activations: Any, others: Any) -> Any:
        """Returns the value, without a gradient."""
        raise NotImplementedError

    def forward(self, activations: Any, others: Any) -> Any:
        """Returns the value in the forward pass of a gradient."""
        return self(activations, others)

    def forward_with_codes(
        self,
        activations: Sequence[jax.Array],
        others: Any,
        codecs: Sequence[Codec],
        key: Any,
        operator: str,
        names: Sequence[str],
    ) -> tuple[Any, Any]:
        """Returns the value in the forward pass of a gradient, and the `codes` for `backward`."""
        activations, codes = self.encode(activations, others, codecs, key, operator, names)
        return self.forward(activations, others), codes

    def encode(
        self,
        activations: Sequence[jax.Array],
        others: Any,
        codecs: Sequence[Codec],
        key: Any,
        operator: str,
        names: Sequence[str],
    ) -> tuple[Sequence[jax.Array], Any]:
        """Returns the activations to compute with, and the `codes` for `backward`."""
        del others
        return encode_all(activations, codecs, key, operator, names)

    def hold(self, others: Any) -> Any:
        """Returns the stored form of `others` for `backward`."""
        return hold(others)

    def backward(
        self, codes: Any, codecs: Sequence[Codec], held: Any, cotangent: Any
    ) -> tuple[Any, Any]:
        """Returns the cotangents of activations and others."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class _Differentiated(Operator):
    """A plain function, differentiated at the decoded activations."""

    fun: Callable[[Any, Any], Any]

    def __call__(self, activations, others):
        return self.fun(activations, others)

    def forward_with_codes(self, activations, others, codecs, key, operator, names):
        return value_and_codes(self.fun, activations, others, codecs, key, operator, names)

    def backward(self, codes, codecs, held, cotangent):
        others = restore(held)
        _, dactivations, dothers = differentiate(
            self.fun, codes, codecs, others, cotangent, with_value=False
        )
        return dactivations, dothers


def coded_call(
    fun: Operator | Callable[[Any, Any], Any],
    activations: Sequence[jax.Array],
    others: Any,
    codecs: Sequence[Codec],
    key: Any,
    operator: str,
    names: Sequence[str],
) -> Any:
    """Returns `fun(activations, others)`, and stores codes of the activations, and `others`.

    The value is exact. The backward pass differentiates `fun` at the decoded activations, unless
    `fun` is an `Operator` that defines another backward pass.

    Args:
      fun: the function; returns a pytree of arrays and closes over no traced arrays.
      activations: floating point arrays.
      others: a pytree of all other arrays that `fun` reads.
      codecs: codecs of the activations.
      key: randomness, folded with the number of the activation, or a tuple with a key for each
        activation; None if no codec draws.
      operator: name of the operator for `actjax.explain`.
      names: names of the activations for `actjax.explain`.

    Raises:
      ValueError: a codec draws random numbers and there is no key.
    """
    for i, codec in enumerate(codecs):
        if codec.needs_key:
            codec.required_key(key[i] if isinstance(key, tuple | list) else key)
    fun = fun if isinstance(fun, Operator) else _Differentiated(fun)
    return _coded_call(fun, operator, tuple(names), tuple(activations), others, tuple(codecs), key)


@functools.partial(ReverseMode, nondiff_argnums=(0, 1, 2))
def _coded_call(fun, operator, names, activations, others, codecs, key):
    del operator, names, codecs, key
    return fun(activations, others)


def _coded_call_fwd(fun, operator, names, activations, others, codecs, key):
    with jax.named_scope(f"actjax.{operator}"):
        value, codes = fun.forward_with_codes(activations, others, codecs, key, operator, names)
        return value, (codes, fun.hold(others), codecs)


def _coded_call_bwd(fun, operator, names, residuals, cotangent):
    del names
    codes, held, codecs = residuals
    with jax.named_scope(f"actjax.{operator}"):
        dactivations, dothers = fun.backward(codes, codecs, held, cotangent)
    return dactivations, dothers, None, None


_coded_call.defvjp(_coded_call_fwd, _coded_call_bwd)
