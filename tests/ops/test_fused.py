"""Tests of actjax/ops/fused.py: exact values, and gradients at what was kept of the inputs."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree
from jax.test_util import check_grads
from jaxprs import nbytes, products

import actjax
from actjax import (
    Exact,
    Quantized,
    attention,
    attention_linear,
    explain,
    input_groups,
    linear,
    norm_linear,
    rms_norm,
    swiglu,
    swiglu_linear,
    with_bases,
)

BF16 = 2.0**-8
"""Unit roundoff of bfloat16: the relative error of one rounding."""
KEY = jax.random.key(7)
NEAREST = Quantized(4, group=3)
DITHER = Quantized(2, group=4, rounding="dither")
BATCH, LENGTH, HEADS, GROUPS, SIZE = 2, 5, 4, 2, 2
WIDTH = HEADS * SIZE
"""Of the linear input, and of everything that is normalised or gated."""
EPS, THETA = 1e-6, 100.0


def normal(seed: int, *shape: int, dtype=None) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def tables() -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines of RoPE."""
    angles = np.arange(LENGTH)[:, None] * THETA ** (-2 * np.arange(SIZE // 2) / SIZE)
    return jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))


@dataclasses.dataclass(frozen=True)
class Case:
    """A fused operator, and its first half by itself.

    Attributes:
      fused: from activations, the scale of the norm (or None) and weights to outputs.
      first: from activations and scale to the linear input, by the operator of actjax.
      oracle: the same, in NumPy.
      vjp: from activations, scale and cotangent to cotangents of the first two, in NumPy.
      inputs: names of the activations.
      shapes: of the activations.
    """

    fused: Callable[..., Any]
    first: Callable[..., Any]
    oracle: Callable[..., Any]
    vjp: Callable[..., Any]
    inputs: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    has_scale: bool = False

    def activations(self, dtype=None) -> tuple[jax.Array, ...]:
        return tuple(normal(i, *shape, dtype=dtype) for i, shape in enumerate(self.shapes))

    def scale(self) -> jax.Array | None:
        return 1 + normal(9, WIDTH) / 4 if self.has_scale else None


def norm_vjp(x, scale, dy):
    dx, dscale = oracles.rms_norm_vjp(x, scale, EPS, dy)
    return (dx,), dscale


def attention_case(causal: bool, rotates: bool, groups: int = GROUPS) -> Case:
    def rope():
        return {"rope": tables()} if rotates else {}

    def turn(x, sign=1):
        return oracles.rope(x, sign * np.arange(LENGTH), THETA) if rotates else x

    def oracle(q, k, v):
        return oracles.attention(turn(q), turn(k), v, causal).reshape(BATCH, LENGTH, WIDTH)

    def vjp(q, k, v, dy):
        dy = np.reshape(dy, np.shape(q))
        dq, dk, dv = oracles.attention_vjp(turn(q), turn(k), v, dy, causal)
        return turn(dq, -1), turn(dk, -1), dv

    shapes = [(BATCH, LENGTH, heads, SIZE) for heads in (HEADS, groups, groups)]
    return Case(
        lambda xs, _, w, **given: attention_linear(*xs, w, causal=causal, **rope(), **given),
        lambda xs, _: attention(*xs, causal=causal, merge_heads=True, **rope()),
        lambda xs, _: oracle(*xs),
        lambda xs, _, dy: (vjp(*xs, dy), None),
        ("q", "k", "v"),
        tuple(shapes),
    )


CASES = {
    "norm": Case(
        lambda xs, scale, w, **given: norm_linear(*xs, scale, w, eps=EPS, **given),
        lambda xs, scale: rms_norm(*xs, scale, eps=EPS),
        lambda xs, scale: oracles.rms_norm(*xs, scale, EPS),
        lambda xs, scale, dy: norm_vjp(*xs, scale, dy),
        ("x",),
        ((BATCH, LENGTH, WIDTH),),
        has_scale=True,
    ),
    "swiglu": Case(
        lambda xs, _, w, **given: swiglu_linear(*xs, w, **given),
        lambda xs, _: swiglu(*xs),
        lambda xs, _: oracles.swiglu(*xs),
        lambda xs, _, dy: (oracles.swiglu_vjp(*xs, dy), None),
        ("gate", "up"),
        ((BATCH, LENGTH, WIDTH),) * 2,
    ),
    "attention": attention_case(causal=True, rotates=True),
    "attention, full, one head for all": attention_case(causal=False, rotates=False, groups=1),
}
THREE = ("norm", "swiglu", "attention")
three = pytest.mark.parametrize("name", THREE)

MIXED = {
    "norm": (DITHER,),
    "swiglu": (NEAREST, DITHER),
    "attention": (DITHER, Exact(), NEAREST),
    "attention, full, one head for all": (NEAREST,) * 3,
}
"""A codec for each input."""

