"""Tests of actjax/ops/lora.py: frozen weights with adapters, and their outputs in two parts."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax.flatten_util import ravel_pytree
from jax.test_util import check_grads
from jaxprs import nbytes, products

import actjax
from actjax import (
    Exact,
    LoRA,
    LowRankSum,
    NF4Weight,
    PointApproximation,
    Quantized,
    RandomProjection,
    attention,
    attention_linear,
    explain,
    linear,
    norm_linear,
    qkv_projection,
    swiglu,
    swiglu_linear,
)

BF16 = 2.0**-8
"""Unit roundoff of bfloat16: the relative error of one rounding."""
KEY = jax.random.key(7)
NEAREST = Quantized(4, group=4)
DITHER = Quantized(2, group=4, rounding="dither")
BATCH, LENGTH, HEADS, GROUPS, SIZE = 2, 5, 4, 2, 2
WIDTH = HEADS * SIZE
"""Of the linear input."""
THETA = 100.0


def normal(seed: int, *shape: int, dtype=None) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


quantize = jax.jit(NF4Weight.quantize)  # Step by step most of the time would be compilation.


def assert_close(got, want, rtol=1e-11, atol=1e-12):
    """By default to float64: sums of up to 40 terms of size 1 to 10, some 1e-16 each."""
    same = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(same, got, want)


# The operators.


def scale_of_norm() -> np.ndarray:
    # A new array each time: of one that it has seen in float32, JAX 0.10 keeps that in float64.
    return 1 + np.random.default_rng(9).standard_normal(WIDTH) / 4


def tables() -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines of RoPE."""
    angles = np.arange(LENGTH)[:, None] * THETA ** (-2 * np.arange(SIZE // 2) / SIZE)
    return jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))


def turn(x, sign=1):
    return oracles.rope(x, sign * np.arange(LENGTH), THETA)


def attended(q, k, v):
    return oracles.attention(turn(q), turn(k), v, True).reshape(BATCH, LENGTH, WIDTH)


def attended_vjp(q, k, v, dy):
    dy = np.reshape(dy, np.shape(q))
    dq, dk, dv = oracles.attention_vjp(turn(q), turn(k), v, dy, True)
    return turn(dq, -1), turn(dk, -1), dv


@dataclasses.dataclass(frozen=True)
class Operator:
    """An operator that ends in a linear one.

    Attributes:
      call: from activations and weights to outputs.
      first: from activations to the linear input, in NumPy.
      vjp: from activations and its cotangent to theirs, in NumPy.
      shapes: of the activations.
    """

    call: Callable[..., Any]
    first: Callable[..., Any]
    vjp: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]

    def activations(self, dtype=None) -> tuple[jax.Array, ...]:
        return tuple(normal(i, *shape, dtype=dtype) for i, shape in enumerate(self.shapes))


TOKENS = (BATCH, LENGTH, WIDTH)
OPERATORS = {
    "linear": Operator(linear, lambda x: x, lambda x, dy: (dy,), (TOKENS,)),
    "norm": Operator(
        lambda x, w, **given: norm_linear(x, jnp.asarray(scale_of_norm()), w, eps=1e-6, **given),
        lambda x: oracles.rms_norm(x, scale_of_norm(), 1e-6),
        lambda x, dy: (oracles.rms_norm_vjp(x, scale_of_norm(), 1e-6, dy)[0],),
        (TOKENS,),
    ),
    "swiglu": Operator(swiglu_linear, oracles.swiglu, oracles.swiglu_vjp, (TOKENS,) * 2),
    "attention": Operator(
        lambda q, k, v, w, **given: attention_linear(q, k, v, w, rope=tables(), **given),
        attended,
        attended_vjp,
        tuple((BATCH, LENGTH, heads, SIZE) for heads in (HEADS, GROUPS, GROUPS)),
    ),
}
operators = pytest.mark.parametrize("name", OPERATORS)


def merged(x):
    """Returns an activation as it is encoded: heads are merged."""
    return x.reshape(BATCH, LENGTH, -1)


def decoded(name, activations, codec):
    """Returns what the backward pass is to see."""
    if name == "linear":  # Of one input, its key is the one that is given.
        return (codec.decode(codec.encode(*activations, KEY)),)
    codecs = codec if isinstance(codec, tuple) else (codec,) * len(activations)
    found = []
    for i, (x, one) in enumerate(zip(activations, codecs, strict=True)):
        code = one.encode(merged(x), jax.random.fold_in(KEY, i))
        found.append(one.decode(code).reshape(x.shape))
    return tuple(found)


def run_oracle(name, exact, hats, weights, biases, dzs):
    """Returns outputs at the exact inputs, and cotangents at the decoded ones.

    Hu et al., "LoRA" (2022), equation 3: `y = x W + s (m x) A B`, with `m` the mask of the dropout.

    Args:
      name: of the operator.
      exact: the activations.
      hats: what of them is decoded.
      weights: `(w,)`, or `(w, a, b, scale, mask)`.
      biases: as many.
      dzs: as many.
    """
    operator = OPERATORS[name]
    exact, hats, weights, biases, dzs = jax.tree.map(
        lambda x: np.asarray(x, np.float64), (exact, hats, weights, biases, dzs)
    )
    y, y_hat = operator.first(*exact), operator.first(*hats)
    zs, grads, dy = [], [], 0
    for (w, *adapter), bias, dz in zip(weights, biases, dzs, strict=True):
        z = y @ w + (0 if bias is None else bias)
        dy = dy + dz @ w.T
        if adapter:
            a, b, scale, mask = adapter
            low, dlow = scale * (mask * y) @ a, scale * dz @ b.T
            z = z + low @ b
            dy = dy + mask * (dlow @ a.T)
            da = np.einsum("bsd,bsr->dr", mask * y_hat, dlow)
            grads.append((da, np.einsum("bsr,bsn->rn", low, dz)))
        else:
            grads.append(np.einsum("bsd,bsn->dn", y_hat, dz))
        zs.append(z)
    dbs = [None if b is None else dz.sum((0, 1)) for b, dz in zip(biases, dzs, strict=True)]
    return tuple(zs), operator.vjp(*hats, dy), grads, dbs


# Values and gradients.

