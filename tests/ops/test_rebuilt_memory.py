"""Tests of what operators with a rebuilt input hold, and of what they compute again."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jaxprs import products
from ops.block_cases import block_params, mlp_block
from ops.helpers import KEY, compiled_temporaries, normal, shaped, tables
from ops.operator_cases import DRAWN, LENGTH, REBUILT, SIZE, WIDTH

from actjax import Exact, attention


def weights(count=3, dtype=None):
    return tuple(normal(20 + n, WIDTH, n, dtype=dtype) for n in (3, 1, 4)[:count])


def test_under_scan_an_exact_layer_takes_the_bytes_of_its_inputs_and_no_more():
    # XLA could merge the two passes and keep what is rebuilt. test_contract.py measures codes.
    tokens, codec = (1, 512), Exact()

    def temporaries(layers):
        def loss(params, x):
            body = lambda x, p: (mlp_block(x, p, codec, (None,) * 4), None)  # noqa: E731
            return jnp.sum(jax.lax.scan(body, x, params)[0] ** 2)

        params = jax.tree.map(lambda p: shaped(*p.shape), block_params(layers, factor=8))
        return compiled_temporaries(jax.grad(loss, argnums=(0, 1)), params, shaped(*tokens, 64))

    grown = temporaries(12) - temporaries(4)
    # The input of the norm, gate and up.
    stored = sum(codec.stored_bytes((*tokens, width), "float32") for width in (64, 96, 96))
    # Buffers are aligned; nothing else depends on the number of layers. The narrowest float array
    # kept in a single one of the eight more layers would be 64 KiB.
    assert abs(grown - 8 * stored) < 4096


# What is computed.


@pytest.mark.parametrize("name", ["norm", "swiglu"])
def test_no_product_is_computed_again(name):
    operator = REBUILT[name]
    plain = {
        "norm": lambda x, scale: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) * scale,
        "swiglu": lambda gate, up, _: jax.nn.silu(gate) * up,
    }[name]

    def autodiff(xs, scale, ws):
        y = plain(*xs, scale)
        return sum(jnp.sum(y @ w) for w in ws)

    def rebuilt(codec, xs, scale, ws):
        return sum(map(jnp.sum, operator.call(xs, scale, ws, codec=codec, key=KEY)))

    for count in (1, 3):
        arguments = operator.activations(), operator.scale(), weights(count)
        losses = autodiff, *(functools.partial(rebuilt, codec) for codec in (Exact(), DRAWN))
        made = [len(products(jax.grad(loss, (0, 2)), *arguments)) for loss in losses]
        # One forward, and one for the gradient of each factor.
        assert made == [3 * count] * 3


def test_attention_linear_computes_only_attention_again():
    operator, ws = REBUILT["attention"], weights()

    def rebuilt(codec, xs, ws):
        return sum(map(jnp.sum, operator.call(xs, None, ws, codec=codec, key=KEY)))

    def recomputed(xs, ws):
        rope = tables(LENGTH, SIZE)
        y = attention(*xs, rope=rope, recompute=True, merge_heads=True)
        return sum(jnp.sum(y @ w) for w in ws)

    losses = recomputed, *(functools.partial(rebuilt, codec) for codec in (Exact(), DRAWN))
    made = [len(products(jax.grad(f, (0, 1)), operator.activations(), ws)) for f in losses]
    # Two in either forward pass of attention, five in its backward pass, nine of the linear one.
    assert made == [2 + 2 + 5 + 9] * 3


def test_a_barrier_keeps_the_two_passes_apart():
    # XLA could merge them and keep the rebuilt input: the code of `Exact` is the input itself.
    for operator in REBUILT.values():
        fun = lambda *args, operator=operator: jnp.sum(operator.call(*args))  # noqa: E731
        arguments = operator.activations(), operator.scale(), weights()[0]
        assert "optimization_barrier" in str(jax.make_jaxpr(jax.grad(fun))(*arguments))
