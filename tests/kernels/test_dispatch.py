"""Tests of actjax/kernels/dispatch.py: the choice of an implementation, which changes no result."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from kernels.kernel_cases import TINY, normal, random_code

import actjax
from actjax import Quantized
from actjax.formats.blockwise import blockwise_zeros
from actjax.formats.code import QuantizeInputs
from actjax.kernels.adam_8bit.api import adam_8bit
from actjax.kernels.dequantize.api import dequantize
from actjax.kernels.quantize.api import quantize
from actjax.kernels.rms_norm_backward.api import rms_norm_backward
from actjax.kernels.swiglu_backward.api import swiglu_backward
from train.planning.collectives import bytes_by_kind

CODEC = Quantized(4, group=16, scale_dtype="float32")
X = normal(4, 32)
HALF = jnp.asarray(X, jnp.bfloat16)
CODE = random_code(CODEC, "float32", X.shape)
MU, NU = (blockwise_zeros(X.shape, "float32", unsigned=unsigned) for unsigned in (False, True))


def quantized(*arrays, format=CODEC.format, implementation=None):
    return quantize(QuantizeInputs(*arrays), format=format, implementation=implementation)


# Every kernel with options and arguments.
KERNELS = {
    "quantize": (quantized, (X,)),
    "dequantize": (dequantize, (CODE,)),
    "swiglu_backward": (swiglu_backward, (CODE, CODE, X)),
    "rms_norm_backward": (rms_norm_backward, (CODE, X[0], X)),
    "adam_8bit": (
        functools.partial(adam_8bit, b1=0.9, b2=0.99, eps=1e-8),
        (X, MU, NU, np.ones(2, np.float32)),
    ),
}

ARGUMENTS = {name: args for name, (_, args) in KERNELS.items()}
# Arguments that programs for TPUs take, which need no other package.
AS_LEAN = Quantized(4, group=128, levels="normal", rotate=True, balance=True)
LEAN_CODE = jax.jit(AS_LEAN.encode)(normal(1, 8, 128))
ON_TPU = {
    "dequantize": (LEAN_CODE,),
    "swiglu_backward": (LEAN_CODE, LEAN_CODE, normal(1, 8, 128)),
}
TPU = "tpu_custom_call"
PROGRAMS = 3  # SwiGLU decodes each factor by a program.


def all_kernels(implementation, args):
    """Returns the results of every kernel, by name."""
    functions = {name: function for name, (function, _) in KERNELS.items()}
    return {name: functions[name](*x, implementation=implementation) for name, x in args.items()}


def uses_kernel(function, *args):
    """Returns whether the traced program contains a kernel, which is chosen where it is lowered."""
    return "actjax_kernel" in str(jax.make_jaxpr(function)(*args))


def lowered(function, *args):
    """Returns the text of a program for a TPU, traced anew."""
    traced = jax.jit(lambda *args: function(*args)).trace(*args)
    return traced.lower(lowering_platforms=("tpu",)).as_text()


def assert_equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


# Names.


def test_an_implementation_that_refuses_says_why():
    function, args = KERNELS["dequantize"]
    reason = "takes no channels or offsets on TPUs"
    pattern = f"^`implementation` 'mosaic' of dequantize {reason}: use"
    with pytest.raises(ValueError, match=pattern):
        function(*args, implementation="mosaic")
    # As a preference, not an argument of the call, it falls back to the definition.
    with actjax.kernels.use("mosaic"):
        assert not uses_kernel(lambda *args: function(*args), *args)
    assert TPU not in lowered(function, *args)


# The choice.


def test_by_default_the_device_decides():
    # One traced program, lowered for all platforms.
    traced = jax.jit(lambda args: all_kernels(None, args)).trace(ON_TPU)
    for platform, count in {"cpu": 0, "tpu": PROGRAMS}.items():
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count(TPU) == count, platform


def test_a_named_implementation_is_used():
    run = {name: functools.partial(all_kernels, name) for name in (None, "reference", "mosaic")}
    texts = {name: lowered(fun, ON_TPU) for name, fun in run.items()}
    assert [text.count(TPU) for text in texts.values()] == [PROGRAMS, 0, PROGRAMS]
    with actjax.kernels.use("mosaic"):
        assert lowered(run[None], ON_TPU).count(TPU) == PROGRAMS
        # The argument of a call takes precedence.
        assert not uses_kernel(run["reference"], ON_TPU)


def test_a_function_is_compiled_again_for_another_implementation():
    traces = []

    @jax.jit
    def decoded(code):
        traces.append(None)
        return dequantize(code)

    (code,) = ON_TPU["dequantize"]
    want = decoded(code)
    text = decoded.lower(code).as_text()
    assert len(traces) == 1
    with actjax.kernels.use("mosaic"):
        assert decoded.lower(code).as_text() != text
        assert uses_kernel(decoded, code)
        np.testing.assert_allclose(decoded(code), want, rtol=1e-5, atol=1e-5)
        with actjax.kernels.use(None):
            assert decoded.lower(code).as_text() == text
        with actjax.kernels.use("reference"):
            assert not uses_kernel(decoded, code)
        assert uses_kernel(decoded, code)
    # As before, without another trace.
    count = len(traces)
    assert decoded.lower(code).as_text() == text
    assert len(traces) == count


def test_an_error_within_leaves_the_choice_as_it_was():
    with pytest.raises(ZeroDivisionError), actjax.kernels.use("reference"):
        _ = 1 / 0
    assert uses_kernel(lambda code: dequantize(code), CODE)


# Meshes.


@functools.cache
def four_devices():
    return jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))


def placed(args):
    """Returns arguments with their four tokens, or rows, on four devices."""

    def put(x):
        spec = PartitionSpec("data") if np.shape(x)[:1] == (4,) else PartitionSpec()
        return jax.device_put(x, NamedSharding(four_devices(), spec))

    return jax.tree.map(put, args)


def test_each_device_computes_a_kernel_for_its_tokens():
    args = placed(ARGUMENTS)
    with jax.set_mesh(four_devices()):
        program = jax.jit(functools.partial(all_kernels, None)).lower(args).compile()
    exchanged = bytes_by_kind(program.as_text())
    # The gradient of the scale of a norm is a sum over tokens.
    assert exchanged.pop("all-reduce") == X[0].nbytes
    assert not any(exchanged.values())
    got, want = program(args), jax.jit(functools.partial(all_kernels, "reference"))(ARGUMENTS)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # The sums are added up in another order.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_features_are_split_where_groups_are_whole():
    function, _ = KERNELS["quantize"]
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,))
    by_feature = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    for columns, exchanges in ((32, False), (24, True)):
        x = normal(4, 48)[:, :columns]
        with jax.set_mesh(mesh):
            round_trip = jax.jit(lambda x: dequantize(function(x)))
            program = round_trip.lower(jax.device_put(x, by_feature)).compile()
        assert any(bytes_by_kind(program.as_text()).values()) == exchanges
        want = jax.jit(lambda x: dequantize(function(x, implementation="reference")))(x)
        np.testing.assert_array_equal(program(jax.device_put(x, by_feature)), want)


def test_random_numbers_are_those_of_the_place_in_the_whole_array():
    codec = dataclasses.replace(CODEC, rounding="stochastic")
    function = functools.partial(quantized, format=codec.format)
    seed = np.asarray([1, 2], np.uint32)
    with jax.set_mesh(four_devices()):
        got = jax.jit(lambda x, seed: function(x, seed))(*placed((X, seed)))
    assert_equal(got, jax.jit(function)(X, seed))


def test_kernels_run_on_each_device_of_a_mesh_but_not_on_arrays_that_xla_partitions():
    for mesh in (four_devices(), jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))):
        with jax.set_mesh(mesh):
            for function, args in KERNELS.values():
                assert uses_kernel(lambda *args, f=function: f(*args), *args)
    mesh = jax.make_mesh((2,), ("tokens",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("tokens")))
    fun = jax.grad(lambda x: actjax.rms_norm(x, np.ones(32, "float32"), codec=CODEC).sum())
    assert not uses_kernel(fun, x)
    assert jax.jit(fun)(x).shape == x.shape


def test_a_shard_map_partitions_nothing_and_with_check_vma_uses_the_definition():
    spec, (function, _) = PartitionSpec("data"), KERNELS["quantize"]
    # Rows do not depend on each other.
    want = jax.jit(functools.partial(function, implementation="reference"))(X)
    for checks in (True, False):
        each = jax.shard_map(
            lambda x: function(x),
            mesh=four_devices(),
            in_specs=spec,
            out_specs=spec,
            check_vma=checks,
        )
        assert uses_kernel(each, X) != checks
        assert_equal(jax.jit(each)(X), want)


# Transformations.


def with_scale(scale):
    return dequantize(dataclasses.replace(CODE, scale=scale))


def derivatives():
    """Returns a derivative in each mode of `dequantize`, and one of a kernel with two codes."""
    tangent = normal(*CODE.scale.shape, seed=1)
    backward = lambda dy: jnp.sum(swiglu_backward(CODE, CODE, dy)[1])  # noqa: E731
    return (
        jax.jvp(with_scale, (CODE.scale,), (tangent,)),
        jax.grad(lambda scale: jnp.vdot(with_scale(scale), X))(CODE.scale),
        jax.grad(backward)(X),
    )


def test_derivatives_are_those_of_the_definition():
    computed = {}
    for name in ("reference", None):
        with actjax.kernels.use(name):
            computed[name] = jax.jit(lambda: derivatives())()
    want = computed.pop("reference")
    assert all(np.any(leaf) for leaf in jax.tree.leaves(want))
    for got in computed.values():
        # All but the first sum numbers in another order.
        for rtol, a, b in zip((0, 16 * TINY, 16 * TINY), got, want, strict=True):
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol), a, b)


def test_outlier_channels_pass_derivatives_on():
    channels = np.int32([3, 17])

    def outliers(x, implementation):
        code = quantized(x, None, channels, implementation=implementation)
        return jnp.vdot(dequantize(code, implementation=implementation)[:, channels], X[:, :2])

    # They are copied, and nothing else contributes to them.
    want = np.zeros_like(X)
    want[:, channels] = X[:, :2]
    for implementation in ("reference", None):
        got = jax.jit(jax.grad(functools.partial(outliers, implementation=implementation)))(X)
        np.testing.assert_array_equal(got, want)


def test_vmap_equals_one_call_each():
    @jax.jit
    def mapped_and_alone(values, scale, dy):
        alone = jax.lax.map(lambda x: rms_norm_backward(x, scale, dy), values)
        return jax.vmap(rms_norm_backward, in_axes=(0, None, None))(values, scale, dy), alone

    mapped, alone = mapped_and_alone(np.stack([X + i for i in range(3)]), X[0], X)
    # Sums of 32 numbers and of 4, in another order.
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(close, mapped, alone)
