"""Tests of actjax/residuals.py: any function may keep codes of its residuals, and is else itself.

Float64 and `quick_compile` where values are compared, so that a tolerance of 1e-12 of the largest
entry is a few hundred roundings of sums of some tens of terms: room for another order of summation
and none for another formula.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import actjax
from actjax import (
    Calibrated,
    Candidate,
    Exact,
    PointApproximation,
    Quantized,
    RandomizedSVD,
    compress_residuals,
    explain,
)

KEY = jax.random.key(5)
Q4 = Quantized(4, group=8)
RANDOM = Quantized(2, group=8, rounding="stochastic")
ALIVE = "alive without the backward pass"

NEW_JAX = jax.__version_info__ >= (0, 12, 0)
OPEN = {
    "test_data_may_be_sharded[explicit]": "shardings in types are lost",
    **({} if NEW_JAX else {"test_shard_map[within]": "shard_map in the function is not entered"}),
    "test_shard_map[around]": "varying axes are lost",
    "test_second_derivatives_obey_rules_of_their_own": "custom rules are written out",
}
"""What is known not to work yet, and why: strict, so that a repair shows."""


@pytest.fixture(autouse=True)
def _open(request):
    if request.node.name in OPEN:
        request.applymarker(pytest.mark.xfail(reason=OPEN[request.node.name], strict=True))


def normal(seed: int, *shape: int, dtype: Any = None) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def leave(_: Candidate) -> None:
    """The rule that leaves everything."""


RULES = Exact(), leave
ONE = normal(0, 6, 8), normal(1, 8, 8)
LAYERS = normal(0, 6, 8), normal(1, 3, 8, 8) / 3


def is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def total(tree: Any) -> jax.Array:
    """A scalar whose cotangents are not constant."""
    floats = [y for y in jax.tree.leaves(tree) if is_float(y)]
    return sum((jnp.sum(jnp.sin(1.3 * y + 0.2)) for y in floats), jnp.zeros(()))


def loss_of(fun):
    return lambda *args: total(fun(*args))


def output_and_gradient(fun, args) -> tuple[Any, Any]:
    """Returns `fun(*args)`, and the gradient of its total by each floating point array."""
    leaves, treedef = jax.tree.flatten(args)
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]
    positions = [i for i in positions if is_float(leaves[i])]

    def loss(floats: Any) -> Any:
        merged = list(leaves)
        for i, x in zip(positions, floats, strict=True):
            merged[i] = x
        output = fun(*jax.tree.unflatten(treedef, merged))
        return total(output), output

    (_, output), gradient = jax.value_and_grad(loss, has_aux=True)([leaves[i] for i in positions])
    return output, gradient


def assert_close(got: Any, want: Any, tolerance: float = 1e-12) -> None:
    """Compares trees, each array up to `tolerance` times its largest entry."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        a, b = (np.asarray(x, np.float64 if is_float(x) else None) for x in (a, b))
        size = np.max(np.abs(b), initial=0) if is_float(b) else 0
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * size)


def relative_error(got: Any, want: Any) -> float:
    """Returns the norm of the difference of two trees, in that of the second."""
    return float(optax.global_norm(jax.tree.map(jnp.subtract, got, want)) / optax.global_norm(want))


def held_bytes(fun, *args) -> int:
    """Returns the bytes that `fun` holds for its backward pass, what `args` hold left out."""
    pullback = lambda *args: jax.tree.leaves(jax.vjp(fun, *args)[1])  # noqa: E731
    jaxpr = jax.make_jaxpr(pullback)(*args).jaxpr
    given = {*jaxpr.invars, *jaxpr.constvars}
    held = {x for x in jaxpr.outvars if not isinstance(x, core.Literal)} - given
    return sum(x.aval.size * x.aval.dtype.itemsize for x in held)


def asked(fun, *args, **options) -> list[Candidate]:
    """Returns what the rule is asked about, each once."""
    found: dict[Candidate, None] = {}
    wrapped = compress_residuals(fun, lambda c: found.setdefault(c), **options)
    jax.eval_shape(lambda *args: jax.vjp(wrapped, *args)[1], *args)
    return list(found)


def rows_kept(fun, *args) -> list[actjax.Residual]:
    return [r for r in explain(fun, *args).residuals if r.reason != ALIVE]


def lossy(codec, x):
    return codec.decode(codec.encode(x))


def mlp(x, w, v):
    return jnp.tanh(x @ w) @ v


def layer_norm(x, scale, shift):
    mean = x.mean(-1, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, -1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-6) * scale + shift


def attention(x, w):
    q, k, v = (x @ part for part in w)
    scores = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), q @ k.T / 3, -jnp.inf)
    return jax.nn.softmax(scores) @ v


def dropout(x, w, key):
    h = jnp.tanh(x @ w)
    return jnp.where(jax.random.bernoulli(key, 0.7, h.shape), h / 0.7, 0) @ w


def scanned(layer, **options):
    return lambda x, ws: lax.scan(lambda c, w: (layer(c, w), None), x, ws, **options)[0]


def tanh_layer(x, w):
    return jnp.tanh(x @ w)


def two_products(x, w):
    return jnp.sin(jnp.tanh(x @ w) @ w)


# Functions of JAX in all their kinds: name -> function, arguments.


def activation(name):
    fun = lambda x, w, v: getattr(jax.nn, name)(x @ w) @ v  # noqa: E731
    return fun, lambda: (normal(0, 6, 8), normal(1, 8, 8), normal(2, 8, 4))


def of_x(fun):
    return fun, lambda: (normal(0, 6, 8),)


def of_x_w(fun):
    return fun, lambda: (normal(0, 6, 8), normal(1, 8, 8) / 3)


def of_layers(fun):
    return fun, lambda: (normal(0, 6, 8), normal(1, 3, 8, 8) / 3)


@jax.custom_jvp
def jvp_of_its_own(x):
    return jnp.sin(x) * x


@jvp_of_its_own.defjvp
def _(primals, tangents):
    (x,), (dx,) = primals, tangents
    return jvp_of_its_own(x), 1.5 * jnp.cos(x) * x * dx


@jax.custom_vjp
def vjp_of_its_own(x, y):
    return jnp.sin(x) * y


def _own_forward(x, y):
    return vjp_of_its_own(x, y), (jnp.cos(x), y, jnp.sin(x))


def _own_backward(residuals, g):
    cos, y, sin = residuals
    return 2 * g * cos * y, 3 * g * sin


vjp_of_its_own.defvjp(_own_forward, _own_backward)


def used_thrice(x, w):
    h = jnp.tanh(x @ w)
    return h @ w, {"twice": h @ w[:, :4], "transposed": h.T @ x}


def an_output_is_kept(x, w):
    y = jnp.exp(x @ w)
    return y, y @ w, y


def integers_and_floats(carry, w):
    x, count, weak = carry
    return (tanh_layer(x, w), count + 1, weak * 1.5 + count), count


def nested_loops(x, ws):
    def inner(carry, w):
        return lax.scan(lambda c, _: (tanh_layer(c, w), c[0] * jnp.sin(c[1])), carry, None, 2)

    return lax.scan(inner, x, ws)


def keys_in_the_carry(x, ws, key):
    def layer(carry, w):
        x, key = carry
        key, own = jax.random.split(key)
        return (dropout(x, w, own), key), None

    return lax.scan(layer, (x, key), ws)


def a_closed_over_array(x, w):
    table = np.arange(48.0).reshape(6, 8) / 10
    return jax.jit(lambda y: jnp.sin(y * table) @ w)(x)


def checkpoint_with_names(x, w):
    def block(x):
        return jnp.sin(checkpoint_name(jnp.tanh(x @ w), "mine") @ w)

    policy = jax.checkpoint_policies.save_only_these_names("mine")
    return jax.checkpoint(block, policy=policy)(jnp.sin(x)) * x


def scattered(x, w):
    h = jnp.tanh(x @ w)
    return (h.at[jnp.array([0, 3, 3])].add(jnp.exp(h[:3])) @ w).at[1].set(jnp.sin(h[0]))


