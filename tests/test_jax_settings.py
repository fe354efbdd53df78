"""Every public function under the settings of JAX in which functions of jax.numpy and optax work.

It takes 65 s of processor time, most of it tracing: a function is traced anew under each setting.
"""

import contextlib
import functools
import gc
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from ops.helpers import KEY, normal, tables

import actjax
from actjax import Exact, PointApproximation, Quantized, RandomizedSVD, RandomProjection, optim
from actjax import equinox as coded_equinox
from actjax.flax import linen as coded_linen
from actjax.flax import replace

X, W, BIAS, SCALE = normal(0, 2, 8, 16), normal(1, 16, 8), normal(2, 8), normal(3, 16)
HEADS = normal(4, 2, 8, 2, 8), normal(5, 2, 8, 1, 8), normal(6, 2, 8, 1, 8)
LABELS = np.arange(16, dtype=np.int32).reshape(2, 8) % 8
PARAMS = {"layers": {"w": normal(7, 2, 16, 16), "scale": normal(8, 2, 16)}, "head": W}
Q4 = Quantized(4, group=16)
CODECS = {
    "Exact": Exact(),
    "Quantized": Quantized(4, group=16, rounding="stochastic"),
    "balance": Quantized(4, group=16, rotate=True, balance=True, levels="normal"),
    "dither": Quantized(3, group=16, rounding="dither", outlier_fraction=0.125),
    "channel": Quantized(2, scaling="channel", rotate=True),
    "RandomProjection": RandomProjection(4),
    "RandomizedSVD": RandomizedSVD(3),
    "PointApproximation": PointApproximation(points=2),
}


def differentiated(fun):
    """Returns a function with the outputs and the gradients of `fun`."""

    def run(*args):
        y, pull = jax.vjp(fun, *args)
        return y, pull(jax.tree.map(jnp.cos, y))

    return run


def operator(fun, *args, **options):
    return differentiated(functools.partial(fun, **options)), args


def layer(h, block):
    h = actjax.rms_norm(h, block["scale"], codec=Q4)
    return h + jnp.tanh(actjax.linear(h, block["w"], codec=Q4))


def loss(params, x):
    h = jax.lax.scan(lambda h, block: (layer(h, block), None), x, params["layers"])[0]
    return actjax.cross_entropy(h, params["head"], LABELS)


def mlp(params, x):
    return jnp.mean(jnp.sin(jnp.tanh(x @ params["w"]) @ params["out"]))


MLP = {"w": normal(9, 16, 64), "out": normal(10, 64, 16)}


def projected(params, x):
    h = actjax.linear(x, params["w"], codec=RandomProjection(4), key=KEY)
    return actjax.cross_entropy(h, params["head"], LABELS)


FACTORED = {"w": PARAMS["layers"]["w"][0], "head": W}


def factored(params, x):
    value, grads = actjax.value_and_grad(projected)(params, x)
    clipped, norm = actjax.clip_by_global_norm(grads, 0.5)
    return value, clipped, norm, actjax.global_norm(grads)


def accumulated(params, xs):
    return actjax.accumulate(actjax.value_and_grad(projected), params, xs)


def in_bases(params, x):
    groups = actjax.input_groups(projected, params, x)
    bases = {name: jnp.eye(16, 3) for name in set(groups.values())}
    held = actjax.with_bases(lambda params: projected(params, x), bases)
    return actjax.value_and_grad(projected, bases=bases)(params, x), jax.grad(held)(params)


def step(tx, params, grads):
    return optim.apply(tx, grads, optim.init(tx, params), params, clip=0.5)


def transform(tx, dtype="float32"):
    params, grads = (jax.tree.map(lambda x: x.astype(dtype), t) for t in (PARAMS, PARAMS))
    return functools.partial(step, tx), (params, jax.tree.map(jnp.sin, grads))


def clipped(params, grads):
    tx = optim.clip_by_global_norm(0.5)
    return tx.update(grads, tx.init(params), params)


def in_backward(params, x):
    update = optim.in_backward(
        lambda params, x: x,
        lambda block, h, x, key: layer(h, block),
        lambda params, h, x: actjax.cross_entropy(h, params["head"], LABELS),
        optim.scale_by_adam_8bit(min_size=64, block=16),
        clip=0.5,
    )
    return update.step(params, update.init(params), x, jax.random.split(KEY, 2))


def redrawn(params):
    tx = optim.subspace(optax.scale_by_adam(), 2, source="random")
    return optim.redraw(tx, optim.init(tx, params), params)


def module(x):
    model = replace(nnx.MultiHeadAttention(2, 16, decode=False, rngs=nnx.Rngs(0)), Q4)
    model.norm = replace(nnx.LayerNorm(16, rngs=nnx.Rngs(0)), Q4)
    graph, state = nnx.split(model, nnx.Param)[0], nnx.state(model, nnx.Param)

    def fun(state, x):
        model = nnx.merge(graph, state)
        return model(model.norm(x))

    return differentiated(fun), (state, x)


