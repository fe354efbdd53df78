"""A function that runs on one part of its activations after the other, in both passes."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from actjax._core.coded_call import Operator, decode_late, restore, split_smooth

Run = Callable[[Any, Any], list[jax.Array]]
"""From activations and others to outputs."""


@dataclasses.dataclass(frozen=True)
class InChunks(Operator):
    """A function of chunks of its activations, for `coded_call`.

    Intermediate values of one chunk are freed before the next one begins: in the forward pass, and
    in the backward pass, which runs the function again. Gradients of `others` are summed in
    float32.

    If the length is not a multiple of the size, the remaining positions run as the end of a full
    chunk, so that the function is traced for one size alone.

    Attributes:
      run: the function.
      size: positions of a chunk, at most the length of the axis.
      axis: the axis that is cut: of every activation, and of every output.
    """

    run: Run
    size: int
    axis: int

    def __call__(self, activations, others):
        length = activations[0].shape[self.axis]
        left = length % self.size
        run = self.run if left else functools.partial(jax.eval_shape, self.run)
        end = run(self._end(activations), others)
        outputs = [jnp.zeros(self._whole_shape(x.shape, length), x.dtype) for x in end]
        if left:
            outputs = self._put_end(outputs, end, left)

        def body(i, outputs):
            return self._put(outputs, self.run(self._cut(activations, i), others), i)

        return jax.lax.fori_loop(0, length // self.size, body, outputs)

    def backward(self, codes, codecs, held, cotangent):
        decoded, cotangent = decode_late(codes, codecs, cotangent)
        smooth, merge = split_smooth(restore(held))
        length = decoded[0].shape[self.axis]
        left = length % self.size

        def differentiate(parts, cotangents):
            run = lambda parts, floats: self.run(parts, merge(floats))  # noqa: E731
            return jax.vjp(run, tuple(parts), smooth)[1](list(cotangents))

        def body(i, carry):
            # The gradient of a chunk takes the place of the chunk.
            arrays, sums = carry
            grads, dfloats = differentiate(self._cut(arrays, i), self._cut(cotangent, i))
            return self._put(arrays, grads, i), _added(sums, dfloats)

        sums = [jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)) for x in smooth]
        arrays = list(decoded)
        if left:
            ends = [self._without_start(x, left) for x in self._end(cotangent)]
            grads, dfloats = differentiate(self._end(decoded), ends)
            arrays, sums = self._put_end(arrays, grads, left), _added(sums, dfloats)
        arrays, sums = jax.lax.fori_loop(0, length // self.size, body, (arrays, sums))
        sums = [s.astype(x.dtype) for s, x in zip(sums, smooth, strict=True)]
        return tuple(arrays), merge(sums, constants=None)

    def _whole_shape(self, shape: tuple[int, ...], length: int) -> tuple[int, ...]:
        """Returns the shape of an output from that of a chunk."""
        if len(shape) <= self.axis or shape[self.axis] != self.size:
            raise ValueError(
                f"`fun` of checkpoint got chunks of {self.size} along `axis` {self.axis}, so its"
                f" outputs must have this axis: got one of shape {shape}."
            )
        return (*shape[: self.axis], length, *shape[self.axis + 1 :])

    def _cut(self, arrays: Sequence[jax.Array], i: Any) -> list[jax.Array]:
        """Returns chunk `i` of arrays."""
        slice_of = jax.lax.dynamic_slice_in_dim
        return [slice_of(x, i * self.size, self.size, self.axis) for x in arrays]

    def _put(self, arrays: Sequence[Any], parts: Sequence[Any], i: Any) -> list[jax.Array]:
        """Returns arrays whose chunk `i` is replaced."""
        put = jax.lax.dynamic_update_slice_in_dim
        pairs = zip(arrays, parts, strict=True)
        return [put(x, part, i * self.size, self.axis) for x, part in pairs]

    def _end(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the last chunk of arrays."""
        lengths = [x.shape[self.axis] for x in arrays]
        slice_of = jax.lax.slice_in_dim
        pairs = zip(arrays, lengths, strict=True)
        return [slice_of(x, n - self.size, n, axis=self.axis) for x, n in pairs]

    def _put_end(self, arrays: Sequence[Any], parts: Sequence[Any], left: int) -> list[jax.Array]:
        """Returns arrays whose last `left` positions are those of last chunks."""
        put, slice_of = jax.lax.dynamic_update_slice_in_dim, jax.lax.slice_in_dim
        size, axis = self.size, self.axis
        return [
            put(x, slice_of(part, size - left, size, axis=axis), x.shape[axis] - left, axis)
            for x, part in zip(arrays, parts, strict=True)
        ]

    def _without_start(self, x: jax.Array, left: int) -> jax.Array:
        """Returns a last chunk with zeros in all but the last `left` positions."""
        shape = [self.size if n == self.axis else 1 for n in range(x.ndim)]
        return jnp.where((jnp.arange(self.size) >= self.size - left).reshape(shape), x, 0)


def _added(sums: Sequence[jax.Array], terms: Sequence[jax.Array]) -> list[jax.Array]:
    return [s + x.astype(s.dtype) for s, x in zip(sums, terms, strict=True)]