OUTPUTS = (3, 1, 4)


def weights(dtype=None) -> tuple[jax.Array, ...]:
    return tuple(normal(20 + n, WIDTH, n, dtype=dtype) for n in OUTPUTS)


def biases(dtype=None) -> tuple[jax.Array | None, ...]:
    return normal(30, 3, dtype=dtype), None, normal(31, 4, dtype=dtype)


def cotangents(dtype=None) -> tuple[jax.Array, ...]:
    return tuple(normal(40 + n, BATCH, LENGTH, n, dtype=dtype) for n in OUTPUTS)


def one_each(name: str, codec: Any) -> tuple[Any, ...]:
    return codec if isinstance(codec, tuple) else (codec,) * len(CASES[name].shapes)


def merged(x: jax.Array) -> jax.Array:
    """Returns an activation as it is encoded: heads are merged."""
    return x.reshape(*x.shape[:2], -1) if x.ndim == 4 else x


def decoded(name: str, activations: Any, codec: Any, key: jax.Array) -> tuple[jax.Array, ...]:
    """Returns what the backward pass is to see: each input coded with a key of its own."""
    found = []
    for i, (x, one) in enumerate(zip(activations, one_each(name, codec), strict=True)):
        code = one.encode(merged(x), jax.random.fold_in(key, i))
        found.append(one.decode(code).reshape(x.shape))
    return tuple(found)


@functools.partial(jax.jit, static_argnames=("name", "codec"))
def run(name, codec, activations, scale, ws, bs, dzs, key=KEY):
    """Returns outputs, cotangents, and what inputs are decoded to."""

    def fun(activations, scale, ws, bs):
        return CASES[name].fused(activations, scale, ws, bias=bs, codec=codec, key=key)

    zs, pullback = jax.vjp(fun, activations, scale, ws, bs)
    return zs, pullback(dzs), decoded(name, activations, codec, key)


def run_oracle(name, exact, decoded, scale, ws, bs, dzs):
    """Returns outputs at the exact inputs, cotangents at the decoded ones, in NumPy float64."""
    case = CASES[name]
    wide = functools.partial(jax.tree.map, lambda x: np.asarray(x, np.float64))
    exact, decoded, ws, bs, dzs = map(wide, (exact, decoded, ws, bs, dzs))
    scale = None if scale is None else np.asarray(scale, np.float64)
    y, y_hat = case.oracle(exact, scale), case.oracle(decoded, scale)
    zs = tuple(y @ w + (0 if b is None else b) for w, b in zip(ws, bs, strict=True))
    dy = sum(dz @ w.T for w, dz in zip(ws, dzs, strict=True))
    dws = tuple(np.einsum("bsd,bsn->dn", y_hat, dz) for dz in dzs)
    dbs = tuple(None if b is None else dz.sum((0, 1)) for b, dz in zip(bs, dzs, strict=True))
    return zs, (*case.vjp(decoded, scale, dy), dws, dbs)


# Values and gradients.


@pytest.mark.parametrize(
    ("name", "exact"), [*((name, True) for name in THREE), *((name, False) for name in CASES)]
)
def test_value_is_exact_and_gradients_are_those_at_the_decoded_input(
    name, exact, x64, quick_compile
):
    codec = Exact() if exact else MIXED[name]
    activations, scale = CASES[name].activations(), CASES[name].scale()
    rest = scale, weights(), biases(), cotangents()
    *got, hats = run(name, codec, activations, *rest)
    for one, x, hat in zip(one_each(name, codec), activations, hats, strict=True):
        assert np.array_equal(x, hat) == (one == Exact())
    want = run_oracle(name, activations, hats, *rest)

    def assert_same(got, want):
        assert got.dtype == jnp.float64
        # Sums of up to 40 terms of size 1 to 10, in another order: some 1e-16 each.
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12)

    jax.tree.map(assert_same, tuple(got), want)


@pytest.mark.parametrize(
    ("name", "dtype"), [("norm", "float32"), ("swiglu", "bfloat16"), ("attention", "float32")]
)
def test_forward_value_is_that_of_the_two_operators_to_the_bit(name, dtype, quick_compile):
    case, (w, *_), (b, *_) = CASES[name], weights(dtype), biases(dtype)

    @jax.jit
    def values(activations, scale, w, b):
        def fused(codec, w=w):
            return case.fused(activations, scale, w, bias=b, codec=codec, key=KEY)

        want = linear(case.first(activations, scale), w, bias=b)
        codecs = Exact(), NEAREST, MIXED[name]
        plain = [fused(codec) for codec in codecs]
        # With a backward pass to come, and without.
        return want, plain, [jax.vjp(functools.partial(fused, codec), w)[0] for codec in codecs]

    want, *got = values(case.activations(dtype), case.scale(), w, b)
    assert want.dtype == dtype
    for z in jax.tree.leaves(got):
        np.testing.assert_array_equal(z, want)