EACH = [
    ("linear", RandomProjection(3)),
    ("linear", PointApproximation(points=4)),
    ("linear", NEAREST),
    ("norm", DITHER),
    ("swiglu", (NEAREST, DITHER)),
    ("attention", (DITHER, Exact(), NEAREST)),
]
"""Lossy codecs, one for each input where there are several."""


def problem():
    """Returns weights, adapters of the first and the last, biases and cotangents."""
    ws = tuple(normal(20 + n, WIDTH, n) for n in (5, 3, 4))
    adapters = tuple(
        (normal(30 + n, WIDTH, r), normal(40 + n, r, n)) for n, r in ((5, 2), (4, 3))
    )  # fmt: skip
    biases = normal(50, 5), None, normal(51, 4)
    return ws, adapters, biases, tuple(normal(60 + n, BATCH, LENGTH, n) for n in (5, 3, 4))


def with_adapters(first, plain, last, adapters, keys=(None, None), dropout=0.0):
    """Returns weights as operators take them: the middle one has no adapter."""
    return (
        LoRA(first, *adapters[0], keys[0], 0.5, dropout),
        plain,
        LoRA(last, *adapters[1], keys[1], -2.0, dropout),
    )


@pytest.mark.parametrize(
    ("name", "codec"), [*((n, Exact()) for n in ("linear", "swiglu")), *EACH], ids=str
)
def test_value_is_exact_and_gradients_are_those_at_the_decoded_input(
    name, codec, x64, quick_compile
):
    operator, (ws, adapters, biases, dzs) = OPERATORS[name], problem()
    xs, coded = operator.activations(), quantize(ws[2])

    @jax.jit
    def run(xs, plain, adapters, biases):
        def fun(xs, plain, adapters, biases):
            given = with_adapters(ws[0], plain, coded, adapters)
            return operator.call(*xs, given, bias=biases, codec=codec, key=KEY)

        zs, pullback = jax.vjp(fun, xs, plain, adapters, biases)
        return zs, pullback(dzs), decoded(name, xs, codec), coded.astype(jnp.float64)

    zs, (dxs, dplain, dadapters, dbs), hats, last = run(xs, ws[1], adapters, biases)
    one = np.ones(())
    weights = (ws[0], *adapters[0], 0.5, one), (ws[1],), (last, *adapters[1], -2.0, one)
    want_zs, want_dxs, grads, want_dbs = run_oracle(name, xs, hats, weights, biases, dzs)
    assert_close(zs, want_zs)
    assert_close(dxs, want_dxs)
    assert_close((dadapters[0], dplain, dadapters[1]), tuple(grads))
    assert_close(dbs, tuple(want_dbs))


@pytest.mark.parametrize("lead", [(), (2, 3, 4)], ids=str)
def test_any_number_of_leading_axes(lead, x64, quick_compile):
    x, w, a, b, dz = (
        normal(i, *s) for i, s in enumerate(((*lead, 6), (6, 5), (6, 2), (2, 5), (*lead, 5)))
    )

    @jax.jit
    def run(x, a, b):
        z, pullback = jax.vjp(lambda x, a, b: linear(x, LoRA(w, a, b, scale=3.0)), x, a, b)
        return z, *pullback(dz)

    got = run(x, a, b)
    x, w, a, b, dz = map(np.asarray, (x, w, a, b, dz))
    flat, dflat = x.reshape(-1, 6), dz.reshape(-1, 5)
    assert_close(
        got,
        (
            x @ w + 3 * x @ a @ b,
            dz @ w.T + 3 * dz @ b.T @ a.T,
            flat.T @ (3 * dflat @ b.T),
            (3 * flat @ a).T @ dflat,
        ),
    )


def test_exact_codec_passes_finite_differences(x64, quick_compile):
    operator, (ws, adapters, biases, _) = OPERATORS["linear"], problem()
    # As one vector: all arguments at once. With dropout, of which the mask is no function of them.
    flat, split = ravel_pytree((operator.activations(), ws[1], adapters, biases))
    keys = jax.random.split(KEY)

    def fun(flat):
        xs, plain, adapters, biases = split(flat)
        given = with_adapters(ws[0], plain, ws[2], adapters, keys, 0.3)
        # Sines, so that the cotangent is not constant.
        return jnp.sin(ravel_pytree(operator.call(*xs, given, bias=biases))[0] / 8)

    # The defaults of check_grads would let an error of 0.1% pass. With steps of 1e-5 truncation and
    # cancellation err by about 1e-10 each.
    check_grads(jax.jit(fun), [flat], 1, ["rev"], 1e-8, 1e-8, 1e-5)


def test_a_projection_of_three_takes_adapters(x64, quick_compile):
    (x,), (ws, adapters, biases, dzs) = OPERATORS["linear"].activations(), problem()

    @jax.jit
    def run(adapters):
        def fun(adapters):
            return qkv_projection(x, *with_adapters(*ws, adapters), bias=biases)

        zs, pullback = jax.vjp(fun, adapters)
        return zs, *pullback(dzs)

    zs, dadapters = run(adapters)
    one = np.ones(())
    weights = (ws[0], *adapters[0], 0.5, one), (ws[1],), (ws[2], *adapters[1], -2.0, one)
    want_zs, _, grads, _ = run_oracle("linear", (x,), (x,), weights, biases, dzs)
    assert_close(zs, want_zs)
    assert_close(dadapters, (grads[0], grads[2]))


@operators
def test_a_single_weight_gives_a_single_output_and_a_tuple_a_tuple(name):
    operator, (ws, adapters, *_) = OPERATORS[name], problem()
    w = LoRA(ws[0], *adapters[0])
    for given, count in ((w, None), ((w,), 1), ([w, ws[0]], 2)):
        zs = jax.eval_shape(operator.call, *operator.activations(), given)
        assert (len(zs) if isinstance(zs, tuple) else None) == count
        assert {z.shape for z in jax.tree.leaves(zs)} == {(BATCH, LENGTH, 5)}


def test_an_adapter_that_is_zero_changes_no_bit():
    # As adapters begin: `b` is zero, and so is the gradient of `a`, but not that of `b`.
    x, w, a = normal(0, 6, 8), normal(1, 8, 5), normal(2, 8, 2)
    fun = lambda a, b: linear(x, LoRA(w, a, b, scale=2.0))  # noqa: E731
    z, pullback = jax.vjp(fun, a, jnp.zeros((2, 5)))
    np.testing.assert_array_equal(z, x @ w)
    da, db = pullback(z)
    np.testing.assert_array_equal(da, 0)
    assert np.all(db != 0)


