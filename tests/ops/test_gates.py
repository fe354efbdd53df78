"""Tests of actjax/ops/gelu.py and glu.py beyond `test_contract.py`: any float32, and sums."""

import functools

import jax
import numpy as np
import oracles
from cheap_codecs import Coarse
from ops.helpers import assert_close, normal, of_all_sizes

from actjax import Exact, LowRankSum, gelu, swiglu

NEAREST = Coarse()
FORMS = {"tanh": True, "erf": False}


@jax.jit
def run_gelu(x, dy):
    """Returns value and gradient of each form, and the value of the default form."""
    results = []
    for approximate in FORMS.values():
        y, pull = jax.vjp(functools.partial(gelu, approximate=approximate), x)
        results.append((y, *pull(dy)))
    return results, gelu(x)


@jax.jit
def run_swiglu(gate, up, dy):
    y, pull = jax.vjp(swiglu, gate, up)
    return y, *pull(dy)


def test_gelu_has_the_form_of_tanh_if_not_given():
    (tanh, _), default = run_gelu(np.float32([-2, 0.5]), np.float32([1, 1]))
    np.testing.assert_array_equal(tanh[0], default)


def test_gelu_of_any_float32_is_what_the_oracle_gives():
    x, dy = of_all_sizes(0, 4000, largest=100), np.tanh(of_all_sizes(1, 4000))
    results, _ = run_gelu(x, dy)
    x, dy = np.float64(x), np.float64(dy)
    for (y, dx), approximate in zip(results, FORMS.values(), strict=True):
        want_y, want_dx = oracles.gelu(x, approximate), oracles.gelu_vjp(x, approximate, dy)
        # The exponent of both forms is at most 104 where results are above the smallest normal
        # number, which is flushed to zero, and errs by some units of itself.
        rtol = 2.0**-24 * (16 + 4 * np.minimum(x * x, 104))
        smallest = 1e-37 * np.maximum(1, np.abs(x))
        assert np.all(np.abs(y - want_y) <= rtol * np.abs(want_y) + smallest)
        # The derivative passes zero: its error is relative to its terms.
        with np.errstate(invalid="ignore", divide="ignore"):
            terms = np.abs(dy) * np.where(x == 0, 0.5, np.abs(want_y / x))
        slope = np.abs(want_dx) + 2 * terms
        assert np.all(np.abs(dx - want_dx) <= rtol * slope + 1e-37 * np.maximum(1, x * x))


def test_gelu_of_extreme_inputs_stays_finite():
    x = np.float32([-3e38, -1e19, -40, -0.0, 0, 1e-40, 40, 1e13, 1e19, 3e38])
    slope = np.where(np.abs(x) < 1, 0.5, x > 0)
    for y, dx in run_gelu(x, np.ones_like(x))[0]:
        np.testing.assert_allclose(y, x * slope, atol=1e-37)
        np.testing.assert_allclose(dx, slope, rtol=1e-6, atol=1e-37)


def test_swiglu_of_any_float32_is_what_the_oracle_gives():
    gate, up = (of_all_sizes(i, 4000) for i in range(2))
    dy = np.tanh(of_all_sizes(2, 4000))
    got = run_swiglu(gate, up, dy)
    gate, up, dy = map(np.float64, (gate, up, dy))
    want_y, (want_dgate, want_dup) = oracles.swiglu(gate, up), oracles.swiglu_vjp(gate, up, dy)
    y, dgate, dup = map(np.float64, got)
    # exp(-g) of a negative gate is as wrong as g is rounded: |g| ulps, while it is above the
    # smallest normal number, which is flushed to zero (|g| < 88).
    rtol = 1e-6 * np.clip(np.abs(gate), 1, 88)
    smallest = 1e-37 * np.maximum(1, np.abs(up)) * np.maximum(1, np.abs(gate))
    assert np.all(np.abs(y - want_y) <= rtol * np.abs(want_y) + smallest)
    assert np.all(np.abs(dup - want_dup) <= rtol * np.abs(want_dup) + smallest)
    # The derivative of silu passes zero: its error is relative to its terms.
    terms = np.abs(up * dy) * np.minimum(1, (1 + np.abs(gate)) * np.exp(np.minimum(gate, 0)))
    assert np.all(np.abs(dgate - want_dgate) <= rtol * np.abs(want_dgate) + 1e-6 * terms + smallest)


def test_swiglu_of_extreme_gates_stays_finite():
    gate = np.float32([-1e30, -104, -0.0, 0, 1e-40, 104, 1e30])
    y, dgate, dup = run_swiglu(gate, np.full_like(gate, 3), np.ones_like(gate))
    slope = np.where(np.abs(gate) > 1, gate > 1, 0.5)
    np.testing.assert_allclose(y, 3 * gate * slope, atol=1e-37)
    np.testing.assert_allclose(dgate, 3 * slope, atol=1e-37)
    np.testing.assert_allclose(dup, gate * slope, atol=1e-37)


def test_the_low_rank_part_of_a_sum_is_kept_beside_the_code_of_its_base(x64):
    parts = [np.asarray(normal(i, *s)) for i, s in enumerate(((6, 8), (6, 2), (2, 8)))]
    dy = normal(3, 6, 8)

    @jax.jit
    def run(*parts):
        results = []
        for codec in (Exact(), NEAREST):

            def fun(*parts, codec=codec):
                return gelu(LowRankSum(*parts), approximate=False, codec=codec)

            y, pull = jax.vjp(fun, *parts)
            results.append((y, *pull(dy), codec.decode(codec.encode(parts[0]))))
        return results

    base, left, right = parts
    for *got, decoded in run(*parts):
        dx = oracles.gelu_vjp(decoded + left @ right, False, dy)
        want = oracles.gelu(base + left @ right, False), dx, dx @ right.T, left.T @ dx
        assert_close(got, list(want), 1e-11, 1e-12)
