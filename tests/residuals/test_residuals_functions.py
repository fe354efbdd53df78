"""Tests of `compress_residuals` and `checkpoint`: arguments and side effects of the function."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from residuals.residual_helpers import (
    CODE,
    LAYERS,
    ONE,
    RULES,
    asked,
    assert_close,
    loss_of,
    lossy,
    normal,
    output_and_gradient,
    rows_kept,
    scanned,
    tanh_layer,
    total,
)

from actjax import Exact, checkpoint, compress_residuals

# A row is a loss of arrays, which wraps functions.


def closed_over(of, x, w):
    ws = jnp.stack([w, w.T])
    run = lambda y, w: of(lambda y: jnp.sin(y @ w) * x + ws.sum() / 9)(y)  # noqa: E731
    scanned = lax.scan(lambda y, w: (run(y, w), None), x, ws)[0]
    return total(run(x, w), run(jnp.tanh(x), w), scanned, jax.vmap(run, (None, 0))(x, ws))


def keywords(of, x, w):
    def fun(x, *, w, train):
        return jnp.sin(x @ w) if train else x

    return total(of(fun)(x, w=w, train=True))


def numbers(of, x, w):
    fun = of(lambda x, c: jnp.sin(jnp.exp(x) * c).real)
    return total([fun(x, number) for number in (2.5, 3, True, 2.5j)])


def leaves_that_are_no_arrays(of, x, w):
    """Reads settings as a module of Equinox does: an activation function among the weights."""

    def layer(module, x, train, power, mode, absent):
        y = module["activation"](x @ module["w"]) ** power
        assert mode == "sum"
        assert absent is None
        return jnp.sum(y if train else -y)

    run = of(layer, activations=1)
    module = {"activation": jnp.tanh, "w": w, "scale": 2}
    return run(module, x, True, 3, "sum", None) + total(run(module, w, False, 2, "sum", None))


def complex_numbers(of, x, w):
    fun = of(lambda z, x: (jnp.abs(z * z * jnp.exp(z) * x), jnp.exp(1j * z) * x))
    y, z = fun(x + 1j * x[::-1], x)
    inside = of(lambda x: jnp.abs(x * (1 + 1j * w)))(x)
    return jnp.sum(y) + jnp.sum(jnp.abs(z - 0.3) ** 2) + total(inside)


def carries_as_activations(of, x, w):
    def fun(xs, w):
        return lax.scan(lambda c, x: (jnp.tanh(c @ w + x), None), xs[0], xs)[0], xs

    return total(of(fun, activations=(0, 1))(jnp.stack([x, x.T]), w))


def data_through(prepare):
    """Returns a loss of data that pass an operation without a derivative, once and in a loop."""

    def loss(of, x, w):
        def looped(w, x):
            return lax.scan(lambda c, xi: (jnp.tanh((c + prepare(xi)) @ w), c), x[0], x)[0]

        data = lax.stop_gradient(x)
        return total(of(lambda w, x: jnp.tanh(prepare(x) @ w))(w, data), of(looped)(w, data))

    return loss


FUNCTIONS = {
    "closed over, also in a scan and under vmap": closed_over,
    "keyword arguments": keywords,
    "numbers": numbers,
    "leaves that are no arrays": leaves_that_are_no_arrays,
    "integers": lambda of, x, w: total(
        of(lambda tokens, w: jnp.sin(w[tokens]))(np.array([3, 1, 3]), w)
    ),
    "complex numbers": complex_numbers,
    "activations that are outputs and scanned": carries_as_activations,
    "data through a while loop": data_through(
        lambda x: lax.while_loop(lambda z: jnp.sum(z * z) > 1, lambda z: z / 2, x)
    ),
    "data through a callback": data_through(
        lambda x: jax.pure_callback(np.sign, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_exact_codecs_change_nothing(name, x64):
    wraps = [lambda f, **_: f, *(functools.partial(compress_residuals, rule=r) for r in RULES)]
    if "data through" not in name:  # The second forward pass of `checkpoint` is differentiated.
        wraps.append(functools.partial(checkpoint, codec=Exact()))

    @jax.jit
    def run(x, w):
        return [jax.grad(functools.partial(FUNCTIONS[name], of), (0, 1))(x, w) for of in wraps]

    want, *others = run(normal(0, 8, 8), normal(1, 8, 8) / 2)
    assert np.any(want[0]) or np.any(want[1])
    for got in others:
        assert_close(got, want)


def test_exact_codecs_change_nothing_without_jit(x64):
    def fun(params, x, flags):
        return {"y": jnp.tanh(x @ params["w"][0])}, flags["count"] + 1, flags["none"]

    args = {"w": (normal(1, 8, 8),)}, normal(0, 6, 8), {"count": np.int32(3), "none": None}
    want = output_and_gradient(fun, args)
    for rule in (Exact(), lambda _: "leave"):
        assert_close(output_and_gradient(compress_residuals(fun, rule), args), want)
    product = lambda x, y: jnp.sin(x) * y  # noqa: E731
    assert compress_residuals(product, Exact())(2.0, 3) == product(2.0, 3)


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


def test_gradients_through_operations_without_derivative_are_refused():
    """`graph/test_one_way.py` tests which arguments pass one, in loops and branches too."""

    def fun(x, y):
        halved = lax.while_loop(lambda z: jnp.sum(z * z) > 1, lambda z: z / 2, jnp.sin(x))
        return halved + jnp.sin(x @ y)

    with pytest.raises(ValueError, match=r"`while`, which has no derivative in reverse mode: use"):
        jax.eval_shape(jax.grad(loss_of(compress_residuals(fun, CODE))), *ONE)


def test_side_effects_happen_once_in_each_pass():
    told = []

    def tell(what, value):
        jax.debug.callback(lambda _: told.append(what), value)

    def sine_that_tells(of_residual):
        @jax.custom_vjp
        def sine(x):
            return jnp.sin(x)

        def backward(cos, g):
            tell("residual" if of_residual else "cotangent", cos if of_residual else g)
            return (cos * g,)

        sine.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), backward)
        return sine

    def layer(x, w):
        tell("layer", x)
        return tanh_layer(x, w)

    def fun(x, ws):
        return sine_that_tells(True)(x @ ws[0]) + sine_that_tells(False)(scanned(layer)(x, ws))

    got = jax.jit(jax.grad(loss_of(compress_residuals(fun, Exact()))))(*LAYERS)
    jax.effects_barrier()
    assert sorted(told) == ["cotangent", *["layer"] * 3, "residual"]
    silent = lambda x, ws: jnp.sin(x @ ws[0]) + jnp.sin(scanned(tanh_layer)(x, ws))  # noqa: E731
    # Float32: some tens of terms.
    assert_close(got, jax.jit(jax.grad(loss_of(silent)))(*LAYERS), 1e-5)


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
    assert chain(24) < 2.2 * chain(12)


# `activations`: arguments that are not needed after the forward pass.


def test_activations_are_stored_as_codes(x64):
    def fun(params, batch):
        return jax.nn.silu(batch["x"]) @ params + batch["y"] ** 2 @ params, batch["count"]

    params = normal(0, 8, 8)
    batch = {"x": normal(1, 16, 8), "y": normal(2, 16, 8), "count": np.arange(3)}
    assert not asked(fun, params, batch)
    names = {c.name for c in asked(fun, params, batch, activations=1)}
    assert names == {"[1]['x']", "[1]['y']"}
    wrapped = compress_residuals(fun, CODE, activations=[1])
    stored = {r.name: r.stored_bytes for r in rows_kept(wrapped, params, batch)}
    assert stored == dict.fromkeys(names, CODE.stored_bytes((16, 8), "float64"))

    @jax.jit
    def run(params, batch):
        (y, _), pullback = jax.vjp(wrapped, params, batch)
        g = jnp.cos(y)
        dparams, dbatch = pullback((g, np.zeros(3, jax.dtypes.float0)))
        assert (dbatch["count"].dtype, dbatch["count"].shape) == (jax.dtypes.float0, (3,))
        x, z, dz = lossy(CODE, batch["x"]), lossy(CODE, batch["y"]), g @ params.T
        gate = 1 / (1 + jnp.exp(-x))
        slope = gate * (1 + x * (1 - gate))
        want = (x * gate + z**2).T @ g, dz * slope, 2 * dz * z
        return (dparams, dbatch["x"], dbatch["y"]), want

    assert_close(*run(params, batch))