def test_the_frozen_weight_has_a_gradient_of_zero(quick_compile):
    x, lora = normal(0, 6, 8), LoRA(normal(1, 8, 5), normal(2, 8, 2), normal(3, 2, 5))
    grads = jax.jit(jax.grad(lambda lora: jnp.sum(linear(x, lora) ** 2)))(lora)
    assert isinstance(grads, LoRA)
    np.testing.assert_array_equal(grads.weight, np.zeros((8, 5)))
    assert all(np.all(g != 0) for g in (grads.a, grads.b))


def test_the_gradient_of_a_is_unbiased_if_the_codec_is(x64, quick_compile):
    x, w, a, b, dz = (normal(i, *s) for i, s in enumerate(((7, 6), (6, 5), (6, 2), (2, 5), (7, 5))))

    @jax.jit
    @jax.vmap
    def sample(key):
        run = lambda a: linear(x, LoRA(w, a, b), codec=RandomProjection(3), key=key)  # noqa: E731
        return jax.vjp(run, a)[1](dz)[0]

    samples = np.asarray(sample(jax.random.split(KEY, 2000)))
    standard_error = samples.std(0) / np.sqrt(2000)
    assert standard_error.min() > 0  # Each key draws other numbers.
    error = np.abs(samples.mean(0) - np.asarray(x).T @ np.asarray(dz @ b.T))
    assert np.all(error <= 5 * standard_error)


