"""Tests of actjax/kernels/butterflies.py: the exchange of numbers within a slice.

The rotation itself is tested with the kernels, against `actjax.formats.rotation`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.kernel_cases import normal

from actjax import Quantized
from actjax.kernels.butterflies import _exchanged
from actjax.kernels.rms_norm_backward.api import rms_norm_backward


def test_a_sum_of_bits_gives_the_other_number():
    pairs = normal(64, 2, 4)
    pairs[:4] = [[[0.0] * 4, [-0.0] * 4]] * 2 + [[[3e38] * 4, [-1e-45] * 4]] * 2
    got = np.asarray(jax.jit(_exchanged)(jnp.asarray(pairs)))
    np.testing.assert_array_equal(got.view(np.uint32), pairs[:, ::-1].astype("f4").view(np.uint32))


@pytest.mark.slow
def test_an_optimized_program_of_the_interpreter_agrees():
    # It computes some numbers twice, with different roundings.
    x, dy = jnp.asarray(normal(16, 128)), jnp.asarray(normal(16, 128, seed=1))
    codec = Quantized(4, levels="normal", rotate=True)
    code = jax.jit(codec.encode)(x, jax.random.key(0))
    got, want = (
        jax.jit(
            functools.partial(rms_norm_backward, implementation=implementation),
            compiler_options={"xla_backend_optimization_level": 3},
        )(code, jnp.ones(128), dy)
        for implementation in ("interpreted", "reference")
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