CASES = {
    **{f"MLP with {name}": activation(name) for name in ("gelu", "relu", "tanh", "silu")},
    "MLP with relu6 and softplus": of_x_w(
        lambda x, w: jax.nn.softplus(jax.nn.relu6(x @ w) @ w) + jax.nn.leaky_relu(x @ w)
    ),
    "layer norm": (
        lambda x, w, s, b: layer_norm(x @ w, s, b) @ w,
        lambda: (normal(0, 6, 8), normal(1, 8, 8), normal(2, 8), normal(3, 8)),
    ),
    "softmax attention": (attention, lambda: (normal(0, 6, 8), normal(1, 3, 8, 8) / 2)),
    "dropout": (dropout, lambda: (normal(0, 6, 8), normal(1, 8, 8), KEY)),
    "dropout, key of the old style, key returned": (
        lambda x, w, key: (dropout(x, w, jax.random.split(key)[0]), key),
        lambda: (normal(0, 6, 8), normal(1, 8, 8), jax.random.PRNGKey(0)),
    ),
    "convolution": (
        lambda x, k: jnp.sin(
            lax.conv_general_dilated(jnp.tanh(x), jnp.sin(k), (1, 1), "SAME")
        ),
        lambda: (normal(0, 2, 3, 5, 5), normal(1, 4, 3, 3, 3)),
    ),
    "pooling": of_x(lambda x: lax.reduce_window(
        jnp.sin(x), -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"
    )),
    "cumulative": of_x(lambda x: jnp.cumsum(jnp.sin(x), 0) * jnp.cumprod(x, 1)),
    "sort": of_x(lambda x: lax.cummax(jnp.sin(x), 0) * jnp.sort(x, 1)),
    "gather": (
        lambda x, i: jnp.sin(x)[i] * jnp.take_along_axis(x, jnp.argsort(x, 1), 1)[:3],
        lambda: (normal(0, 6, 8), jnp.array([0, 1, 1])),
    ),
    "scatter": of_x_w(scattered),
    "masks": of_x(lambda x: jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), jnp.exp(x)) * x),
    "extrema": of_x(
        lambda x: jnp.max(jnp.sin(x), 0) + jnp.min(x) + jnp.abs(x).sum() * jnp.clip(x, -0.5, 0.5)
    ),
    "steps": of_x(lambda x: x * jnp.round(2 * x) * jnp.sign(x) + x % 0.7),
    "powers": of_x(lambda x: jnp.abs(x) ** 2.3 + x**3 + 2**x),
    "einsum": of_x_w(lambda x, w: jnp.einsum("bi,ij,bk->bjk", jnp.sin(x), w, jnp.tanh(x))),
    "broadcast": of_x(lambda x: jnp.sin(x[:, None] * x[None, :, :1]) * jnp.exp(x[0])),
    "nested jit": of_x_w(
        lambda x, w: jax.jit(lambda y: jnp.sin(jax.jit(jnp.tanh)(y @ w)))(x) @ w
    ),
    "vmap within": of_x_w(lambda x, w: jax.vmap(lambda row: jnp.sin(row @ w) * row)(x)),
    "custom_jvp": of_x_w(lambda x, w: jvp_of_its_own(jvp_of_its_own(x @ w) @ w)),
    "custom_vjp": of_x_w(lambda x, w: vjp_of_its_own(vjp_of_its_own(x @ w, x) @ w, x)),
    "rfft": of_x(lambda x: jnp.abs(jnp.fft.rfft(jnp.sin(x))) ** 2),
    "solve": of_x(lambda x: jnp.linalg.solve(x @ x.T + 9 * jnp.eye(6), jnp.sin(x))),
    "cond": of_x_w(lambda x, w: lax.cond(
        jnp.sum(x @ w) > 0, lambda y: jnp.sin(y @ w), lambda y: jnp.exp(y) * (y @ w), jnp.tanh(x)
    )),
    "scan": of_layers(
        lambda x, ws: lax.scan(lambda c, w: (tanh_layer(c, w), jnp.sin(c).sum()), x, ws)
    ),
    "scan, reverse and unrolled": of_layers(
        lambda x, ws: lax.scan(
            lambda c, w: (tanh_layer(c, w), jnp.sin(c)), x, ws, reverse=True, unroll=2
        )
    ),
    "scan of nothing": of_x_w(
        lambda x, w: lax.scan(lambda c, _: (tanh_layer(c, w), c), x, None, 3)
    ),
    "scan, no iteration": of_layers(lambda x, ws: scanned(tanh_layer)(jnp.sin(x), ws[:0])),
    "scan with integers": of_layers(lambda x, ws: lax.scan(integers_and_floats, (x, 0, 0.0), ws)),
    "scan with keys in the carry": (
        keys_in_the_carry, lambda: (normal(0, 6, 8), normal(1, 3, 8, 8) / 3, KEY)
    ),
    "scan over what the loop before it made": of_layers(
        lambda x, ws: scanned(tanh_layer)(
            x, jnp.sin(lax.map(lambda w: jnp.exp(w) @ w, ws) / 9)
        )
    ),
    "nested scan": of_layers(nested_loops),
    "fori_loop": of_x_w(lambda x, w: lax.fori_loop(0, 3, lambda i, c: tanh_layer(c, w) * i + c, x)),
    "associative scan": of_x(lambda x: lax.associative_scan(jnp.multiply, jnp.sin(x))),
    "checkpoint": of_x_w(lambda x, w: jax.checkpoint(two_products)(jnp.sin(x), w) * x),
    "checkpoint, products saved": of_x_w(
        lambda x, w: jax.checkpoint(
            two_products, policy=jax.checkpoint_policies.dots_saveable
        )(jnp.sin(x), w) * x
    ),
    "checkpoint, names saved": of_x_w(checkpoint_with_names),
    "scan of checkpointed layers": of_layers(scanned(jax.checkpoint(tanh_layer))),
    "integers out": of_x(lambda x: (jnp.argmax(jnp.sin(x), 1), jnp.sin(x) * jnp.exp(x), True)),
    "trees": (
        lambda d: {"y": jnp.sin(d["x"] @ d["w"]) @ d["w"], "rest": (d["x"], None)},
        lambda: ({"x": normal(0, 6, 8), "w": normal(1, 8, 8)},),
    ),
    "Python numbers": (
        lambda x, f, i, b: jnp.sin(jnp.exp(x * f) * i) * b,
        lambda: (normal(0, 6, 8), 0.25, 3, True),
    ),
    "NumPy arrays": (
        lambda x, s: jnp.sin(jnp.exp(x) * s),
        lambda: (np.asarray(normal(0, 6, 8)), np.float32(2)),
    ),
    "constants": of_x_w(a_closed_over_array),
    "nothing but constants out": of_x(lambda x: (jnp.ones(3), 2.0, 1, jnp.sin(jnp.exp(x)))),
    "linear": of_x(lambda x: (2 * x + 1).T),
    "identity": of_x(lambda x: x),
    "an argument unchanged": of_x_w(lambda x, w: (x, jnp.sin(x @ w) @ w, w)),
    "an output is kept": of_x_w(an_output_is_kept),
    "used three times": of_x_w(used_thrice),
    "an output unused": of_x_w(lambda x, w: (jnp.sin(x @ w), jnp.exp(w))[:1]),
    "zero-size": of_x(lambda x: (jnp.sin(jnp.exp(x)), jnp.exp(jnp.sin(x[:0])) @ x.T)),
    "scalars": (lambda s: jnp.sin(jnp.dot(s, s)) * jnp.exp(s), lambda: (normal(0, 1)[0],)),
    "one more compressed within": of_x_w(
        lambda x, w: jnp.sin(compress_residuals(two_products, Exact())(jnp.sin(x), w) @ w)
    ),
    "attention of jax.nn": (
        lambda x: jax.nn.dot_product_attention(
            *(x[:, None, :] * c for c in (1, 2, jnp.sin(x)[:, None, :])), is_causal=True
        ),
        lambda: (normal(0, 5, 2, 4),),
    ),
}  # fmt: skip
NOTHING_TO_DECIDE = {"linear", "identity", "no iteration", "NumPy arrays", "extrema", "powers",
                     "steps", "broadcast", "masks", "constants", "integers out", "Python numbers",
                     "nothing but constants out", "attention of jax.nn"}  # fmt: skip
"""All that these keep follows from their arguments."""


@pytest.mark.parametrize("name", CASES)
def test_without_a_lossy_codec_nothing_changes(x64, quick_compile, name):
    fun, make = CASES[name]
    args = make()
    leaves, treedef = jax.tree.flatten(args)
    arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]
    found = []
    variants = (
        fun,
        compress_residuals(fun, Exact()),
        compress_residuals(fun, found.append, rebuild=False),
    )

    @jax.jit
    def run(given):
        merged = list(leaves)  # Python's numbers stay what they are.
        for i, x in zip(arrays, given, strict=True):
            merged[i] = x
        args = jax.tree.unflatten(treedef, merged)
        return [output_and_gradient(variant, args) for variant in variants]

    want, *others = run([leaves[i] for i in arrays])
    assert jax.tree.leaves(want[1])
    for got in others:
        assert_close(got, want)
    if name not in NOTHING_TO_DECIDE:
        assert found


@pytest.mark.parametrize("rule", [Exact(), leave, lambda _: "leave"], ids=["exact", "none", "text"])
def test_without_jit_nothing_changes_either(x64, quick_compile, rule):
    def fun(params, x, flags):
        return {"y": mlp(x, *params["w"])}, flags["count"] + 1, flags["none"]

    params = {"w": (normal(1, 8, 8), normal(2, 8, 4))}
    args = params, normal(0, 6, 8), {"count": jnp.int32(3), "none": None}
    got = output_and_gradient(compress_residuals(fun, rule), args)
    assert_close(got, output_and_gradient(fun, args))


@pytest.mark.parametrize("number", [2.5, 3, True, 2.5j], ids=repr)
def test_a_number_of_python_is_an_argument(x64, quick_compile, number):
    fun = lambda x, c: jnp.sin(jnp.exp(x) * c).real  # noqa: E731
    x, compressed = normal(0, 3, 4), compress_residuals(fun, Exact())
    assert_close(compressed(x, number), fun(x, number))
    got, want = (jax.grad(loss_of(f))(x, number) for f in (compressed, fun))
    assert_close(got, want)


