"""Floating point operations of matrix products, counted in a traced program."""

from typing import Any

import jax

from actjax.residuals.graph.products import product_flops

ATTENTION_BLOCK = 256
"""Queries, and keys, of a block in the blockwise form of `actjax.attention`."""


def matmul_flops(fun: Any, *args: Any, loop_length: float = 1) -> int:
    """Returns the operations of all matrix products in `fun(*args)`; two per multiply-add.

    Counts the body of a `scan` as often as it runs; `compiled.cost_analysis()` counts it once.
    Does not count factorizations, nor products in custom calls such as cuDNN's attention.

    Args:
      fun: a function that JAX can trace.
      *args: its arguments, or their shapes.
      loop_length: mean number of iterations of a `while_loop`, whose length is data. For causal
        attention over blocks of keys, see `causal_loop_length`.
    """
    return round(product_flops(jax.make_jaxpr(fun)(*args).jaxpr, loop_length))


def causal_loop_length(seq_len: int) -> float:
    """Returns the mean number of key blocks that a query block attends to in causal attention."""
    return (1 + -(-seq_len // ATTENTION_BLOCK)) / 2