def test_the_adapters_of_peft_have_the_same_values_and_gradients():
    torch = pytest.importorskip("torch", reason="the reference of adapters")
    peft = pytest.importorskip("peft", reason="the reference of adapters")
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=["0"], lora_dropout=0.0, init_lora_weights=False
    )
    model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(16, 12)), config)
    layer = model.base_model.model[0]
    x = torch.randn(2, 7, 16, requires_grad=True)
    z, dz = model(x), torch.randn(2, 7, 12)
    z.backward(dz)
    a, b = (part["default"].weight for part in (layer.lora_A, layer.lora_B))
    assert layer.base_layer.weight.grad is None
    array = lambda tensor: jnp.asarray(tensor.detach().numpy())  # noqa: E731
    w, bias = array(layer.base_layer.weight).T, array(layer.base_layer.bias)

    def fun(x, a, b):
        return linear(x, LoRA(w, a, b, scale=6 / 3), bias=bias)

    got, pullback = jax.vjp(fun, array(x), array(a).T, array(b).T)
    found = got, *pullback(array(dz)), LoRA(w, array(a).T, array(b).T, scale=2.0).merged()
    grads = array(z), array(x.grad), array(a.grad).T, array(b.grad).T
    merged_weight = array(model.merge_and_unload()[0].weight).T
    for one, want in zip(found, (*grads, merged_weight), strict=True):
        assert one.shape == want.shape
        # Float32 sums of 16 terms and less.
        np.testing.assert_allclose(one, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


# Dropout.


def recovered(name, xs, key, rate):
    """Returns by what the dropout multiplies each number of the linear input.

    With a weight of zero and adapters of one that is what comes out.
    """
    one = jnp.eye(WIDTH)
    out = OPERATORS[name].call(*xs, LoRA(0 * one, one, one, key, 1.0, rate))
    return out / OPERATORS[name].call(*xs, one)


@pytest.mark.parametrize(
    ("name", "codec"),
    [("linear", Exact()), ("linear", PointApproximation(points=4)), ("norm", DITHER)],
    ids=str,
)
def test_dropout_is_the_same_in_both_passes_and_spares_the_weight(name, codec, x64, quick_compile):
    operator, (ws, adapters, biases, dzs) = OPERATORS[name], problem()
    xs, keys, rate = operator.activations(), tuple(jax.random.split(KEY)), 0.25

    @jax.jit
    def run(xs, plain, adapters):
        def fun(xs, plain, adapters):
            given = with_adapters(ws[0], plain, ws[2], adapters, keys, rate)
            return operator.call(*xs, given, bias=biases, codec=codec, key=KEY)

        zs, pullback = jax.vjp(fun, xs, plain, adapters)
        masks = [recovered(name, xs, key, rate) for key in keys]
        return zs, pullback(dzs), masks, decoded(name, xs, codec)

    zs, (dxs, dplain, dadapters), masks, hats = run(xs, ws[1], adapters)
    kept = [np.round(mask * (1 - rate)) for mask in masks]
    for mask, one in zip(masks, kept, strict=True):
        # What is kept is divided by the share that is.
        np.testing.assert_allclose(mask, one / (1 - rate), rtol=1e-12, atol=1e-12)
        assert set(np.unique(one)) == {0, 1}
    assert not np.array_equal(*kept)
    first, last = (one / (1 - rate) for one in kept)
    weights = (ws[0], *adapters[0], 0.5, first), (ws[1],), (ws[2], *adapters[1], -2.0, last)
    want_zs, want_dxs, grads, _ = run_oracle(name, xs, hats, weights, biases, dzs)
    assert_close(zs, want_zs)
    assert_close(dxs, want_dxs)
    assert_close((dadapters[0], dplain, dadapters[1]), tuple(grads))


def test_dropout_sets_each_number_to_zero_at_its_rate(quick_compile):
    x, one = jnp.ones((4000, 8)), jnp.eye(8)
    for rate in (0.1, 0.6):
        mask = jax.jit(linear)(x, LoRA(0 * one, one, one, KEY, 1.0, rate)) == 0
        # Of independent coins, by features and by tokens: five standard errors.
        for axis, count in ((0, 4000), (1, 8), (None, 32000)):
            error = np.abs(np.asarray(mask).mean(axis) - rate)
            assert np.all(error <= 5 * np.sqrt(rate * (1 - rate) / count))


def test_dropout_is_unbiased_over_keys(x64, quick_compile):
    x, w, a, b, dz = (normal(i, *s) for i, s in enumerate(((4, 6), (6, 5), (6, 2), (2, 5), (4, 5))))

    @jax.jit
    @jax.vmap
    def sample(key):
        z, pullback = jax.vjp(lambda x, a, b: linear(x, LoRA(w, a, b, key, 2.0, 0.4)), x, a, b)
        return z, *pullback(dz)

    found = sample(jax.random.split(KEY, 2000))
    x, w, a, b, dz = map(np.asarray, (x, w, a, b, dz))
    low, dlow = 2 * x @ a, 2 * dz @ b.T
    exact = x @ w + low @ b, dz @ w.T + dlow @ a.T, x.T @ dlow, low.T @ dz
    for samples, want in zip(found, exact, strict=True):
        standard_error = np.std(samples, 0) / np.sqrt(2000)
        assert standard_error.min() > 0
        assert np.all(np.abs(np.mean(samples, 0) - want) <= 5 * standard_error)


def test_without_a_key_or_a_rate_nothing_is_dropped():
    x, parts = normal(0, 6, 8), (normal(1, 8, 5), normal(2, 8, 2), normal(3, 2, 5))
    want = linear(x, LoRA(*parts))
    np.testing.assert_array_equal(linear(x, LoRA(*parts, dropout=0.5)), want)
    np.testing.assert_array_equal(linear(x, LoRA(*parts, KEY)), want)
    assert not np.allclose(linear(x, LoRA(*parts, KEY, dropout=0.5)), want)


# Subspaces.


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_beside_a_weight_in_a_basis_an_adapter_has_the_gradient_in_it(dropout, x64, quick_compile):
    x, w, other, a, b, dz, basis = (
        normal(i, *s)
        for i, s in enumerate(((6, 8), (8, 5), (8, 5), (8, 2), (2, 5), (6, 5), (8, 3)))
    )

    @jax.jit
    def run(params):
        def fun(params):
            lora = LoRA(w, params["a"], params["b"], KEY, 1.0, dropout)
            ys = linear(x, (params["other"], lora))
            return sum(jnp.sum(dz * y) for y in ys)

        bases = {"other": basis} if dropout else {"a": basis}
        if not dropout:  # Without it they share an input, which is named for its first weight.
            assert set(actjax.input_groups(fun, params).values()) == {"a", "b"}
        one = jnp.eye(8)
        mask = linear(x, LoRA(0 * one, one, one, KEY, 1.0, dropout)) / x
        return actjax.value_and_grad(fun, bases=bases)(params)[1], mask

    grads, mask = run({"other": other, "a": a, "b": b})
    x, b, dz, basis, mask, a = map(np.asarray, (x, b, dz, basis, mask, a))
    seen = x @ basis @ basis.T
    dense = [g.left @ g.right if isinstance(g, actjax.LowRank) else g for g in grads.values()]
    want = {"a": (mask * seen).T @ dz @ b.T, "b": (mask * x @ a).T @ dz, "other": seen.T @ dz}
    assert_close(dict(zip(grads, dense, strict=True)), want)


# The weight as an array.


@pytest.mark.parametrize("coded", [False, True], ids=["array", "4 bits"])
def test_merged_is_the_sum(coded, x64, quick_compile):
    w, a, b = normal(0, WIDTH, 4), normal(1, WIDTH, 2), normal(2, 2, 4)
    if coded:
        weight = quantize(w)
        w = weight.astype("float64")
    else:
        weight = w
    got = jax.jit(LoRA.merged)(LoRA(weight, a, b, KEY, 3.0, 0.5))
    assert_close(got, np.asarray(w) + 3 * np.asarray(a) @ np.asarray(b))


def test_merged_has_the_dtype_of_the_weight_or_the_one_given():
    w, a, b = normal(0, 8, 5, dtype="bfloat16"), normal(1, 8, 2), normal(2, 2, 5)
    lora = LoRA(w, a, b)
    assert lora.merged().dtype == jnp.bfloat16
    wide = lora.merged("float32")
    assert wide.dtype == jnp.float32
    # A sum in float32, of which the result alone is rounded.
    want = np.float64(w) + np.float64(a) @ np.float64(b)
    np.testing.assert_allclose(wide, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.float64(lora.merged()), want, rtol=1.01 * BF16, atol=1e-5)


def test_stacked_layers_are_merged_each_by_itself():
    w, a, b = normal(0, 3, 8, 5), normal(1, 3, 8, 2), normal(2, 3, 2, 5)
    lora = LoRA(w, a, b, scale=2.0)
    assert (lora.shape, lora.ndim, lora.dtype) == ((3, 8, 5), 3, "float32")
    np.testing.assert_allclose(jax.vmap(LoRA.merged)(lora), w + 2 * a @ b, rtol=1e-5, atol=1e-5)


# Precision.


def test_bfloat16_is_rounded_where_it_must_be(quick_compile):
    bf16 = "bfloat16"
    x, w, dz = (normal(i, *s, dtype=bf16) for i, s in enumerate(((6, 32), (32, 5), (6, 5))))
    # Adapters are wider, as master weights are.
    a, b = normal(3, 32, 4) / 6, normal(4, 4, 5)

    @jax.jit
    def run(x, a, b):
        z, pullback = jax.vjp(lambda x, a, b: linear(x, LoRA(w, a, b, scale=1.5)), x, a, b)
        return z, *pullback(dz)

    z, dx, da, db = run(x, a, b)
    assert z.dtype == dx.dtype == bf16
    assert da.dtype == db.dtype == jnp.float32
    x, w, dz, a, b = (np.float64(one) for one in (x, w, dz, a, b))
    sizes = [np.abs(one) for one in (x, w, dz, a, b)]
    low = 1.5 * sizes[0] @ sizes[3]
    dlow = 1.5 * sizes[2] @ sizes[4].T
    for got, want, roundings in (
        # Each product is rounded, and the sum; of the adapter's both factors, the product between
        # them, and that by the scale.
        (z, x @ w + 1.5 * x @ a @ b, 2 * sizes[0] @ sizes[1] + 6 * low @ sizes[4]),
        (dx, dz @ w.T + 1.5 * dz @ b.T @ a.T, 2 * sizes[2] @ sizes[1].T + 6 * dlow @ sizes[3].T),
        # One factor is cast, the product with it is rounded, and that by the scale.
        (da, x.T @ (1.5 * dz @ b.T), 3 * sizes[0].T @ dlow),
        (db, (1.5 * x @ a).T @ dz, 3 * low.T @ sizes[2]),
    ):
        assert np.all(np.abs(np.float64(got) - want) <= BF16 * roundings)


def test_sums_are_taken_in_float32():
    # 4096 ones: a bfloat16 sum stops at 256, where adding one rounds back.
    ones = functools.partial(jnp.ones, dtype=jnp.bfloat16)
    fun = lambda x, a, b: linear(x, LoRA(0 * ones((2, 1)), a, b))  # noqa: E731
    run = jax.jit(lambda *args: jax.vjp(fun, *args)[1](ones((4096, 1))))
    _, da, db = run(ones((4096, 2)), ones((2, 1)), ones((1, 1)))
    np.testing.assert_array_equal(da.astype("float32"), 4096)
    np.testing.assert_array_equal(db.astype("float32"), 8192)
    z = linear(ones((1, 4096)), LoRA(0 * ones((4096, 1)), ones((4096, 1)), ones((1, 1))))
    assert z == 4096


# What is held.


def temporaries(layers: int, codec) -> int:
    """Returns the bytes of temporaries of the gradient of a scan over adapted layers."""

    def loss(adapters, x, weights, keys):
        def body(x, layer):
            weight, (a, b), key = layer
            return linear(x, LoRA(weight, a, b, key, 2.0, 0.1), codec=codec), None

        return jnp.sum(jax.lax.scan(body, x, (weights, adapters, keys))[0] ** 2)

    def shape(*lead):
        return jax.ShapeDtypeStruct(lead, jnp.float32)

    weights = jax.eval_shape(jax.vmap(NF4Weight.quantize), shape(layers, 32, 32))
    keys = jax.eval_shape(lambda: jax.random.split(KEY, layers))
    adapters = shape(layers, 32, 4), shape(layers, 4, 32)
    lowered = jax.jit(jax.grad(loss)).lower(adapters, shape(1024, 32), weights, keys)
    return lowered.compile().memory_analysis().temp_size_in_bytes


def test_a_layer_of_a_scan_takes_its_code_and_one_thin_product():
    codec = Quantized(4, group=32)
    # With dropout, and weights of 4 bits.
    few, many = (temporaries(layers, codec) for layers in (4, 12))
    stored = codec.stored_bytes((1024, 32), "float32") + 1024 * 4 * 4
    # Buffers are padded to 64 bytes. The input is 128 KiB, a mask of its bits 4 KiB, and a weight
    # of 4 bits decoded 4 KiB.
    assert stored <= (many - few) / 8 < stored + 1024


@operators
def test_backward_holds_codes_and_thin_products_and_no_linear_input(name):
    operator, (ws, adapters, biases, _) = OPERATORS[name], problem()
    xs, codec = operator.activations("float32"), DITHER

    def fun(xs, ws, adapters, biases):
        negated = tuple(-x for x in xs)
        return operator.call(
            *negated, with_adapters(*ws, adapters), bias=biases, codec=codec, key=KEY
        )

    def pullback(*args):
        return jax.vjp(fun, *args)[1]

    stored = sum(codec.stored_bytes(merged(x).shape, "float32") for x in xs)
    # Ranks of 2 and of 3, and a number to scale each.
    thin = BATCH * LENGTH * (2 + 3) * 4 + 2 * 4
    others = {"norm": scale_of_norm().astype("float32"), "attention": tables()}.get(name, ())
    held = nbytes(jax.eval_shape(pullback, xs, ws, adapters, biases))
    # What is alive anyway is named by the pullback too.
    assert held == stored + thin + nbytes((ws, adapters, biases, others))


def test_explain_names_the_thin_product():
    ws, adapters, _, _ = problem()
    lora = LoRA(ws[0], *adapters[0])

    def fun(x, a, b):
        weight = LoRA(lora.weight, a, b)
        return jnp.sum(linear(-x, weight, codec=NEAREST, name="mine"))

    found = explain(fun, normal(0, *TOKENS, dtype="float32"), lora.a, lora.b).residuals
    sizes = {entry.name: entry.stored_bytes for entry in found if entry.operator == "linear"}
    assert sizes["mine"] == NEAREST.stored_bytes(TOKENS, "float32")
    assert sorted(sizes.values())[0] == BATCH * LENGTH * 2 * 4
    assert len(sizes) == 2
    assert all("mine" in name for name in sizes)


# What is computed.


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        *(("linear", codec) for codec in (Exact(), RandomProjection(3), NEAREST)),
        *((name, DITHER) for name in ("norm", "swiglu", "attention")),
    ],
    ids=str,
)
def test_no_product_is_made_for_a_gradient_of_the_weight(name, codec):
    operator = OPERATORS[name]
    xs, w, a, b = operator.activations(), normal(1, WIDTH, 7), normal(2, WIDTH, 3), normal(3, 3, 7)

    def made(wrap):
        def fun(xs, w, a, b):
            return jnp.sum(operator.call(*xs, wrap(w, a, b), codec=codec, key=KEY) ** 2)

        # With respect to everything.
        return products(jax.grad(fun, (0, 1, 2, 3)), xs, w, a, b)

    def of_weight(shapes):
        return [shape for shape in shapes if sorted(shape) == [7, WIDTH]]

    assert not of_weight(made(LoRA))
    # That this can fail: a plain weight has one, and so has a sum that is made before.
    assert of_weight(made(lambda w, a, b: w))
    assert of_weight(made(lambda w, a, b: w + a @ b))