def linen_module(x):
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            h = coded_linen.LayerNorm(codec=Q4)(x)
            return coded_linen.Dense(16, codec=Q4)(h) + coded_linen.RMSNorm(codec=Q4)(x)

    model = Model()
    return operator(model.apply, model.init(KEY, x), x)


def equinox_module(x):
    class Model(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        norms: tuple[eqx.nn.LayerNorm, eqx.nn.RMSNorm]

        def __call__(self, x):
            first, second = map(jax.vmap, self.norms)
            h = first(x)
            return self.attention(h, h, h) + second(x)

    norms = eqx.nn.LayerNorm(16), eqx.nn.RMSNorm(16)
    model = coded_equinox.replace(Model(eqx.nn.MultiheadAttention(2, 16, key=KEY), norms), Q4)
    arrays, rest = eqx.partition(model, eqx.is_array)
    return operator(lambda arrays, x: eqx.combine(arrays, rest)(x), arrays, x)


RMSPROP = optax.rmsprop(1e-2, momentum=0.9)
"""A transform with both kinds of moments that works without promotion of dtypes, as optax's Adam
does not."""
SMALL = {"min_size": 64}
QKV = {"codec": (CODECS["Quantized"], Q4, Q4), "key": KEY, "rope": tables(8, 8)}
TRACED = {
    **{
        f"linear: {name}": operator(actjax.linear, X, W, codec=codec, key=KEY)
        for name, codec in CODECS.items()
    },
    "linear: biases": operator(
        lambda x, *ws: actjax.linear(x, ws[:2], bias=(ws[2], None), codec=Q4), X, W, W, BIAS
    ),
    "qkv_projection": operator(
        lambda x, *w: actjax.qkv_projection(x, *w[:3], bias=(w[3], None, None), codec=Q4),
        X, W, W, W, BIAS,
    ),
    "norm_linear": operator(actjax.norm_linear, X, SCALE, W, codec=Q4),
    "gelu_linear": operator(actjax.gelu_linear, X, W, codec=Q4),
    "swiglu_linear": operator(actjax.swiglu_linear, X, X, W, codec=Q4),
    "attention_linear": operator(
        lambda q, k, v, w: actjax.attention_linear(q, k, v, w, **QKV), *HEADS, normal(11, 16, 8)
    ),
    "attention": operator(lambda *qkv: actjax.attention(*qkv, **QKV), *HEADS),
    "attention: dense": operator(
        lambda *qkv: actjax.attention(
            *qkv, **QKV, implementation="dense", segments=LABELS // 4, window=3
        ),
        *HEADS,
    ),
    "swiglu: bfloat16": operator(actjax.swiglu, *[X.astype("bfloat16")] * 2, codec=Q4),
    "rms_norm": operator(actjax.rms_norm, X, SCALE, codec=Q4),
    "layer_norm": operator(actjax.layer_norm, X, SCALE, SCALE, codec=Q4),
    "gelu": operator(actjax.gelu, X, codec=Q4),
    "swiglu": operator(actjax.swiglu, X, X, codec=Q4),
    "conv": operator(actjax.conv, X, normal(12, 3, 16, 4), codec=Q4),
    "embedding": operator(lambda table: actjax.embedding(table, LABELS), W),
    "rope": operator(actjax.rope, HEADS[0], *tables(8, 8)),
    "cross_entropy": operator(
        lambda x, w: actjax.cross_entropy(x, w, LABELS, mask=LABELS > 2, z_loss=1e-3, chunk=5),
        X, W,
    ),
    "token_log_probs": operator(
        lambda x, w: actjax.token_log_probs(x, w, LABELS, codec=Q4, chunk=5), X, W
    ),
    "checkpoint": operator(
        actjax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w.T, Q4), X, W
    ),
    "compress_residuals": operator(actjax.compress_residuals(mlp, Q4), MLP, X),
    "value_and_grad, clip_by_global_norm, global_norm": (factored, (FACTORED, X)),
    "accumulate": (accumulated, (FACTORED, jnp.stack([X, -X]))),
    "input_groups, with_bases": (in_bases, (FACTORED, X)),
    "optim.eight_bit": transform(optim.eight_bit(RMSPROP, block=16, **SMALL)),
    "optim.scale_by_adam_8bit": transform(optim.scale_by_adam_8bit(block=16, **SMALL)),
    "optim.four_bit": transform(optim.four_bit(RMSPROP, group=16, **SMALL)),
    "optim.scale_by_adam_4bit": transform(optim.scale_by_adam_4bit(group=16, **SMALL)),
    "optim.scale_by_factored_adam": transform(optim.scale_by_factored_adam()),
    "optim.scale_by_factored_adam_4bit": transform(
        optim.scale_by_factored_adam_4bit(group=16, **SMALL)
    ),
    "optim.subspace": transform(
        optim.subspace(optax.scale_by_rms(), 2, remainder=optim.ScaledRemainder())
    ),
    "optim.stochastic_rounding": transform(optim.stochastic_rounding(RMSPROP), "bfloat16"),
    "optim.clip_by_global_norm": (clipped, (PARAMS, PARAMS)),
    "optim.apply, optim.init": transform(RMSPROP),
    "optim.in_backward": (in_backward, (PARAMS, X)),
    "optim.redraw": (redrawn, (PARAMS,)),
    "flax.nnx": module(X),
    "flax.linen": linen_module(X),
    "equinox": equinox_module(X[0]),
}  # fmt: skip
"""Functions of arrays, which may be jitted, and their arguments."""