@pytest.mark.parametrize("name", ["norm", "attention"])
def test_gradients_of_the_exact_codec_are_those_of_the_two_operators(name, x64, quick_compile):
    case, dz = CASES[name], cotangents()[0]
    arguments = case.activations(), case.scale(), weights()[0], biases()[0]

    def apart(activations, scale, w, b):
        return linear(case.first(activations, scale), w, bias=b)

    def fused(activations, scale, w, b):
        return case.fused(activations, scale, w, bias=b)

    both = jax.jit(lambda *args: [jax.vjp(f, *args)[1](dz) for f in (fused, apart)])
    same = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-13)
    jax.tree.map(same, *both(*arguments))


@three
def test_exact_codec_passes_finite_differences(name, x64, quick_compile):
    case = CASES[name]
    # As one vector: all arguments at once.
    flat, split = ravel_pytree((case.activations(), case.scale(), weights(), biases()))

    def fun(flat):
        activations, scale, ws, bs = split(flat)
        # Sines, so that the cotangent is not constant.
        return jnp.sin(ravel_pytree(case.fused(activations, scale, ws, bias=bs))[0] / 4)

    # The defaults of check_grads would let an error of 0.1% pass. With steps of 1e-5 truncation and
    # cancellation err by about 1e-10 each.
    check_grads(jax.jit(fun), [flat], 1, ["rev"], 1e-8, 1e-8, 1e-5)


@three
def test_a_single_weight_gives_a_single_output_and_a_tuple_a_tuple(name):
    case, w = CASES[name], weights()[0]
    given = case.activations(), case.scale()
    for ws, count in ((w, None), (nnx.Param(w), None), ((w,), 1), ([w, w], 2)):
        zs = jax.eval_shape(lambda ws: case.fused(*given, ws), ws)
        assert (len(zs) if isinstance(zs, tuple) else None) == count
        assert {z.shape for z in jax.tree.leaves(zs)} == {(BATCH, LENGTH, 3)}


def test_eps_is_that_of_the_norm(quick_compile):
    x, scale, w, dz = normal(0, 4, 8), jnp.ones(8), normal(1, 8, 3), normal(2, 4, 3)

    @jax.jit
    def run(x, w):
        z, pullback = jax.vjp(lambda x, w: norm_linear(x, scale, w, eps=0.5), x, w)
        return z, *pullback(dz)

    normed = oracles.rms_norm(x, scale, 0.5)
    want_dx = oracles.rms_norm_vjp(x, scale, 0.5, np.asarray(dz) @ np.asarray(w).T)[0]
    want = normed @ np.asarray(w), want_dx, normed.T @ np.asarray(dz)
    for got, exact in zip(run(x, w), want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)  # Float32.
    default = norm_linear(1e-3 * x, scale, w)
    np.testing.assert_array_equal(default, norm_linear(1e-3 * x, scale, w, eps=1e-6))
    assert not np.allclose(default, norm_linear(1e-3 * x, scale, w, eps=1e-5))


@pytest.mark.parametrize("lead", [(), (2, 3, 4)], ids=str)
def test_any_number_of_leading_axes(lead, x64, quick_compile):
    x, w, dz = normal(0, *lead, 8), normal(1, 8, 3), normal(2, *lead, 3)

    @jax.jit
    def run(x, w):
        z, pullback = jax.vjp(lambda x, w: swiglu_linear(x, x, w), x, w)
        return z, *pullback(dz)

    z, dx, dw = run(x, w)
    y = oracles.swiglu(x, x)
    np.testing.assert_allclose(z, y @ np.asarray(w), rtol=1e-12, atol=1e-13)
    want_dx = sum(oracles.swiglu_vjp(x, x, np.asarray(dz) @ np.asarray(w).T))
    np.testing.assert_allclose(dx, want_dx, rtol=1e-12, atol=1e-13)
    want_dw = y.reshape(-1, 8).T @ np.asarray(dz).reshape(-1, 3)
    np.testing.assert_allclose(dw, want_dw, rtol=1e-12, atol=1e-13)


# The error of a code.


def test_dither_errs_by_what_a_level_is(quick_compile):
    # A level of b bits is 1 / (2^b - 1) of the range, and to first order the error follows it.
    x, scale, w, dz = normal(0, 32, 16), jnp.ones(16), normal(1, 16, 4), normal(2, 32, 4)

    def gradient(codec, key=None):
        return jax.grad(lambda w: jnp.sum(dz * norm_linear(x, scale, w, codec=codec, key=key)))(w)

    @functools.partial(jax.jit, static_argnums=0)
    def errors(bits):
        codec = Quantized(bits, group=16, rounding="dither", scale_dtype="float32")
        keys = jax.random.split(KEY, 16)
        return jax.vmap(functools.partial(gradient, codec))(keys) - gradient(Exact())

    coarse, fine = (float(jnp.sqrt(jnp.mean(errors(bits) ** 2))) for bits in (3, 8))
    # Of second order is a share of Δ, in 3 bits a seventh of the range: with its sign, a fifth.
    assert coarse / fine == pytest.approx((2**8 - 1) / (2**3 - 1), rel=0.2)


