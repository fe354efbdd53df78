"""Tests of what operators with a rebuilt input hold, and of what they compute again."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jaxprs import nbytes, products
from ops.block_cases import block, block_params, mlp_block
from ops.helpers import KEY, compiled_temporaries, normal, pullback, shaped, tables
from ops.operator_cases import DITHER, LENGTH, MIXED, REBUILT, SIZE, WIDTH, merged

from actjax import Exact, Quantized, attention, explain, norm_linear, swiglu_linear


def weights(count=3, dtype=None):
    return tuple(normal(20 + n, WIDTH, n, dtype=dtype) for n in (3, 1, 4)[:count])


@pytest.mark.parametrize("name", REBUILT)
def test_backward_holds_codes_and_weights_and_no_linear_input(name):
    operator = REBUILT[name]
    for dtype in ("float32", "bfloat16"):
        bias = normal(30, 3, dtype=dtype), None, normal(31, 4, dtype=dtype)
        arguments = operator.activations(dtype), operator.scale(), weights(dtype=dtype), bias
        for codec in (Exact(), MIXED[name], DITHER):

            def fun(activations, scale, ws, bs, codec=codec):
                return operator.call(activations, scale, ws, bias=bs, codec=codec, key=KEY)

            others = nbytes(jax.eval_shape(lambda *args: args[1:], *arguments))
            others += nbytes(tables(LENGTH, SIZE)) if name == "attention" else 0
            held = nbytes(pullback(fun, *arguments))
            assert held == operator.stored_bytes(codec, dtype) + others, (dtype, codec)


def test_the_exact_codec_holds_the_arguments_themselves():
    x, up, scale, w = normal(0, 6, 8), normal(1, 6, 8), normal(2, 8), normal(3, 8, 3)
    for fun, args in ((norm_linear, (x, scale, w)), (swiglu_linear, (x, up, w))):
        held = jax.make_jaxpr(lambda *args, fun=fun: jax.vjp(fun, *args)[1])(*args).jaxpr
        assert set(held.outvars) == set(held.invars)


@pytest.mark.parametrize(
    ("codec", "with_attention"),
    [(Quantized(4, group=32), True), (Exact(), False)],
    ids=str,
)
def test_under_scan_a_layer_takes_the_bytes_of_its_codes_and_no_more(codec, with_attention):
    tokens, half = (1, 512), block if with_attention else mlp_block

    def temporaries(layers):
        def loss(params, x):
            body = lambda x, p: (half(x, p, codec, (None,) * 4), None)  # noqa: E731
            return jnp.sum(jax.lax.scan(body, x, params)[0] ** 2)

        params = jax.tree.map(lambda p: shaped(*p.shape), block_params(layers, factor=8))
        return compiled_temporaries(jax.grad(loss, argnums=(0, 1)), params, shaped(*tokens, 64))

    grown = temporaries(12) - temporaries(4)
    # The input of a norm, gate and up; the input of another norm, q, k and v.
    widths = (64, 96, 96) + ((64, 64, 32, 32) if with_attention else ())
    stored = sum(codec.stored_bytes((*tokens, width), "float32") for width in widths)
    # Buffers are aligned; nothing else depends on the number of layers. The narrowest float array
    # kept in a single one of the eight more layers would be 64 KiB.
    assert abs(grown - 8 * stored) < 4096


def test_explain_names_what_is_kept():
    names = {
        "norm": ["mine"],
        "swiglu": ["mine gate", "mine up"],
        "gelu": ["mine"],
        "attention": ["mine q", "mine k", "mine v"],
    }
    for name, operator in REBUILT.items():
        codec = MIXED[name]

        def fun(xs, scale, w, operator=operator, codec=codec):
            negated = tuple(-x for x in xs)
            return jnp.sum(operator.call(negated, scale, w, codec=codec, key=KEY, name="mine"))

        xs = operator.activations()
        found = explain(fun, xs, operator.scale(), weights()[0])
        entries = {e.name: e for e in found.residuals if e.operator == f"{name}_linear"}
        assert sorted(entries) == sorted(names[name])
        for label, one, x in zip(names[name], codec, xs, strict=True):
            assert entries[label].stored_bytes == one.stored_bytes(merged(x).shape, x.dtype)


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
        losses = autodiff, *(functools.partial(rebuilt, codec) for codec in (Exact(), DITHER))
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

    losses = recomputed, *(functools.partial(rebuilt, codec) for codec in (Exact(), DITHER))
    made = [len(products(jax.grad(f, (0, 1)), operator.activations(), ws)) for f in losses]
    # Two in either forward pass of attention, five in its backward pass, nine of the linear one.
    assert made == [2 + 2 + 5 + 9] * 3


def test_a_barrier_keeps_the_two_passes_apart():
    # XLA could merge them and keep the rebuilt input: the code of `Exact` is the input itself.
    for operator in REBUILT.values():
        fun = lambda *args, operator=operator: jnp.sum(operator.call(*args))  # noqa: E731
        arguments = operator.activations(), operator.scale(), weights()[0]
        assert "optimization_barrier" in str(jax.make_jaxpr(jax.grad(fun))(*arguments))
