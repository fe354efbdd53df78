"""Tests of LowRankSum: outputs of adapted weights as base and low-rank part."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import nbytes
from ops.helpers import (
    BF16,
    KEY,
    assert_close,
    assert_equal,
    compiled_temporaries,
    normal,
    ones,
    pullback,
    shaped,
    tables,
)
from ops.operator_cases import (
    BATCH,
    DRAWN,
    KV_HEADS,
    LENGTH,
    NEAREST,
    OPERATORS,
    REBUILT,
    SIZE,
    TOKENS,
    WIDTH,
    decoded,
    merged,
)
from weights.lora_cases import problem, with_adapters

from actjax import (
    Exact,
    LoRA,
    LowRankSum,
    Quantized,
    attention,
    attention_linear,
    linear,
    norm_linear,
    qkv_projection,
    swiglu,
    swiglu_linear,
)

# Float64: sums of up to 40 terms of size 1 to 10, some 1e-16 each.
same = functools.partial(assert_close, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("name", "dropout"), [("linear", 0.3), ("norm", 0.0)])
def test_the_parts_add_up_to_the_output(name, dropout, x64):
    operator, (ws, adapters, biases, dzs) = OPERATORS[name], problem()
    xs, scale = operator.activations(), operator.scale()

    def outputs(split, keys, xs, plain, adapters, biases):
        adapted = with_adapters(ws[0], plain, ws[2], adapters, keys, dropout)
        options = {"bias": biases, "codec": DRAWN, "key": KEY, "split": split}
        zs = operator.call(xs, scale, adapted, **options)
        if not split:
            return zs
        first, plain, last = zs
        assert isinstance(first, LowRankSum)
        assert isinstance(last, LowRankSum)
        assert (first.shape, first.ndim, first.dtype) == ((*TOKENS[:2], 5), 3, "float64")
        return first.value(), plain, last.value()

    @jax.jit
    def run(keys, *args):
        both = [functools.partial(outputs, split, keys) for split in (True, False)]
        results = [jax.vjp(fun, *args) for fun in both]
        return [(zs, pull(dzs)) for zs, pull in results]

    same(*run(jax.random.split(KEY), xs, ws[1], adapters, biases))


def test_the_base_is_the_output_of_the_weight_alone():
    x, parts = normal(0, 6, 8), (normal(1, 8, 5), normal(2, 8, 2), normal(3, 2, 5))
    bias = np.full(5, 1.5, np.float32)

    @jax.jit
    def run(x, parts, bias):
        w = parts[0]
        total = linear(x, LoRA(*parts, KEY, 2.0, 0.3), bias=bias, split=True)
        q, k, _ = qkv_projection(x, LoRA(*parts), w, w, split=True)
        pairs = [total.base, q.base, linear(x, w, split=True)]
        return total, pairs, [linear(x, w, bias=bias), k, linear(x, w)]

    total, got, want = run(x, parts, bias)
    assert (total.left.shape, total.right.shape) == ((6, 2), (2, 5))
    assert_equal(got, want)


def test_features_are_split_into_heads_and_merged_again(x64):
    total = LowRankSum(normal(0, 6, 4), normal(1, 6, 2), normal(2, 2, 4))
    want = np.asarray(total.base) + np.asarray(total.left) @ np.asarray(total.right)
    shapes = (2, 3, 4), (6, 2, -1)

    @jax.jit
    def run(total):
        cut = [total.reshape(*shape) for shape in shapes]
        return cut, [one.value() for one in cut], [one.reshape(6, 4).value() for one in cut]

    for shape, cut, value, again in zip(shapes, *run(total), strict=True):
        want_cut = want.reshape(shape)
        assert (cut.shape, cut.ndim) == (want_cut.shape, want_cut.ndim)
        same(value, want_cut)
        same(again, want)


SHAPES = {name: REBUILT[name].shapes for name in ("swiglu", "attention")}
OPERATIONS = {
    "swiglu": swiglu,
    "attention": lambda *xs, **options: merged(
        attention(*xs, rope=tables(LENGTH, SIZE), **options)
    ),
    "swiglu linear": swiglu_linear,
    "attention linear": lambda *xs, **options: attention_linear(
        *xs, rope=tables(LENGTH, SIZE), **options
    ),
}  # fmt: skip


def sums(shapes):
    """Returns the parts of activations: base, left and right."""
    total = []
    for i, shape in enumerate(shapes):
        wide, rank = int(np.prod(shape[2:])), 2 + i
        total.append(
            (
                normal(i, BATCH, LENGTH, wide),
                np.asarray(normal(10 + i, BATCH, LENGTH, rank)) / 2,
                np.asarray(normal(20 + i, rank, wide)) / 2,
            )
        )
    return tuple(total)


# Operator, codecs, and which inputs have two parts.
@pytest.mark.parametrize(
    ("name", "codec", "which"),
    [
        ("swiglu", Exact(), (True, True)),
        ("swiglu", NEAREST, (False, True)),
        ("swiglu linear", (DRAWN, Exact()), (True, True)),
        ("attention", Exact(), (True, False, True)),
        ("attention", DRAWN, (True, True, True)),
        ("attention linear", (Exact(), NEAREST, DRAWN), (True, True, False)),
    ],
    ids=str,
)
def test_gradients_are_those_at_the_decoded_base_and_the_exact_rest(name, codec, which, x64):
    kind = name.split()[0]
    operation, oracle, shapes = OPERATIONS[name], REBUILT[kind], SHAPES[kind]
    parts, w, bias = sums(shapes), normal(5, WIDTH, 3), normal(6, 3)
    dy = normal(7, *TOKENS[:2], 3 if "linear" in name else WIDTH)

    @jax.jit
    def run(parts, w, bias):
        def fun(parts, w, bias):
            xs = []
            for (base, left, right), two, shape in zip(parts, which, shapes, strict=True):
                x = LowRankSum(base, left, right) if two else base
                xs.append(x.reshape(*shape))
            if "linear" in name:
                return operation(*xs, w=w, bias=bias, codec=codec, key=KEY)
            return operation(*xs, codec=codec, key=KEY)

        y, pull = jax.vjp(fun, parts, w, bias)
        return y, pull(dy), decoded(kind, [base for base, _, _ in parts], codec)

    y, (dparts, dw, db), hats = run(parts, w, bias)
    parts, hats, w, dy = jax.tree.map(np.asarray, (parts, hats, w, dy))

    def added(bases):
        return [
            (base + (left @ right if two else 0)).reshape(shape)
            for base, (_, left, right), two, shape in zip(bases, parts, which, shapes, strict=True)
        ]

    exact, point = added([base for base, _, _ in parts]), added(hats)
    want_y, d_inner = oracle.oracle(exact, None), dy
    if "linear" in name:
        want_y, d_inner = want_y @ w + np.asarray(bias), dy @ w.T
        same(dw, np.einsum("bsd,bsn->dn", oracle.oracle(point, None), dy))
        same(db, dy.sum((0, 1)))
    same(y, want_y)
    for got, dx, (_, left, right), two in zip(
        dparts, oracle.vjp(point, None, d_inner)[0], parts, which, strict=True
    ):
        dx = merged(dx)
        same(got[0], dx)
        want = dx @ right.T, np.einsum("bsr,bsn->rn", left, dx)
        same(got[1:], want if two else tuple(0 * one for one in want))


# What is held.


def code_bytes(codec, tokens, widths):
    return sum(codec.stored_bytes((*tokens, width), "float32") for width in widths)


def test_a_layer_of_a_scan_takes_codes_of_the_bases_and_one_thin_product_a_weight():
    codec, rank = Quantized(4, group=32), 4
    shapes = [(64, 96), (64, 96), (96, 64)]

    def temporaries(layers):
        def loss(adapters, ws, x):
            def body(x, layer):
                loras = [LoRA(w, *ab, scale=2.0) for w, ab in zip(*layer, strict=True)]
                two = tuple(loras[:2])
                gate, up = norm_linear(x, jnp.ones(64), two, codec=codec, split=True)
                return swiglu_linear(gate, up, loras[2], codec=codec), None

            return jnp.sum(jax.lax.scan(body, x, (ws, adapters))[0] ** 2)

        ws = [shaped(layers, *s) for s in shapes]
        adapters = [(shaped(layers, d, rank), shaped(layers, rank, n)) for d, n in shapes]
        return compiled_temporaries(jax.grad(loss), adapters, ws, shaped(512, 64))

    # The input of the norm, and the bases of gate and up.
    stored = code_bytes(codec, (512,), (64, 96, 96)) + 3 * 512 * rank * 4
    # Buffers are aligned. A second copy of one thin product in each of the eight more layers would
    # be 64 KiB.
    assert abs(temporaries(12) - temporaries(4) - 8 * stored) < 4096


def test_for_adapted_heads_codes_of_the_bases_and_the_thin_products_are_held():
    rank, tokens = 3, (BATCH, LENGTH)
    widths = [WIDTH, KV_HEADS * SIZE, KV_HEADS * SIZE]
    loras = tuple(
        LoRA(*(normal(i, *s) for s in ((WIDTH, n), (WIDTH, rank), (rank, n))))
        for i, n in enumerate(widths)
    )
    out = LoRA(*(normal(9, *s) for s in ((WIDTH, WIDTH), (WIDTH, rank), (rank, WIDTH))))

    def fun(x, loras, out):
        qkv = linear(-x, loras, codec=DRAWN, key=KEY, split=True)
        q, k, v = (y.reshape(*tokens, -1, SIZE) for y in qkv)
        return attention_linear(q, k, v, out, codec=DRAWN, key=KEY)

    held = pullback(fun, normal(0, *TOKENS), loras, out)
    wide = [leaf for leaf in jax.tree.leaves(held) if leaf.shape[:2] == tokens]
    # The step of each of the four codes is a scalar.
    codes = code_bytes(DRAWN, tokens, (WIDTH, *widths)) - 4 * 4
    assert nbytes(wide) == codes + 4 * BATCH * LENGTH * rank * 4


def test_sums_of_the_adapter_are_taken_in_float32():
    # 4096 ones: a bfloat16 sum stops at 256, where adding one rounds back.
    bf16 = functools.partial(ones, dtype=jnp.bfloat16)
    codec = Quantized(4, group=2)

    @jax.jit
    def run(base, left, right):
        def fun(left, right):
            # The gate of 100 is open.
            return swiglu(100 * base, LowRankSum(base, left, right), codec=codec)

        return jax.vjp(fun, left, right)[1](base / 100)

    _, dright = run(bf16(4096, 2), bf16(4096, 1), bf16(1, 2))
    np.testing.assert_allclose(np.float32(dright), 4096, rtol=2 * BF16)