def test_another_key_draws_other_numbers_and_the_same_key_the_same(quick_compile):
    x, w = normal(0, 6, 8), normal(1, 8, 3)

    def fun(key, gate, up):
        return jnp.sum(swiglu_linear(gate, up, w, codec=DITHER, key=key))

    run = jax.jit(lambda key: jax.value_and_grad(fun, (1, 2))(key, x, x))
    (first, first_grad), again, (other, other_grad) = (run(jax.random.key(s)) for s in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, (first, first_grad), again)
    assert first == other
    assert not any(np.array_equal(a, b) for a, b in zip(first_grad, other_grad, strict=True))
    # Keys may be of the old style, or given to each input as they are folded.
    key = jax.random.PRNGKey(1)
    for same in (key, tuple(jax.random.fold_in(key, i) for i in range(2))):
        jax.tree.map(np.testing.assert_array_equal, (first, first_grad), run(same))


# Precision.


@pytest.mark.parametrize("name", ["norm", "attention"])
def test_bfloat16_is_rounded_where_the_two_operators_round(name, quick_compile):
    case, bf16 = CASES[name], jnp.bfloat16
    activations, scale = case.activations(bf16), case.scale()
    # Weights are wider, as master weights are; what is rounded in them is the operator's.
    ws, bs, dzs = weights(), biases(), cotangents(bf16)
    zs, grads, hats = run(name, NEAREST, activations, scale, ws, bs, dzs)
    assert {x.dtype for x in (*zs, *grads[0], *hats)} == {jnp.dtype(bf16)}
    assert {x.dtype for x in jax.tree.leaves(grads[1:])} == {jnp.dtype("float32")}
    cast = tuple(w.astype(bf16) for w in ws)
    want_zs, want = run_oracle(name, activations, hats, scale, cast, bs, dzs)
    sizes = [np.linalg.norm(x) for x in (*want[0], *want[2])]
    y_hat = case.oracle(*jax.tree.map(lambda x: np.asarray(x, np.float64), (hats, scale)))
    terms = [np.abs(y_hat).reshape(-1, WIDTH).T @ np.abs(dz).reshape(-1, dz.shape[-1])
             for dz in (np.asarray(dz, np.float64) for dz in dzs)]  # fmt: skip
    for z, exact in zip(zs, want_zs, strict=True):
        # The linear input and the output are rounded, and in attention the weights of values.
        assert np.linalg.norm(np.float64(z) - exact) <= 3 * BF16 * np.linalg.norm(exact)
    for dw, exact, term in zip(grads[2], want[2], terms, strict=True):
        # Of `dw` the rebuilt input alone is rounded, in attention the weights of values besides.
        roundings = 2 if name == "attention" else 1
        assert np.all(np.abs(dw - exact) <= roundings * BF16 * term + 1e-5)
    for dx, exact, size in zip(grads[0], want[0], sizes, strict=False):
        # Its cotangent, what is taken from one another within, and the result.
        assert np.linalg.norm(np.float64(dx) - exact) <= 4 * BF16 * size
    for db, exact in zip(grads[3], want[3], strict=True):
        assert (db is None) == (exact is None)
        if db is not None:
            np.testing.assert_allclose(db, exact, rtol=1e-6, atol=1e-5)  # Float32 sums.


def test_sums_are_taken_in_float32():
    # 4096 ones: a bfloat16 sum stops at 256, where adding one rounds back.
    ones = functools.partial(jnp.ones, dtype=jnp.bfloat16)

    def fun(scale, w, b):
        return norm_linear(ones((4096, 2)), scale, w, eps=0.0, bias=b)

    arguments = ones(2), ones((2, 1)), ones(1)
    run = jax.jit(lambda *args: jax.vjp(fun, *args)[1](ones((4096, 1))))
    for grad in run(*arguments):
        assert grad.dtype == jnp.bfloat16
        np.testing.assert_array_equal(grad.astype(jnp.float32), 4096)


# What is held.


def held(fun, *args) -> list[jax.Array]:
    """Returns the arrays that the backward pass of `fun` holds, each once."""
    return list({id(leaf): leaf for leaf in jax.tree.leaves(jax.vjp(fun, *args)[1])}.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["exact", "mixed", "all drawn"])