def test_a_tuple_of_adapters_takes_the_products_of_each():
    x, w, a, b = normal(0, 16, WIDTH), normal(1, WIDTH, 7), normal(2, WIDTH, 3), normal(3, 3, 7)

    def made(count):
        def fun(x, a, b):
            return sum(map(jnp.sum, linear(x, (LoRA(w, a, b),) * count)))

        return len(products(jax.grad(fun, (0, 1, 2)), x, a, b))

    # Three products forward; of the weight one backward, and of either thin matrix two.
    assert [made(1), made(3)] == [8, 24]


# Under transformations of JAX.


def adapted(x, w, a, b, key):
    lora = LoRA(w, a, b, key, 0.5, 0.3)
    return jnp.tanh(linear(x, lora, codec=RandomProjection(3), key=key))


GRADIENT = jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(adapted(*args))), (0, 2, 3)))


@pytest.fixture
def stack():
    """Arguments of `adapted`, three of each."""
    shapes = (6, 8), (8, 8), (8, 2), (2, 8)
    keys = jax.random.split(KEY, 3)
    return [*(normal(i, 3, *shape) for i, shape in enumerate(shapes)), keys]


@pytest.mark.parametrize("mapped", [(2, 3), (0, 1, 2, 3, 4)], ids=str)
def test_vmap_is_a_loop(mapped, stack, quick_compile):
    axes = tuple(0 if i in mapped else None for i in range(5))
    lone = [x if i in mapped else x[0] for i, x in enumerate(stack)]
    got = jax.jit(jax.vmap(GRADIENT, axes))(*lone)
    for i in range(3):
        want = GRADIENT(*(x[i] if j in mapped else x for j, x in enumerate(lone)))
        # Float32 sums of up to 12 terms of size 1 to 10, compiled in another order.
        assert_close([g[i] for g in got], list(want), 1e-5, 1e-5)


