"""Tests of `compress_residuals`: which arrays are stored, and what a rule is asked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cheap_codecs import CoarseRandom, Spanned
from flax import linen
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from residuals.residual_helpers import (
    CODE,
    KEY,
    ONE,
    asked,
    assert_close,
    held_bytes,
    layer_norm,
    leave,
    loss_of,
    normal,
    rows_kept,
    scanned,
    tanh_layer,
    two_products,
)

import actjax
from actjax import Candidate, Quantized, compress_residuals, explain

ARGS = normal(0, 16, 8), normal(1, 8, 8)
STACKED = normal(0, 16, 8), normal(1, 3, 8, 8)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, w: jax.nn.gelu(x @ w) @ w,
        lambda x, w: jax.nn.gelu(x @ w, approximate=False) @ w,
        lambda x, w: jax.nn.silu(x @ w) @ w,
        lambda x, w: layer_norm(x @ w, 1.5, 0.1) @ w,
        lambda x, w: jax.nn.softmax(x @ w) @ w,
        lambda x, w: jax.nn.gelu(layer_norm(x @ w, w[0], w[1])) @ w,
        lambda x, w: jax.nn.silu((x @ w + w[0]) * w[1]) @ w,
    ],
    ids=["gelu", "exact gelu", "silu", "layer norm", "softmax", "both", "bias and scale"],
)
def test_one_array_is_stored_if_all_others_follow_from_it(fun):
    x, w = ARGS
    wrapped = compress_residuals(fun, CODE)
    (row,) = rows_kept(wrapped, x, w)
    # Or the exponentials of a softmax, which it reads.
    assert row.operator in ("dot_general", "exp")
    assert (row.shape, row.codec, row.reason) == ((16, 8), repr(CODE), "")
    assert held_bytes(wrapped, x, w) == row.stored_bytes == CODE.stored_bytes((16, 8), "float32")
    assert held_bytes(fun, x, w) > 16 * 8 * 4


def test_a_quotient_that_nothing_else_reads_is_not_stored():
    # JAX's derivative reads the divisor and `x`, which is alive.
    fun = lambda x, w: 0.5 * (x / (1 + (x @ w) ** 2))  # noqa: E731
    (row,) = rows_kept(compress_residuals(fun, CODE), *ARGS)
    assert row.operator == "dot_general"


def test_a_sine_is_stored_with_its_derivative():
    rows = rows_kept(compress_residuals(lambda x, w: jnp.sin(x @ w) @ w, CODE), *ARGS)
    assert sorted(row.operator for row in rows) == ["cos", "sin"]


def saved_often(x, w, v):
    h = x @ w
    views = (
        h, h, h.T, h.reshape(4, 4, 8), h[::-1], h[:, None], h.astype("float64"),
        jnp.broadcast_to(h[None], (3, 16, 8)), checkpoint_name(h, "mine"),
    )  # fmt: skip
    return [jnp.einsum("...i,...j->ij", view, view * v) for view in views]


def test_views_of_one_array_are_stored_once(x64):
    args = normal(0, 16, 8, dtype="float32"), normal(1, 8, 8, dtype="float32"), jnp.float32(2)
    for rule, want in ((leave, 16 * 8 * 4), (CODE, CODE.stored_bytes((16, 8), "float32"))):
        assert held_bytes(compress_residuals(saved_often, rule), *args) == want
    assert held_bytes(saved_often, *args) > 3 * 16 * 8 * 4


def in_bfloat16(x, w):
    y = jnp.tanh(x.astype("bfloat16") @ w.astype("bfloat16"))
    return y.astype("float32")


def carried(x, w):
    return lax.fori_loop(0, 3, lambda _, c: (tanh_layer(*c), c[1]), (x, w))[0]


def of_linen(x):
    model = linen.Sequential(
        [linen.Dense(32, dtype="bfloat16"), linen.gelu, linen.Dense(8, dtype="bfloat16")]
    )
    return model.apply, (jax.eval_shape(model.init, KEY, x), x)


TANH = "tanh", (16, 8)
ASKED = {
    "mixed precision": (in_bfloat16, ARGS, [TANH]),
    "mixed precision in a scan": (
        scanned(in_bfloat16), STACKED, [("convert_element_type", (16, 8)), TANH]
    ),
    "mixed precision of linen": (*of_linen(normal(0, 64, 16)), [("dot_general", (64, 32))]),
    "parameter in a carry": (carried, ARGS, [("argument", (16, 8)), TANH]),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_arrays_that_a_rule_is_asked_about(name):
    """Weights and their casts are not among them."""
    fun, args, want = ASKED[name]
    # Since JAX 0.11 the backward pass of tanh reads its slope.
    primitives = [
        (c.primitive.replace("one_minus_square", "tanh"), c.shape) for c in asked(fun, *args)
    ]
    assert sorted(primitives) == want


@pytest.mark.parametrize("rebuild", [True, False])
def test_parameters_integers_and_data_are_not_encoded(rebuild):
    table, labels = normal(3, 16, 8), np.arange(16) % 8

    def fun(params, x, key):
        h = jnp.tanh(x @ params["w"]) * table
        h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h, 0)
        chosen = h @ params["w"].T
        return jnp.take_along_axis(chosen, labels[:, None], 1), chosen[jnp.argsort(chosen[:, 0])]

    args = {"w": normal(1, 8, 8), "b": normal(2, 8)}, normal(0, 16, 8), KEY
    candidates = asked(fun, *args, rebuild=rebuild)
    assert {(c.dtype, c.shape) for c in candidates} == {("float32", (16, 8))}
    assert all(c.primitive != "argument" for c in candidates)


def test_codes_are_not_encoded_again():
    def fun(x, w):
        h = actjax.linear(jnp.sin(x @ w), w, codec=Spanned(2), name="mine")
        return jnp.tanh(compress_residuals(two_products, CoarseRandom(), key=KEY)(h, w)) @ w

    assert all(c.shape == (16, 8) for c in asked(fun, *ARGS))
    codecs = [r.codec for r in rows_kept(compress_residuals(fun, CODE), *ARGS)]
    assert set(codecs) == {repr(Spanned(2)), repr(CoarseRandom()), repr(CODE)}


# Rules.


def test_a_rule_gets_a_description_of_each_array():
    def fun(params, x):
        h = checkpoint_name(x["h"] @ params, "hidden").astype("float32")
        return jax.nn.silu(jax.nn.silu(h) @ params.astype("float32"))

    args = normal(0, 8, 8, dtype="bfloat16"), {"h": normal(1, 16, 8, dtype="bfloat16")}
    by_name = {c.name: c for c in asked(fun, *args, activations=1)}
    hidden, argument = by_name.pop("hidden"), by_name.pop("[1]['h']")
    assert hidden == Candidate("hidden", "dot_general", (16, 8), "bfloat16")
    assert (hidden.size, hidden.nbytes) == (128, 256)
    assert argument == Candidate("[1]['h']", "argument", (16, 8), "bfloat16")
    (other,) = by_name.values()
    assert (other.primitive, other.dtype, other.nbytes) == ("dot_general", "float32", 512)
    assert "test_residuals_kept.py" in other.name


@pytest.mark.parametrize("constant", [lambda: jnp.zeros((8, 16)), lambda: 2.0], ids=["array", "2"])
def test_a_candidate_has_the_name_of_the_array_or_of_a_view(constant):
    def fun(x, w):
        transposed = checkpoint_name((x @ w).T, "transposed")
        return (transposed * checkpoint_name(constant(), "constant")).T @ w

    assert [c.name for c in asked(fun, *ARGS)] == ["transposed"]


@pytest.mark.parametrize(
    "named",
    [
        lambda x, w: jnp.tanh(checkpoint_name(x @ w, "mine").astype("bfloat16")).astype("float32"),
        lambda x, w: checkpoint_name(jnp.tanh(x @ w), "mine") * 2,
        lambda x, w: jnp.abs(jax.jit(lambda h: checkpoint_name(jnp.tanh(h), "mine"))(x @ w)),
        lambda x, w: actjax.linear(checkpoint_name(jnp.tanh(x @ w), "mine"), w),
        lambda x, w: lax.scan(
            lambda h, _: (jnp.tanh(checkpoint_name(h, "mine")) @ w, None), x, None, 2
        )[0],
    ],
    ids=["cast", "made from the array", "jit", "operator", "carry"],
)  # fmt: skip
def test_a_name_is_that_of_the_array_which_is_stored_instead(named):
    assert {c.name for c in asked(named, *ARGS)} == {"mine"}


def test_in_a_loop_a_rule_is_asked_about_one_iteration():
    def fun(x, y, ws):
        def layer(carry, w):
            x, y = carry
            product = checkpoint_name(x @ w, "product")
            return (jax.nn.silu(product) * y, jax.nn.silu(y) * x), None

        return lax.scan(layer, (x, y), ws)

    x, ws = STACKED
    candidates = {(c.name, c.primitive, c.shape) for c in asked(fun, x, x, ws)}
    assert candidates == {
        ("carry 0", "argument", (16, 8)),
        ("carry 1", "argument", (16, 8)),
        ("product", "dot_general", (16, 8)),
    }
    assert "carry" in {c.name for c in asked(scanned(tanh_layer), x, ws)}


@pytest.mark.parametrize(
    "loop",
    [
        lambda x, w: lax.map(lambda row: jnp.sin(row @ w), x),
        lambda x, w: lax.scan(lambda c, row: (jnp.tanh(c @ w + row),) * 2, x[0], x)[1],
    ],
    ids=["map", "scan"],
)
def test_stacked_outputs_of_a_loop_are_candidates_where_they_are_read(loop):
    candidates = asked(lambda x, w: loop(x, w) @ w, *ARGS)
    (stacked,) = [c for c in candidates if c.shape == (16, 8)]
    # The line of the user's program, not of actjax.
    assert stacked.name.startswith("test_residuals_kept.py:")
    assert stacked.primitive != "optimization_barrier"


def test_a_codec_as_rule_does_not_encode_small_arrays():
    def fun(x, w, v):
        return jnp.sin(x @ w), jnp.sin(x[:2] @ v), jnp.sin(x[:4] @ v)

    # The largest array has 33 * 16 elements, the second 2 * 8 (33 times fewer), the third 4 * 8.
    args = normal(0, 33, 8), normal(1, 8, 16), normal(2, 8, 8)
    rows = rows_kept(compress_residuals(fun, CODE, rebuild=False), *args)
    assert {r.shape: (r.codec, r.reason) for r in rows} == {
        (33, 16): (repr(CODE), ""),
        (2, 8): ("", "not encoded by the rule"),
        (4, 8): (repr(CODE), ""),
    }


def test_a_codec_as_rule_does_not_encode_scalars_and_empty_arrays():
    def fun(x, y):
        none = x[:0]
        scalar = lax.scan(lambda c, y: (c * jnp.sin(y) + y, None), 1.0, x)[0]
        return jnp.sin(jnp.dot(x, y)) * x, scalar, jnp.sin(none[:, None] @ none[None]) @ none

    assert asked(fun, np.ones(3), np.ones(3))
    variants = compress_residuals(fun, CODE), fun
    run = jax.jit(lambda *args: [jax.grad(loss_of(f))(*args) for f in variants])
    # The gradient is exact up to float32.
    assert_close(*run(np.ones(3, np.float32), np.ones(3, np.float32)), 1e-5)


def test_explain_reports_each_decision():
    def fun(x, w):
        h = checkpoint_name(jnp.sin(checkpoint_name(x @ w, "first") @ w), "second")
        return scanned(tanh_layer)(h @ w, jnp.stack([w, w]))

    def rule(c):
        return {"first": CODE, "carry": Quantized(8, group=8)}.get(c.name)

    wrapped = compress_residuals(fun, rule, rebuild=False)
    explanation = explain(wrapped, *ARGS)
    rows, table = {r.name: r for r in explanation.residuals}, str(explanation)
    assert (rows["first"].codec, rows["first"].exact_bytes) == (repr(CODE), 512)
    assert (rows["second"].codec, rows["second"].reason) == ("", "not encoded by the rule")
    assert (rows["carry"].codec, rows["carry"].shape) == ("Quantized(bits=8, group=8)", (2, 16, 8))
    eight_bits = "Quantized(bits=8, group=8)"
    for text in (repr(CODE), eight_bits, "not encoded by the rule", "first", "second"):
        assert text in table
    assert explanation.stored_bytes == held_bytes(wrapped, *ARGS)


def test_the_table_has_room_for_codecs_beside_long_names():
    def a_function_with_a_name_that_is_longer_than_most_names(x, w):
        return [jnp.sin(x @ w) for _ in range(2)]

    def and_another_one_around_it(x, w):
        return a_function_with_a_name_that_is_longer_than_most_names(x, w)

    wrapped = compress_residuals(and_another_one_around_it, Quantized(4, group=8))
    assert "Quantized(bits=4" in str(explain(wrapped, *ONE))


@pytest.mark.parametrize("looped", [False, True], ids=["once", "scan"])
def test_explain_shows_codes_of_scattered_arrays(looped):
    def layer(x, w):
        return (x @ w).at[0].add(1.0) @ w

    args = STACKED if looped else ARGS
    wrapped = compress_residuals(scanned(layer) if looped else layer, CODE)
    rows = rows_kept(wrapped, *args)
    assert {r.codec for r in rows} == {repr(CODE)}
    assert sum(r.stored_bytes for r in rows) == held_bytes(wrapped, *args)