@three
def test_backward_holds_codes_weights_and_no_linear_input(name, kind, dtype):
    case, ws, bs = CASES[name], weights(dtype), biases(dtype)
    codec = {"exact": Exact(), "mixed": MIXED[name], "all drawn": DITHER}[kind]
    activations, scale = case.activations(dtype), case.scale()

    def fun(activations, scale, ws, bs):
        return case.fused(activations, scale, ws, bias=bs, codec=codec, key=KEY)

    pullback = jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], activations, scale, ws, bs)
    stored = sum(
        one.stored_bytes(merged(x).shape, x.dtype)
        for one, x in zip(one_each(name, codec), activations, strict=True)
    )
    others = nbytes((scale, ws, bs)) + (nbytes(tables()) if name == "attention" else 0)
    assert nbytes(pullback) == stored + others


def test_exact_codec_holds_the_very_arrays():
    x, up, scale, w = normal(0, 6, 8), normal(1, 6, 8), normal(2, 8), normal(3, 8, 3)
    for fun, args in ((norm_linear, (x, scale, w)), (swiglu_linear, (x, up, w))):
        assert {id(leaf) for leaf in held(fun, *args)} == {id(arg) for arg in args}


@pytest.mark.parametrize(
    ("codec", "with_attention"), [(Exact(), False), (Quantized(4, group=32), True)], ids=str
)
def test_under_scan_a_layer_takes_the_bytes_of_its_codes_and_no_more(codec, with_attention):
    tokens, half = (1, 512), block if with_attention else mlp_block

    def temporaries(layers):
        def loss(params, x):
            body = lambda x, p: (half(x, p, codec, (None,) * 4), None)  # noqa: E731
            return jnp.sum(jax.lax.scan(body, x, params)[0] ** 2)

        params = jax.eval_shape(lambda: block_params(layers, factor=8))
        x = jax.ShapeDtypeStruct((*tokens, 64), "float32")
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    grown = temporaries(12) - temporaries(4)
    # The input of a norm, gate and up; that of another norm, q, k and v.
    widths = (64, 96, 96) + ((64, 64, 32, 32) if with_attention else ())
    stored = sum(codec.stored_bytes((*tokens, width), "float32") for width in widths)
    # Buffers are aligned; besides them nothing depends on the number of layers. The narrowest float
    # kept in a single one of the eight more layers would be 64 KiB.
    assert abs(grown - 8 * stored) < 4096


@three
def test_explain_names_what_is_kept(name):
    case, (w, *_), codec = CASES[name], weights(), MIXED[name]
    arguments = case.activations(), case.scale(), w

    def fun(xs, scale, w):
        negated = tuple(-x for x in xs)
        return jnp.sum(case.fused(negated, scale, w, codec=codec, key=KEY, name="mine"))

    found = explain(fun, *arguments)
    entries = {e.name: e for e in found.residuals if e.operator == f"{name}_linear"}
    names = {
        "norm": ["mine"],
        "swiglu": ["mine gate", "mine up"],
        "attention": ["mine q", "mine k", "mine v"],
    }[name]
    assert sorted(entries) == sorted(names)
    for label, one, x in zip(names, codec, arguments[0], strict=True):
        assert entries[label].stored_bytes == one.stored_bytes(merged(x).shape, x.dtype)


# What is computed.


@pytest.mark.parametrize("codec", [Exact(), DITHER], ids=str)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["norm", "swiglu"])
def test_no_product_is_computed_again(name, count, codec):
    case, ws = CASES[name], weights()[:count]
    plain = {
        "norm": lambda x, scale: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) * scale,
        "swiglu": lambda gate, up, _: jax.nn.silu(gate) * up,
    }[name]

    def fused(xs, scale, ws):
        return sum(map(jnp.sum, case.fused(xs, scale, ws, codec=codec, key=KEY)))

    def autodiff(xs, scale, ws):
        y = plain(*xs, scale)
        return sum(jnp.sum(y @ w) for w in ws)

    gradients = [jax.grad(f, (0, 2)) for f in (fused, autodiff)]
    arguments = case.activations(), case.scale(), ws
    # Forward, and each of the two factors' gradients.
    assert [len(products(g, *arguments)) for g in gradients] == [3 * count] * 2


@pytest.mark.parametrize("codec", [Exact(), DITHER], ids=str)
def test_of_attention_nothing_but_attention_is_computed_again(codec):
    case, ws = CASES["attention"], weights()

    def fused(xs, ws):
        return sum(map(jnp.sum, case.fused(xs, None, ws, codec=codec, key=KEY)))

    def recomputed(xs, ws):
        y = attention(*xs, rope=tables(), recompute=True, merge_heads=True)
        return sum(jnp.sum(y @ w) for w in ws)

    gradients = [jax.grad(f, (0, 1)) for f in (fused, recomputed)]
    got, want = (len(products(g, case.activations(), ws)) for g in gradients)
    # Two in either forward pass of attention, five in the backward pass, and those of the linear.
    assert got == want == 2 + 2 + 5 + 9


