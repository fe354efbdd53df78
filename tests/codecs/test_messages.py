"""Error messages of the codecs."""

import functools
import math

import jax
import numpy as np
import pytest
from cases import CODECS
from messages import assert_messages

import actjax
from actjax import Calibrated, Exact, Offloaded, PointApproximation, RandomizedSVD, RandomProjection
from actjax.codecs import ChannelRange, basis

Q = actjax.Quantized
ERRORS = (ValueError, TypeError)
BALANCED = Q(2, group=16, levels="normal", rotate=True, balance=True)
BY_CHANNEL = Q(4, scaling="channel")


def ones(*shape, dtype="float32"):
    return np.ones(shape, dtype)


def encode(codec, x):
    """Returns a call that encodes `x` with a key."""
    return lambda: codec.encode(x, jax.random.key(0))


def settings(codec, name, values, expected, **others):
    """Returns a row for each value of a setting that a codec refuses."""
    return [
        (
            functools.partial(codec, **{**others, name: value}),
            f"`{name}` of {codec.__name__} {expected}, got {value!r}",
        )
        for value in values
    ]


def test_settings_are_named_with_their_value():
    quantized, points = functools.partial(settings, Q, bits=4), PointApproximation
    either, at_least_one = "takes either `ratio` or `points`", "must be an integer >= 1"
    rows = [
        *settings(
            Q,
            "bits",
            (0, 7, 16, -4, 4.0, True, None, "4", [4]),
            "must be one of (1, 2, 3, 4, 5, 6, 8)",
        ),
        *quantized("group", (0, -1, 2.5, True, None, "8"), at_least_one),
        *quantized(
            "rounding", ("up", "", None), "must be one of ('nearest', 'stochastic', 'dither')"
        ),
        *quantized("scaling", ("token", None), "must be one of ('group', 'channel')"),
        *quantized(
            "scale_dtype", ("float16", "float64", None), "must be one of ('bfloat16', 'float32')"
        ),
        *quantized("levels", ("nf4", None), "must be one of ('uniform', 'normal')"),
        *quantized("outlier_fraction", (-0.1, 1, math.nan, True, None, "0.1"), "must be in [0, 1)"),
        *quantized("rotate", ("yes",), "must be True or False"),
        *quantized("balance", (1,), "must be True or False"),
        *(
            (
                functools.partial(Q, bits, rounding=rounding, levels="normal"),
                "`levels` of Quantized can be 'normal' for up to 4 bits with rounding='nearest',"
                f" got bits={bits}, rounding={rounding!r}: use levels='uniform'.",
            )
            for bits, rounding in ((8, "nearest"), (4, "stochastic"), (2, "dither"))
        ),
        (lambda: Q(4, group=7, rotate=True), "no effect in a group of odd size, got group=7:"),
        (lambda: Q(4, scaling="channel", balance=True), "`balance` of Quantized needs scaling="),
        (points, either),
        (lambda: points(0.5, 2), either),
        *settings(points, "ratio", (0.0, 1.5, math.nan), "must be in (0, 1]"),
        *settings(points, "points", (0, 2.0), at_least_one),
        *settings(points, "tolerance", (-1.0, math.nan), "must be >= 0", points=2),
        *settings(RandomProjection, "rank", (0, -1, 2.5, True, "8", None), at_least_one),
        *settings(RandomizedSVD, "rank", (0, -1, 2.5, True, "8", None), at_least_one),
        *settings(RandomizedSVD, "power_iterations", (-1,), "must be an integer >= 0", rank=4),
        *((functools.partial(Offloaded, c), f"got {c!r}") for c in (None, Offloaded(Exact()), Q)),
    ]
    assert_messages(ERRORS, rows)
    assert Q(4, group=7).group == 7


@pytest.mark.parametrize(
    "codec", [codec for codec in CODECS.values() if codec != Exact()], ids=repr
)
def test_activations_and_keys_are_named(codec):
    name = f"`x` of {getattr(codec, 'codec', codec)}"
    x, rows = ones(24, 8), []
    if codec.needs_key:
        rows = [
            *(
                (lambda key=key: codec.encode(x, key), f"got key={key}: pass `key`")
                for key in (None, 0)
            ),
            (
                lambda: codec.encode(x, jax.random.split(jax.random.key(0))),
                "must be a single key, got keys of shape (2,)",
            ),
        ]
    assert_messages(
        ERRORS,
        [
            (encode(codec, [1.0, 2.0]), f"{name} must be an array, got list"),
            (encode(codec, ones(2, 8, dtype="int32")), "must be floating point, got int32"),
            (encode(codec, np.float32(1)), f"{name} must have features, [..., d], got shape ()"),
            *rows,
        ],
    )