def test_numbers_of_python_alone_are_arguments():
    fun = lambda x, y: jnp.sin(jnp.exp(x)) * y  # noqa: E731
    assert compress_residuals(fun, Exact())(2.0, 3) == fun(2.0, 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_half_precision(quick_compile, dtype):
    def fun(x, w, v):
        return jnp.tanh(x @ w).astype("float32") @ v, jnp.sin(x @ w).astype("float32").sum()

    def run(*args):
        variants = fun, *(compress_residuals(fun, Exact(), rebuild=b) for b in (True, False))
        return [output_and_gradient(f, args) for f in variants]

    args = normal(0, 6, 8, dtype=dtype), normal(1, 8, 8, dtype=dtype), normal(2, 8, 4)
    want, *others = jax.jit(run)(*args)
    for got in others:
        # The same operations; XLA may keep an intermediate of one of them in float32.
        assert_close(got, want, 4 * float(jnp.finfo(dtype).eps))


def test_what_is_differentiated_may_be_closed_over(x64, quick_compile):
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


def test_complex_arguments_have_their_gradient(x64, quick_compile):
    def fun(z, x):
        return jnp.abs(z * z * jnp.exp(z) * x)

    @jax.jit
    def run(z, x):
        variants = compress_residuals(fun, Exact()), fun
        return [jax.grad(loss_of(f), (0, 1))(z, x) for f in variants]

    x = normal(0, 3, 4)
    for got, want in zip(*run(x + 1j * x[::-1], x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12)


def test_complex_outputs_pass_their_cotangent_on(x64, quick_compile):
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


def test_a_setting_of_jax_within_the_function_holds(quick_compile):
    def fun(x, key):
        with jax.threefry_partitionable(False):
            mask = jax.random.normal(key, x.shape)
        return jnp.sin(x * mask)

    x = normal(0, 6, 8)
    with jax.threefry_partitionable(True):
        want = fun(x, KEY)
        got = compress_residuals(fun, Exact())(x, KEY)
    # Those are other random numbers, or sines of the same ones: float32, of size one.
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
def test_data_may_go_through_what_has_no_derivative(x64, quick_compile, prepare, looped):
    def fun(w, x):
        if not looped:
            return jnp.tanh(prepare(x) @ w)
        return lax.scan(lambda c, xi: (jnp.tanh((c + prepare(xi)) @ w), c), jnp.zeros(8), x)[0]

    w, x = normal(1, 8, 8), normal(0, 6, 8)
    want = jax.grad(loss_of(fun))(w, x)
    assert_close(jax.grad(loss_of(compress_residuals(fun, Exact())))(w, x), want)


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
def test_a_gradient_through_what_has_no_derivative_is_refused(fun):
    wrapped = compress_residuals(fun, Q4)
    with pytest.raises(ValueError, match=r"`while`, which has no derivative in reverse mode: use"):
        jax.grad(loss_of(wrapped))(normal(0, 6, 6), normal(1, 6, 6))


def printing(what):
    """A sine whose backward pass tells about its cotangent or its residual."""

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
def test_side_effects_of_a_backward_pass_happen(quick_compile, what):
    sine, told = printing(what)
    x = normal(0, 6, 6)
    got = jax.grad(loss_of(compress_residuals(lambda x: sine(x @ x), Exact())))(x)
    jax.effects_barrier()
    assert told == [what]
    # Float32: some tens of terms.
    assert_close(got, jax.grad(lambda x: total(jnp.sin(x @ x)))(x), 1e-5)


def test_side_effects_of_a_forward_pass_happen_once(quick_compile):
    told = []

    def layer(x, w):
        jax.debug.callback(lambda _: told.append("layer"), x)
        return tanh_layer(x, w)

    jax.jit(jax.grad(loss_of(compress_residuals(scanned(layer), Q4))))(*LAYERS)
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


def test_elementwise_chains_are_not_rebuilt_from_their_beginning_each_time():
    def chain(length):
        step = lambda h, _: jnp.sin(h) + h  # noqa: E731
        fun = lambda x, w: functools.reduce(step, range(length), x @ w)  # noqa: E731
        loss = loss_of(compress_residuals(fun, Q4))
        return len(jax.make_jaxpr(jax.grad(loss))(normal(0, 6, 8), normal(1, 8, 8)).eqns)

    # Twice as long, twice the program. A square of the length would be four times.
    assert chain(48) < 2.2 * chain(24)


# What is decoded, and where it is read.


@pytest.mark.parametrize(
    "codec",
    [
        RANDOM,
        RandomizedSVD(1),
        PointApproximation(points=1),
    ],
    ids=repr,
)
def test_the_value_is_exact_to_the_bit(quick_compile, codec):
    def fun(x, ws):
        h = scanned(lambda c, w: jax.nn.relu(c @ w) + c)(x, ws)
        return h, jnp.argmax(h, 1), x

    wrapped = compress_residuals(fun, codec, key=KEY)
    (value, gradient), (want, exact), alone = jax.jit(
        lambda *args: [output_and_gradient(f, args) for f in (wrapped, fun)] + [wrapped(*args)]
    )(*LAYERS)
    for a, b, c in zip(value, want, alone, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(c, b)
    # Few bits and few directions are no gradient to speak of: these codecs were asked.
    assert relative_error(gradient, exact) > 0.01


def with_residuals_replaced(fun, codec, smallest, *args):
    """Returns the pullback of `fun` that JAX makes, but with its residuals encoded and decoded."""
    _, pullback = jax.vjp(fun, *args)
    given = {id(x) for x in jax.tree.leaves(args)}

    def replace(x: jax.Array) -> jax.Array:
        kept = id(x) in given or not is_float(x) or x.size < smallest
        return x if kept else lossy(codec, x)

    return jax.tree.map(replace, pullback)


@pytest.mark.parametrize(
    ("fun", "shapes"),
    [
        (mlp, [(6, 8), (8, 8), (8, 4)]),
        (lambda x, w: jnp.sin(jnp.sin(x @ w)) * jax.nn.sigmoid(x @ w), [(6, 8), (8, 8)]),
        (lambda x, w: jax.nn.softmax(x @ w) @ w, [(6, 8), (8, 8)]),
        (lambda x, w: jnp.sort(jnp.exp(x @ w), 1)[::-1] ** 3, [(6, 8), (8, 8)]),
        (lambda x, w: jnp.where(x @ w > 0, jnp.exp(x @ w), jax.nn.relu(x) @ w), [(6, 8), (8, 8)]),
        (scanned(two_products, reverse=True), [(6, 8), (3, 8, 8)]),
    ],
    ids=["mlp", "sines", "softmax", "sort", "where", "scan"],
)
def test_without_rebuilding_each_residual_is_replaced_by_its_decoded_value(
    x64, quick_compile, fun, shapes
):
    codec = Quantized(3, group=4)
    # Arrays of an iteration, [6, 8], are stored, statistics, [6, 1], are not.
    rule = lambda c: codec if c.size >= 48 else None  # noqa: E731

    @jax.jit
    def run(args):
        y, pullback = jax.vjp(compress_residuals(fun, rule, rebuild=False), *args)
        others = with_residuals_replaced(fun, codec, 48, *args), jax.vjp(fun, *args)[1]
        return [f(jnp.cos(3 * y)) for f in (pullback, *others)]

    got, want, exact = run([normal(i, *shape) / 2 for i, shape in enumerate(shapes)])
    assert_close(got, want)
    assert relative_error(got, exact) > 0.01


def check_by_hand(fun, by_hand, args, tolerance=1e-12, **options):
    """Compares gradients to those `by_hand(g, *args)` for a cotangent g; `options` have a rule."""

    @jax.jit
    def run(*args):
        y, pullback = jax.vjp(compress_residuals(fun, **options), *args)
        g = jnp.cos(3 * y)
        return pullback(g), by_hand(g, *args)

    got, want = run(*args)
    assert_close(got, want, tolerance)


MLP_SHAPES = (6, 8), (8, 8), (8, 4)


def test_an_exponential_by_hand(x64, quick_compile):
    def by_hand(g, x, w, v):
        e = lossy(Q4, jnp.exp(x @ w))
        dh = g @ v.T * e
        return dh @ w.T, x.T @ dh, e.T @ g

    args = [normal(i, *shape) / 2 for i, shape in enumerate(MLP_SHAPES)]
    check_by_hand(lambda x, w, v: jnp.exp(x @ w) @ v, by_hand, args, rule=Q4, rebuild=False)


@pytest.mark.parametrize("approximate", [True, False])
def test_a_gelu_by_hand(x64, quick_compile, approximate):
    gelu = functools.partial(jax.nn.gelu, approximate=approximate)

    def by_hand(g, x, w, v):
        h = lossy(Q4, x @ w)
        dh = g @ v.T * jax.grad(lambda h: jnp.sum(gelu(h)))(h)
        return dh @ w.T, x.T @ dh, gelu(h).T @ g

    args = [normal(i, *shape) for i, shape in enumerate(MLP_SHAPES)]
    check_by_hand(lambda x, w, v: gelu(x @ w) @ v, by_hand, args, rule=Q4)


def test_a_layer_norm_by_hand(x64, quick_compile):
    def by_hand(g, x, w, v, scale):
        h = lossy(Q4, x @ w)
        deviation = jnp.sqrt(h.var(-1, keepdims=True) + 1e-6)
        unit = (h - h.mean(-1, keepdims=True)) / deviation
        dn = g @ v.T * scale
        # Ba et al.: what lies along ones, or along the result, falls out.
        along = dn.mean(-1, keepdims=True) + unit * jnp.mean(dn * unit, -1, keepdims=True)
        dh = (dn - along) / deviation
        return dh @ w.T, x.T @ dh, (unit * scale).T @ g, jnp.sum(g @ v.T * unit, 0)

    args = [normal(i, *shape) for i, shape in enumerate((*MLP_SHAPES, (8,)))]
    fun = lambda x, w, v, s: layer_norm(x @ w, s, 0.0) @ v  # noqa: E731
    check_by_hand(fun, by_hand, args, 1e-11, rule=Q4)  # Differences of numbers ten times larger.


@pytest.mark.parametrize("rebuild", [True, False])
def test_a_relu_by_hand_has_its_mask_from_the_true_values(x64, quick_compile, rebuild):
    codec = Quantized(1, group=8)

    def by_hand(g, x, w, v):
        h = x @ w
        stored = jax.nn.relu(lossy(codec, h)) if rebuild else lossy(codec, jax.nn.relu(h))
        dh = jnp.where(h > 0, g @ v.T, 0)
        return dh @ w.T, x.T @ dh, stored.T @ g

    args = [normal(i, *shape) for i, shape in enumerate(MLP_SHAPES)]
    fun = lambda x, w, v: jax.nn.relu(x @ w) @ v  # noqa: E731
    check_by_hand(fun, by_hand, args, rule=codec, rebuild=rebuild)


def test_a_residual_stream_by_hand(x64, quick_compile):
    def fun(x, w0, w1, w2):
        h = x @ w0
        return (h + jnp.tanh(h @ w1)) @ w2

    def by_hand(g, x, w0, w1, w2):
        h, u = x @ w0, x @ w0 @ w1
        s = lossy(Q4, h + jnp.tanh(u))  # The sum has a code of its own.
        h, u = lossy(Q4, h), lossy(Q4, u)
        ds = g @ w2.T
        du = ds * (1 - jnp.tanh(u) ** 2)
        dh = ds + du @ w1.T
        return dh @ w0.T, x.T @ dh, h.T @ du, s.T @ g

    check_by_hand(fun, by_hand, [normal(i, 8, 8) / 2 for i in range(4)], rule=Q4)


def test_a_loop_by_hand(x64, quick_compile):
    def by_hand(g, x, ws):
        codes = []
        for w in ws:
            codes.append((lossy(Q4, x), lossy(Q4, x @ w)))
            x = jnp.tanh(x @ w)
        dws = []
        for w, (c, u) in reversed([*zip(ws, codes, strict=True)]):
            du = g * (1 - jnp.tanh(u) ** 2)
            g, dws = du @ w.T, [c.T @ du, *dws]
        return g, jnp.stack(dws)

    args = normal(0, 6, 8), normal(1, 3, 8, 8) / 2
    check_by_hand(scanned(tanh_layer), by_hand, args, rule=Q4)


def downstream(jaxpr, sources, across_barriers: bool) -> set:
    """Returns the variables that depend on `sources`, also by having to wait in a barrier."""
    found = {*sources}
    for eqn in jaxpr.eqns:
        reached = [not isinstance(x, core.Literal) and x in found for x in eqn.invars]
        if eqn.primitive.name == "optimization_barrier" and not across_barriers:
            found |= {x for x, is_reached in zip(eqn.outvars, reached, strict=True) if is_reached}
        elif any(reached):
            found |= {*eqn.outvars}
    return found


def arrays(jaxpr, dtype, *shape) -> set:
    made = {x for eqn in jaxpr.eqns for x in eqn.outvars}
    return {x for x in made if (x.aval.dtype, x.aval.shape) == (dtype, shape)}


def test_codes_are_made_before_outputs_are_read():
    wrapped = compress_residuals(mlp, Q4)
    args = [normal(i, *shape) for i, shape in enumerate(MLP_SHAPES)]
    jaxpr = jax.make_jaxpr(lambda *args: jax.vjp(wrapped, *args))(*args).jaxpr
    barriers = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "optimization_barrier"]
    codes = arrays(jaxpr, "uint8", 6, 4) & {x for eqn in barriers for x in eqn.invars}
    assert codes
    assert jaxpr.outvars[0] in set.intersection(*(downstream(jaxpr, [c], True) for c in codes))


def test_no_code_is_decoded_before_it_is_needed():
    wrapped = compress_residuals(lambda x, w, v: jnp.sin(jnp.tanh(x @ w) @ v), Q4)
    args = normal(3, 6, 24), normal(0, 6, 8), normal(1, 8, 16), normal(2, 16, 24)
    jaxpr = jax.make_jaxpr(lambda g, *args: jax.vjp(wrapped, *args)[1](g))(*args).jaxpr
    # Decoded are floats that follow from 4-bit numbers, two in a byte.
    last, first = (
        arrays(jaxpr, "float32", 6, width)
        & downstream(jaxpr, arrays(jaxpr, "uint8", 6, width // 2), False)
        for width in (24, 16)
    )
    assert last
    assert first
    # The last array waits for the cotangent, the first for what is made of the last.
    assert last <= downstream(jaxpr, jaxpr.invars[:1], True)
    assert first <= downstream(jaxpr, last, True)


# A mask from lossy values is another mask: the gradient flows where it should not.
KINKS = {
    "relu": jax.nn.relu,
    "leaky_relu": jax.nn.leaky_relu,
    "relu6": jax.nn.relu6,
    "abs": jnp.abs,
    "where": lambda x: jnp.where(x > 0, x, 0.0),
    "maximum": lambda x: jnp.maximum(x, 0.0),
    "clip": lambda x: jnp.clip(x, -0.5, 0.5),
    "product with a mask": lambda x: x * (x > 0),
    "integer part": lambda x: x * lax.stop_gradient(x.astype(int).astype(x.dtype)),
    "maximum of a row": lambda x: jnp.max(x, 1),
}


@pytest.mark.parametrize("name", KINKS)
def test_the_gradient_is_zero_where_it_is_zero(quick_compile, name):
    fun = lambda x: KINKS[name](x @ jnp.eye(16))  # noqa: E731
    variants = compress_residuals(fun, Quantized(2, group=16)), fun
    got, want = jax.jit(lambda x: [jax.grad(lambda x: f(x).sum())(x) for f in variants])(
        normal(2, 40, 16)
    )
    np.testing.assert_array_equal(got == 0, want == 0)
    # Slopes of 0, 1 and -1 and shares of a tie: exact, or decoded with the 8 bits of a scale.
    np.testing.assert_allclose(got, want, atol=2 * 2**-8)


def thrice(kink):
    return lambda x: lax.scan(lambda c, _: (kink(c) - 0.3, None), x, None, 3)[0]


DYING = {"activation": (lambda kink: kink, 0), "carry": (thrice, ())}


@pytest.mark.parametrize("where", DYING)
@pytest.mark.parametrize("name", ["relu", "maximum", "clip", "product with a mask"])
def test_the_gradient_is_zero_where_it_is_zero_if_its_input_dies(quick_compile, name, where):
    wrap, activations = DYING[where]
    fun = wrap(KINKS[name])
    variants = compress_residuals(fun, Quantized(2, group=16), activations=activations), fun
    got, want = jax.jit(lambda x: [jax.grad(lambda x: f(x).sum())(x) for f in variants])(
        normal(2, 40, 16)
    )
    np.testing.assert_array_equal(got == 0, want == 0)
    np.testing.assert_allclose(got, want, atol=3 * 2 * 2**-8)  # As above, of three in a row.


@pytest.mark.parametrize("rebuild", [True, False])
def test_the_mask_of_dropout_is_exact(quick_compile, rebuild):
    def fun(x, w, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x @ w, 0)

    x, eye = normal(0, 16, 16), jnp.eye(16)
    wrapped = compress_residuals(fun, Quantized(1), rebuild=rebuild)
    got, want = jax.jit(
        lambda x: [jax.grad(lambda x: f(x, eye, KEY).sum())(x) for f in (wrapped, fun)]
    )(x)
    np.testing.assert_array_equal(got, want)
    # The mask follows from the key, which is alive: nothing is kept of it if it is rebuilt.
    # Else a bit a number.
    assert held_bytes(wrapped, x, eye, KEY) == (0 if rebuild else x.size // 8)


# What is kept.


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, w: jax.nn.gelu(x @ w) @ w,
        lambda x, w: jax.nn.gelu(x @ w, approximate=False) @ w,
        lambda x, w: jax.nn.silu(x @ w) @ w,
        lambda x, w: layer_norm(x @ w, 1.5, 0.1) @ w,
        lambda x, w: jax.nn.softmax(x @ w) @ w,
        lambda x, w: jax.nn.gelu(layer_norm(x @ w, w[0], w[1])) @ w,
        lambda x, w: jnp.sin((x @ w + w[0]) * w[1]) @ w,
    ],
    ids=["gelu", "exact gelu", "silu", "layer norm", "softmax", "both", "bias and scale"],
)
def test_one_array_is_kept_where_all_follows_from_it(fun):
    x, w = normal(0, 16, 8), normal(1, 8, 8)
    wrapped = compress_residuals(fun, Q4)
    (row,) = rows_kept(wrapped, x, w)
    assert row.operator == "dot_general"
    assert (row.shape, row.codec, row.reason) == ((16, 8), repr(Q4), "")
    assert held_bytes(wrapped, x, w) == row.stored_bytes == Q4.stored_bytes((16, 8), "float32")
    assert held_bytes(fun, x, w) > 16 * 8 * 4


def test_the_sum_is_stored_where_a_residual_stream_is_joined():
    def fun(x, w):
        h = x @ w
        h = h + jnp.tanh(h @ w)
        return jax.nn.gelu(h) @ w

    kinds = sorted(c.primitive for c in asked(fun, normal(0, 16, 8), normal(1, 8, 8)))
    assert kinds == ["add", "dot_general", "dot_general"]


def test_a_bias_is_no_residual_stream():
    fun = lambda x, w, b: jnp.sin(x @ w + b) @ w  # noqa: E731
    (one,) = asked(fun, normal(0, 16, 8), normal(1, 8, 8), normal(2, 8))
    assert one.primitive == "dot_general"


def saved_often(x, w, v):
    h = x @ w
    views = (
        h, h, h.T, h.reshape(4, 4, 8), h[::-1], h[:, None], h.astype("float64"),
        jnp.broadcast_to(h[None], (3, 16, 8)), checkpoint_name(h, "mine"),
    )  # fmt: skip
    return [jnp.einsum("...i,...j->ij", view, view * v) for view in views]


def test_a_tensor_saved_often_is_stored_once_whatever_it_looks_like(x64, quick_compile):
    args = normal(0, 16, 8, dtype="float32"), normal(1, 8, 8, dtype="float32"), jnp.float32(2)
    for rule, want in ((leave, 16 * 8 * 4), (Q4, Q4.stored_bytes((16, 8), "float32"))):
        assert held_bytes(compress_residuals(saved_often, rule), *args) == want
    assert held_bytes(saved_often, *args) > 3 * 16 * 8 * 4
    # The leaves of what `jax.vjp` returns, really.
    leaves = jax.tree.leaves(jax.vjp(compress_residuals(saved_often, leave), *args)[1])
    given = {id(x) for x in args}
    assert sum(x.nbytes for x in {id(x): x for x in leaves if id(x) not in given}.values()) == 512


def test_views_are_stored_once_without_rebuilding_too():
    def fun(x, w):
        h = jnp.exp(x @ w)
        return h @ w, h.T @ x, h.reshape(4, 4, 8) @ w, jnp.swapaxes(h, 0, 1) @ x

    args = normal(0, 16, 8), normal(1, 8, 8)
    want = Q4.stored_bytes((16, 8), "float32")
    assert held_bytes(compress_residuals(fun, Q4, rebuild=False), *args) == want


@pytest.mark.parametrize("rebuild", [True, False])
def test_parameters_integers_and_data_are_left(rebuild):
    table, labels = normal(3, 16, 8), jnp.arange(16) % 8

    def fun(params, x, key):
        h = jnp.tanh(x @ params["w"]) * table
        h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0)
        chosen = h @ params["w"].T
        return jnp.take_along_axis(chosen, labels[:, None], 1), chosen[jnp.argsort(chosen[:, 0])]

    args = {"w": normal(1, 8, 8), "b": normal(2, 8)}, normal(0, 16, 8), KEY
    found = asked(fun, *args, rebuild=rebuild)
    assert found
    assert all(c.dtype == "float32" and c.primitive != "argument" for c in found)
    assert all(c.shape == (16, 8) for c in found)


@pytest.mark.parametrize("looped", [False, True], ids=["once", "scan"])
def test_parameters_cast_for_mixed_precision_are_left(looped):
    def layer(x, w):
        y = jnp.tanh(x.astype("bfloat16") @ w.astype("bfloat16"))
        return y.astype("float32")

    fun = scanned(layer) if looped else layer
    args = normal(0, 16, 8), normal(1, *((3,) if looped else ()), 8, 8)
    found = asked(fun, *args)
    assert found
    assert {c.shape for c in found} == {(16, 8)}


def test_a_perceptron_of_flax_in_mixed_precision_keeps_its_weights():
    model = linen.Sequential(
        [linen.Dense(32, dtype="bfloat16"), linen.gelu, linen.Dense(8, dtype="bfloat16")]
    )
    x = normal(0, 64, 16)
    params = jax.eval_shape(model.init, KEY, x)
    assert {c.shape for c in asked(model.apply, params, x)} == {(64, 32)}


def test_a_parameter_in_the_carry_of_a_loop_is_left():
    def fun(x, w):
        return lax.fori_loop(0, 3, lambda _, c: (tanh_layer(*c), c[1]), (x, w))[0]

    assert {c.shape for c in asked(fun, normal(0, 16, 8), normal(1, 8, 8))} == {(16, 8)}


def test_codes_are_left():
    def fun(x, w):
        h = actjax.linear(jnp.sin(x @ w), w, codec=RandomizedSVD(2), key=KEY, name="mine")
        return jnp.tanh(compress_residuals(two_products, RANDOM, key=KEY)(h, w)) @ w

    args = normal(0, 16, 8), normal(1, 8, 8)
    assert all(c.shape == (16, 8) for c in asked(fun, *args))
    codecs = [r.codec for r in rows_kept(compress_residuals(fun, Q4), *args)]
    assert set(codecs) == {repr(RandomizedSVD(2)), repr(RANDOM), repr(Q4)}


# Rules.


def test_a_rule_is_told_what_there_is_to_know():
    def fun(params, x):
        h = checkpoint_name(x["h"] @ params, "hidden").astype("float32")
        return jnp.sin(jnp.tanh(h) @ params.astype("float32"))

    args = normal(0, 8, 8, dtype="bfloat16"), {"h": normal(1, 16, 8, dtype="bfloat16")}
    found = asked(fun, *args, activations=1)
    by_name = {c.name: c for c in found}
    assert by_name["hidden"] == Candidate("hidden", "dot_general", (16, 8), "bfloat16")
    assert (by_name["hidden"].size, by_name["hidden"].nbytes) == (128, 256)
    assert by_name["[1]['h']"] == Candidate("[1]['h']", "argument", (16, 8), "bfloat16")
    (other,) = (c for c in found if c.name not in ("hidden", "[1]['h']"))
    assert (other.primitive, other.dtype, other.nbytes) == ("dot_general", "float32", 512)
    assert "test_residuals.py" in other.name


@pytest.mark.parametrize("constant", [lambda: jnp.zeros((8, 16)), lambda: 2.0], ids=["array", "2"])
def test_a_name_is_that_of_the_array_or_of_a_view(constant):
    def fun(x, w):
        transposed = checkpoint_name((x @ w).T, "transposed")
        return (transposed * checkpoint_name(constant(), "constant")).T @ w

    (found,) = asked(fun, normal(0, 16, 8), normal(1, 8, 8))
    assert found.name == "transposed"


def test_in_a_loop_a_rule_is_asked_about_one_iteration():
    def fun(x, y, ws):
        def layer(carry, w):
            x, y = carry
            product = checkpoint_name(x @ w, "product")
            return (jnp.tanh(product) * y, jnp.sin(y) * x), None

        return lax.scan(layer, (x, y), ws)

    found = asked(fun, normal(0, 16, 8), normal(2, 16, 8), normal(1, 3, 8, 8))
    names = {c.name: c for c in found}
    assert names.keys() == {"carry 0", "carry 1", "product"}
    assert {c.shape for c in found} == {(16, 8)}
    assert names["carry 0"].primitive == "argument"
    one = asked(scanned(tanh_layer), normal(0, 16, 8), normal(1, 3, 8, 8))
    assert "carry" in {c.name for c in one}


@pytest.mark.parametrize(
    "loop",
    [
        lambda x, w: lax.map(lambda row: jnp.sin(row @ w), x),
        lambda x, w: lax.scan(lambda c, row: (jnp.tanh(c @ w + row),) * 2, x[0], x)[1],
    ],
    ids=["map", "scan"],
)
def test_what_a_loop_stacks_is_decided_on_where_it_is_read(loop):
    found = asked(lambda x, w: loop(x, w) @ w, normal(0, 16, 8), normal(1, 8, 8))
    (stacked,) = [c for c in found if c.shape == (16, 8)]
    # The line of the user's program, not of ours.
    assert stacked.name.startswith("test_residuals.py:")
    assert stacked.primitive != "optimization_barrier"


def test_a_codec_as_a_rule_leaves_what_is_small():
    def fun(x, w, v):
        return jnp.sin(x @ w), jnp.sin(x[:2] @ v), jnp.sin(x[:4] @ v)

    # The largest has 33 * 16 elements; the second 2 * 8, 33 times fewer; the third 4 * 8.
    args = normal(0, 33, 8), normal(1, 8, 16), normal(2, 8, 8)
    rows = rows_kept(compress_residuals(fun, Q4, rebuild=False), *args)
    assert {r.shape: (r.codec, r.reason) for r in rows} == {
        (33, 16): (repr(Q4), ""),
        (2, 8): ("", "left by the rule"),
        (4, 8): (repr(Q4), ""),
    }


def test_explain_reports_each_decision():
    def fun(x, w):
        h = checkpoint_name(jnp.sin(checkpoint_name(x @ w, "first") @ w), "second")
        return scanned(tanh_layer)(h @ w, jnp.stack([w, w]))

    def rule(c):
        return {"first": Q4, "carry": Quantized(8, group=8)}.get(c.name)

    args = normal(0, 16, 8), normal(1, 8, 8)
    wrapped = compress_residuals(fun, rule, rebuild=False)
    rows, table = {r.name: r for r in rows_kept(wrapped, *args)}, str(explain(wrapped, *args))
    assert (rows["first"].codec, rows["first"].exact_bytes) == (repr(Q4), 512)
    assert (rows["second"].codec, rows["second"].reason) == ("", "left by the rule")
    assert (rows["carry"].codec, rows["carry"].shape) == ("Quantized(bits=8, group=8)", (2, 16, 8))
    for text in (repr(Q4), "Quantized(bits=8, group=8)", "left by the rule", "first", "second"):
        assert text in table
    assert explain(wrapped, *args).stored_bytes == held_bytes(wrapped, *args)


def test_the_table_has_room_for_codecs_beside_long_names():
    def a_function_of_which_the_name_is_not_short_as_names_go(x, w):
        return [jnp.sin(x @ w) for _ in range(2)]

    def and_another_one_around_it(x, w):
        return a_function_of_which_the_name_is_not_short_as_names_go(x, w)

    wrapped = compress_residuals(and_another_one_around_it, Q4)
    table = str(explain(wrapped, *ONE))
    assert "Quantized(bits=4" in table


@pytest.mark.parametrize("looped", [False, True], ids=["once", "scan"])
def test_explain_knows_a_code_whatever_made_the_array(looped):
    def layer(x, w):
        return (x @ w).at[0].add(1.0) @ w

    fun = scanned(layer) if looped else layer
    args = normal(0, 16, 8), normal(1, *((3,) if looped else ()), 8, 8)
    wrapped = compress_residuals(fun, Q4)
    rows = rows_kept(wrapped, *args)
    assert {r.codec for r in rows} == {repr(Q4)}
    assert sum(r.stored_bytes for r in rows) == held_bytes(wrapped, *args)


@pytest.mark.parametrize(
    "wrong", [4, True, "exact", Exact, np.ones(3), jnp.ones(3)], ids=lambda x: type(x).__name__
)
def test_what_is_no_decision_is_named(wrong):
    wrapped = compress_residuals(two_products, lambda _: wrong)
    with pytest.raises(TypeError, match=r"`rule` returned .*Candidate\(name=.*Codec, or None"):
        jax.eval_shape(wrapped, normal(0, 6, 8), normal(1, 8, 8))


def test_what_is_no_function_is_named():
    with pytest.raises(TypeError, match="`fun` of compress_residuals must be a function, got 3"):
        compress_residuals(3, Q4)


@pytest.mark.parametrize("wrong", [None, "leave", 4])
def test_what_is_no_rule_is_named(wrong):
    with pytest.raises(TypeError, match=r"`rule` of compress_residuals must be an actjax\.Codec"):
        compress_residuals(two_products, wrong)


def test_a_rank_that_does_not_fit_is_named():
    wrapped = compress_residuals(two_products, RandomizedSVD(7), key=KEY)
    with pytest.raises(ValueError, match=r"`rank` 7 of RandomizedSVD.*\(6, 8\).*lower the rank"):
        jax.eval_shape(jax.grad(loss_of(wrapped)), normal(0, 6, 8), normal(1, 8, 8))


@pytest.mark.parametrize(
    ("fun", "args"),
    [
        (lambda x, y: jnp.sin(jnp.dot(x, y)) * x, (jnp.ones(3), jnp.ones(3))),
        (lambda x: lax.scan(lambda c, y: (c * jnp.sin(y) + y, None), 1.0, x)[0], (jnp.ones(3),)),
        (lambda x: jnp.sin(x @ x.T) @ x, (jnp.ones((0, 3)),)),
    ],
    ids=["scalar", "scalar carry", "no rows"],
)
def test_a_codec_as_a_rule_leaves_what_it_cannot_divide(quick_compile, fun, args):
    got = jax.grad(loss_of(compress_residuals(fun, Q4)))(*args)
    # A scalar is not worth a code, and nothing has none: exact in float32.
    assert_close(got, jax.grad(loss_of(fun))(*args), 1e-5)


# Arguments that die with the forward pass.


def test_activations_are_stored_as_codes(x64, quick_compile):
    def fun(params, batch):
        return jnp.exp(batch["x"]) @ params + batch["y"] ** 2 @ params, batch["count"]

    params = normal(0, 8, 8)
    batch = {"x": normal(1, 16, 8), "y": normal(2, 16, 8), "count": jnp.arange(3)}
    assert not asked(fun, params, batch)
    names = {c.name for c in asked(fun, params, batch, activations=1)}
    assert names == {"[1]['x']", "[1]['y']"}
    wrapped = compress_residuals(fun, Q4, activations=[1])
    stored = {r.name: r.stored_bytes for r in rows_kept(wrapped, params, batch)}
    assert stored == dict.fromkeys(names, Q4.stored_bytes((16, 8), "float64"))

    @jax.jit
    def run(params, batch):
        ((y, _), pullback) = jax.vjp(wrapped, params, batch)
        g = jnp.cos(y)
        dparams, dbatch = pullback((g, np.zeros(3, jax.dtypes.float0)))
        assert (dbatch["count"].dtype, dbatch["count"].shape) == (jax.dtypes.float0, (3,))
        x, z, dz = lossy(Q4, batch["x"]), lossy(Q4, batch["y"]), g @ params.T
        want = (jnp.exp(x) + z**2).T @ g, dz * jnp.exp(x), 2 * dz * z
        return (dparams, dbatch["x"], dbatch["y"]), want

    assert_close(*run(params, batch))


def test_activations_may_be_returned_and_looped_over(x64, quick_compile):
    def fun(xs, w):
        return lax.scan(lambda c, x: (jnp.tanh(c @ w + x), None), xs[0], xs)[0], xs

    variants = fun, *(compress_residuals(fun, rule, activations=(0, 1)) for rule in RULES)
    want, *others = jax.jit(lambda *args: [output_and_gradient(f, args) for f in variants])(
        normal(0, 3, 6, 8), normal(1, 8, 8)
    )
    for got in others:
        assert_close(got, want)


@pytest.mark.parametrize("wrong", [-1, True, "x", [0, 1.5], None])
def test_what_is_no_position_is_named(wrong):
    with pytest.raises(TypeError):
        compress_residuals(two_products, Q4, activations=wrong)


def test_a_position_that_is_not_there_is_named():
    wrapped = compress_residuals(two_products, Q4, activations=2)
    with pytest.raises(ValueError, match="position 2, but the function was called with 2"):
        wrapped(normal(0, 6, 8), normal(1, 8, 8))


# Randomness.


def random_gradient(key, fun, *args):
    return jax.grad(loss_of(compress_residuals(fun, RANDOM, key=key)))(*args)


def loop_in_loop(x, ws):
    return lax.scan(lambda c, _: (scanned(tanh_layer)(c, ws), None), x, None, 2)[0]


@pytest.mark.parametrize(
    ("fun", "args"),
    [(two_products, ONE), (scanned(tanh_layer), LAYERS), (loop_in_loop, LAYERS)],
    ids=["once", "loop", "loop in a loop"],
)
def test_the_key_makes_the_gradient(quick_compile, fun, args):
    run = jax.jit(lambda key: random_gradient(key, fun, *args))
    a, b, c = run(KEY), run(KEY), run(jax.random.key(6))
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, c)


@pytest.mark.parametrize(
    ("fun", "args"), [(two_products, ONE), (scanned(tanh_layer), LAYERS)], ids=["once", "loop"]
)
def test_a_missing_key_is_named(fun, args):
    with pytest.raises(ValueError, match=r"rounding='stochastic'\) draws random.*pass `key`"):
        random_gradient(None, fun, *args)


def test_a_key_of_another_name_is_told():
    with pytest.raises(
        ValueError, match=r"`key` of compress_residuals has no entry for '.*'other'"
    ):
        random_gradient({"other": KEY}, two_products, *ONE)
    with pytest.raises(TypeError, match=r"`key` of compress_residuals must be a jax.random key"):
        compress_residuals(two_products, RANDOM, key=3)


def test_what_is_passed_by_name_may_be_static_and_has_gradients(x64, quick_compile):
    def fun(x, *, w, train):
        return jnp.sin(x @ w) if train else x

    x, w = normal(0, 6, 8), normal(1, 8, 8)
    got = jax.grad(lambda w: total(compress_residuals(fun, Exact())(x, w=w, train=True)))(w)
    assert_close(got, jax.grad(lambda w: total(fun(x, w=w, train=True)))(w))


def codes_of(fun, *args) -> list[np.ndarray]:
    """Returns the bytes that are kept, one array a code."""

    @jax.jit
    def run(*args):
        wrapped = compress_residuals(fun, RANDOM, key=KEY, rebuild=False)
        leaves = jax.tree.leaves(jax.vjp(wrapped, *args)[1])
        return [leaf for leaf in leaves if leaf.dtype == jnp.uint8]

    return [np.asarray(leaf) for leaf in run(*args)]


def test_each_array_and_each_iteration_draws_its_own_numbers(quick_compile):
    def fun(x, ws):
        stacked = lax.scan(lambda c, w: (c, jnp.exp(x @ w)), x, ws)
        return stacked, jnp.exp(x @ ws[0]), jnp.exp(x @ ws[0])

    x, w = ONE
    one, other, stack = sorted(codes_of(fun, x, jnp.stack([w] * 3)), key=lambda code: code.ndim)
    # Of the same array, five times.
    assert len({code.tobytes() for code in (*stack, one, other)}) == 5


def test_two_loops_draw_different_numbers(quick_compile):
    fun = lambda x, ws: [scanned(tanh_layer)(x, ws) for _ in range(2)]  # noqa: E731
    codes = codes_of(fun, *LAYERS)
    half = len(codes) // 2  # Of the same arrays in both loops.
    assert half > 1
    assert len({code.tobytes() for code in codes}) == 2 * half


def test_stochastic_rounding_is_unbiased(quick_compile):
    fun = lambda x, w, v: (x @ w) @ v  # noqa: E731
    args = normal(0, 6, 8), normal(1, 8, 8), normal(2, 8, 4)
    g = normal(3, 6, 4)

    def draw(key):
        return jax.vjp(compress_residuals(fun, RANDOM, key=key), *args)[1](g)[2]

    draws = jax.jit(jax.vmap(draw))(jax.random.split(KEY, 600))
    deviation = jnp.std(draws, 0) / math.sqrt(600)
    # The mean of 600 is normal; one of 32 entries exceeds five deviations once in 50,000 runs.
    exact = (args[0] @ args[1]).T @ g
    assert np.all(np.abs(jnp.mean(draws, 0) - exact) < 5 * deviation + 1e-5)


def test_keys_may_be_given_by_name(quick_compile):
    def fun(x, ws):
        h = jnp.sin(checkpoint_name(x @ ws[0], "first"))
        return scanned(lambda x, w: jnp.tanh(checkpoint_name(x @ w, "second")))(h, ws)

    @jax.jit
    def run(keys):
        return jax.grad(loss_of(compress_residuals(fun, RANDOM, key=keys)), 1)(*LAYERS)

    names = "first", "second", "carry"
    keys = dict(zip(names, jax.random.split(KEY, 3), strict=True))
    want, other = run(keys), jax.random.key(1)
    np.testing.assert_array_equal(run(dict(reversed(keys.items()))), want)
    for name in names:
        assert not np.array_equal(run({**keys, name: other}), want)
    with pytest.raises(ValueError, match=r"`key` of .* has no entry for 'carry'"):
        run({"first": other, "second": other})


# Under transformations of JAX.


class Narrow(actjax.Codec):
    """Half precision: a codec of few operations, by someone else."""

    biased, needs_key = True, False

    def encode(self, x, key=None):
        return x.astype("bfloat16")

    def decode(self, code):
        return code.astype("float32")

    def weight_grad(self, code, dz):
        raise AssertionError("Nobody asked for products.")

    def stored_bytes(self, shape, dtype):
        return 2 * math.prod(shape)


def test_under_jit_it_is_the_same(quick_compile):
    fun = compress_residuals(lambda x, w: jnp.exp(x @ w), Narrow())
    args = ONE[0], ONE[1] / 3

    def gradient(x, w):
        y, pullback = jax.vjp(fun, x, w)
        return pullback(y)

    y = jnp.exp(args[0] @ args[1])
    dh = y * y.astype("bfloat16").astype("float32")
    for run in (gradient, jax.jit(gradient)):
        # Float32, sums of tens of terms; the product may round to another number of 8 bits.
        assert_close(run(*args), (dh @ args[1].T, args[0].T @ dh), 2**-9)
    (row,) = rows_kept(fun, *args)
    assert (row.codec, row.stored_bytes) == ("Narrow()", 2 * 48)


def test_vmap_is_one_at_a_time(x64, quick_compile):
    fun = compress_residuals(two_products, Q4)

    @jax.jit
    def run(xs, w):
        each = [jax.grad(loss_of(fun), (0, 1))(x, w) for x in xs]
        dxs, dws = (jnp.stack(leaves) for leaves in zip(*each, strict=True))
        within = jax.grad(loss_of(jax.vmap(fun, (0, None))), (0, 1))(xs, w)
        around = jax.vmap(jax.grad(loss_of(fun), (0, 1)), (0, None))(xs, w)
        return [(within, (dxs, dws.sum(0))), (around, (dxs, dws))]

    for got, want in run(normal(0, 3, 6, 8), normal(1, 8, 8)):
        assert_close(got, want)


def test_collectives_of_a_named_axis(x64, quick_compile):
    fun = lambda x: jnp.sin(lax.pmean(jnp.exp(x), "i") * jnp.tanh(x))  # noqa: E731
    variants = compress_residuals(fun, Exact()), fun
    run = jax.jit(lambda xs: [jax.vmap(jax.grad(loss_of(f)), axis_name="i")(xs) for f in variants])
    assert_close(*run(normal(0, 3, 6, 8)))


def test_a_scan_around_it_keeps_codes_alone(x64, quick_compile):
    layer = compress_residuals(tanh_layer, Q4, activations=0)
    # The carry dies in the loop that is entered, and here by `activations`.
    variants = scanned(layer), compress_residuals(scanned(tanh_layer), Q4)
    args = normal(0, 6, 8), normal(1, 3, 8, 8) / 3
    run = jax.jit(lambda *args: [jax.grad(loss_of(f), (0, 1))(*args) for f in variants])
    assert_close(*run(*args))
    codes = 2 * 3 * Q4.stored_bytes((6, 8), "float64")
    assert [held_bytes(f, *args) for f in variants] == [codes, codes]


def test_a_scan_around_a_loop_passes_keys(quick_compile):
    def layer(c, key):
        return compress_residuals(scanned(tanh_layer), RANDOM, key=key)(c, LAYERS[1])

    def run(key):
        return jax.grad(loss_of(scanned(layer)))(LAYERS[0], jax.random.split(key, 2))

    jax.eval_shape(run, KEY)


def test_checkpoint_around_it_keeps_arguments_alone(x64, quick_compile):
    fun = compress_residuals(two_products, Q4)
    variants = jax.checkpoint(fun), fun
    args = normal(0, 6, 8), normal(1, 8, 8)
    assert_close(*jax.jit(lambda *args: [jax.grad(loss_of(f))(*args) for f in variants])(*args))
    assert held_bytes(variants[0], *args) == 0


def test_what_a_checkpoint_within_saves_is_decided_on(x64, quick_compile):
    fun = scanned(jax.checkpoint(two_products))
    args = normal(0, 6, 8), normal(1, 3, 8, 8) / 3
    assert [c.name for c in asked(fun, *args)] == ["carry"]
    variants = compress_residuals(fun, Q4), scanned(actjax.checkpoint(two_products, Q4))
    assert_close(*jax.jit(lambda *args: [jax.grad(loss_of(f))(*args) for f in variants])(*args))


def temporary_bytes(fun, layers: int) -> int:
    shapes = [(256, 64), (layers, 64, 128), (layers, 128, 64)]
    x, w, v = (jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    lowered = jax.jit(jax.grad(lambda x, ws: jnp.sum(fun(x, ws) ** 2))).lower(x, (w, v))
    return lowered.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpoint"])
def test_the_compiled_loop_holds_codes_and_no_stack_of_floats(checkpointed):
    def layer(x, weights):
        w, v = weights
        return jax.nn.gelu(x @ w) @ v

    codec = Quantized(4, group=64)
    fun = scanned(jax.checkpoint(layer) if checkpointed else layer)
    fun = compress_residuals(fun, codec)
    growth = (temporary_bytes(fun, 12) - temporary_bytes(fun, 4)) / 8
    # The gradient is by x alone, so that of the carry nothing is read but by a recomputation.
    codes = codec.stored_bytes((256, 64 if checkpointed else 128), "float32")
    assert codes <= growth <= 1.05 * codes  # A twentieth for alignment; floats are 7 times more.


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_data_may_be_sharded(quick_compile, kind):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    x, ws = normal(0, 8, 8), LAYERS[1]
    gradient = jax.jit(jax.grad(loss_of(compress_residuals(scanned(tanh_layer), Q4)), (0, 1)))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, NamedSharding(mesh, P("data")))
        weights = jax.device_put(ws, NamedSharding(mesh, P()))
        compiled = gradient.lower(sharded, weights).compile()
        got = compiled(sharded, weights)
    assert "all-gather" not in compiled.as_text()  # Each device encodes its own rows.
    assert got[0].sharding.shard_shape((8, 8)) == (2, 8)
    assert_close(jax.device_get(got), jax.device_get(gradient(x, ws)), 1e-5)  # Float32.


@pytest.mark.parametrize("where", ["within", "around"])
def test_shard_map(quick_compile, where):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x, w = normal(0, 8, 8), ONE[1]
    rows, whole = P("data"), P()

    def sharded(fun, out_specs):
        return jax.shard_map(fun, mesh=mesh, in_specs=(rows, whole), out_specs=out_specs)

    if where == "within":
        fun = compress_residuals(sharded(two_products, rows), Exact())
        run = jax.grad(loss_of(fun), (0, 1))
    else:
        fun = compress_residuals(two_products, Exact())
        local = jax.grad(lambda x, w: lax.psum(total(fun(x, w)), "data"), (0, 1))
        run = sharded(local, (rows, whole))
    want = jax.jit(jax.grad(loss_of(two_products), (0, 1)))(x, w)
    assert_close(jax.device_get(jax.jit(run)(x, w)), jax.device_get(want), 1e-5)  # Float32.


def test_scales_of_a_calibration_may_be_traced(quick_compile):
    def fun(x, w):
        return jnp.sin(x @ w)

    @jax.jit
    def run(x, w):
        calibrated = Calibrated.fit(Quantized(8, scaling="channel"), x @ w)
        variants = [compress_residuals(fun, rule) for rule in (calibrated, lambda _: calibrated)]
        return [jax.grad(loss_of(f))(x, w) for f in (*variants, fun)]

    one, other, want = run(*ONE)
    np.testing.assert_array_equal(one, other)
    # Steps of 2 / 255 of a channel's range, of 12 at most: errors of 0.05 of cosines.
    assert 0 < relative_error(one, want) < 0.05


def second_derivatives(fun, *args):
    first = jax.grad(loss_of(fun))
    return jax.grad(lambda *args: total(first(*args)))(*args)


def test_second_derivatives_are_right_without_a_lossy_codec(x64, quick_compile):
    variants = two_products, *(compress_residuals(two_products, rule) for rule in RULES)
    want, *others = jax.jit(lambda *args: [second_derivatives(f, *args) for f in variants])(
        normal(0, 6, 8), normal(1, 8, 8) / 3
    )
    for got in others:
        assert_close(got, want, 1e-11)  # Of products of four matrices.


def test_second_derivatives_obey_rules_of_their_own(x64, quick_compile):
    @jax.custom_jvp
    def root(x):
        return jnp.sqrt(x)

    @root.defjvp
    def _(primals, tangents):
        (x,), (dx,) = primals, tangents
        safe = jnp.where(x > 0, root(jnp.where(x > 0, x, 1)), 1)
        return root(x), dx * jnp.where(x > 0, 0.5 / safe, 0)

    x = jnp.array([0.0, 1.0, 2.0])
    want = second_derivatives(root, x)
    assert np.all(np.isfinite(want))
    assert_close(second_derivatives(compress_residuals(root, Exact()), x), want)


def test_second_derivatives_through_codes_are_right_or_refused(quick_compile):
    args = ONE[0], ONE[1] / 3
    wrapped = compress_residuals(two_products, Quantized(8, group=8))
    try:
        got = jax.jit(functools.partial(second_derivatives, wrapped))(*args)
    except (TypeError, ValueError, NotImplementedError):
        return
    # 8 bits are a relative error of about 1/255 of each array: a tenth is 25 times that.
    want = jax.jit(functools.partial(second_derivatives, two_products))(*args)
    assert relative_error(got, want) < 0.1


def test_forward_mode_is_refused():
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(compress_residuals(two_products, Q4), ONE, ONE)


# Code that nobody here wrote. Bounds are generous: 4 bits in groups of 16 are steps of 1/15 of the
# range of a group, a mean error of a tenth of its deviation; a quarter is room for a few layers.


def filled(shapes):
    """Returns parameters without the compilation of their initialisation."""
    leaves, treedef = jax.tree.flatten(shapes)
    scaled = [normal(i, *x.shape) / 4 for i, x in enumerate(leaves)]
    return jax.tree.unflatten(treedef, scaled)


class Perceptron(linen.Module):
    """Of flax.linen."""

    @linen.compact
    def __call__(self, x):
        for width in (64, 64):
            x = linen.LayerNorm()(linen.gelu(linen.Dense(width)(x)))
        return linen.Dense(10)(x)


def test_a_perceptron_of_flax(quick_compile):
    model, x, labels = Perceptron(), normal(0, 32, 16), jnp.arange(32) % 10
    codec = Quantized(4, group=16)
    params = filled(jax.eval_shape(model.init, KEY, x))
    wrapped = compress_residuals(model.apply, codec)

    def loss(apply, params):
        return optax.softmax_cross_entropy_with_integer_labels(apply(params, x), labels).mean()

    fs = [functools.partial(loss, f) for f in (wrapped, model.apply)]
    assert relative_error(*jax.jit(lambda params: [jax.grad(f)(params) for f in fs])(params)) < 0.25
    # Two hidden layers, an array each; autodiff keeps more than five.
    # Beside the codes, of each norm two bits a token: where its variance was clipped at zero.
    codes = 2 * codec.stored_bytes((32, 64), "float32")
    assert held_bytes(wrapped, params, x) == codes + 2 * 2 * 32 // 8
    assert held_bytes(model.apply, params, x) > 10 * 32 * 64 * 4
    assert repr(codec) in str(explain(wrapped, params, x))


class Block(nnx.Module):
    """A transformer block of flax.nnx."""

    def __init__(self, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(16, rngs=rngs), nnx.LayerNorm(16, rngs=rngs)])
        self.attention = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


