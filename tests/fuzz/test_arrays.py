"""Any array through every codec: what comes back is what the docstring of the codec states.

Shapes and dtypes come back, the code has the stated bytes, the same key gives the same bits, finite
numbers stay finite and near, zeros stay zeros, and NaN and infinities are seen where they are.
"""

import contextlib
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CODECS
from fuzz.profiles import examples
from hypothesis import given
from hypothesis import strategies as st

import actjax

SHAPES = (
    *((13, 37), (5, 3), (2, 3, 5, 8), (3, 130), (1, 9), (9, 1), (11,), (600, 2), (0, 8), (4, 0)),
    (32, 128),
)
"""Small and odd, of several axes, of one token or feature, long, and empty.

One has 4,096 numbers: XLA for CPUs may drop a NaN from the maximum of so many."""
DTYPES = ("float32", "bfloat16", "float16")
Q = actjax.Quantized
FEW = [((13, 37), "float32"), ((5, 3), "bfloat16")]
"""Shapes and dtypes of the test that is not slow: a program is compiled for each."""
ROUNDINGS = ("nearest", "stochastic", "dither")


@st.composite
def quantized(draw):
    """Any `Quantized` that its constructor accepts."""
    normal, balance = draw(st.booleans()), draw(st.booleans())
    rotate = draw(st.booleans())
    return Q(
        draw(st.sampled_from((1, 2, 3, 4) if normal else (1, 2, 3, 4, 5, 6, 8))),
        group=draw(st.sampled_from((128, 4, 6, 32) if rotate else (128, 4, 6, 32, 1))),
        rounding="nearest" if normal else draw(st.sampled_from(ROUNDINGS)),
        outlier_fraction=draw(st.sampled_from((0.0, 0.1))),
        scale_dtype=draw(st.sampled_from(("bfloat16", "float32"))),
        levels="normal" if normal else "uniform", rotate=rotate, balance=balance,
    )  # fmt: skip


RANK = st.integers(1, 4)
ANY_CODEC = st.one_of(
    quantized(),
    st.builds(actjax.RandomProjection, RANK),
    st.builds(actjax.RandomizedSVD, RANK, power_iterations=st.integers(0, 2)),
    st.builds(actjax.PointApproximation, points=RANK, tolerance=st.sampled_from((math.inf, 0.8))),
)


def largest(codec, shape, dtype):
    """Returns the largest number that a codec documents to take without an overflow."""
    top = float(jnp.finfo(dtype).max)
    if isinstance(codec, actjax.Exact):
        return top
    if isinstance(codec, Q):
        rotated = 1 / min(codec.group, max(1, shape[-1])) if codec.rotate else 1
        dithered = 2 / 3 if codec.rounding == "dither" else 1
        return top / 2 * rotated * dithered / (64 if codec.balance else 1) * 0.99
    # Products with random or orthonormal factors grow with the numbers that they sum.
    return top * 2.0**-10 / max(1, np.prod(shape)) ** 0.5


BASES = {
    "normal": lambda rng, shape, top: rng.normal(size=shape),
    "zeros": lambda rng, shape, top: np.zeros(shape),
    "a constant": lambda rng, shape, top: np.full(shape, rng.choice([rng.normal(), top])),
    "huge": lambda rng, shape, top: top * rng.uniform(-1, 1, shape),
    "tiny": lambda rng, shape, top: rng.normal(size=shape) * rng.choice([1 / top, 1e-40]),
    "integers": lambda rng, shape, top: rng.integers(-9, 10, shape) * 1.0,
    "a direction": lambda rng, shape, top: (
        rng.normal(size=(*shape[:-1], 1)) * rng.normal(size=shape[-1:])
    ),
    "mixed scales": lambda rng, shape, top: (
        rng.choice([-1, 1], shape)
        * 10.0 ** rng.uniform(-np.log10(top) / 2, np.log10(top) / 2, shape)
    ),
}
"""Contents from random numbers, a shape and the largest number."""
SPECIAL = (np.nan, np.inf, -np.inf, "largest", 1e4, 0.0)