def choices():
    """Returns what functions that measure or describe a function say of it."""
    small = actjax.compress(mlp, error=0.05, verbose=False).measure(MLP, X)

    def gradient(codecs, keys, params, x):
        return jax.grad(actjax.compress_residuals(mlp, codecs["h"], key=keys["h"]))(params, x)

    sensitivity = actjax.sensitivity(gradient, {"h": Q4}, KEY, MLP, X, samples=1)
    bits = actjax.allocate_bits(sensitivity, {"h": 16}, 4)
    return (
        len(small.choice.tried),
        actjax.explain(mlp, MLP, X).stored_bytes,
        actjax.sampling_variance([MLP, jax.tree.map(jnp.sin, MLP)]),
        actjax.compression_variance(sensitivity, bits) > 0,
    )


MEASURING = (
    *("compress", "explain", "sensitivity", "sampling_variance", "allocate_bits"),
    "compression_variance",
)
"""The functions of `choices`, which run as Python."""
ARRAYS_ON_DEVICES = ("optim.to_host",)
"""Functions that move arrays and compute nothing."""
LAYERS = ("flax.nnx", "flax.linen", "equinox")


def test_the_table_has_every_public_function():
    public = {
        prefix + name
        for prefix, module in {"": actjax, "optim.": optim}.items()
        for name, value in vars(module).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    named = {name for key in TRACED for name in key.partition(":")[0].split(", ")}
    assert {*named, *MEASURING, *ARRAYS_ON_DEVICES} == {*public, *LAYERS}


def traced(fun, args):
    """Returns the program of a function, traced anew, and the shapes of its results."""
    program = jax.make_jaxpr(lambda *args: fun(*args))(*args)
    return {"program": str(program), "shapes": [x.shape for x in program.out_avals]}


def values(fun, args):
    return [np.float64(x) for x in jax.tree.leaves(jax.jit(lambda *args: fun(*args))(*args))]


@functools.cache
def plain(look, key):
    return look(*TRACED[key])


@functools.cache
def plain_choices():
    return choices()


@contextlib.contextmanager
def noting(failures, key):
    """Context that adds an error to a dictionary, so that a test names all functions that fail."""
    try:
        yield
    except Exception as error:
        failures[key] = f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def forbidding():
    """All settings that only forbid something, at once: a function is traced anew under each."""
    gc.freeze()  # Leaks are searched among all objects at every trace: not those of other tests.
    with (
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.checking_leaks(),
    ):
        yield


# With what is compared: a setting that only forbids something changes no program.
SETTINGS = {
    "rank promotion, dtype promotion, leaks": (forbidding, "program"),
    "disable_jit": (jax.disable_jit, "shapes"),
    "enable_x64": (lambda: jax.enable_x64(True), "shapes"),
    "debug_nans": (lambda: jax.debug_nans(True), "shapes"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_functions_are_traced_and_measured(name):
    (setting, what), failures = SETTINGS[name], {}
    # Results are checked for NaN where a program runs.
    for key, case in TRACED.items() if name != "debug_nans" else ():
        want = plain(traced, key)[what]
        with noting(failures, key), setting():
            assert traced(*case)[what] == want, "another program"
    want = plain_choices()
    with noting(failures, MEASURING), setting():
        np.testing.assert_allclose(choices(), want, rtol=1e-5)
    assert not failures


EXECUTED = (
    *("linear: Quantized", "norm_linear", "swiglu_linear", "rms_norm", "gelu"),
    *("swiglu", "conv", "rope", "checkpoint", "compress_residuals", "optim.scale_by_adam_8bit"),
)
"""Functions of few operations: without jit each operation is a program."""


@pytest.mark.parametrize("name", ["disable_jit", "enable_x64", "debug_nans"])
def test_functions_have_the_same_values(name):
    setting, failures = SETTINGS[name][0], {}
    for key in EXECUTED:
        want = plain(values, key)
        with noting(failures, key), setting():
            for a, b in zip(values(*TRACED[key]), want, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.max(np.abs(b)))
    assert not failures
