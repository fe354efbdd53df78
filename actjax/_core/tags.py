"""Names of stored arrays, written into the traced program for `actjax.explain`.

A tag is a `checkpoint_name`: an identity that costs nothing in the compiled program. A code is
tagged where it is made. An array that is stored exactly is tagged where it is *read*: a tag on the
stored array would make it differ from the array that a neighboring operator stores, and both would
be stored.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from actjax._core.no_derivative import no_derivative
from actjax._host import is_on_host
from actjax.codecs import Codec, Exact
from actjax.codecs.base import Code


@dataclasses.dataclass(frozen=True)
class Tag:
    """Describes one array of a code.

    Attributes:
      operator: the operator that stores it, for example "linear".
      name: name of the activation, for example "qkv input".
      codec: `repr` of the codec.
      shape: shape of the exact activation, as the operator saw it.
      dtype: dtype of the exact activation.
      leaf: position of the array in the code, from 0.
      leaf_size: elements of the array as the operator saw it. `vmap` and `scan` make the array
        itself larger; the ratio says how often the operator ran.
    """

    operator: str
    name: str
    codec: str
    shape: tuple[int, ...]
    dtype: str
    leaf: int
    leaf_size: int

    @property
    def is_code(self) -> bool:
        """Whether the array is part of a code; False for the activation itself."""
        return not self.codec.startswith(("Exact(", _LEFT))

    @property
    def left(self) -> str:
        """Why the array is not encoded; empty if no rule decided on it."""
        return self.codec.removeprefix(_LEFT) if self.codec.startswith(_LEFT) else ""

    def encode(self) -> str:
        """Returns the tag as a `checkpoint_name`."""
        shape = ",".join(map(str, self.shape))
        name = self.name.replace("|", "/")
        where = f"{self.leaf}:{self.leaf_size}"
        operator = re.sub(r"\W", "_", self.operator)
        return f"actjax.{operator}|{name}|{self.codec}|{self.dtype}[{shape}]|{where}"

    @staticmethod
    def decode(text: str) -> "Tag | None":
        """Inverse of `encode`; None if the name is not a tag."""
        match = _PATTERN.fullmatch(text)
        if match is None:
            return None
        operator, name, codec, dtype, shape, leaf, leaf_size = match.groups()
        sizes = tuple(int(n) for n in shape.split(",") if n)
        return Tag(operator, name, codec, sizes, dtype, int(leaf), int(leaf_size))


_LEFT = "left: "
_PATTERN = re.compile(r"actjax\.(\w+)\|([^|]*)\|([^|]*)\|(\w+)\[([\d,]*)\]\|(\d+):(\d+)")


def keep(
    x: jax.Array, codec: Codec, key: jax.Array | None, operator: str, name: str
) -> tuple[jax.Array, Code]:
    """Encodes `x` for the backward pass and tags the code.

    Returns:
      `x` for the forward pass to compute with, and the code to store for the backward pass.
    """
    if isinstance(codec, Exact):
        return _tag(x, x, repr(codec), operator, name, 0), x
    x, code = encoded_first(x, codec.encode(no_derivative(x), key))
    return x, name_code(code, x, repr(codec), operator, name)


def encoded_first(x: jax.Array, code: Code) -> tuple[jax.Array, Code]:
    """Returns an array and its code; operations that read the array wait for the code.

    Otherwise XLA may postpone the encoding to the backward pass, or until it can encode the arrays
    of many layers at once, and hold the arrays until then.
    """
    leaves, treedef = jax.tree.flatten(code)
    # An array on its way to the host loses its memory space in an optimization barrier.
    here = [i for i, leaf in enumerate(leaves) if not is_on_host(leaf)]
    x, passed = jax.lax.optimization_barrier((x, [leaves[i] for i in here]))
    for i, leaf in zip(here, passed, strict=True):
        leaves[i] = leaf
    return x, jax.tree.unflatten(treedef, leaves)


def name_code(code: Code, x: jax.Array, codec: str, operator: str, name: str) -> Code:
    """Returns a code of `x` with tags; `codec` describes the codec as text."""
    leaves, treedef = jax.tree.flatten(code)
    tagged = [_tag(leaf, x, codec, operator, name, i) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(treedef, tagged)


def keep_output(y: jax.Array, operator: str, name: str) -> jax.Array:
    """Tags an output that the operator also stores: the caller returns and stores the result."""
    return _tag(y, y, repr(Exact()), operator, name, 0)


def tag_left(x: jax.Array, reason: str, operator: str, name: str) -> jax.Array:
    """Tags an array that is stored without encoding, with the reason."""
    return _tag(x, x, _LEFT + reason, operator, name, 0)


EXACT_INPUT = "a segment must be computed again from exact values"


def tag_exact(x: jax.Array) -> jax.Array:
    """Tags an array between segments that no rule decides on."""
    return tag_left(x, EXACT_INPUT, "segment", "input")


def _tag(
    leaf: jax.Array, x: jax.Array, codec: str, operator: str, name: str, index: int
) -> jax.Array:
    dtype = jnp.dtype(x.dtype).name
    tag = Tag(operator, name, codec, x.shape, dtype, index, leaf.size)
    return checkpoint_name(leaf, tag.encode())
