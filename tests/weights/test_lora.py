"""Tests of LoRA: values and gradients of frozen weights with adapters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops.helpers import (
    BF16,
    KEY,
    assert_close,
    assert_gradients_are_differences,
    normal,
    ones,
)
from ops.operator_cases import BATCH, DRAWN, LENGTH, NEAREST, OPERATORS, WIDTH, decoded
from weights.lora_cases import problem, run_oracle, with_adapters, with_masks

from actjax import (
    Exact,
    FrozenWeight,
    LoRA,
    NF4Weight,
    PointApproximation,
    RandomProjection,
    linear,
    qkv_projection,
)

# By default in float64: sums of up to 40 terms of size 1 to 10, some 1e-16 each.
same = functools.partial(assert_close, rtol=1e-11, atol=1e-12)


# Values and gradients. The exact codec, and lossy codecs, one for each input.
@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("linear", Exact()),
        ("linear", RandomProjection(3)),
        ("linear", PointApproximation(points=4)),
        ("norm", DRAWN),
        ("gelu", NEAREST),
        ("swiglu", (NEAREST, DRAWN)),
        ("attention", (DRAWN, Exact(), NEAREST)),
    ],
    ids=str,
)
def test_value_is_exact_and_gradients_are_those_at_the_decoded_input(name, codec, x64):
    operator, (ws, adapters, biases, dzs) = OPERATORS[name], problem()
    xs, scale = operator.activations(), operator.scale()
    # The last weight is frozen and has no adapter.
    ws, biases = (*ws, normal(70, WIDTH, 2)), (*biases, None)
    dzs = (*dzs, normal(71, BATCH, LENGTH, 2))

    @jax.jit
    def run(xs, plain, adapters, biases):
        coded = NF4Weight.quantize(ws[2])

        def fun(xs, plain, adapters, biases):
            adapted = *with_adapters(ws[0], plain, coded, adapters), FrozenWeight(ws[3])
            return operator.call(xs, scale, adapted, bias=biases, codec=codec, key=KEY)

        zs, pullback = jax.vjp(fun, xs, plain, adapters, biases)
        return zs, pullback(dzs), decoded(name, xs, codec), coded.astype(jnp.float64)

    zs, (dxs, dplain, dadapters, dbs), hats, last = run(xs, ws[1], adapters, biases)
    weights = *with_masks((ws[0], ws[1], last), adapters), (ws[3],)
    want_zs, want_dxs, (*grads, _), want_dbs = run_oracle(name, xs, hats, weights, biases, dzs)
    got = zs, dxs, (dadapters[0], dplain, dadapters[1]), dbs
    same(got, (want_zs, want_dxs, tuple(grads), want_dbs))


def test_any_number_of_leading_axes(x64):
    w, a, b = (normal(i, *s) for i, s in enumerate(((6, 5), (6, 2), (2, 5))))
    inputs = [(normal(3, *lead, 6), normal(4, *lead, 5)) for lead in ((), (2, 3, 4))]

    @jax.jit
    def run(inputs, a, b):
        results = []
        for x, dz in inputs:
            z, pullback = jax.vjp(lambda x, a, b: linear(x, LoRA(w, a, b, scale=3.0)), x, a, b)
            results.append((z, *pullback(dz)))
        return results

    results = run(inputs, a, b)
    w, a, b = map(np.asarray, (w, a, b))
    for got, (x, dz) in zip(results, jax.tree.map(np.asarray, inputs), strict=True):
        flat, dflat = x.reshape(-1, 6), dz.reshape(-1, 5)
        dx, da = dz @ w.T + 3 * dz @ b.T @ a.T, flat.T @ (3 * dflat @ b.T)
        same(got, (x @ w + 3 * x @ a @ b, dx, da, (3 * flat @ a).T @ dflat))


def test_exact_codec_passes_finite_differences(x64):
    ws, adapters, biases, _ = problem()
    # With dropout, whose mask does not depend on the arguments.
    keys = tuple(jax.random.split(KEY))

    def fun(x, plain, adapters, biases):
        adapted = with_adapters(ws[0], plain, ws[2], adapters, keys, 0.3)
        return qkv_projection(x, *adapted, bias=biases)

    xs = OPERATORS["linear"].activations()
    assert_gradients_are_differences(fun, *xs, ws[1], adapters, biases)


def test_a_single_weight_gives_a_single_output_and_a_tuple_a_tuple():
    ws, adapters, *_ = problem()
    w = LoRA(ws[0], *adapters[0])
    for operator in OPERATORS.values():
        arguments = operator.activations(), operator.scale()
        for weights, count in ((w, None), ((w,), 1), ([w, ws[0]], 2)):
            zs = jax.eval_shape(lambda ws: operator.call(*arguments, ws), weights)
            assert (len(zs) if isinstance(zs, tuple) else None) == count
            assert {z.shape for z in jax.tree.leaves(zs)} == {(BATCH, LENGTH, 5)}


def test_an_adapter_that_is_zero_changes_no_bit():
    # As adapters begin: `b` is zero, and so is the gradient of `a`, but not that of `b`.
    x, w, a = normal(0, 6, 8), normal(1, 8, 5), normal(2, 8, 2)

    @jax.jit
    def run(x, w, a, b):
        z, pullback = jax.vjp(lambda lora: linear(x, lora), LoRA(w, a, b, scale=2.0))
        return z, *pullback(z), x @ w

    z, grads, product = run(x, w, a, np.zeros((2, 5), np.float32))
    np.testing.assert_array_equal(z, product)
    np.testing.assert_array_equal(grads.a, 0)
    assert np.all(np.asarray(grads.b) != 0)
    # The frozen weight has a gradient of zero.
    assert isinstance(grads, LoRA)
    np.testing.assert_array_equal(grads.weight, np.zeros((8, 5)))


def test_the_gradient_of_a_is_unbiased_if_the_codec_is(x64):
    x, w, a, b, dz = (normal(i, *s) for i, s in enumerate(((7, 6), (6, 5), (6, 2), (2, 5), (7, 5))))

    @jax.jit
    def samples():
        def sample(key):
            run = lambda a: linear(x, LoRA(w, a, b), codec=RandomProjection(3), key=key)  # noqa: E731
            return jax.vjp(run, a)[1](dz)[0]

        return jax.vmap(sample)(jax.random.split(KEY, 2000))

    results = np.asarray(samples())
    standard_error = results.std(0) / np.sqrt(2000)
    assert standard_error.min() > 0  # Each key draws other numbers.
    error = np.abs(results.mean(0) - np.asarray(x).T @ np.asarray(dz) @ np.asarray(b).T)
    assert np.all(error <= 5 * standard_error)


@pytest.mark.slow  # The imports take seconds.
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
    array = lambda tensor: tensor.detach().numpy()  # noqa: E731

    @jax.jit
    def run(x, w, bias, a, b, dz):
        fun = lambda x, a, b: linear(x, LoRA(w, a, b, scale=6 / 3), bias=bias)  # noqa: E731
        z, pullback = jax.vjp(fun, x, a, b)
        return z, *pullback(dz), LoRA(w, a, b, scale=2.0).merged()

    w, bias = array(layer.base_layer.weight).T, array(layer.base_layer.bias)
    results = run(array(x), w, bias, array(a).T, array(b).T, array(dz))
    grads = array(z), array(x.grad), array(a.grad).T, array(b.grad).T
    merged_weight = array(model.merge_and_unload()[0].weight).T
    for one, want in zip(results, (*grads, merged_weight), strict=True):
        assert one.shape == want.shape
        # Float32 sums of 16 terms and less.
        np.testing.assert_allclose(one, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


# The weight as an array.


def test_merged_is_the_sum(x64):
    w, a, b = normal(0, 3, WIDTH, 4), normal(1, 3, WIDTH, 2), normal(2, 3, 2, 4)

    @jax.jit
    def run(w, a, b):
        # Stacked layers are merged each by itself, and quantized weights are decoded.
        coded = NF4Weight.quantize(w[0])
        lora = LoRA(w, a, b, scale=3.0)
        assert (lora.shape, lora.ndim, lora.dtype) == ((3, WIDTH, 4), 3, "float64")
        merged = jax.vmap(LoRA.merged)(lora), LoRA(coded, a[0], b[0], KEY, 3.0, 0.5).merged()
        return merged, coded.astype("float64")

    merged, coded = run(w, a, b)
    w, a, b = map(np.asarray, (w, a, b))
    same(merged, (w + 3 * a @ b, coded + 3 * a[0] @ b[0]))


def test_merged_has_the_dtype_of_the_weight_or_the_given_one():
    w, a, b = normal(0, 8, 5, dtype="bfloat16"), normal(1, 8, 2), normal(2, 2, 5)

    @jax.jit
    def run(w, a, b):
        lora = LoRA(w, a, b)
        return lora.merged(), lora.merged("float32")

    narrow, wide = run(w, a, b)
    assert (narrow.dtype, wide.dtype) == ("bfloat16", "float32")
    # A sum in float32, and only the result is rounded.
    want = np.float64(w) + np.float64(a) @ np.float64(b)
    np.testing.assert_allclose(wide, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.float64(narrow), want, rtol=1.01 * BF16, atol=1e-5)


# Precision.


def test_bfloat16_errs_by_its_roundings_only():
    bf16 = "bfloat16"
    x, w, dz = (normal(i, *s, dtype=bf16) for i, s in enumerate(((6, 32), (32, 5), (6, 5))))
    # Adapters are wider, as master weights are.
    a, b = np.asarray(normal(3, 32, 4)) / 6, normal(4, 4, 5)

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
        # Each product is rounded, and the sum; of the adapter both factors, the product between
        # them, and its multiple by the scale.
        (z, x @ w + 1.5 * x @ a @ b, 2 * sizes[0] @ sizes[1] + 6 * low @ sizes[4]),
        (dx, dz @ w.T + 1.5 * dz @ b.T @ a.T, 2 * sizes[2] @ sizes[1].T + 6 * dlow @ sizes[3].T),
        # One factor is cast, the product with it is rounded, and its multiple by the scale.
        (da, x.T @ (1.5 * dz @ b.T), 3 * sizes[0].T @ dlow),
        (db, (1.5 * x @ a).T @ dz, 3 * low.T @ sizes[2]),
    ):
        assert np.all(np.abs(np.float64(got) - want) <= BF16 * roundings)


def test_sums_are_taken_in_float32():
    # 4096 ones: a bfloat16 sum stops at 256, where adding one rounds back.
    bf16 = functools.partial(ones, dtype=jnp.bfloat16)

    @jax.jit
    def run(x, a, b, dz):
        fun = lambda a, b: linear(x, LoRA(jnp.zeros((2, 1), x.dtype), a, b))  # noqa: E731
        tall = LoRA(0 * dz, dz, b)
        return *jax.vjp(fun, a, b)[1](dz), linear(dz.T, tall)

    da, db, z = run(bf16(4096, 2), bf16(2, 1), bf16(1, 1), bf16(4096, 1))
    np.testing.assert_array_equal(np.float32(da), 4096)
    np.testing.assert_array_equal(np.float32(db), 8192)
    assert z == 4096
