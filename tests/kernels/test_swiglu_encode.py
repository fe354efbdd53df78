"""Tests of `swiglu_encode`: the value and the codes of SwiGLU, of one kernel or of its parts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from kernels.kernel_cases import TINY, f64, normal

import actjax
from actjax import Quantized
from actjax.codecs.quantized import QuantizeInputs
from actjax.kernels.quantize.api import quantize
from actjax.kernels.swiglu_encode.api import swiglu_encode

GATE, UP = Quantized(4, group=16, scale_dtype="float32"), Quantized(6, group=16)
FORMATS = GATE.format, UP.format
X, Y = normal(4, 32), normal(4, 32, seed=1)


def encoded(gate, up, *, features=None, implementation=None, formats=FORMATS):
    return swiglu_encode(
        *map(QuantizeInputs, (gate, up)),
        formats=formats, features=features, implementation=implementation,
    )  # fmt: skip


def assert_equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_value_and_codes():
    value, *codes = jax.jit(functools.partial(encoded, features=29))(X, Y)
    want = f64(X) / (1 + np.exp(-f64(X))) * f64(Y)
    want[:, 29:] = 0
    # The exponential of a rounded number, and four operations.
    np.testing.assert_array_less(abs(value - want), (8 + 2 * abs(X)) * TINY * abs(want) + 1e-30)
    both = zip((X, Y), FORMATS, strict=True)
    alone = [jax.jit(functools.partial(quantize, format=f))(QuantizeInputs(x)) for x, f in both]
    assert_equal(codes, alone)


def test_where_no_program_does_all_of_it_its_parts_have_theirs():
    taken = Quantized(4, group=128, levels="normal", rotate=True).format
    formats = taken, dataclasses.replace(taken, group=64)
    run = functools.partial(encoded, formats=formats)
    traced = jax.jit(run).trace(normal(1, 8, 128), normal(1, 8, 128))
    for platform, count in {"cpu": 0, "tpu": 1}.items():
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count("tpu_custom_call") == count, platform


def test_transformations():
    both = np.stack([X, 2 * X]), np.stack([Y, Y])
    got = jax.jit(jax.vmap(encoded))(*both)
    each = [jax.jit(encoded)(*pair) for pair in zip(*both, strict=True)]
    assert_equal(got, jax.tree.map(lambda *x: np.stack(x), *each))
    # The value has derivatives, the codes none.
    dx = jax.jit(jax.grad(lambda x: jnp.sum(encoded(x, Y)[0])))(X)
    sigmoid = 1 / (1 + np.exp(-f64(X)))
    slope = f64(Y) * sigmoid * (1 + f64(X) * (1 - sigmoid))
    np.testing.assert_allclose(dx, slope, rtol=64 * TINY, atol=64 * TINY)


def test_each_device_encodes_its_part():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    place = NamedSharding(mesh, PartitionSpec("data", "tensor"))
    placed = [jax.device_put(x, place) for x in (X, Y)]
    run = functools.partial(encoded, features=29)
    with jax.set_mesh(mesh):
        got = jax.jit(lambda *args: run(*args))(*placed)
    assert got[1].planes[0].sharding.shard_shape(got[1].planes[0].shape) == (2, 8)
    assert_equal(got, jax.jit(run)(X, Y))


@pytest.mark.parametrize(
    "codec", [Quantized(4, 16, balance=True), (Quantized(3, 16), actjax.Exact())]
)
def test_an_operator_holds_the_codes_that_its_codecs_make(codec):
    """With a codec of another kind beside it, nothing is encoded by the kernel."""

    def loss(gate, up):
        return jnp.vdot(actjax.swiglu(gate, up, codec=codec), Y)

    gate, up = codec if isinstance(codec, tuple) else (codec, codec)

    @jax.jit
    def exact():
        decoded = gate.decode(gate.encode(X)), up.decode(up.encode(Y))
        value = lambda gate, up: jnp.vdot(actjax.swiglu(gate, up), Y)  # noqa: E731
        return jax.grad(value, argnums=(0, 1))(*decoded)

    for a, b in zip(jax.jit(jax.grad(loss, argnums=(0, 1)))(X, Y), exact(), strict=True):
        np.testing.assert_allclose(a, b, rtol=64 * TINY, atol=64 * TINY)
    assert "gate" in {residual.name for residual in actjax.explain(loss, X, Y).residuals}


class Doubled(Quantized):
    """A codec of a user, in the form of another."""

    def encode(self, x, key=None):
        return super().encode(2 * x, key)


def test_a_subclass_encodes_in_its_own_way():
    @jax.jit
    def gradients():
        loss = lambda gate, up, codec: jnp.vdot(actjax.swiglu(gate, up, codec=codec), Y)  # noqa: E731
        own = jax.grad(loss, argnums=(0, 1))(X, Y, Doubled(4, 16))
        return own, jax.grad(loss, argnums=(0, 1))(2 * X, 2 * Y, Quantized(4, 16))

    assert_equal(*gradients())


def test_each_activation_has_its_key():
    dither, key = Quantized(2, 16, rounding="dither"), jax.random.key(3)

    @jax.jit
    def gradient(x):
        loss = lambda gate, up: jnp.sum(actjax.swiglu(gate, up, codec=dither, key=key))  # noqa: E731
        return jax.grad(loss, argnums=(0, 1))(x, x)

    @jax.jit
    def exact(x):
        decoded = [dither.decode(dither.encode(x, jax.random.fold_in(key, i))) for i in (0, 1)]
        loss = lambda gate, up: jnp.sum(actjax.swiglu(gate, up))  # noqa: E731
        return jax.grad(loss, argnums=(0, 1))(*decoded)

    for a, b in zip(gradient(X), exact(X), strict=True):
        np.testing.assert_allclose(a, b, rtol=64 * TINY, atol=64 * TINY)


def test_wrong_arguments_are_named():
    rows = [
        ((X, Y[:2]), {}, ValueError, "`up` of swiglu_encode"),
        ((X, Y.astype("float16")), {}, ValueError, "`up` of swiglu_encode must be float32, as"),
        ((X.astype("int32"), Y), {}, TypeError, "`x` of swiglu_encode"),
        ((X, Y), {"features": 33}, ValueError, "features"),
    ]
    for args, options, error, message in rows:
        with pytest.raises(error, match=message):
            encoded(*args, **options)
    with pytest.raises(ValueError, match="`gate` must have features"):
        actjax.swiglu(np.float32(1), np.float32(1))
