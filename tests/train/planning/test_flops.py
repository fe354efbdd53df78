"""Operations of matrix products."""

import jax
import jax.numpy as jnp
import numpy as np

from actjax.ops.attention_implementations import BLOCK
from train.planning.flops import ATTENTION_BLOCK, causal_loop_length, matmul_flops

A, B = np.ones((3, 5), np.float32), np.ones((5, 7), np.float32)


def test_a_product_costs_two_operations_per_multiply_add_of_every_entry():
    assert matmul_flops(jnp.matmul, A, B) == 2 * 3 * 5 * 7
    batched = np.ones((4, 3, 5), np.float32)
    assert matmul_flops(lambda a, b: jnp.einsum("bij,jk->bki", a, b), batched, B) == 8 * 3 * 5 * 7


def test_the_body_of_a_scan_counts_as_often_as_it_runs():
    squares = np.ones((6, 5, 5), np.float32)

    def scanned(x, ws):
        return jax.lax.scan(lambda x, w: (jax.jit(jnp.matmul)(x, w), None), x, ws)[0]

    assert matmul_flops(scanned, A, squares) == 6 * 2 * 3 * 5 * 5


def test_a_gradient_costs_two_more_products_and_rematerialization_another():
    def loss(a, b):
        return jnp.sum(jnp.sin(a @ b))

    one = 2 * 3 * 5 * 7
    assert matmul_flops(jax.grad(loss, (0, 1)), A, B) == 3 * one
    recomputed = jax.grad(jax.checkpoint(lambda a, b: loss(jnp.sin(a @ B @ B.T), b)), (0, 1))
    plain = jax.grad(lambda a, b: loss(jnp.sin(a @ B @ B.T), b), (0, 1))
    assert matmul_flops(recomputed, A, B) > matmul_flops(plain, A, B)


def test_the_loop_of_causal_attention_covers_half_of_its_blocks():
    assert ATTENTION_BLOCK == BLOCK
    assert causal_loop_length(BLOCK) == 1
    assert causal_loop_length(4 * BLOCK) == (1 + 2 + 3 + 4) / 4
