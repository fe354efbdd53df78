"""Helpers of the tests of operators: inputs, RoPE tables, comparisons, and sizes."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

BF16 = 2.0**-8
"""Unit roundoff of bfloat16: the relative error of one rounding."""
KEY = jax.random.key(7)
THETA = 100.0
"""Base of the RoPE frequencies."""


def normal(seed: int, *shape: int, dtype: Any = None) -> jax.Array:
    """Returns numbers of size 1, drawn and cast in NumPy: in JAX each shape would compile."""
    numbers = np.random.default_rng(seed).standard_normal(shape)
    return jax.device_put(numbers.astype(dtype or jax.dtypes.canonicalize_dtype(float)))


def ones(*shape: int, dtype: Any = np.float32) -> jax.Array:
    """Returns ones without compiling a program."""
    return jax.device_put(np.ones(shape, dtype))


def of_all_sizes(seed: int, *shape: int, largest: int = 60) -> np.ndarray:
    """Returns float32 numbers from zero and the smallest one up to 2**largest, and of size 10."""
    rng = np.random.default_rng(seed)
    powers = 2.0 ** rng.uniform(-149, largest, shape) * rng.choice(
        [-1, 0, 1], shape, p=[0.4, 0.2, 0.4]
    )
    return np.where(rng.random(shape) < 0.5, powers, rng.uniform(-20, 20, shape)).astype(np.float32)


def composed(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a scan of vmap of a checkpoint of `fun`, over two leading axes of its arguments."""
    inner = jax.vmap(jax.checkpoint(fun))
    return lambda *args: jax.lax.scan(lambda _, xs: (None, inner(*xs)), None, args)[1]


def tables(length: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines of RoPE, [length, size / 2]."""
    angles = np.arange(length)[:, None] * THETA ** (-2 * np.arange(size // 2) / size)
    dtype = jax.dtypes.canonicalize_dtype(float)
    return jax.device_put((np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)))


def assert_close(got: Any, want: Any, rtol: float, atol: float) -> None:
    """Compares two trees of arrays."""
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol), got, want)


def assert_equal(got: Any, want: Any) -> None:
    """Compares two trees of arrays bit for bit."""
    jax.tree.map(np.testing.assert_array_equal, got, want)


def pullback(fun: Callable[..., Any], *args: Any) -> Any:
    """Returns the shapes and dtypes that the backward pass of `fun` holds. Compiles nothing."""
    return jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], *args)


def compiled_temporaries(fun: Callable[..., Any], *args: Any) -> int:
    """Returns the bytes of temporaries of a compiled function; `args` are arrays or shapes."""
    return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes


def shaped(*shape: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    """Returns a shape and dtype in place of an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def assert_gradients_are_differences(fun: Callable[..., Any], *arguments: Any) -> None:
    """Compares the gradient of each argument with central differences, in float64.

    With steps of 1e-5 truncation and cancellation err by about 1e-10 each. One program computes all
    differences.
    """
    step, rng = 1e-5, np.random.default_rng(0)
    leaves, treedef = jax.tree.flatten(jax.tree.map(np.asarray, arguments))
    directions = [rng.standard_normal(x.shape) for x in leaves]
    sides = [(i, sign * step) for i in range(len(leaves)) for sign in (1, -1)]
    moved = [
        np.stack([x + (size if i == j else 0) * direction for i, size in sides])
        for j, (x, direction) in enumerate(zip(leaves, directions, strict=True))
    ]
    outputs = jax.eval_shape(fun, *arguments)
    cotangents = jax.tree.map(lambda y: rng.standard_normal(y.shape), outputs)

    def product(ys):
        return sum(map(jax.numpy.vdot, jax.tree.leaves(ys), jax.tree.leaves(cotangents)))

    @jax.jit
    def run(leaves, moved):
        call = lambda leaves: fun(*treedef.unflatten(leaves))  # noqa: E731
        values = jax.lax.map(lambda leaves: product(call(leaves)), moved)
        return jax.vjp(call, leaves)[1](cotangents)[0], values

    gradients, values = jax.tree.map(np.asarray, run(leaves, moved))
    differences = (values[0::2] - values[1::2]) / (2 * step)
    slopes = [np.vdot(g, direction) for g, direction in zip(gradients, directions, strict=True)]
    np.testing.assert_allclose(slopes, differences, rtol=1e-8, atol=1e-8)
