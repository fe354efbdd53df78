"""Tests of what exact attention holds for its backward pass, and of its workspace."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from ops.attention_cases import problem, value_and_gradients
from ops.helpers import compiled_temporaries, ones, shaped

from actjax import attention, linear
from train.planning.devices import GPUS, compile_for


def held(fun, *args) -> tuple[set, int]:
    """Returns positions of the arguments that the backward pass of `fun` holds, and all bytes."""
    program = jax.make_jaxpr(lambda *args: jax.vjp(fun, *args)[1])(*args).jaxpr
    arrays = set(program.outvars)
    size = sum(x.aval.size * x.aval.dtype.itemsize for x in arrays)
    return {i for i, x in enumerate(program.invars) if x in arrays}, size


def test_backward_holds_inputs_output_and_log_sum_exp():
    for dtype in ("float32", "bfloat16"):
        q, k, v, _ = problem(2, 16, 4, 2, 8, dtype)
        # The log-sum-exp is a float32 for each head and query.
        size = 2 * q.nbytes + 2 * k.nbytes + 2 * 16 * 4 * 4
        assert held(attention, q, k, v) == ({0, 1, 2}, size)


def test_recomputation_holds_only_the_inputs():
    q, k, v, _ = problem(2, 16, 4, 2, 8)
    recomputed = functools.partial(attention, recompute=True)
    assert held(recomputed, q, k, v) == ({0, 1, 2}, q.nbytes + 2 * k.nbytes)


def test_a_linear_operator_that_follows_stores_no_second_copy_of_the_output():
    q, k, v, _ = problem(2, 16, 4, 2, 8)
    w = ones(32, 5)

    def fun(q, k, v, w):
        return linear(attention(q, k, v, merge_heads=True), w)

    assert held(fun, q, k, v, w)[1] == held(attention, q, k, v)[1] + w.nbytes


def test_memory_is_linear_in_the_length():
    def both(*arguments):
        return [value_and_gradients(*arguments, recompute=again) for again in (False, True)]

    inputs = [shaped(1, 4096, h, 8) for h in (2, 1, 1, 2)]
    # The scores of 4096 tokens take 128 MiB, a byte for each 16 MiB; inputs, outputs, gradients and
    # their float32 sums in both forms take less than 32 arrays as large as q, of 256 KiB.
    assert compiled_temporaries(both, *inputs) < 32 * 2**18


def test_recomputation_keeps_no_output_across_a_scan():
    def temporaries(layers: int) -> int:
        def loss(scales, q):
            def body(q, scale):
                # The product with the output keeps no copy of it.
                return q + scale * attention(q, q, q, recompute=True), None

            return jnp.sum(jax.lax.scan(body, q, scales)[0])

        return compiled_temporaries(
            jax.grad(loss, argnums=1), shaped(layers), shaped(1, 512, 2, 16)
        )

    size = 512 * 2 * 16 * 4
    # A layer more keeps q, which is k and v too; its output would be as large again.
    assert size <= (temporaries(8) - temporaries(4)) / 4 < 1.1 * size


def test_a_barrier_keeps_the_two_forward_passes_apart():
    # XLA could merge two equal forward passes and keep the output. It does not merge loops on a
    # CPU, so this test reads the traced program.
    q, k, v, _ = problem(1, 4, 1, 1, 4)

    def has_barrier(recompute: bool) -> bool:
        fun = lambda *args: jnp.sum(attention(*args, recompute=recompute))  # noqa: E731
        return "optimization_barrier" in str(jax.make_jaxpr(jax.grad(fun, (0, 1, 2)))(q, k, v))

    assert has_barrier(recompute=True)
    assert not has_barrier(recompute=False)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None,
    reason="needs the compiler for GPUs: pip install -e '.[compile]'",
)
def test_packed_rows_on_a_gpu_take_no_bias_of_all_scores():
    def run(*arguments, segments):
        return value_and_gradients(*arguments, segments=segments)

    inputs = [shaped(1, 16384, h, 64, dtype=jnp.bfloat16) for h in (8, 2, 2, 8)]
    with compile_for(GPUS["h100"]) as place:
        segments = place(shaped(1, 16384, dtype=jnp.int32))
        program = jax.jit(run).lower(*place(inputs), segments=segments).compile()
    # A bias of all scores takes 512 MiB, and its gradient as much. The biases of a chunk take 32
    # MiB each, the float32 sums of the gradients of keys and values 8 MiB each.
    assert program.memory_analysis().temp_size_in_bytes < 128 * 2**20
    # A call for each width of the ranges of keys: the backward pass computes no output again.
    for name in ("fmhaScaleBiasSoftmax", "fmhaScaleBiasSoftmaxBackward"):
        assert program.as_text().count(f'"__cudnn${name}"') == 5
