"""`adam_8bit` in one pass: moments are decoded, updated and encoded in registers."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as plgpu

from actjax._math.precision import over
from actjax.formats.blockwise import Blockwise, decades
from actjax.kernels import tiles
from actjax.kernels.adam_8bit.limits import refuses
from actjax.kernels.layer_call import pallas_call
from actjax.kernels.layers import Scaled, result_like, rows, scaled, split_scaled
from actjax.kernels.tail import Tail

__all__ = ["adam_8bit", "refuses"]

_LOG2_OF_10 = np.float32(math.log2(10))


def adam_8bit(
    grad: jax.Array | Scaled,
    mu: Blockwise,
    nu: Blockwise,
    corrections: jax.Array,
    *,
    b1: float,
    b2: float,
    eps: float,
    eps_root: float,
    tail: Tail | None = None,
    interpret: bool = False,
) -> tuple[Any, Blockwise, Blockwise]:
    """As `actjax.kernels.adam_8bit.api.adam_8bit`; a `Layer` is written in its place.

    With a tail its results are in the place of the update.
    """
    tokens = math.prod(grad.shape[:-1])
    # A block ends with its row, and a program has no more numbers than exist.
    features = grad.shape[-1]
    grid = tiles.grid_of(tokens, features, min(mu.block, features), numbers=2048)

    whole, factors = split_scaled(grad)
    arrays = [rows(x) for x in (whole, mu.codes, mu.scales, nu.codes, nu.scales)]
    others = [] if tail is None else tail.operands(rows)
    shapes = [result_like(x) for x in arrays[1:]]
    if tail is None:
        shapes.append(jax.ShapeDtypeStruct(arrays[0].shape, jnp.float32))
    else:
        shapes += tail.results(others, *grid.programs)

    def kernel(*refs: Any) -> None:
        factor, refs = (refs[0][0], refs[1:]) if factors else (None, refs)
        end, first = 6 + len(others), 10 + len(others)

        def write(part: tiles.Part, update: jax.Array) -> None:
            if tail is not None:
                tiles.run_tail(tail, refs[6:end], refs[first:], part, update)
            else:
                tiles.store(refs[first], part.token, part.feature(0), update, part.exists(0))

        run = functools.partial(_update, b1=b1, b2=b2, eps=eps, eps_root=eps_root)
        grid.run(lambda cut: run((*refs[:6], *refs[end:first]), factor, write, cut(1)))

    results = pallas_call(
        kernel,
        grid=grid.programs,
        out_shape=tuple(shapes),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="actjax_adam_8bit",
    )(*factors, *arrays, corrections, *others)
    shaped = [x.reshape(*grad.shape[:-1], x.shape[-1]) for x in results[:4]]
    new_mu = dataclasses.replace(mu, codes=shaped[0], scales=shaped[1])
    new_nu = dataclasses.replace(nu, codes=shaped[2], scales=shaped[3])
    update = results[4].reshape(grad.shape) if tail is None else tail.finished(results[4:])
    return update, new_mu, new_nu


def _update(
    refs: Sequence[Any],
    factor: Any,
    write: Callable[[tiles.Part, jax.Array], None],
    part: tiles.Part,
    *,
    b1: float,
    b2: float,
    eps: float,
    eps_root: float,
) -> None:
    """Updates a part.

    Args:
      refs: references to the gradient, the moments, the corrections, and the new moments.
      factor: as in `Scaled`; None for none.
      write: takes the part and its update.
      part: the part.
      b1: decay of the first moment.
      b2: decay of the second.
      eps: added to the root.
      eps_root: added under the root.
    """
    grad_ref, mu_ref, mu_scale_ref, nu_ref, nu_scale_ref, corrections_ref, *new_refs = refs
    place, mask = (part.token, part.feature(0)), part.exists(0)
    block, blocks_exist = (part.token, part.group), part.groups_exist()

    def moment(codes: Any, scales: Any, unsigned: bool) -> jax.Array:
        index = tiles.load(codes, *place, mask).astype(jnp.int32)
        return _value(index, unsigned) * tiles.load(scales, *block, blocks_exist)

    g = tiles.load(grad_ref, *place, mask)
    g = (g if factor is None else scaled(g, factor)).astype(jnp.float32)
    first = np.float32(b1) * moment(mu_ref, mu_scale_ref, False) + np.float32(1 - b1) * g
    second = np.float32(b2) * moment(nu_ref, nu_scale_ref, True)
    second = second + np.float32(1 - b2) * (g * g)
    root = jnp.sqrt(second * (1 / corrections_ref[1]) + np.float32(eps_root))
    update = first * (1 / corrections_ref[0]) / (root + np.float32(eps))
    write(part, update)
    for value, unsigned, codes, scales in (
        (first, False, *new_refs[:2]),
        (second, True, *new_refs[2:]),
    ):
        size = jnp.abs(value) if mask is None else jnp.where(mask, jnp.abs(value), 0.0)
        scale = jnp.max(size, axis=2, keepdims=True)
        index = _index(over(size, scale), unsigned)
        if unsigned:
            # A positive value never becomes zero: it divides the first moment.
            index = jnp.where(value > 0, jnp.maximum(index, 1), 0)
        else:
            index = jnp.where(value < 0, -index, index)
        tiles.store(codes, *place, index, mask)
        tiles.store(scales, *block, scale, blocks_exist)


def _value(codes: jax.Array, unsigned: bool) -> jax.Array:
    """Returns the values of codes for a scale of 1, as `blockwise.Blockwise.decode`."""
    size = codes.astype(jnp.float32) if unsigned else jnp.abs(codes).astype(jnp.float32)
    # The exponent of an integer is the power of two of its leading bit.
    bits = jax.lax.bitcast_convert_type(size, jnp.int32)
    power = (bits >> 23) - 127
    inverse = jax.lax.bitcast_convert_type((127 - power) << 23, jnp.float32)
    decade = (power - decades(unsigned)).astype(jnp.float32)
    fraction = np.float32(0.1) + np.float32(0.9) * ((size + 1) * inverse - 1)
    level = jnp.where(codes == 0, 0.0, jnp.exp2(decade * _LOG2_OF_10) * fraction)
    return level if unsigned else jnp.where(codes < 0, -level, level)


def _index(size: jax.Array, unsigned: bool) -> jax.Array:
    """Returns the nearest level of magnitudes in [0, 1], int32, as `blockwise.dynamic_index`."""
    top = decades(unsigned)
    exponent = jax.lax.bitcast_convert_type(size, jnp.int32) >> 23
    # The exponent times log10(2), as a fraction, gives this decade or the one above.
    decade = jnp.minimum(((127 - exponent) * 1233) >> 12, top)
    scaled = size * jnp.exp2(decade.astype(jnp.float32) * _LOG2_OF_10)
    above = scaled >= 1
    decade = jnp.where(above, decade - 1, decade)
    scaled = jnp.where(above, scaled * np.float32(0.1), scaled)
    levels = jax.lax.bitcast_convert_type((127 + top - decade) << 23, jnp.float32)
    # The last decade has one level, its upper end; the next level below is 0.
    place = jnp.where(
        decade == top, scaled, (scaled - np.float32(0.1)) * np.float32(1 / 0.9) * levels
    )
    return _nearest(place) + (1 << (top - decade)) - 1


def _nearest(x: jax.Array) -> jax.Array:
    """Rounds numbers of [-1, 2^22) to the nearest integer, int32."""
    # Through the bits: XLA would simplify adding and subtracting a constant.
    bits = jax.lax.bitcast_convert_type(x + np.float32(1.5 * 2**23), jnp.int32)
    return bits - np.int32(0x4B400000)
