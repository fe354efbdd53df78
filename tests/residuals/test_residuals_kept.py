"""Tests of `compress_residuals`: which arrays are stored, and what a rule is asked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from messages import assert_messages
from residuals.residual_helpers import (
    CODE,
    KEY,
    ONE,
    RANDOM,
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
from actjax import Candidate, Exact, Quantized, RandomizedSVD, compress_residuals, explain


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
def test_one_array_is_stored_if_all_others_follow_from_it(fun):
    x, w = normal(0, 16, 8), normal(1, 8, 8)
    wrapped = compress_residuals(fun, CODE)
    (row,) = rows_kept(wrapped, x, w)
    assert row.operator == "dot_general"
    assert (row.shape, row.codec, row.reason) == ((16, 8), repr(CODE), "")
    assert held_bytes(wrapped, x, w) == row.stored_bytes == CODE.stored_bytes((16, 8), "float32")
    assert held_bytes(fun, x, w) > 16 * 8 * 4


def test_the_sum_of_a_residual_stream_is_stored():
    def fun(x, w):
        h = x @ w
        h = h + jnp.tanh(h @ w)
        return jax.nn.gelu(h) @ w

    kinds = sorted(c.primitive for c in asked(fun, normal(0, 16, 8), normal(1, 8, 8)))
    assert kinds == ["add", "dot_general", "dot_general"]


def test_a_sum_with_a_bias_is_not_stored():
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


def test_views_of_one_array_are_stored_once(x64):
    args = normal(0, 16, 8, dtype="float32"), normal(1, 8, 8, dtype="float32"), jnp.float32(2)
    for rule, want in ((leave, 16 * 8 * 4), (CODE, CODE.stored_bytes((16, 8), "float32"))):
        assert held_bytes(compress_residuals(saved_often, rule), *args) == want
    assert held_bytes(saved_often, *args) > 3 * 16 * 8 * 4


def test_views_of_one_array_are_stored_once_without_rebuilding():
    def fun(x, w):
        h = jnp.exp(x @ w)
        return h @ w, h.T @ x, h.reshape(4, 4, 8) @ w, jnp.swapaxes(h, 0, 1) @ x

    args = normal(0, 16, 8), normal(1, 8, 8)
    want = CODE.stored_bytes((16, 8), "float32")
    assert held_bytes(compress_residuals(fun, CODE, rebuild=False), *args) == want


@pytest.mark.parametrize("rebuild", [True, False])
def test_parameters_integers_and_data_are_not_encoded(rebuild):
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
def test_parameters_cast_for_mixed_precision_are_not_encoded(looped):
    def layer(x, w):
        y = jnp.tanh(x.astype("bfloat16") @ w.astype("bfloat16"))
        return y.astype("float32")

    fun = scanned(layer) if looped else layer
    args = normal(0, 16, 8), normal(1, *((3,) if looped else ()), 8, 8)
    found = asked(fun, *args)
    assert found
    assert {c.shape for c in found} == {(16, 8)}


def test_weights_of_flax_in_mixed_precision_are_not_encoded():
    model = linen.Sequential(
        [linen.Dense(32, dtype="bfloat16"), linen.gelu, linen.Dense(8, dtype="bfloat16")]
    )
    x = normal(0, 64, 16)
    params = jax.eval_shape(model.init, KEY, x)
    assert {c.shape for c in asked(model.apply, params, x)} == {(64, 32)}


def test_a_parameter_in_the_carry_of_a_loop_is_not_encoded():
    def fun(x, w):
        return lax.fori_loop(0, 3, lambda _, c: (tanh_layer(*c), c[1]), (x, w))[0]

    assert {c.shape for c in asked(fun, normal(0, 16, 8), normal(1, 8, 8))} == {(16, 8)}


def test_codes_are_not_encoded_again():
    def fun(x, w):
        h = actjax.linear(jnp.sin(x @ w), w, codec=RandomizedSVD(2), key=KEY, name="mine")
        return jnp.tanh(compress_residuals(two_products, RANDOM, key=KEY)(h, w)) @ w

    args = normal(0, 16, 8), normal(1, 8, 8)
    assert all(c.shape == (16, 8) for c in asked(fun, *args))
    codecs = [r.codec for r in rows_kept(compress_residuals(fun, CODE), *args)]
    assert set(codecs) == {repr(RandomizedSVD(2)), repr(RANDOM), repr(CODE)}


# Rules.


def test_a_rule_gets_a_description_of_each_array():
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
    assert "test_residuals_kept.py" in other.name


@pytest.mark.parametrize("constant", [lambda: jnp.zeros((8, 16)), lambda: 2.0], ids=["array", "2"])
def test_a_candidate_has_the_name_of_the_array_or_of_a_view(constant):
    def fun(x, w):
        transposed = checkpoint_name((x @ w).T, "transposed")
        return (transposed * checkpoint_name(constant(), "constant")).T @ w

    (found,) = asked(fun, normal(0, 16, 8), normal(1, 8, 8))
    assert found.name == "transposed"


@pytest.mark.parametrize(
    "named",
    [
        lambda x, w: jnp.sin(checkpoint_name(x @ w, "mine").astype("bfloat16")).astype("float32"),
        lambda x, w: checkpoint_name(jnp.tanh(x @ w), "mine") * 2,
        lambda x, w: jnp.tanh(jax.jit(lambda h: checkpoint_name(jnp.sin(h), "mine"))(x @ w)),
        lambda x, w: actjax.linear(checkpoint_name(jnp.sin(x @ w), "mine"), w),
        lambda x, w: lax.scan(
            lambda h, _: (jnp.sin(checkpoint_name(h, "mine")) @ w, None), x, None, 2
        )[0],
    ],
    ids=["cast", "made from the array", "jit", "operator", "carry"],
)  # fmt: skip
def test_a_name_is_that_of_the_array_which_is_stored_instead(named):
    args = normal(0, 16, 8), normal(1, 8, 8)
    assert {c.name for c in asked(named, *args)} == {"mine"}


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
def test_stacked_outputs_of_a_loop_are_candidates_where_they_are_read(loop):
    found = asked(lambda x, w: loop(x, w) @ w, normal(0, 16, 8), normal(1, 8, 8))
    (stacked,) = [c for c in found if c.shape == (16, 8)]
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


@pytest.mark.parametrize(
    ("fun", "args"),
    [
        (lambda x, y: jnp.sin(jnp.dot(x, y)) * x, (jnp.ones(3), jnp.ones(3))),
        (lambda x: lax.scan(lambda c, y: (c * jnp.sin(y) + y, None), 1.0, x)[0], (jnp.ones(3),)),
        (lambda x: jnp.sin(x @ x.T) @ x, (jnp.ones((0, 3)),)),
    ],
    ids=["scalar", "scalar carry", "no rows"],
)
def test_a_codec_as_rule_does_not_encode_scalars_and_empty_arrays(fun, args):
    variants = compress_residuals(fun, CODE), fun
    got, want = jax.jit(lambda *args: [jax.grad(loss_of(f))(*args) for f in variants])(*args)
    # Scalars and empty arrays are not encoded: the gradient is exact up to float32.
    assert_close(got, want, 1e-5)


def test_explain_reports_each_decision():
    def fun(x, w):
        h = checkpoint_name(jnp.sin(checkpoint_name(x @ w, "first") @ w), "second")
        return scanned(tanh_layer)(h @ w, jnp.stack([w, w]))

    def rule(c):
        return {"first": CODE, "carry": Quantized(8, group=8)}.get(c.name)

    args = normal(0, 16, 8), normal(1, 8, 8)
    wrapped = compress_residuals(fun, rule, rebuild=False)
    rows, table = {r.name: r for r in rows_kept(wrapped, *args)}, str(explain(wrapped, *args))
    assert (rows["first"].codec, rows["first"].exact_bytes) == (repr(CODE), 512)
    assert (rows["second"].codec, rows["second"].reason) == ("", "not encoded by the rule")
    assert (rows["carry"].codec, rows["carry"].shape) == ("Quantized(bits=8, group=8)", (2, 16, 8))
    for text in (
        repr(CODE),
        "Quantized(bits=8, group=8)",
        "not encoded by the rule",
        "first",
        "second",
    ):
        assert text in table
    assert explain(wrapped, *args).stored_bytes == held_bytes(wrapped, *args)


def test_the_table_has_room_for_codecs_beside_long_names():
    def a_function_with_a_name_that_is_longer_than_most_names(x, w):
        return [jnp.sin(x @ w) for _ in range(2)]

    def and_another_one_around_it(x, w):
        return a_function_with_a_name_that_is_longer_than_most_names(x, w)

    wrapped = compress_residuals(and_another_one_around_it, Quantized(4, group=8))
    table = str(explain(wrapped, *ONE))
    assert "Quantized(bits=4" in table


@pytest.mark.parametrize("looped", [False, True], ids=["once", "scan"])
def test_explain_shows_codes_of_scattered_arrays(looped):
    def layer(x, w):
        return (x @ w).at[0].add(1.0) @ w

    fun = scanned(layer) if looped else layer
    args = normal(0, 16, 8), normal(1, *((3,) if looped else ()), 8, 8)
    wrapped = compress_residuals(fun, CODE)
    rows = rows_kept(wrapped, *args)
    assert {r.codec for r in rows} == {repr(CODE)}
    assert sum(r.stored_bytes for r in rows) == held_bytes(wrapped, *args)


# Errors.


def test_messages():
    for wrong in (4, True, "exact", Exact, np.ones(3), jnp.ones(3)):
        wrapped = compress_residuals(two_products, lambda _, wrong=wrong: wrong)
        with pytest.raises(TypeError, match=r"`rule` returned .*Candidate\(name=.*Codec, or None"):
            jax.eval_shape(wrapped, normal(0, 6, 8), normal(1, 8, 8))
    rule = "`rule` of compress_residuals must be an actjax.Codec"
    assert_messages(TypeError, [
        (lambda: compress_residuals(3, CODE), "`fun` of compress_residuals must be a function"),
        *((lambda it=it: compress_residuals(two_products, it), rule) for it in (None, "leave", 4)),
    ])  # fmt: skip


def test_a_rank_that_is_too_large_is_refused():
    wrapped = compress_residuals(two_products, RandomizedSVD(7), key=KEY)
    with pytest.raises(ValueError, match=r"`rank` 7 of RandomizedSVD.*\(6, 8\).*lower the rank"):
        jax.eval_shape(jax.grad(loss_of(wrapped)), normal(0, 6, 8), normal(1, 8, 8))