def test_vmap_of_an_adapter_as_a_whole(stack, quick_compile):
    x, w, a, b, keys = stack
    loras = LoRA(w, a, b, keys, 0.5, 0.3)
    got = jax.jit(jax.vmap(linear))(x, loras)
    for i in range(3):
        one = LoRA(w[i], a[i], b[i], keys[i], 0.5, 0.3)
        np.testing.assert_allclose(got[i], linear(x[i], one), rtol=1e-5, atol=1e-5)


def test_checkpoint_drops_the_same_numbers_again(stack, quick_compile):
    arguments = [x[0] for x in stack]
    again = jax.checkpoint(adapted)
    got = jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(again(*args))), (0, 2, 3)))(*arguments)
    assert_close(got, GRADIENT(*arguments), 1e-5, 1e-5)


def test_scan_over_stacked_adapters(x64, quick_compile):
    x, w, a, b = (normal(i, 2, *s) for i, s in enumerate(((6, 8), (8, 8), (8, 2), (2, 8))))
    keys = tuple(jax.random.split(KEY))
    stacked = LoRA(w, a, b, jnp.stack(keys), 0.5, 0.3)

    def step(x, lora):
        return jnp.tanh(linear(x, lora, codec=NEAREST)), None

    def loss(x, stacked):
        return jnp.sum(jnp.sin(jax.lax.scan(step, x, stacked)[0]))

    @jax.jit
    def run(x, stacked):
        def of_adapters(a, b):
            return loss(x, dataclasses.replace(stacked, a=a, b=b))

        def layer(i, x, a, b):
            return step(x, LoRA(w[i], a, b, keys[i], 0.5, 0.3))[0]

        # Layer by layer, and backwards again.
        y, first = jax.vjp(functools.partial(layer, 0), x, a[0], b[0])
        z, second = jax.vjp(functools.partial(layer, 1), y, a[1], b[1])
        dy, *last = second(jnp.cos(z))
        want = [jnp.stack(pair) for pair in zip(first(dy)[1:], last, strict=True)]
        return jax.grad(of_adapters, (0, 1))(a, b), tuple(want)

    assert_close(*run(x[0], stacked))


# An activation in two parts.


@pytest.mark.parametrize(("name", "dropout"), [("linear", 0.3), ("norm", 0.0)])
def test_the_parts_add_up_to_the_output(name, dropout, x64, quick_compile):
    operator, (ws, adapters, biases, dzs) = OPERATORS[name], problem()
    xs, keys = operator.activations(), jax.random.split(KEY)

    def outputs(split, xs, plain, adapters, biases):
        given = with_adapters(ws[0], plain, ws[2], adapters, keys, dropout)
        zs = operator.call(*xs, given, bias=biases, codec=DITHER, key=KEY, split=split)
        if not split:
            return zs
        first, plain, last = zs
        assert isinstance(first, LowRankSum)
        assert isinstance(last, LowRankSum)
        assert (first.shape, first.ndim, first.dtype) == ((*TOKENS[:2], 5), 3, "float64")
        return first.value(), plain, last.value()

    @jax.jit
    def run(*args):
        results = [jax.vjp(functools.partial(outputs, split), *args) for split in (True, False)]
        return [(zs, pullback(dzs)) for zs, pullback in results]

    assert_close(*run(xs, ws[1], adapters, biases))


def test_the_base_is_what_the_weight_alone_gives(quick_compile):
    x, parts, bias = normal(0, 6, 8), (normal(1, 8, 5), normal(2, 8, 2), normal(3, 2, 5)), 1.5
    bias = jnp.full(5, bias)
    found = linear(x, LoRA(*parts, KEY, 2.0, 0.3), bias=bias, split=True)
    assert (found.left.shape, found.right.shape) == ((6, 2), (2, 5))
    np.testing.assert_array_equal(found.base, linear(x, parts[0], bias=bias))
    np.testing.assert_array_equal(linear(x, parts[0], split=True), linear(x, parts[0]))
    q, k, _ = qkv_projection(x, LoRA(*parts), parts[0], parts[0], split=True)
    np.testing.assert_array_equal(q.base, k)


@pytest.mark.parametrize("shape", [(2, 3, 4), (6, 2, -1)], ids=str)
def test_features_are_cut_into_heads_and_put_together_again(shape, x64):
    found = LowRankSum(normal(0, 6, 4), normal(1, 6, 2), normal(2, 2, 4))
    want = np.asarray(found.base) + np.asarray(found.left) @ np.asarray(found.right)
    cut = found.reshape(*shape)
    want_cut = want.reshape(shape)
    assert (cut.shape, cut.ndim) == (want_cut.shape, want_cut.ndim)
    assert_close(cut.value(), want_cut)
    assert_close(cut.reshape(6, 4).value(), want)
    # A pytree.
    assert_close(jax.jit(lambda s: s.value())(cut), want_cut)


GIVEN = {"key": KEY}
NONLINEAR = {
    "swiglu": (swiglu, oracles.swiglu, oracles.swiglu_vjp, (TOKENS,) * 2),
    "attention": (
        lambda *xs, **given: merged(attention(*xs, rope=tables(), **given)),
        attended,
        attended_vjp,
        OPERATORS["attention"].shapes,
    ),
    "swiglu linear": (swiglu_linear, oracles.swiglu, oracles.swiglu_vjp, (TOKENS,) * 2),
    "attention linear": (
        OPERATORS["attention"].call, attended, attended_vjp, OPERATORS["attention"].shapes,
    ),
}  # fmt: skip