@three
def test_a_barrier_keeps_the_two_passes_apart(name):
    # XLA could merge them, and keep what is to be rebuilt: the code of `Exact` is the input itself.
    case = CASES[name]
    fun = lambda *args: jnp.sum(case.fused(*args))  # noqa: E731
    text = str(jax.make_jaxpr(jax.grad(fun))(case.activations(), case.scale(), weights()[0]))
    assert "optimization_barrier" in text


# Under transformations of JAX.

TRANSFORMS = {
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda xs, *rest: jax.lax.scan(
        lambda _, xs: (None, f(xs, *rest)), None, xs
    )[1],
    "vmap": lambda f: jax.vmap(f, in_axes=(0, None, None)),
}  # fmt: skip


# Attention is in a scan below.
UNDER = {"checkpoint": ("norm", "attention"), "scan": ("swiglu",), "vmap": ("norm", "attention")}


@pytest.mark.parametrize(
    ("transform", "name"), [(transform, name) for transform in UNDER for name in UNDER[transform]]
)
def test_gradients_are_the_same_under(transform, name, quick_compile):
    case, (w, *_) = CASES[name], weights()
    activations, scale, dz = case.activations(), case.scale(), cotangents()[0]
    if transform != "checkpoint":
        activations, dz = jax.tree.map(lambda x: x[:, None], (activations, dz))

    @jax.jit
    def run(*args):
        fused = functools.partial(case.fused, codec=NEAREST)
        grads = jax.vjp(TRANSFORMS[transform](fused), *args)[1](dz)
        return grads, decoded(name, case.activations(), NEAREST, KEY)

    (dxs, *got), hats = run(activations, scale, w)
    dxs = jax.tree.map(lambda dx, x: dx.reshape(x.shape), dxs, case.activations())
    # Groups lie within tokens: examples are coded alike, by themselves or in a batch.
    _, want = run_oracle(name, hats, hats, scale, (w,), (None,), (dz.reshape(BATCH, LENGTH, 3),))
    # Float32, sums of at most 40 terms of size 1 to 10.
    same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=5e-5)
    jax.tree.map(same, (dxs, *got), (*want[:2], want[2][0]))


@pytest.mark.parametrize("transform", ["map", "vmap"])
def test_each_example_has_its_own_key_under(transform, quick_compile):
    x, w, keys = normal(0, 3, 8), normal(1, 8, 4), jax.random.split(KEY, 2)

    @jax.jit
    def gradient(key):
        return jax.grad(lambda w: jnp.sum(norm_linear(x, jnp.ones(8), w, codec=DITHER, key=key)))(w)

    over = {"map": jax.lax.map, "vmap": lambda f, keys: jax.vmap(f)(keys)}[transform]
    mapped = jax.jit(lambda keys: over(gradient, keys))(keys)
    np.testing.assert_allclose(mapped, [gradient(key) for key in keys], rtol=1e-5, atol=1e-6)
    assert not np.allclose(mapped[0], mapped[1])


LAYERS = 2
WEIGHTS = {"q": (8, 8), "k": (8, 4), "v": (8, 4), "o": (8, 8)} | {
    "gate": (8, 12), "up": (8, 12), "down": (12, 8)
}  # fmt: skip
INPUTS = {"q": "k", "k": "k", "v": "k", "o": "o", "gate": "gate", "up": "gate", "down": "down"}
"""Which weights share an input: named for the first, in the order of a dictionary's keys."""


def block_params(*lead: int, factor: int = 1) -> dict[str, jax.Array]:
    shapes = WEIGHTS | {"first": (8,), "second": (8,)}
    return {
        name: normal(i, *lead, *(factor * n for n in shape)) / 2
        for i, (name, shape) in enumerate(shapes.items())
    }


def block(x, p, codec, keys):
    """A layer of a decoder, of fused operators alone."""
    given = [{"codec": codec, "key": key} for key in keys[:2]]
    qkv = norm_linear(x, p["first"], (p["q"], p["k"], p["v"]), **given[0])
    q, k, v = (y.reshape(*x.shape[:2], n, -1) for y, n in zip(qkv, (4, 2, 2), strict=True))
    return mlp_block(x + attention_linear(q, k, v, p["o"], **given[1]), p, codec, keys)


def mlp_block(x, p, codec, keys):
    """The second half of it."""
    given = [{"codec": codec, "key": key} for key in keys[2:]]
    gate, up = norm_linear(x, p["second"], (p["gate"], p["up"]), **given[0])
    return x + swiglu_linear(gate, up, p["down"], **given[1])


KEYS = tuple(jax.random.split(KEY, 4))


def scanned(params, x, codec):
    body = lambda x, p: (block(x, p, codec, KEYS), None)  # noqa: E731
    return jnp.sum(jnp.sin(jax.lax.scan(body, x, params)[0]))


scanned_value_and_grad = jax.jit(jax.value_and_grad(scanned, (0, 1)), static_argnums=2)


