"""Tests of actjax/optim/stepping/in_place.py: kernels that read and write stacks of layers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxprs import equations
from optim.calls import calls_on_layers

import actjax
from actjax import kernels, optim
from actjax._math.padding import zero_beyond
from actjax.kernels.tail import Elementwise
from actjax.optim.stepping import in_place, pieces, tails
from actjax.optim.stepping.gradients import value_and_grad
from actjax.optim.stepping.passes import Layered
from actjax.residuals.graph.programs import inlined

DEPTH, WIDTH, FEATURES, TOKENS = 2, 32, 64, 16
CODE = actjax.Quantized(4, group=32, balance=True)


def rounded(adam):
    decay = optax.add_decayed_weights(0.1)
    return optim.stochastic_rounding(optax.chain(adam, decay, optax.scale(-0.05)))


TX = rounded(optim.scale_by_adam_8bit(block=32, min_size=1024))
SHAPES = {"gate": (WIDTH, FEATURES), "up": (WIDTH, FEATURES), "down": (FEATURES, WIDTH)}


def numbers(seed: int, *shape: int, dtype: str = "bfloat16") -> jax.Array:
    drawn = np.random.default_rng(seed).normal(size=shape) / shape[-2] ** 0.5
    return jnp.asarray(drawn.astype(jnp.dtype(dtype)))


def parameters() -> dict:
    layers = {name: numbers(i, DEPTH, *shape) for i, (name, shape) in enumerate(SHAPES.items())}
    layers["scale"] = jnp.asarray(np.ones((DEPTH, WIDTH), jnp.bfloat16))
    return {"layers": layers, "head": numbers(3, WIDTH, WIDTH)}


def layer(block, x, inputs, key):
    del inputs, key
    gate, up = actjax.norm_linear(x, block["scale"], (block["gate"], block["up"]), codec=CODE)
    return x + actjax.swiglu_linear(gate, up, block["down"], codec=CODE)


def after(params, x, inputs):
    return jnp.mean(jnp.square((x @ params["head"]).astype(jnp.float32) - inputs["y"]))


# Gradients are clipped, by a factor within the kernel of Adam.
UPDATE = optim.in_backward(lambda params, inputs: inputs["x"], layer, after, TX, clip=0.5)
INPUTS = {"x": numbers(4, 2, TOKENS, WIDTH), "y": numbers(5, 2, TOKENS, WIDTH, dtype="float32")}


@pytest.fixture
def choose(monkeypatch):
    """A function that chooses whether stacks are read and written in place."""

    def set_to(wanted: bool) -> None:
        monkeypatch.setattr(in_place, "applies", lambda *_: wanted)

    monkeypatch.setattr(tails, "_LEAST", 1)
    return set_to


@pytest.fixture
def compare(choose):
    """A function that returns the results of another with slices, and in place."""

    def both(fun, *args):
        results = []
        for wanted in (False, True):
            choose(wanted)
            # A new function, which is traced again.
            results.append(jax.jit(lambda *xs: fun(*xs))(*args))
        return results

    return both


def assert_equal(one, other):
    """Compares the results of steps.

    Codes agree to the bit. XLA may round other numbers once less; then one weight in a thousand is
    rounded to its other neighbor. The last is the norm of the update, whose sum of at most 2^13
    squares is added up in another order.
    """
    *one, norm = jax.tree.leaves(one)
    *other, other_norm = jax.tree.leaves(other)
    for a, b in zip(one, other, strict=True):
        is_weight = a.dtype == jnp.bfloat16
        rtol = 2.0**-22 if a.dtype == jnp.float32 else 2.0**-7 * is_weight
        a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
        atol = 2.0**-23 * np.abs(b).max() * (rtol > 0)  # A weight is a sum.
        np.testing.assert_allclose(a, b, rtol, atol)
        assert np.mean(a != b) < 1e-3 or not is_weight
    np.testing.assert_allclose(norm, other_norm, rtol=2**13 * 2.0**-24)


def assert_same_bits(one, other):
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def two_steps(params):
    def step(_, carry):
        params, state, *_ = carry
        return UPDATE.step(params, state, INPUTS, jnp.zeros((DEPTH,)))

    zero = jnp.zeros(())
    return jax.lax.fori_loop(0, 2, step, (params, UPDATE.init(params), zero, zero))


def two_updates(tx, params, grads):
    def step(_, carry):
        return optim.apply(tx, grads, carry[1], carry[0], with_norm=True)

    return jax.lax.fori_loop(0, 2, step, (params, optim.init(tx, params), jnp.zeros(())))


def test_two_steps_equal_those_with_slices(compare, monkeypatch):
    sliced, in_place = compare(two_steps, parameters())
    assert_equal(sliced, in_place)
    monkeypatch.setattr(tails, "_LEAST", 2**30)
    without_tails = jax.jit(lambda params: two_steps(params))(parameters())
    assert_same_bits(sliced, without_tails)


def test_kernels_get_the_stacks(choose):
    choose(True)
    params = parameters()
    state = jax.eval_shape(UPDATE.init, params)
    step = jax.make_jaxpr(UPDATE.step)(params, state, INPUTS, jnp.zeros((DEPTH,)))
    counts = calls_on_layers(step)
    # A plane, a scale and an offset of each of three codes; two moments of three matrices.
    assert counts["rms_norm_encode"] == (3, 3)
    assert counts["swiglu_encode"] == (6, 6)
    # Codes with the mean and the spread of their channels.
    assert counts["rms_norm_backward"] == (5, 0)
    assert counts["swiglu_backward"] == (10, 0)
    # With them the three matrices.
    assert counts["adam_8bit"] == (15, 15)


def masked(tx):
    """Sets updates to zero beyond 60 of 64 rows, as `models.padding.keeps_padding` does."""
    cut = optax.stateless(
        lambda updates, _: jax.tree.map(lambda u: zero_beyond(60, u, -2), updates)
    )
    return optax.chain(tx, cut)


ADAMW = optax.adamw(0.05, weight_decay=0.1)
TABLE = jnp.asarray(np.linspace(-0.5, 0.5, 8).reshape(4, 2).astype("float32"))


def keeps(*chosen):
    """A transform whose state is, for each name, "last": the update; "old": the weight; "next":
    the next of these; or "set": a constant."""

    def init(params):
        ones = jax.tree.map(jnp.ones_like, params)
        return [jnp.asarray(True) if name == "set" else ones for name in chosen]

    def update(updates, state, params=None):
        new = {"last": updates, "old": params, "set": jnp.asarray(False)}
        kept = [new[x] if x in new else state[i + 1] for i, x in enumerate(chosen)]
        return updates, kept

    return optax.GradientTransformation(init, update)


TRANSFORMS = {
    "8 bits": TX,
    "4 bits": rounded(optim.scale_by_adam_4bit(group=32, min_size=1024)),
    "4 bits, factored": rounded(
        optim.scale_by_factored_adam_4bit(group=32, min_size=1024, eps_squared=1e-12)
    ),
    "adamw": optim.stochastic_rounding(ADAMW),
    "adamw, to nearest": ADAMW,
    "adamw, masked": optim.stochastic_rounding(masked(ADAMW)),
    "8 bits, masked": optim.stochastic_rounding(
        masked(optim.scale_by_adam_8bit(block=32, min_size=1))
    ),
    "numbers of a table": optax.stateless(
        lambda updates, _: jax.tree.map(lambda u: u * TABLE[2, 1] - TABLE[1:3][0, 0] * u, updates)
    ),
    "lion": optim.stochastic_rounding(optax.lion(0.05)),
    "sgd": optax.sgd(0.05, momentum=0.9, nesterov=True),
    "lamb, which reads norms of updates": optim.stochastic_rounding(optax.lamb(0.05)),
    "states that are other arrays": optax.chain(
        optax.trace(0.9), keeps("last", "next", "old", "last", "set"), optax.scale(-0.05)
    ),
    "scalars in the state": optax.inject_hyperparams(optax.sgd)(0.05, momentum=0.9),
    "8 bits, with smaller last blocks": rounded(optim.scale_by_adam_8bit(block=24, min_size=1)),
    "adafactor": optim.stochastic_rounding(optax.adafactor(0.05, min_dim_size_to_factor=16)),
}


@pytest.mark.parametrize("tx", TRANSFORMS.values(), ids=list(TRANSFORMS))
def test_apply_equals_the_update_with_slices(compare, tx):
    # XLA rounds numbers of 16 bits in other places; those of weights that are rounded are float32.
    dtype = "bfloat16" if isinstance(tx, optim.RoundedTransformation) else "float32"
    params = {"layers": {"down": numbers(6, DEPTH, FEATURES, WIDTH, dtype=dtype)}}
    grads = jax.tree.map(lambda x: numbers(7, *x.shape, dtype=dtype), params)
    assert_equal(*compare(functools.partial(two_updates, tx), params, grads))


@pytest.mark.parametrize("name", ["8 bits", "4 bits", "adamw"])
def test_pieces_of_a_matrix_equal_those_with_slices(compare, monkeypatch, name):
    monkeypatch.setattr(pieces, "LARGEST", 1024)
    params, tx = {"head": numbers(8, FEATURES, WIDTH)}, TRANSFORMS[name]
    state = jax.jit(functools.partial(optim.init, tx))(params)
    assert state.pieces
    update = functools.partial(optim.apply, tx, clip=0.5, with_norm=True)
    assert_equal(*compare(update, params, state, params))


@pytest.mark.parametrize(
    ("name", "kernel", "written"),
    [
        ("adamw", "elementwise", 3),
        ("adamw, masked", "elementwise", 3),
        ("lion", "elementwise", 2),
        ("sgd", "elementwise", 2),
        ("8 bits, masked", "adam_8bit", 5),
        ("4 bits", "adam_4bit", 4),
        ("4 bits, factored", "adam_4bit", 3),
    ],
)
def test_an_update_is_one_kernel(choose, name, kernel, written):
    choose(True)
    params = {"layers": {"down": numbers(6, DEPTH, FEATURES, WIDTH)}}
    state = jax.eval_shape(lambda: optim.init(TRANSFORMS[name], params))
    program = jax.make_jaxpr(functools.partial(optim.apply, TRANSFORMS[name]))(
        params, state, params
    )
    counts = calls_on_layers(program)
    assert counts.pop(kernel)[1] == written
    assert set(counts) <= {"adam_4bit_maxima", "copies"}


def test_a_kernel_reads_scalars_where_they_are(choose):
    choose(True)
    params = {"layers": {"down": numbers(6, DEPTH, FEATURES, WIDTH)}}
    tx = TRANSFORMS["numbers of a table"]
    state = jax.eval_shape(lambda: optim.init(tx, params))
    program = jax.make_jaxpr(functools.partial(optim.apply, tx))(params, state, params)
    (call,) = (eqn for eqn in equations(program) if str(eqn.params.get("call")) == "elementwise")
    shapes = [x.aval.shape for x in call.invars]
    assert shapes.count(TABLE.shape) == 2


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_gradient_by_layers_is_that_of_autodiff(choose, dtype):
    choose(True)
    params = jax.tree.map(lambda x: x.astype(dtype), parameters())
    inputs = INPUTS | {"x": INPUTS["x"].astype(dtype)}

    def loss(params):
        x, _ = jax.lax.scan(
            lambda x, block: (layer(block, x, None, None), None), inputs["x"], params["layers"]
        )
        return after(params, x, inputs)

    model = Layered(lambda params, inputs: inputs["x"], layer, after, lambda p: p["layers"])
    by_layers = jax.jit(functools.partial(value_and_grad, model))
    want = jax.jit(jax.value_and_grad(loss))(params)
    got = by_layers(params, inputs, jnp.zeros((DEPTH,)))
    # Both round to 8 bits in other places, a dozen times on the way. In float32 a number may get
    # another code.
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=2**-6 * np.abs(b).max())
    counts = calls_on_layers(jax.make_jaxpr(by_layers)(params, inputs, jnp.zeros((DEPTH,))))
    assert counts["rms_norm_encode"] == (3, 3)
    assert counts["swiglu_encode"] == (6, 6)
    assert counts["swiglu_backward"] == (10, 0)


def test_gradients_of_more_bits_than_the_state(compare):
    params = {"layers": {"down": numbers(6, DEPTH, FEATURES, WIDTH)}}
    grads = jax.tree.map(lambda x: numbers(7, *x.shape, dtype="float32"), params)

    def update(params, grads):
        return optim.apply(ADAMW, grads, optim.init(ADAMW, params), params, with_norm=True)

    assert_equal(*compare(update, params, grads))


def test_a_chain_computes_as_xla_does():
    def chain(x, y):
        return jnp.tanh(x) / jax.lax.pow(jnp.maximum(x, y), y), jnp.clip(x, -1, 1)

    x = jnp.asarray(np.asarray([[np.nan, 0.5, 2.0, -3.0]], jnp.bfloat16))
    y = jnp.asarray(np.asarray([[1.0, np.nan, 2.0, 1.5]], jnp.bfloat16))
    program = inlined(jax.make_jaxpr(chain)(x, y)).jaxpr
    tail = Elementwise(
        *(tuple(program.eqns), tuple(program.invars), tuple(program.outvars)),
        *(False, 2, (), (None, None), ()),
    )
    row, column = np.zeros((1, 1), np.int32), np.arange(4)[None]
    run = functools.partial(tail.run, row=row, column=column)
    for got, expected in zip(jax.jit(run)([x, y]), jax.jit(chain)(x, y), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(
            np.asarray(got, "float32"), np.asarray(expected, "float32"), rtol=2**-7
        )


@pytest.mark.parametrize("dtype", ["complex64", "float8_e4m3fn"])
def test_other_dtypes_stay_with_xla(choose, dtype):
    choose(True)
    params = {"layers": {"w": jax.ShapeDtypeStruct((DEPTH, 8, 8), jnp.dtype(dtype))}}
    tx = optax.sgd(0.05)
    state = jax.eval_shape(lambda p: optim.init(tx, p), params)
    program = jax.make_jaxpr(functools.partial(optim.apply, tx))(params, state, params)
    assert "elementwise" not in calls_on_layers(program)


def test_the_implementation_that_is_asked_for_runs(choose):
    choose(True)
    params = {"layers": {"down": numbers(6, DEPTH, FEATURES, WIDTH)}}
    state = jax.eval_shape(lambda: optim.init(ADAMW, params))
    for name in (None, "reference"):
        with kernels.use(name):
            update = functools.partial(optim.apply, ADAMW)
            program = jax.make_jaxpr(update)(params, state, params)
        calls: Any = [eqn.params["call"] for eqn in equations(program) if "call" in eqn.params]
        chosen = {call.chosen for call in calls if str(call) == "elementwise"}
        assert chosen == {name}


def test_codes_on_the_host_stay_there(choose):
    choose(True)

    def offloaded(block, x, inputs, key):
        del inputs, key
        return x + actjax.linear(x, block["w"], codec=actjax.Offloaded(CODE))

    model = Layered(lambda params, inputs: inputs["x"], offloaded, after, lambda p: p["layers"])
    params = {"layers": {"w": numbers(9, DEPTH, WIDTH, WIDTH)}, "head": numbers(3, WIDTH, WIDTH)}
    program = jax.make_jaxpr(functools.partial(value_and_grad, model))(params, INPUTS, None)
    stacks = [eqn.outvars for eqn in equations(program) if eqn.primitive.name == "scan"]
    stored: list[Any] = [x for variables in stacks for x in variables]
    spaces = {x.aval.memory_space for x in stored}
    assert jax.memory.Space.Host in spaces


@pytest.mark.parametrize("fields", [{"rounding": "dither"}, {"outlier_fraction": 0.05}], ids=str)
def test_codes_with_other_arrays_are_read_in_place(compare, fields):
    codec = actjax.Quantized(4, group=32, **fields)

    def coded(block, x, inputs, key):
        del inputs
        gate, up = actjax.norm_linear(
            x, block["scale"], (block["gate"], block["up"]), codec=codec, key=key
        )
        return x + actjax.swiglu_linear(gate, up, block["down"], codec=codec, key=key)

    update = optim.in_backward(lambda _, inputs: inputs["x"], coded, after, optax.sgd(0.1))
    keys = jax.random.split(jax.random.key(0), DEPTH)

    def step(params):
        return update.step(params, update.init(params), INPUTS, keys)[0]

    for a, b in zip(*map(jax.tree.leaves, compare(step, parameters())), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=2**-7 * np.abs(b).max())
