"""Operations beside a kernel that the kernel does itself, so that their results are never written.

A kernel that converts a gradient to float32 takes it in 16 bits, and multiplies it by the factor
that clips it. A kernel whose result is added to another array, such as the cotangent of a skip
connection, adds it. The results are the same to the bit.
"""

import collections
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from actjax.kernels import primitive
from actjax.kernels.layers import Scaled


def with_sums(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """Returns a program whose kernels add arrays to their results, where only the sum is read."""
    reads = collections.Counter(x for eqn in jaxpr.eqns for x in _variables(eqn.invars))
    reads.update(_variables(jaxpr.outvars))
    places = {x: i for i, eqn in enumerate(jaxpr.eqns) for x in eqn.outvars}
    kernels = {x: eqn for eqn in jaxpr.eqns if (x := primitive.sum_of(eqn)) is not None}
    new: dict[int, core.JaxprEqn | None] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        variables = _variables(eqn.invars)
        if eqn.primitive.name != "add_any" or len(variables) < 2:
            continue
        for x, addend in (variables, variables[::-1]):
            # The other array must be known where the kernel runs.
            is_known = places.get(addend, -1) < places.get(x, -1)
            if x in kernels and reads[x] == 1 and is_known:
                new[places[x]] = primitive.with_addend(kernels[x], addend, eqn.outvars[0])
                new[i] = None
                break
    eqns = [new.get(i, eqn) for i, eqn in enumerate(jaxpr.eqns)]
    return jaxpr.replace(eqns=[eqn for eqn in eqns if eqn is not None])


def _variables(atoms: Any) -> list[core.Var]:
    return [x for x in atoms if isinstance(x, core.Var)]


class Gradients:
    """Arrays in float32 that are an array of 16 bits, or the rounded product of one and a scalar.

    It is told of the equations of a program while they run.
    """

    primitives = "convert_element_type", "mul"

    def __init__(self) -> None:
        """Begins with no array."""
        # By the ids of arrays, which are kept so that no other array gets one.
        self._sources: dict[int, tuple[jax.Array, Any]] = {}
        self._products: dict[int, tuple[jax.Array, Scaled]] = {}

    def source(self, x: Any) -> Any:
        """Returns the array of 16 bits, or a `Scaled`; `x` itself if it is no such array."""
        return self._sources.get(id(x), (x, x))[1]

    def followed(
        self, eqn: core.JaxprEqn, inputs: list[jax.Array], outputs: list[jax.Array]
    ) -> list[jax.Array]:
        """Returns the outputs of an equation with these inputs, and remembers their source."""
        (y,) = outputs
        if eqn.primitive.name == "mul":
            array, factor = inputs if jnp.shape(inputs[1]) == () else inputs[::-1]
            source = self.source(array)
            if jnp.shape(factor) == () and y.dtype == jnp.float32 and _has_16_bits(source):
                factor = jnp.asarray(factor, jnp.float32)
                self._products[id(y)] = y, Scaled(source, factor)
            return outputs
        source = self.source(inputs[0])
        if id(inputs[0]) in self._products:
            _, source = self._products[id(inputs[0])]
            if y.dtype == source.dtype:
                self._sources[id(y)] = y, source
        elif y.dtype == jnp.float32 and (isinstance(source, Scaled) or _has_16_bits(source)):
            self._sources[id(y)] = y, source
        return outputs


def _has_16_bits(x: Any) -> bool:
    if isinstance(x, Scaled):
        return False
    dtype = jnp.result_type(x)
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2
