"""Tests of what adapters hold for the backward pass, and of the products that they compute."""

import jax
import jax.numpy as jnp
import pytest
from jaxprs import nbytes, products
from ops.helpers import KEY, compiled_temporaries, normal, pullback, shaped, tables
from ops.operator_cases import (
    BATCH,
    DRAWN,
    LENGTH,
    NEAREST,
    OPERATORS,
    SIZE,
    TOKENS,
    WIDTH,
)
from weights.lora_cases import problem, with_adapters

from actjax import Exact, LoRA, NF4Weight, Quantized, RandomProjection, explain, linear


def test_a_layer_of_a_scan_takes_its_code_and_one_thin_product():
    # With dropout, and weights of 4 bits.
    codec = Quantized(4, group=32)

    def temporaries(layers: int) -> int:
        def loss(adapters, x, weights, keys):
            def body(x, layer):
                weight, (a, b), key = layer
                return linear(x, LoRA(weight, a, b, key, 2.0, 0.1), codec=codec), None

            return jnp.sum(jax.lax.scan(body, x, (weights, adapters, keys))[0] ** 2)

        weights = jax.eval_shape(jax.vmap(NF4Weight.quantize), shaped(layers, 32, 32))
        keys = jax.eval_shape(lambda: jax.random.split(KEY, layers))
        adapters = shaped(layers, 32, 4), shaped(layers, 4, 32)
        return compiled_temporaries(jax.grad(loss), adapters, shaped(1024, 32), weights, keys)

    few, many = temporaries(4), temporaries(12)
    stored = codec.stored_bytes((1024, 32), "float32") + 1024 * 4 * 4
    # Buffers are padded to 64 bytes. The input is 128 KiB, a mask of its bits 4 KiB, and a decoded
    # weight 4 KiB.
    assert stored <= (many - few) / 8 < stored + 1024


@pytest.mark.parametrize("name", OPERATORS)
def test_backward_holds_codes_and_thin_products_and_no_linear_input(name):
    operator, (ws, adapters, biases, _) = OPERATORS[name], problem()
    xs, scale = operator.activations(), operator.scale()

    def fun(xs, scale, ws, adapters, biases):
        negated = tuple(-x for x in xs)
        adapted = with_adapters(*ws, adapters)
        return operator.call(negated, scale, adapted, bias=biases, codec=DRAWN, key=KEY)

    # Ranks of 2 and of 3, and a number to scale each.
    thin = BATCH * LENGTH * (2 + 3) * 4 + 2 * 4
    others = tables(LENGTH, SIZE) if name == "attention" else ()
    # The pullback lists the arguments too, which are alive anyway.
    arguments = jax.eval_shape(lambda *args: args, scale, ws, adapters, biases)
    held = nbytes(pullback(fun, xs, scale, ws, adapters, biases))
    assert held == operator.stored_bytes(DRAWN, "float32") + thin + nbytes((arguments, others))


def test_explain_names_the_thin_product():
    ws, adapters, _, _ = problem()
    lora = LoRA(ws[0], *adapters[0])

    def fun(x, a, b):
        weight = LoRA(lora.weight, a, b)
        return jnp.sum(linear(-x, weight, codec=NEAREST, name="mine"))

    results = explain(fun, normal(0, *TOKENS), lora.a, lora.b).residuals
    sizes = {entry.name: entry.stored_bytes for entry in results if entry.operator == "linear"}
    assert sizes["mine"] == NEAREST.stored_bytes(TOKENS, "float32")
    assert sorted(sizes.values())[0] == BATCH * LENGTH * 2 * 4
    assert len(sizes) == 2
    assert all("mine" in name for name in sizes)


# What is computed.


def test_no_product_is_computed_for_a_gradient_of_the_weight():
    w, a, b = normal(1, WIDTH, 7), normal(2, WIDTH, 3), normal(3, 3, 7)
    cases = [("linear", codec) for codec in (Exact(), RandomProjection(3), NEAREST)]
    for name, codec in (*cases, *((name, DRAWN) for name in ("norm", "swiglu", "attention"))):
        operator = OPERATORS[name]
        xs, scale = operator.activations(), operator.scale()

        def of_weight(wrap, operator=operator, codec=codec, xs=xs, scale=scale):
            def fun(xs, w, a, b):
                z = operator.call(xs, scale, wrap(w, a, b), codec=codec, key=KEY)
                return jnp.sum(z**2)

            # With respect to everything.
            shapes = products(jax.grad(fun, (0, 1, 2, 3)), xs, w, a, b)
            return [shape for shape in shapes if sorted(shape) == [7, WIDTH]]

        assert not of_weight(LoRA), (name, codec)
        # Shows that this can fail: a plain weight has one, and so has a sum that is made before.
        assert of_weight(lambda w, a, b: w)
        assert of_weight(lambda w, a, b: w + a @ b)


def test_a_tuple_of_adapters_takes_the_products_of_each():
    x, w, a, b = normal(0, 16, WIDTH), normal(1, WIDTH, 7), normal(2, WIDTH, 3), normal(3, 3, 7)

    def made(count):
        def fun(x, a, b):
            return sum(map(jnp.sum, linear(x, (LoRA(w, a, b),) * count)))

        return len(products(jax.grad(fun, (0, 1, 2)), x, a, b))

    # Three products forward; backward one of the weight, and two of either thin matrix.
    assert [made(1), made(3)] == [8, 24]
