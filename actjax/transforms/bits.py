"""Bits for each stored tensor: measured sensitivities, and allocation within a budget.

GACT (Liu et al., 2022): to first order the variance that compression adds to the gradient is a sum
over the stored tensors, `Σ_l c_l S(b_l)` with `S(b) = (2^b - 1)^-2` (Theorem 2), so `c_l`, the
sensitivity of the gradient to tensor l, is the only quantity to measure.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from actjax._math.precision import accumulation_dtype, contract_tokens
from actjax.codecs import Codec, Quantized
from actjax.kernels.packing import BITS

Gradient = Callable[..., Any]
"""From `{name: codec}`, `{name: key}` and further arguments to a gradient, a pytree of arrays."""
Estimate = Literal["probe", "algorithm 1"]


def error_of_bits(bits: int) -> float:
    """Returns `S(b) = (2^b - 1)^-2`, proportional to the squared error of uniform levels."""
    return (2.0**bits - 1) ** -2


def sensitivity(
    gradient: Gradient,
    codecs: Mapping[str, Quantized],
    key: jax.Array,
    *args: Any,
    estimate: Estimate = "probe",
    samples: int = 4,
) -> dict[str, float]:
    """Returns `c_l` for each stored tensor: the variance it adds to the gradient, over `S(b_l)`.

    "algorithm 1" is GACT's Algorithm 1: `½ ‖g_0 - g_1‖² / S(b_l)` for two gradients that differ
    only in the random rounding of tensor l. It takes `samples (L + 1)` gradients for L tensors and
    includes every effect of the error.

    "probe" takes `samples` gradients of gradients; its cost does not grow with L. With random signs
    `v`, the derivative of `<v, g>` with respect to a stored tensor is `u = J_lᵀ v`, and
    `E_v Σ_j u_j² Var(Δ_j) = Σ_j ‖J_l,j‖² Var(Δ_j)`, GACT's bound (appendix A.4). The variance of
    rounding is known from the scales. To first order both estimates have the same mean, and the
    probe has less noise. The function must be twice differentiable; attention is only with
    implementation="dense".

    Args:
      gradient: the gradient on a batch, a function of `{name: codec}`, `{name: key}` and `args`. It
        passes codecs and keys to the operators, or to `compress_residuals`, that store these
        tensors. It is jitted here.
      codecs: how each tensor is stored. The measurement uses uniform levels and stochastic
        rounding, which the theory assumes, instead of those of the codec.
      key: randomness of the estimate; consumed.
      *args: further arguments of `gradient`, such as parameters and a batch.
      estimate: "probe" or "algorithm 1".
      samples: number of estimates to average.

    Raises:
      ValueError: an unknown estimate, no samples, or no codecs.
      TypeError: a codec that is not a `Quantized`.
    """
    if estimate not in get_args(Estimate):
        raise ValueError(f"`estimate` must be one of {get_args(Estimate)}, got {estimate!r}.")
    if samples < 1 or not codecs:
        raise ValueError(
            f"`samples` must be at least 1 and `codecs` not empty, got {samples} and {codecs}."
        )
    for name, codec in codecs.items():
        if not isinstance(codec, Quantized):
            raise TypeError(f"`codecs` of sensitivity must be Quantized, got {codec!r} for {name}.")
    random = {
        name: dataclasses.replace(codec, rounding="stochastic", levels="uniform")
        for name, codec in codecs.items()
    }
    measure = _probe if estimate == "probe" else _algorithm_1
    totals = dict.fromkeys(codecs, 0.0)
    run = measure(gradient, random)
    for own in jax.random.split(key, samples):
        for name, variance in run(own, *args).items():
            totals[name] += float(variance) / error_of_bits(codecs[name].bits) / samples
    return totals


def _algorithm_1(gradient: Gradient, codecs: dict[str, Quantized]) -> Callable[..., Any]:
    run = jax.jit(lambda keys, *args: gradient(codecs, keys, *args))

    def measure(key: jax.Array, *args: Any) -> dict[str, jax.Array]:
        first, second = (_keys(codecs, k) for k in jax.random.split(key))
        base = run(first, *args)
        # In sequence: at most two gradients exist at once.
        return {
            name: _distance(base, run({**first, name: second[name]}, *args)) / 2 for name in codecs
        }

    return measure


def _probe(gradient: Gradient, codecs: dict[str, Quantized]) -> Callable[..., Any]:
    def along(taps: dict[str, jax.Array], keys: Any, signs_key: jax.Array, *args: Any) -> jax.Array:
        probed = {name: _Probed(codecs[name], taps[name]) for name in codecs}
        grads = gradient(probed, keys, *args)
        leaves = jax.tree.leaves(grads)
        keys = jax.random.split(signs_key, len(leaves))
        signs = (
            jax.random.rademacher(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)
        )
        products = (jnp.sum(s * x, dtype=jnp.float32) for s, x in zip(signs, leaves, strict=True))
        return sum(products, jnp.zeros(()))

    @jax.jit
    def measure(key: jax.Array, *args: Any) -> dict[str, jax.Array]:
        keys_key, signs_key = jax.random.split(key)
        taps = {name: jnp.zeros(()) for name in codecs}
        return jax.grad(along)(taps, _keys(codecs, keys_key), signs_key, *args)

    return measure


def _keys(codecs: Mapping[str, Codec], key: jax.Array) -> dict[str, jax.Array]:
    return dict(zip(codecs, jax.random.split(key, len(codecs)), strict=True))


def _distance(a: Any, b: Any) -> jax.Array:
    """Returns the squared distance of two gradients, in float32."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    wide = ((x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in pairs)
    return sum((jnp.sum((x - y) ** 2) for x, y in wide), jnp.zeros(()))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class _Probed(Codec, holds_arrays=True):
    """Stores the tensor itself; the cotangent of its tap is the variance that `codec` would add.

    Attributes:
      codec: the codec to measure. Static.
      tap: zero. Its cotangent is `Σ_j u_j² Var(Δ_j)` for a cotangent `u` of the tensor, summed over
        all operators and layers that read it.
    """

    codec: Quantized = dataclasses.field(metadata={"static": True})
    tap: Any

    biased = False
    needs_key = False

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        del key
        return x

    def decode(self, code: jax.Array) -> jax.Array:
        return _tapped(self.codec, code, self.tap)

    def weight_grad(self, code: jax.Array, dz: jax.Array) -> jax.Array:
        return contract_tokens(self.decode(code), dz)

    def stored_bytes(self, shape: Sequence[int], dtype: jax.typing.DTypeLike) -> int:
        return self.codec.stored_bytes(shape, dtype)