def sums(shapes):
    """Returns the parts of activations: base, left and right."""
    found = []
    for i, shape in enumerate(shapes):
        wide = int(np.prod(shape[2:]))
        rank = 2 + i
        found.append(
            (
                normal(i, BATCH, LENGTH, wide),
                normal(10 + i, BATCH, LENGTH, rank) / 2,
                normal(20 + i, rank, wide) / 2,
            )
        )
    return tuple(found)


CASES = [
    ("swiglu", Exact(), (True, True)),
    ("swiglu", NEAREST, (False, True)),
    ("swiglu linear", Exact(), (False, True)),
    ("swiglu linear", (DITHER, Exact()), (True, True)),
    ("attention", Exact(), (True, False, True)),
    ("attention", DITHER, (True, True, True)),
    ("attention linear", (Exact(), NEAREST, DITHER), (True, True, False)),
]
"""Operator, codecs, and which inputs are in two parts."""


@pytest.mark.parametrize(("name", "codec", "which"), CASES, ids=str)
def test_gradients_are_those_at_the_decoded_base_and_the_exact_rest(
    name, codec, which, x64, quick_compile
):
    operator, first, vjp, shapes = NONLINEAR[name]
    parts, w, bias = sums(shapes), normal(5, WIDTH, 3), normal(6, 3)
    dy = normal(7, *TOKENS[:2], 3 if "linear" in name else WIDTH)

    @jax.jit
    def run(parts, w, bias):
        def fun(parts, w, bias):
            xs = []
            for (base, left, right), two, shape in zip(parts, which, shapes, strict=True):
                # What is not in two parts is the base alone.
                x = LowRankSum(base, left, right) if two else base
                xs.append(x.reshape(*shape))
            if "linear" in name:
                return operator(*xs, w, bias=bias, codec=codec, key=KEY)
            return operator(*xs, codec=codec, key=KEY)

        y, pullback = jax.vjp(fun, parts, w, bias)
        return y, pullback(dy), decoded(name, [base for base, _, _ in parts], codec)

    y, (dparts, dw, db), hats = run(parts, w, bias)
    parts, hats, w, dy = jax.tree.map(np.asarray, (parts, hats, w, dy))

    def added(bases):
        return [
            (base + (left @ right if two else 0)).reshape(shape)
            for base, (_, left, right), two, shape in zip(bases, parts, which, shapes, strict=True)
        ]

    exact, point = added([base for base, _, _ in parts]), added(hats)
    want_y, y_hat, d_inner = first(*exact), first(*point), dy
    if "linear" in name:
        want_y, d_inner = want_y @ w + np.asarray(bias), dy @ w.T
        assert_close(dw, np.einsum("bsd,bsn->dn", y_hat, dy))
        assert_close(db, dy.sum((0, 1)))
    assert_close(y, want_y)
    for got, dx, (_, left, right), two in zip(
        dparts, vjp(*point, d_inner), parts, which, strict=True
    ):
        dx = merged(dx)
        assert_close(got[0], dx)
        want = dx @ right.T, np.einsum("bsr,bsn->rn", left, dx)
        assert_close(got[1:], want if two else tuple(0 * one for one in want))


def test_what_an_adapter_has_learned_is_not_lost_to_the_code(x64, quick_compile):
    # HyC-LoRA (2025), Algorithm 2, from the input of the adapters to that of the gate.
    (x,), (ws, *_) = OPERATORS["linear"].activations(), problem()
    w = ws[0], normal(70, WIDTH, 5)
    adapters = tuple((normal(71 + i, WIDTH, 2), normal(73 + i, 2, 5)) for i in range(2))
    down, keys = normal(75, 5, 3), tuple(jax.random.split(KEY))
    codec = Quantized(2, group=5, rounding="dither")

    @jax.jit
    def run(x, adapters):
        def fun(x, adapters):
            loras = tuple(
                LoRA(w, *adapter, scale=0.5) for w, adapter in zip(w, adapters, strict=True)
            )
            gate, up = linear(x, loras, codec=NEAREST, split=True)
            return swiglu_linear(gate, up, down, codec=codec, key=keys)

        y, pullback = jax.vjp(fun, x, adapters)
        hats = tuple(
            codec.decode(codec.encode(x @ w, key)) for w, key in zip(w, keys, strict=True)
        )  # fmt: skip
        return y, *pullback(jnp.cos(y)), hats, NEAREST.decode(NEAREST.encode(x))

    y, dx, dadapters, hats, x_hat = jax.tree.map(np.asarray, run(x, adapters))
    x, w, adapters, down = jax.tree.map(np.asarray, (x, w, adapters, down))
    lows = [0.5 * x @ a for a, _ in adapters]
    added = [low @ b for low, (_, b) in zip(lows, adapters, strict=True)]
    exact = [x @ w + more for w, more in zip(w, added, strict=True)]
    assert_close(y, oracles.swiglu(*exact) @ down)
    point = [hat + more for hat, more in zip(hats, added, strict=True)]
    dsums = oracles.swiglu_vjp(*point, np.cos(y) @ down.T)
    want_dx = 0
    for one, (a, b), low, dz, got in zip(w, adapters, lows, dsums, dadapters, strict=True):
        dlow = 0.5 * dz @ b.T
        want = np.einsum("bsd,bsr->dr", x_hat, dlow), np.einsum("bsr,bsn->rn", low, dz)
        assert_close(got, want)
        want_dx = want_dx + dz @ one.T + dlow @ a.T
    assert_close(dx, want_dx)


def nbytes_of_codes(codec, tokens, widths):
    return sum(codec.stored_bytes((*tokens, width), "float32") for width in widths)