def test_scan_over_stacked_layers(x64, quick_compile):
    params, x = block_params(LAYERS), normal(50, BATCH, LENGTH, 8)
    _, (got, got_dx) = scanned_value_and_grad(params, x, NEAREST)

    @jax.jit
    def layer(p, x, dy):
        y, pullback = jax.vjp(lambda p, x: block(x, p, NEAREST, KEYS), p, x)
        return y, *pullback(dy)

    # Layer by layer, and backwards again.
    layers = [{name: p[i] for name, p in params.items()} for i in range(LAYERS)]
    inputs = [x]
    for p in layers:
        inputs.append(layer(p, inputs[-1], x)[0])
    dx = jnp.cos(inputs.pop())
    for i in reversed(range(LAYERS)):
        _, want, dx = layer(layers[i], inputs[i], dx)
        for name, exact in want.items():
            # Two layers in another order of operations. Nothing lies so near the middle of levels.
            np.testing.assert_allclose(got[name][i], exact, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(got_dx, dx, rtol=1e-10, atol=1e-10)


# Subspaces.


@pytest.mark.parametrize("codec", [Exact(), DITHER], ids=str)
def test_inputs_are_found_and_named_for_their_first_weight(codec):
    x = normal(50, BATCH, LENGTH, 8)
    stacked = functools.partial(scanned, codec=codec)
    assert input_groups(stacked, block_params(LAYERS), x) == INPUTS
    single = lambda p, x: jnp.sum(block(x, p, codec, KEYS))  # noqa: E731
    assert input_groups(single, block_params(), x) == INPUTS


def test_in_a_basis_weights_have_the_gradient_at_the_decoded_input_in_it(x64, quick_compile):
    params, x = block_params(LAYERS), normal(50, BATCH, LENGTH, 8)
    widths = {"k": 8, "o": 8, "down": 12}
    bases = {name: normal(i, LAYERS, d, 3) for i, (name, d) in enumerate(widths.items())}
    named = {f"0.{name}": basis for name, basis in bases.items()}
    fun = functools.partial(scanned, codec=NEAREST)
    value, (gradient, dx) = jax.jit(actjax.value_and_grad(fun, (0, 1), bases=named))(params, x)
    want_value, (want, want_dx) = scanned_value_and_grad(params, x, NEAREST)
    same = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)
    same(value, want_value)
    same(dx, want_dx)
    for name, exact in want.items():
        group = INPUTS.get(name)
        if group not in bases:
            same(gradient[name], exact)
            continue
        assert gradient[name].basis == f"0.{group}"
        np.testing.assert_array_equal(gradient[name].left, bases[group])
        same(gradient[name].right, bases[group].mT @ exact)


def test_weights_beside_those_in_a_basis_have_the_gradient_in_it_multiplied_out(x64, quick_compile):
    x, w, other, basis = (normal(i, *s) for i, s in enumerate(((6, 8), (8, 5), (8, 4), (8, 3))))

    def fun(params, other):
        ys = norm_linear(x, jnp.ones(8), (params["w"], other))
        return sum(jnp.sum(jnp.sin(y)) for y in ys)

    want, got = (
        jax.jit(jax.grad(f, 1))({"w": w}, other) for f in (fun, with_bases(fun, {"w": basis}))
    )
    np.testing.assert_allclose(got, basis @ basis.T @ want, rtol=1e-10, atol=1e-10)


def test_a_factored_codec_gives_a_dense_gradient_of_what_it_is_decoded_to(x64, quick_compile):
    # The input of the linear operator is rebuilt, and has no low rank: nothing to factor.
    x, params, codec = normal(0, 6, 8), {"w": normal(1, 8, 4)}, actjax.RandomizedSVD(3)

    @jax.jit
    def run(params):
        def fun(params):
            return jnp.sum(norm_linear(x, jnp.ones(8), params["w"], codec=codec, key=KEY))

        x_hat = codec.decode(codec.encode(x, jax.random.fold_in(KEY, 0)))
        return actjax.value_and_grad(fun)(params)[1]["w"], x_hat

    dw, x_hat = run(params)
    want = oracles.rms_norm(x_hat, np.ones(8), EPS).T @ np.ones((6, 4))
    np.testing.assert_allclose(dw, want, rtol=1e-11, atol=1e-12)


# Errors.

X, W, Q, K = jnp.ones((6, 8)), jnp.ones((8, 5)), jnp.ones((2, 5, 4, 2)), jnp.ones((2, 5, 2, 2))
SCALE, LIST = jnp.ones(8), (Exact(),) * 4
NO_KEY = "`codec` Quantized(bits=2, group=4, rounding='dither') draws random numbers, but got key="
COUNT = "`codec` must be one codec, or one for each of "