def _tapped(codec: Quantized, x: jax.Array, tap: jax.Array) -> jax.Array:
    @jax.custom_vjp
    def identity(x: jax.Array, tap: jax.Array) -> jax.Array:
        del tap
        return x

    def forward(x: jax.Array, tap: jax.Array) -> Any:
        return x, (codec.expected_error(x), tap)

    def backward(residuals: Any, u: jax.Array) -> Any:
        error, tap = residuals
        wide = accumulation_dtype(u.dtype)
        return u, jnp.sum(u.astype(wide) ** 2 * error).astype(tap.dtype)

    identity.defvjp(forward, backward)
    return identity(x, tap)


def allocate_bits(
    sensitivity: Mapping[str, float],
    sizes: Mapping[str, int],
    average_bits: float,
    choices: Sequence[int] = BITS,
) -> dict[str, int]:
    """Returns bits for each tensor that make `Σ c_l S(b_l)` small within a budget.

    Greedy, as in GACT and ActNN (Chen et al., 2021): all tensors begin with the fewest bits; the
    next bits go to the tensor where they lower the sum most per bit. The result is at most one
    increment away from the optimum, since the sum is convex in the bits.

    Args:
      sensitivity: `c_l`, by name.
      sizes: number of elements, by name.
      average_bits: the budget in bits per element, without scales.
      choices: the allowed numbers of bits.

    Raises:
      ValueError: names that differ, or a budget below the fewest bits.
    """
    steps = sorted(choices)
    if sensitivity.keys() != sizes.keys():
        raise ValueError(
            "`sensitivity` and `sizes` must have the same names, got"
            f" {sorted(sensitivity)} and {sorted(sizes)}."
        )
    if average_bits < steps[0]:
        raise ValueError(
            f"`average_bits` must be at least {steps[0]}, the least of {steps}, got {average_bits}."
        )
    # Relative to the largest, so that no gain underflows.
    largest = max(sensitivity.values(), default=0.0)
    unit = largest if 0 < largest < math.inf else 1.0
    level = dict.fromkeys(sizes, 0)
    left = average_bits * sum(sizes.values()) - steps[0] * sum(sizes.values())

    def gain(name: str) -> tuple[float, str]:
        now, then = steps[level[name]], steps[level[name] + 1]
        saved = sensitivity[name] / unit * (error_of_bits(now) - error_of_bits(then))
        return -saved / (sizes[name] * (then - now)), name

    queue = [gain(name) for name in sizes] if len(steps) > 1 else []
    heapq.heapify(queue)
    while queue:
        _, name = heapq.heappop(queue)
        cost = sizes[name] * (steps[level[name] + 1] - steps[level[name]])
        # Skip a tensor that does not fit: a smaller one may.
        if cost > left:
            continue
        left -= cost
        level[name] += 1
        if level[name] + 1 < len(steps):
            heapq.heappush(queue, gain(name))
    return {name: steps[i] for name, i in level.items()}


def compression_variance(sensitivity: Mapping[str, float], bits: Mapping[str, int]) -> float:
    """Returns `Σ c_l S(b_l)`, the variance that compression adds to the gradient (Theorem 2).

    Args:
      sensitivity: `c_l`, by name.
      bits: bits of each tensor, by name.
    """
    return sum(c * error_of_bits(bits[name]) for name, c in sensitivity.items())


def sampling_variance(gradients: Sequence[Any]) -> float:
    """Returns the variance of the mean of gradients of independent batches.

    Args:
      gradients: two or more pytrees of arrays.

    Raises:
      ValueError: fewer than two gradients.
    """
    count = len(gradients)
    if count < 2:
        raise ValueError(f"`gradients` must be two or more, got {count}.")
    mean = jax.tree.map(lambda *g: sum(g) / count, *gradients)
    spread = sum(float(_distance(g, mean)) for g in gradients)
    return spread / (count * (count - 1))