@st.composite
def arrays(draw, codec, shape, dtype):
    """Contents of one kind, with some numbers or tokens in place of others."""
    top = largest(codec, shape, dtype)
    kind, rng = draw(st.sampled_from([*BASES])), np.random.default_rng(draw(st.integers(0, 99)))
    x = np.clip(BASES[kind](rng, shape, top), -top, top)
    rows = x.reshape(-1, shape[-1]) if x.size else x
    for _ in range(draw(st.integers(0, 3)) if x.size else 0):
        token, feature = draw(st.integers(0, len(rows) - 1)), draw(st.integers(0, shape[-1] - 1))
        value = draw(st.sampled_from(SPECIAL))
        value = top if value == "largest" else min(value, top)
        rows[token, slice(None) if draw(st.booleans()) else feature] = value
    return x.astype(jnp.dtype(dtype))


@functools.lru_cache(maxsize=16)
def program(codec, shape, dtype):
    """Returns a compiled round trip, and the bytes that the code holds and that are stated."""
    x = jax.ShapeDtypeStruct(shape, dtype)
    code = jax.eval_shape(codec.encode, x, jax.eval_shape(jax.random.key, 0))
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(code))

    @jax.jit
    def both(x, seed, dz):
        code = codec.encode(x, jax.random.key(seed) if codec.needs_key else None)
        return codec.decode(code), codec.weight_grad(code, dz), jax.tree.leaves(code)

    return both, held, codec.stored_bytes(shape, jnp.dtype(dtype))


def faults(codec, x, seed=0):
    """Returns what is wrong with what comes back of an array; nothing if all is well."""
    both, held, stated = program(codec, x.shape, x.dtype.name)
    dz = np.random.default_rng(seed).uniform(-1, 1, (*x.shape[:-1], 2)).astype(x.dtype)
    first, again = (jax.tree.map(np.asarray, both(x, seed, dz)) for _ in range(2))
    decoded, grad, _ = first
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True)
    wrong = [f"holds {held} bytes, and states {stated}"] if held != stated else []
    if any(a.tobytes() != b.tobytes() for a, b in pairs):
        wrong.append("gives other bits for the same key")
    if (decoded.shape, decoded.dtype) != (x.shape, x.dtype):
        return [*wrong, f"decodes to {decoded.dtype}{decoded.shape}"]
    if (grad.shape, grad.dtype) != ((x.shape[-1], 2), np.float32):
        return [*wrong, f"has a gradient {grad.dtype}{grad.shape}"]
    if not x.size:
        return wrong
    wide, back = x.astype("float64"), decoded.astype("float64")
    check = of_finite if np.isfinite(wide).all() else of_not_finite
    return wrong + check(codec, wide, back, grad, dz, float(jnp.finfo(x.dtype).max))


def of_finite(codec, x, back, grad, dz, top):
    """Returns what is wrong with an array of finite numbers."""
    sizes = np.abs(x).max(-1)
    ratio = sizes.max() / sizes[sizes > 0].min() if sizes.any() else 1
    if isinstance(codec, actjax.PointApproximation) and ratio > top:
        return []  # It may take a tiny point for a huge token.
    if not np.isfinite(back).all():
        return [f"decodes finite numbers to {back[~np.isfinite(back)][0]}"]
    if not x.any() and back.any():
        return ["decodes zeros to other numbers"]
    error, bound = np.abs(back - x), bounds(codec, x)
    if (error > bound).any():
        place = np.unravel_index(np.argmax(error - bound), x.shape)
        return [f"decodes {x[place]:g} to {back[place]:g}, an error above {bound[place]:g}"]
    sums = np.abs(back).reshape(-1, x.shape[-1]).T @ np.abs(dz.astype("float64")).reshape(-1, 2)
    far = sums.max() < np.finfo("float32").max * 2.0**-8
    return ["has a gradient that is not finite"] if far and not np.isfinite(grad).all() else []