ERRORS = {
    "norm: scale": (
        lambda: norm_linear(X, SCALE[:7], W), ValueError, "`scale` must be (8,) for x(6, 8)",
    ),
    "norm: weight": (
        lambda: norm_linear(X, SCALE, W.T),
        ValueError,
        "`w` must be [d, n] with d = (8,) features of `x`: got x(6, 8) @ w(5, 8). Did you pass it",
    ),
    "norm: second weight": (
        lambda: norm_linear(X, SCALE, (W, W[:7])), ValueError, "@ w[1](7, 5)",
    ),
    "norm: no weight": (lambda: norm_linear(X, SCALE, ()), ValueError, "`w` is an empty tuple"),
    "norm: bias": (
        lambda: norm_linear(X, SCALE, W, bias=SCALE),
        ValueError,
        "the bias of `w`(8, 5) must be (5,), got (8,).",
    ),
    "norm: bias count": (
        lambda: norm_linear(X, SCALE, (W, W), bias=(None,)),
        ValueError,
        "`bias` has 1 entries for 2 weights",
    ),
    "norm: integers": (
        lambda: norm_linear(X.astype(int), SCALE, W),
        TypeError,
        "`x` must be a floating point array, got int32",
    ),
    "norm: codec class": (
        lambda: norm_linear(X, SCALE, W, codec=Exact),
        TypeError,
        "`codec` must be an actjax.Codec (an instance, not the class)",
    ),
    "norm: codec name": (
        lambda: norm_linear(X, SCALE, W, codec="exact"), TypeError, "got 'exact'",
    ),
    "norm: codec count": (
        lambda: norm_linear(X, SCALE, W, codec=LIST), ValueError, COUNT + "x: got 4.",
    ),
    "norm: no key": (
        lambda: norm_linear(X, SCALE, W, codec=DITHER), ValueError, NO_KEY + "None: pass `key`",
    ),
    "norm: no key but a number": (
        lambda: norm_linear(X, SCALE, W, codec=DITHER, key=0), ValueError, NO_KEY + "0: pass `key`",
    ),
    "swiglu: shapes": (
        lambda: swiglu_linear(X, X[:5], W), ValueError, "`gate` and `up` must agree in shape",
    ),
    "swiglu: integers": (
        lambda: swiglu_linear(X, X.astype(int), W), TypeError, "`up` must be a floating point",
    ),
    "swiglu: weight": (
        lambda: swiglu_linear(X, X, W[:7]), ValueError, "got x(6, 8) @ w(7, 5)",
    ),
    "swiglu: no codec": (lambda: swiglu_linear(X, X, W, codec=None), TypeError, "got None"),
    "swiglu: no codec in a pair": (
        lambda: swiglu_linear(X, X, W, codec=(Exact(), "exact")), TypeError, "got 'exact'",
    ),
    "swiglu: codec count": (
        lambda: swiglu_linear(X, X, W, codec=LIST), ValueError, COUNT + "gate, up: got 4.",
    ),
    "swiglu: no key": (
        lambda: swiglu_linear(X, X, W, codec=(Exact(), DITHER)), ValueError, NO_KEY + "None",
    ),
    "attention: heads": (
        lambda: attention_linear(Q, K[:, :4], K[:, :4], W),
        ValueError,
        "`q` and `k` must agree in batch, length and head size",
    ),
    "attention: weight": (
        lambda: attention_linear(Q, K, K, W[:4]), ValueError, "got x(2, 5, 8) @ w(4, 5)",
    ),
    "attention: implementation": (
        lambda: attention_linear(Q, K, K, W, implementation="triton"),
        ValueError,
        "or None, got 'triton'.",
    ),
    "attention: tables": (
        lambda: attention_linear(Q, K, K, W, rope=(jnp.ones((4, 1)),) * 2),
        ValueError,
        "`cos` and `sin` [S, D / 2]",
    ),
    "attention: codec count": (
        lambda: attention_linear(Q, K, K, W, codec=[Exact()] * 2),
        ValueError,
        COUNT + "q, k, v: got 2.",
    ),
    "swiglu: key count": (
        lambda: swiglu_linear(X, X, W, codec=DITHER, key=(KEY,)),
        ValueError,
        "`key` must be one key, or one for each of gate, up: got 1.",
    ),
    "attention: no key of one": (
        lambda: attention_linear(Q, K, K, W, codec=DITHER, key=(KEY, None, KEY)),
        ValueError,
        NO_KEY + "None",
    ),
    "attention: no codec": (
        lambda: attention_linear(Q, K, K, W, codec=(Exact(), Exact(), Exact)),
        TypeError,
        "`codec` must be an actjax.Codec (an instance, not the class)",
    ),
    "attention: no key": (
        lambda: attention_linear(Q, K, K, W, codec=DITHER), ValueError, NO_KEY + "None",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_argument_and_what_came(case):
    call, kind, message = ERRORS[case]
    with pytest.raises(kind, match=re.escape(message)):
        call()
