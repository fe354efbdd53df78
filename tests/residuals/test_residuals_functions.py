"""Tests of `compress_residuals`: arguments, outputs and side effects of the function."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from residuals.residual_helpers import (
    CODE,
    KEY,
    LAYERS,
    RULES,
    asked,
    assert_close,
    loss_of,
    lossy,
    mlp,
    normal,
    output_and_gradient,
    rows_kept,
    scanned,
    tanh_layer,
    total,
    two_products,
)

from actjax import Exact, compress_residuals


def test_exact_codecs_change_nothing_without_jit(x64):
    def fun(params, x, flags):
        return {"y": mlp(x, *params["w"])}, flags["count"] + 1, flags["none"]

    params = {"w": (normal(1, 8, 8), normal(2, 8, 4))}
    args = params, normal(0, 6, 8), {"count": jnp.int32(3), "none": None}
    want = output_and_gradient(fun, args)
    for rule in (Exact(), lambda _: "leave"):
        assert_close(output_and_gradient(compress_residuals(fun, rule), args), want)


def test_python_numbers_may_be_arguments(x64):
    fun = lambda x, c: jnp.sin(jnp.exp(x) * c).real  # noqa: E731
    x, compressed = normal(0, 3, 4), compress_residuals(fun, Exact())
    numbers = 2.5, 3, True, 2.5j

    @jax.jit
    def run(x):
        return [
            [(f(x, number), jax.grad(loss_of(f))(x, number)) for number in numbers]
            for f in (compressed, fun)
        ]

    assert_close(*run(x))


def test_all_arguments_may_be_python_numbers():
    fun = lambda x, y: jnp.sin(jnp.exp(x)) * y  # noqa: E731
    assert compress_residuals(fun, Exact())(2.0, 3) == fun(2.0, 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_half_precision(dtype):
    def fun(x, w, v):
        return jnp.tanh(x @ w).astype("float32") @ v, jnp.sin(x @ w).astype("float32").sum()

    def run(*args):
        variants = fun, *(compress_residuals(fun, Exact(), rebuild=b) for b in (True, False))
        return [output_and_gradient(f, args) for f in variants]

    args = normal(0, 6, 8, dtype=dtype), normal(1, 8, 8, dtype=dtype), normal(2, 8, 4)
    want, *others = jax.jit(run)(*args)
    for got in others:
        # The operations are the same; XLA may keep an intermediate value in float32.
        assert_close(got, want, 4 * float(jnp.finfo(dtype).eps))


def test_closed_over_arrays_have_gradients(x64):
    table = normal(3, 6, 8)

    def loss(wrap, w, x):
        inner = wrap(lambda y: jnp.sin(y @ w) * table)
        return total(inner(x) + inner(jnp.tanh(x)))

    @jax.jit
    def run(*args):
        wraps = (lambda f: f), *(functools.partial(compress_residuals, rule=r) for r in RULES)
        return [jax.grad(functools.partial(loss, wrap), (0, 1))(*args) for wrap in wraps]

    want, *others = run(normal(1, 8, 8), normal(0, 6, 8))
    for got in others:
        assert_close(got, want)


def test_keyword_arguments_may_be_static_and_have_gradients(x64):
    def fun(x, *, w, train):
        return jnp.sin(x @ w) if train else x

    x, w = normal(0, 6, 8), normal(1, 8, 8)
    variants = compress_residuals(fun, Exact()), fun
    run = lambda w: [jax.grad(lambda w, f=f: total(f(x, w=w, train=True)))(w) for f in variants]  # noqa: E731
    assert_close(*jax.jit(run)(w))


def test_complex_arguments_have_their_gradient(x64):
    def fun(z, x):
        return jnp.abs(z * z * jnp.exp(z) * x)

    @jax.jit
    def run(z, x):
        variants = compress_residuals(fun, Exact()), fun
        return [jax.grad(loss_of(f), (0, 1))(z, x) for f in variants]

    x = normal(0, 3, 4)
    for got, want in zip(*run(x + 1j * x[::-1], x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12)


def test_complex_outputs_have_cotangents(x64):
    def fun(x):
        return jnp.exp(jnp.sin(x) @ x.T), jnp.exp(1j * x) * x

    def loss(fun, x):
        y, z = fun(x)
        return jnp.sum(y) + jnp.sum(jnp.abs(z - 0.3) ** 2)

    @jax.jit
    def run(x):
        variants = compress_residuals(fun, Exact()), fun
        return [jax.grad(functools.partial(loss, f))(x) for f in variants]

    got, want = run(normal(0, 3, 4))
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_settings_of_jax_inside_the_function_hold():
    def fun(x, key):
        with jax.threefry_partitionable(False):
            mask = jax.random.normal(key, x.shape)
        return jnp.sin(x * mask)

    x = normal(0, 6, 8)
    with jax.threefry_partitionable(True):
        want = fun(x, KEY)
        got = compress_residuals(fun, Exact())(x, KEY)
    # With another setting the random numbers differ. Otherwise these are float32 sines of size 1.
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize(
    "prepare",
    [
        lambda x: lax.while_loop(lambda z: jnp.sum(z * z) > 1, lambda z: z / 2, x),
        lambda x: jax.pure_callback(np.sign, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
    ],
    ids=["while", "callback"],
)
@pytest.mark.parametrize("looped", [False, True], ids=["", "looped"])
def test_data_may_pass_operations_without_derivative(x64, prepare, looped):
    def fun(w, x):
        if not looped:
            return jnp.tanh(prepare(x) @ w)
        return lax.scan(lambda c, xi: (jnp.tanh((c + prepare(xi)) @ w), c), jnp.zeros(8), x)[0]

    w, x = normal(1, 8, 8), normal(0, 6, 8)
    variants = compress_residuals(fun, Exact()), fun
    assert_close(*jax.jit(lambda *args: [jax.grad(loss_of(f))(*args) for f in variants])(w, x))


def _halved(x):
    return lax.while_loop(lambda z: jnp.sum(z * z) > 1, lambda z: z / 2, jnp.sin(x))


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, y: _halved(x) + jnp.sin(x @ y),
        lambda x, y: lax.scan(lambda c, z: (jnp.sin(c @ y), _halved(z)), x, x)[1],
        lambda x, y: lax.scan(lambda c, _: (jnp.sin(_halved(c) @ y), None), x, None, 3)[0],
    ],
    ids=["at once", "looped", "carried"],
)
def test_gradients_through_operations_without_derivative_are_refused(fun):
    wrapped = compress_residuals(fun, CODE)
    with pytest.raises(ValueError, match=r"`while`, which has no derivative in reverse mode: use"):
        jax.eval_shape(jax.grad(loss_of(wrapped)), normal(0, 6, 6), normal(1, 6, 6))


def printing(what):
    """Returns a sine whose backward pass records that it read its cotangent or its residual."""

    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    def backward(cos, g):
        jax.debug.callback(lambda _: told.append(what), cos if what == "residual" else g)
        return (cos * g,)

    told: list[str] = []
    sine.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), backward)
    return sine, told


@pytest.mark.parametrize("what", ["residual", "cotangent"])
def test_side_effects_of_a_backward_pass_happen(what):
    sine, told = printing(what)
    x = normal(0, 6, 6)
    got = jax.jit(jax.grad(loss_of(compress_residuals(lambda x: sine(x @ x), Exact()))))(x)
    jax.effects_barrier()
    assert told == [what]
    # Float32: some tens of terms.
    assert_close(got, jax.jit(jax.grad(lambda x: total(jnp.sin(x @ x))))(x), 1e-5)


def test_side_effects_of_a_forward_pass_happen_once():
    told = []

    def layer(x, w):
        jax.debug.callback(lambda _: told.append("layer"), x)
        return tanh_layer(x, w)

    jax.jit(jax.grad(loss_of(compress_residuals(scanned(layer), CODE))))(*LAYERS)
    jax.effects_barrier()
    assert told == ["layer"] * 3


def test_a_backward_pass_may_be_deep():
    @jax.custom_vjp
    def fun(x):
        return jnp.sin(x)

    def backward(residual, g):
        for _ in range(700):
            residual = residual + 1
        return (g * residual,)

    fun.defvjp(lambda x: (jnp.sin(x), x), backward)
    loss = lambda x: compress_residuals(lambda x: fun(x * 2), Exact())(x).sum()  # noqa: E731
    assert len(jax.make_jaxpr(jax.grad(loss))(normal(0, 3)).eqns) > 700


def test_rebuilding_a_chain_is_linear_in_its_length():
    def chain(length):
        step = lambda h, _: jnp.sin(h) + h  # noqa: E731
        fun = lambda x, w: functools.reduce(step, range(length), x @ w)  # noqa: E731
        loss = loss_of(compress_residuals(fun, CODE))
        return len(jax.make_jaxpr(jax.grad(loss))(normal(0, 6, 8), normal(1, 8, 8)).eqns)

    # A chain of twice the length gives twice the program; quadratic growth would give four times.
    assert chain(48) < 2.2 * chain(24)


# `activations`: arguments that are not needed after the forward pass.


def test_activations_are_stored_as_codes(x64):
    def fun(params, batch):
        return jnp.exp(batch["x"]) @ params + batch["y"] ** 2 @ params, batch["count"]

    params = normal(0, 8, 8)
    batch = {"x": normal(1, 16, 8), "y": normal(2, 16, 8), "count": jnp.arange(3)}
    assert not asked(fun, params, batch)
    names = {c.name for c in asked(fun, params, batch, activations=1)}
    assert names == {"[1]['x']", "[1]['y']"}
    wrapped = compress_residuals(fun, CODE, activations=[1])
    stored = {r.name: r.stored_bytes for r in rows_kept(wrapped, params, batch)}
    assert stored == dict.fromkeys(names, CODE.stored_bytes((16, 8), "float64"))

    @jax.jit
    def run(params, batch):
        ((y, _), pullback) = jax.vjp(wrapped, params, batch)
        g = jnp.cos(y)
        dparams, dbatch = pullback((g, np.zeros(3, jax.dtypes.float0)))
        assert (dbatch["count"].dtype, dbatch["count"].shape) == (jax.dtypes.float0, (3,))
        x, z, dz = lossy(CODE, batch["x"]), lossy(CODE, batch["y"]), g @ params.T
        want = (jnp.exp(x) + z**2).T @ g, dz * jnp.exp(x), 2 * dz * z
        return (dparams, dbatch["x"], dbatch["y"]), want

    assert_close(*run(params, batch))


def test_activations_may_be_outputs_and_scanned(x64):
    def fun(xs, w):
        return lax.scan(lambda c, x: (jnp.tanh(c @ w + x), None), xs[0], xs)[0], xs

    variants = fun, *(compress_residuals(fun, rule, activations=(0, 1)) for rule in RULES)
    want, *others = jax.jit(lambda *args: [output_and_gradient(f, args) for f in variants])(
        normal(0, 3, 6, 8), normal(1, 8, 8)
    )
    for got in others:
        assert_close(got, want)


@pytest.mark.parametrize("wrong", [-1, True, "x", [0, 1.5], None])
def test_invalid_activations_are_refused(wrong):
    with pytest.raises(TypeError):
        compress_residuals(two_products, CODE, activations=wrong)


def test_an_activation_position_out_of_range_is_refused():
    wrapped = compress_residuals(two_products, CODE, activations=2)
    with pytest.raises(ValueError, match="position 2, but the function was called with 2"):
        wrapped(normal(0, 6, 8), normal(1, 8, 8))