def bounds(codec, x):
    """Returns a bound for the error of each number."""
    if isinstance(codec, actjax.Exact):
        return np.zeros_like(x)
    if not isinstance(codec, Q) or codec.balance or codec.levels == "normal":
        # Not wrong by orders of magnitude: a product with a chi-squared factor is below this.
        return np.full_like(x, 1000 * np.abs(x).max() + 1e-37)
    bound, top = np.zeros_like(x), 2**codec.bits - 1
    for part in shared(codec, x):
        group, axis = x[part], -1 if codec.scaling == "group" else tuple(range(x.ndim - 1))
        size = np.abs(group).max(axis, keepdims=True)
        high, low = group.max(axis, keepdims=True), group.min(axis, keepdims=True)
        if codec.outlier_fraction:  # Channels that are stored exactly are zeros among the others.
            high, low = np.maximum(high, 0), np.minimum(low, 0)
        symmetric = codec.scaling == "channel" or codec.rotate
        width = 2 * (codec.group if codec.rotate else 1) * size if symmetric else high - low
        # A scale and an offset are rounded to 8 bits, the result to the dtype, and a scale below
        # 2^-126 is taken for zero.
        step = (width + size * 2.0**-7) / top * (1 + 2.0**-7) + 2.0**-126
        step = (0.5 if codec.rounding == "nearest" else 1.0) * 1.01 * step
        bound[part] = step + size * 2.0**-7 + 2.0**-126 * top
    return bound * (min(codec.group, x.shape[-1]) if codec.rotate else 1)


def shared(codec, x):
    """Returns the parts of `x` whose numbers share scales: a group of a token, or a channel."""
    if not isinstance(codec, Q):
        return [np.s_[...]]
    size = codec.group if codec.scaling == "group" else 1
    return [np.s_[..., i : i + size] for i in range(0, x.shape[-1], size)]


def of_not_finite(codec, x, back, grad, dz, top):
    """Returns what is wrong where NaN and infinities are: they are seen, and reach no others.

    They are seen in their token, and in their group where there are groups. One spoils its
    sequence if channels are balanced.
    """
    bad, bad_back = ~np.isfinite(x), ~np.isfinite(back)
    exact, groups = isinstance(codec, actjax.Exact), isinstance(codec, Q)
    if exact and not np.array_equal(x, back, equal_nan=True):
        return ["changes numbers"]
    by_channel = groups and codec.scaling == "channel"

    def within(flags):
        if exact:
            return flags
        spread = np.zeros_like(flags)
        for part in shared(codec, x):
            axis = tuple(range(x.ndim - 1)) if by_channel else -1
            spread[part] = flags[part].any(axis, keepdims=True)
        return spread

    if (bad & ~within(bad_back)).any():
        return [f"turns {x[bad & ~within(bad_back)][0]} into a finite number"]
    if np.isfinite(grad).all():
        return ["has a finite gradient"]
    if (exact or (groups and not codec.balance)) and (bad_back & ~within(bad)).any():
        return ["spoils a number that shares no scale with them"]
    return []


def search(codecs, kinds):
    """Draws a codec, a shape and dtype, and an array, and fails if it does not come back as stated.

    A codec may refuse a shape that is smaller than usual.
    """

    @given(st.data())
    def example(data):
        codec, (shape, dtype) = data.draw(codecs), data.draw(kinds)
        x = data.draw(arrays(codec, shape, dtype))
        is_small = len(shape) == 1 or min(*shape, np.prod(shape[:-1])) <= 4
        with contextlib.suppress(*([ValueError] if is_small else [])):
            assert faults(codec, x) == [], f"{codec!r}, {x!r}"

    return example


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_arrays_come_back_as_documented(codec):
    examples(40)(search(st.just(codec), st.sampled_from(FEW)))()


@pytest.mark.slow
def test_arrays_of_any_shape_come_back_through_any_codec():
    kinds = st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES))
    examples(30)(search(ANY_CODEC, kinds))()


@dataclasses.dataclass(frozen=True, repr=False)
class Faulty(actjax.Exact):
    """A codec with a fault in what it decodes or states."""

    change: object = None
    less: int = 0

    def decode(self, code):
        return self.change(code) if self.change else code

    def stored_bytes(self, shape, dtype):
        return super().stored_bytes(shape, dtype) - self.less


@pytest.mark.parametrize(
    ("codec", "fault"),
    [
        (Faulty(lambda x: jnp.where(x > 3, jnp.nan, x)), "decodes finite numbers to nan"),
        (Faulty(jnp.nan_to_num), "changes numbers"),
        (Faulty(lambda x: 4 * x), "an error above"),
        (Faulty(lambda x: x.astype("bfloat16")), "decodes to"),
        (Faulty(less=1), "bytes, and states"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_planted_faults_are_found(codec, fault):
    with pytest.raises(AssertionError, match=fault):
        examples(60)(search(st.just(codec), st.just(((5, 3), "float32"))))()