def test_a_transformer_block_of_nnx(quick_compile):
    x, codec = normal(3, 2, 12, 16), Quantized(4, group=16)
    graph, shapes = nnx.split(nnx.eval_shape(lambda: Block(nnx.Rngs(0))))
    params = filled(shapes)
    fun = lambda params, x: nnx.merge(graph, params)(x)  # noqa: E731
    wrapped = compress_residuals(fun, codec)
    variants = wrapped, fun
    got, want = jax.jit(lambda *args: [jax.grad(loss_of(f))(*args) for f in variants])(params, x)
    assert relative_error(got, want) < 0.25
    assert held_bytes(wrapped, params, x) < held_bytes(fun, params, x) / 10
    table = str(explain(wrapped, params, x))
    assert repr(codec) in table
    assert "add: " in table
    # A module may be the function: it closes over its parameters.
    block = nnx.merge(graph, params)
    assert held_bytes(compress_residuals(block, codec), x) < held_bytes(block, x) / 10


@pytest.mark.parametrize("segments", [False, True])
def test_weights_of_attention_made_of_codes_add_up_to_one(segments, quick_compile):
    """Of any weights that do, the gradients of v add up over keys to those of the output."""
    x, w, v = normal(0, 1, 12, 16), normal(1, 2, 16, 16), normal(2, 1, 12, 2, 8)
    dout = normal(3, 1, 12, 2, 8)
    options = {"segments": jnp.arange(12)[None] // 5} if segments else {}

    def fun(w, v):
        q, k = (checkpoint_name(x @ w[i], "qk"[i]).reshape(v.shape) for i in range(2))
        # Scores of tens, as those of trained models: levels of 2 bits are that far apart, too.
        return actjax.attention(q, k, v, recompute=True, **options)

    rule = lambda kept: Quantized(2, group=8) if kept.name in ("q", "k") else None  # noqa: E731
    got = jax.vjp(compress_residuals(fun, rule), w, v)[1](dout)[1]
    # Codes are read at all; sums of 12 terms of size 1 in float32.
    assert np.abs(got - jax.vjp(fun, w, v)[1](dout)[1]).max() > 0.1
    np.testing.assert_allclose(got.sum(1), dout.sum(1), rtol=0, atol=1e-5)


def test_attention_of_jax(quick_compile):
    def fun(x, w):
        q, k, v = (x @ part for part in w)
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    codec, x, w = Quantized(8, group=8), normal(0, 2, 12, 4, 8), normal(1, 3, 8, 8) / 3
    wrapped = compress_residuals(fun, codec)
    variants = wrapped, fun
    got, want = jax.jit(lambda *args: [jax.grad(loss_of(f), (0, 1))(*args) for f in variants])(x, w)
    assert relative_error(got, want) < 0.02  # 8 bits: 17 times below a quarter.
    codes = 3 * codec.stored_bytes(x.shape, "float32")
    codes += codec.stored_bytes((2, 4, 12, 12), "float32")
    assert held_bytes(wrapped, x, w) <= codes
    assert held_bytes(fun, x, w) > 3.5 * codes
    assert repr(codec) in {r.codec for r in explain(wrapped, x, w).residuals}


def test_a_loss_of_optax(quick_compile):
    labels = jnp.arange(32) % 10

    def fun(w, x):
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()

    codec, w, x = Quantized(8, group=16), normal(1, 16, 48), normal(0, 32, 16)
    wrapped = compress_residuals(fun, codec)
    # Probabilities err by the step of 1/255 of a range of about 16: a sixteenth of themselves.
    assert relative_error(*jax.jit(lambda w: [jax.grad(f)(w, x) for f in (wrapped, fun)])(w)) < 0.06
    logits = codec.stored_bytes((32, 48), "float32")
    assert logits <= held_bytes(wrapped, w, x) <= logits + 8 * 32  # A few integers a row.
    assert repr(codec) in str(explain(wrapped, w, x))


def test_gradients_in_factors_stay_so(quick_compile):
    def loss(params, x):
        svd = RandomizedSVD(2)
        h = jnp.sin(actjax.linear(x, params["a"], codec=svd, key=KEY))
        return total(actjax.linear(h, params["b"], codec=svd, key=KEY))

    @jax.jit
    def run(params, x):
        losses = compress_residuals(loss, leave), loss
        return [actjax.value_and_grad(f)(params, x)[1] for f in losses]

    got, want = run({"a": normal(1, 8, 8), "b": normal(2, 8, 8)}, normal(0, 16, 8))
    for name in want:
        assert_close(got[name].dense(), want[name].dense(), 1e-5)  # Float32.