def test_a_layer_of_a_scan_takes_codes_of_the_bases_and_one_thin_product_a_weight():
    codec, rank = Quantized(4, group=32), 4
    shapes = [(64, 96), (64, 96), (96, 64)]

    def size(layers):
        def loss(adapters, ws, x):
            def body(x, layer):
                loras = [LoRA(w, *ab, scale=2.0) for w, ab in zip(*layer, strict=True)]
                two = tuple(loras[:2])
                gate, up = norm_linear(x, jnp.ones(64), two, codec=codec, split=True)
                return swiglu_linear(gate, up, loras[2], codec=codec), None

            return jnp.sum(jax.lax.scan(body, x, (ws, adapters))[0] ** 2)

        def shape(*lead):
            return jax.ShapeDtypeStruct(lead, jnp.float32)

        ws = [shape(layers, *s) for s in shapes]
        adapters = [(shape(layers, d, rank), shape(layers, rank, n)) for d, n in shapes]
        compiled = jax.jit(jax.grad(loss)).lower(adapters, ws, shape(512, 64)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # The input of the norm, and the bases of gate and up.
    stored = nbytes_of_codes(codec, (512,), (64, 96, 96)) + 3 * 512 * rank * 4
    # Buffers are aligned. A second copy of one thin product in each of the eight more layers would
    # be 64 KiB.
    assert abs(size(12) - size(4) - 8 * stored) < 4096


def test_of_adapted_heads_codes_of_the_bases_and_the_thin_products_are_held():
    codec, rank, tokens = DITHER, 3, (BATCH, LENGTH)
    widths = [WIDTH, GROUPS * SIZE, GROUPS * SIZE]
    loras = tuple(
        LoRA(*(normal(i, *s) for s in ((WIDTH, n), (WIDTH, rank), (rank, n))))
        for i, n in enumerate(widths)
    )
    out = LoRA(*(normal(9, *s) for s in ((WIDTH, WIDTH), (WIDTH, rank), (rank, WIDTH))))

    def fun(x, loras, out):
        qkv = linear(-x, loras, codec=codec, key=KEY, split=True)
        q, k, v = (y.reshape(*tokens, -1, SIZE) for y in qkv)
        return attention_linear(q, k, v, out, codec=codec, key=KEY)

    held = jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], normal(0, *TOKENS), loras, out)
    wide = [leaf for leaf in jax.tree.leaves(held) if leaf.shape[:2] == tokens]
    thin = 4 * BATCH * LENGTH * rank * 4
    codes = nbytes_of_codes(codec, tokens, (WIDTH, *widths)) - 4 * nbytes(jax.random.key_data(KEY))
    assert nbytes(wide) == codes + thin


def test_sums_of_the_adapter_are_taken_in_float32(quick_compile):
    # 4096 ones: a bfloat16 sum stops at 256, where adding one rounds back.
    ones = functools.partial(jnp.ones, dtype=jnp.bfloat16)
    codec = Quantized(4, group=2)

    def fun(left, right):
        up = LowRankSum(ones((4096, 2)), left, right)
        return swiglu(100 * ones((4096, 2)), up, codec=codec)

    # The gate of 100 is open.
    run = jax.jit(lambda *args: jax.vjp(fun, *args)[1](ones((4096, 2)) / 100))
    _, dright = run(ones((4096, 1)), ones((1, 2)))
    np.testing.assert_allclose(dright.astype("float32"), 4096, rtol=2 * BF16)


# Errors.

X, W, A, B = jnp.ones((6, 8)), jnp.ones((8, 5)), jnp.ones((8, 2)), jnp.ones((2, 5))
PARTS = "`w` is a LoRA of a weight (8, 5), so `a` must be [8, r] and `b` [r, 5]: got "
CODED = jax.eval_shape(NF4Weight.quantize, W)
SUM = LowRankSum(jnp.ones((6, 5)), jnp.ones((6, 2)), B)

ERRORS = {
    "transposed weight": (lambda: linear(X, LoRA(W.T, A, B)), ValueError, "@ w(5, 8). Did you"),
    "features of the weight": (lambda: linear(X[:, :7], LoRA(W, A, B)), ValueError, "@ w(8, 5)"),
    "transposed a": (lambda: linear(X, LoRA(W, A.T, B)), ValueError, PARTS + "a(2, 8), b(2, 5)"),
    "features of a": (lambda: linear(X, LoRA(W, A[:7], B)), ValueError, PARTS + "a(7, 2)"),
    "transposed b": (lambda: linear(X, LoRA(W, A, B.T)), ValueError, PARTS + "a(8, 2), b(5, 2)"),
    "outputs of b": (lambda: linear(X, LoRA(W, A, B[:, :4])), ValueError, "b(2, 4)"),
    "two ranks": (lambda: linear(X, LoRA(W, A, B[:1])), ValueError, PARTS + "a(8, 2), b(1, 5)"),
    "axes of a": (lambda: linear(X, LoRA(W, A[:, 0], B)), ValueError, PARTS + "a(8,)"),
    "the second of two": (
        lambda: linear(X, (W, LoRA(W, A.T, B))), ValueError, "`w[1]` is a LoRA of a weight",
    ),
    "4 bits": (
        lambda: linear(X, LoRA(CODED, A.T, B)), ValueError, PARTS + "a(2, 8)",
    ),
    "stacked": (
        lambda: linear(X, LoRA(W[None], A[None], B[None])), ValueError, "`w` must be [d, n]",
    ),
    "integers": (
        lambda: linear(X, LoRA(W.astype(int), A, B)),
        TypeError,
        "`w` must be a floating point array, got int32",
    ),
    "bias": (
        lambda: linear(X, LoRA(W, A, B), bias=jnp.ones(4)), ValueError, "must be (5,), got (4,)",
    ),
    "all dropped": (
        lambda: linear(X, LoRA(W, A, B, KEY, dropout=1.0)),
        ValueError,
        "`dropout` of `w` must be in [0, 1), got 1.0",
    ),
    "no rank": (
        lambda: linear(X, LoRA(W, A[:, :0], B[:0])), ValueError, "factors of `w` must not be empty",
    ),
    "a scale": (
        lambda: linear(X, LoRA(W, A, B, scale=math.nan)), ValueError, "`scale` of `w` must be fini",
    ),
    "less than none dropped": (
        lambda: linear(X, LoRA(W, A, B, KEY, dropout=-0.1)), ValueError, "[0, 1), got -0.1",
    ),
    "no key of the codec": (
        lambda: linear(X, LoRA(W, A, B), codec=DITHER), ValueError, "got key=None: pass `key`",
    ),
    "norm": (
        lambda: norm_linear(X, jnp.ones(8), LoRA(W, A.T, B)), ValueError, PARTS + "a(2, 8)",
    ),
    "sums of two shapes": (
        lambda: swiglu(SUM, SUM.base[:5]), ValueError, "`gate` and `up` must agree in shape",
    ),
    "a sum without heads": (
        lambda: attention(SUM, SUM, SUM), ValueError, "`q` must be [B, S, H, D]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_name_the_argument_and_what_came(case):
    call, kind, message = ERRORS[case]
    with pytest.raises(kind, match=re.escape(message)):
        call()