def test_shapes_that_do_not_fit_are_named():
    high = RandomProjection(21), RandomizedSVD(21), RandomizedSVD(99, 1)
    rows = [
        (
            lambda: Exact().weight_grad(ones(24, 8), ones(23, 5)),
            "must agree in their leading axes, got (24, 8) and",
        ),
        (encode(PointApproximation(points=31), ones(30, 6)), "is above the 30 tokens"),
        (encode(PointApproximation(points=1), ones(6, 0)), "must have features, got shape (6, 0)"),
        (encode(PointApproximation(0.5), ones(0, 6)), "at least one token, got shape (0, 6)"),
        *(
            row
            for codec in high
            for row in (
                (
                    encode(codec, ones(40, 20)),
                    f"`rank` {codec.rank} of {codec} is above min(T, d) = 20",
                ),
                (
                    functools.partial(codec.stored_bytes, (4, 10, 20), "float32"),
                    "T = 40 tokens, d = 20 features",
                ),
                (encode(codec, ones(4, 20)), "min(T, d) = 4 "),
            )
        ),
        *(
            (
                functools.partial(basis.encode, ones(2, 12, 8), ones(*shape), bits),
                f"`basis` must be [8, k] for x(2, 12, 8), got {shape}.",
            )
            for shape in ((), (8,), (7, 5), (5, 8), (2, 8, 5))
            for bits in basis.BITS
        ),
        (
            lambda: basis.encode(ones(3, 4), ones(4, 2), 5),
            "`bits` must be one of (4, 8, 16), got 5",
        ),
    ]
    assert_messages(ERRORS, rows)


def test_calibrations_that_do_not_fit_are_named():
    no_tokens = "must have tokens and features to measure, got shape"
    by_group, random = Q(4, group=8), Q(4, scaling="channel", rounding="dither")
    x, w = ones(15, 12), ones(12, 5)
    plain, spread = (Calibrated(codec, ones(12), None) for codec in (BY_CHANNEL, BALANCED))
    rows = [
        (lambda: spread.encode(x), f"`scale` and `centre` of {BALANCED} must be given together"),
        (
            lambda: Calibrated(BALANCED, ones(12), None, ones(12)).errors(x),
            "no scales of channels to narrow: use `observe`",
        ),
        (
            lambda: Calibrated.fit(by_group, x),
            f"`codec` of Calibrated must have scaling='channel', got {by_group}",
        ),
        (lambda: Calibrated.fit(Exact(), x), "must be a Quantized, got Exact"),
        (lambda: Calibrated.fit(BALANCED, [1.0]), "must be an array, got list"),
        (lambda: Calibrated.over_range(BALANCED, x), "must be a ChannelRange, got"),
        (lambda: Calibrated.least_error(BALANCED, ones(0, 4)), "must have tokens and features"),
        (
            lambda: Calibrated.least_error(Q(2, scaling="channel", rotate=True), x),
            "`codec` has rotate=True",
        ),
        *(
            (functools.partial(ChannelRange.of, ones(*shape)), no_tokens)
            for shape in ((0, 8), (2, 0, 8), (4, 0))
        ),
        (lambda: Calibrated(random, ones(12), None).encode(x), "got key=None: pass `key`"),
        (
            lambda: actjax.linear(x, w, codec=Calibrated(random, ones(12), None)),
            "got key=None: pass `key`",
        ),
        (
            lambda: jax.vjp(lambda w: actjax.linear(ones(15, 11), w, codec=plain), ones(11, 5)),
            "`x` has (11,) channels",
        ),
        *(
            (
                functools.partial(
                    Calibrated(BY_CHANNEL, ones(*scale, dtype="uint16"), None).encode, ones(*shape)
                ),
                f"`x` has {shape[-1:]} channels, but the calibration has {scale}.",
            )
            # The last calibration is a stack, and a layer takes one of it.
            for shape, scale in (
                ((15, 11), (12,)),
                ((12, 13), (12,)),
                ((), (1,)),
                ((15, 12), (3, 12)),
            )
        ),
    ]
    assert_messages(ERRORS, rows)
