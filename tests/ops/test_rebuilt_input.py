"""Tests of actjax/ops/rebuilt_input.py beyond `test_contract.py`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from flax import nnx
from jaxprs import products
from ops.block_cases import INPUTS, KEYS, block, block_params, mlp_block, scanned
from ops.helpers import (
    BF16,
    KEY,
    assert_close,
    assert_equal,
    compiled_temporaries,
    normal,
    ones,
    shaped,
    tables,
)
from ops.operator_cases import (
    BATCH,
    DRAWN,
    LENGTH,
    NEAREST,
    OPERATORS,
    REBUILT,
    SIZE,
    WIDTH,
    decoded,
)

import actjax
from actjax import Exact, attention, input_groups, linear, norm_linear

OUTPUTS = (3, 1, 4)
LAYERS = 2


def weights(*outputs: int) -> tuple[jax.Array, ...]:
    return tuple(normal(20 + n, WIDTH, n) for n in outputs or OUTPUTS)


wide = functools.partial(jax.tree.map, lambda x: np.asarray(x, np.float64))


def run_oracle(operator, exact, hats, scale, ws, bs, dzs):
    """Returns outputs at the exact inputs, cotangents at the decoded ones, in NumPy float64."""
    exact, hats, scale, ws, bs, dzs = map(wide, (exact, hats, scale, ws, bs, dzs))
    y, y_hat = operator.oracle(exact, scale), operator.oracle(hats, scale)
    zs = tuple(y @ w + (0 if b is None else b) for w, b in zip(ws, bs, strict=True))
    dy = sum(dz @ w.T for w, dz in zip(ws, dzs, strict=True))
    dws = tuple(np.einsum("bsd,bsn->dn", y_hat, dz) for dz in dzs)
    dbs = tuple(None if b is None else dz.sum((0, 1)) for b, dz in zip(bs, dzs, strict=True))
    return zs, (*operator.vjp(hats, scale, dy), dws, dbs)


def test_a_single_weight_gives_a_single_output_and_a_tuple_a_tuple():
    w = weights()[0]
    for operator in OPERATORS.values():
        inputs = operator.activations(), operator.scale()
        for ws, count in ((w, None), (nnx.Param(w), None), ((w,), 1), ([w, w], 2)):
            zs = jax.eval_shape(lambda ws: operator.call(*inputs, ws), ws)
            assert (len(zs) if isinstance(zs, tuple) else None) == count
            assert {z.shape for z in jax.tree.leaves(zs)} == {(BATCH, LENGTH, 3)}


# Precision.


@pytest.mark.parametrize("name", ["norm", "swiglu", "attention"])
def test_bfloat16_is_rounded_where_the_two_operators_round(name):
    operator, bf16 = REBUILT[name], jnp.bfloat16
    activations, scale = operator.activations(bf16), operator.scale()
    # Weights are wider, as master weights are; the operator rounds them.
    ws, bs = weights(), (normal(30, 3), None, normal(31, 4))
    dzs = tuple(normal(40 + n, BATCH, LENGTH, n, dtype=bf16) for n in OUTPUTS)

    @jax.jit
    def run(xs, scale, ws, bs):
        call = lambda xs, scale, ws, bs: operator.call(xs, scale, ws, bias=bs, codec=NEAREST)  # noqa: E731
        zs, pull = jax.vjp(call, xs, scale, ws, bs)
        apart = linear(operator.first(xs, scale), ws, bias=bs)
        return zs, pull(dzs), apart, decoded(name, xs, NEAREST)

    zs, grads, apart, hats = run(activations, scale, ws, bs)
    assert_equal(zs, apart)
    assert {x.dtype for x in (*zs, *grads[0], *hats)} == {jnp.dtype(bf16)}
    assert {x.dtype for x in jax.tree.leaves(grads[1:])} == {jnp.dtype("float32")}
    cast = tuple(np.asarray(w).astype(bf16) for w in ws)
    want_zs, want = run_oracle(operator, activations, hats, scale, cast, bs, dzs)
    sizes = [np.linalg.norm(x) for x in (*want[0], *want[2])]
    y_hat = operator.oracle(*wide((hats, scale)))
    terms = [np.abs(y_hat).reshape(-1, WIDTH).T @ np.abs(dz).reshape(-1, dz.shape[-1])
             for dz in wide(dzs)]  # fmt: skip
    for z, exact in zip(zs, want_zs, strict=True):
        # The linear input and the output are rounded, and in attention the weights of values.
        assert np.linalg.norm(np.float64(z) - exact) <= 3 * BF16 * np.linalg.norm(exact)
    for dw, exact, term in zip(grads[2], want[2], terms, strict=True):
        # In `dw` only the rebuilt input is rounded, in attention the weights of values besides.
        roundings = 2 if name == "attention" else 1
        assert np.all(np.abs(dw - exact) <= roundings * BF16 * term + 1e-5)
    for dx, exact, size in zip(grads[0], want[0], sizes, strict=False):
        # Its cotangent, terms that are subtracted from one another, and the result.
        assert np.linalg.norm(np.float64(dx) - exact) <= 4 * BF16 * size
    for db, exact in zip(grads[3], want[3], strict=True):
        assert (db is None) == (exact is None)
        if db is not None:
            np.testing.assert_allclose(db, exact, rtol=1e-6, atol=1e-5)  # Float32 sums.


def test_sums_are_taken_in_float32():
    # 4096 ones: a bfloat16 sum stops at 256, where adding one rounds back.
    bf16 = functools.partial(ones, dtype=jnp.bfloat16)

    def fun(x, scale, w, b):
        return norm_linear(x, scale, w, eps=0.0, bias=b)

    arguments = bf16(4096, 2), bf16(2), bf16(2, 1), bf16(1)
    run = jax.jit(lambda dz, *args: jax.vjp(fun, *args)[1](dz))
    for grad in run(bf16(4096, 1), *arguments)[1:]:
        assert grad.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.float32(grad), 4096)


# Memory.


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


# Products.


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
        arguments = operator.activations(), operator.scale(), weights(*OUTPUTS[:count])
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


# Subspaces.


def test_inputs_are_found_and_named_for_their_first_weight():
    x = normal(50, BATCH, LENGTH, 8)
    for codec in (Exact(), DRAWN):
        stacked = functools.partial(scanned, codec=codec)
        assert input_groups(stacked, block_params(LAYERS), x) == INPUTS
        single = lambda p, x, codec=codec: jnp.sum(block(x, p, codec, KEYS))  # noqa: E731
        assert input_groups(single, block_params(), x) == INPUTS


def test_in_a_basis_weights_have_the_gradient_at_the_decoded_input_in_it(x64):
    params, x = block_params(LAYERS), normal(50, BATCH, LENGTH, 8)
    widths = {"k": 8, "o": 8, "down": 12}
    bases = {name: normal(i, LAYERS, d, 3) for i, (name, d) in enumerate(widths.items())}
    fun = functools.partial(scanned, codec=NEAREST)

    @jax.jit
    def run(params, x, bases):
        named = {f"0.{name}": basis for name, basis in bases.items()}
        in_bases = actjax.value_and_grad(fun, (0, 1), bases=named)(params, x)
        value, (want, dx) = jax.value_and_grad(fun, (0, 1))(params, x)
        projected = {name: bases[group].mT @ want[name] for name, group in INPUTS.items()
                     if group in bases}  # fmt: skip
        return in_bases, (value, (want, dx)), projected

    (value, (gradient, dx)), (want_value, (want, want_dx)), projected = run(params, x, bases)
    same = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)
    same(value, want_value)
    same(dx, want_dx)
    for name, exact in want.items():
        if name not in projected:
            same(gradient[name], exact)
            continue
        group = INPUTS[name]
        assert f"0.{group}" in vars(gradient[name]).values()
        np.testing.assert_array_equal(gradient[name].left, bases[group])
        same(gradient[name].right, projected[name])


def test_a_factored_codec_gives_a_dense_gradient_at_the_decoded_input(x64):
    # The input of the linear operator is rebuilt and has no low rank: there is nothing to factor.
    x, w, codec = normal(0, 6, 8), normal(1, 8, 4), actjax.RandomizedSVD(3)

    @jax.jit
    def run(params):
        def fun(params):
            return jnp.sum(norm_linear(x, jnp.ones(8), params["w"], codec=codec, key=KEY))

        x_hat = codec.decode(codec.encode(x, jax.random.fold_in(KEY, 0)))
        return actjax.value_and_grad(fun)(params)[1]["w"], x_hat

    dw, x_hat = run({"w": w})
    want = oracles.rms_norm(x_hat, np.ones(8), 1e-6).T @ np.ones((6, 4))
    assert_close(dw, want, 1e-11, 1e-12)
