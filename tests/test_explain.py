"""Tests of `actjax.explain`: it lists exactly what JAX stores for the backward pass."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from tiny import CONFIG, batch, decoder

import actjax
from actjax import (
    Exact,
    Explanation,
    PointApproximation,
    RandomizedSVD,
    RandomProjection,
    Residual,
    explain,
)
from models import Storage

KEY = jax.random.key(3)
LOSSY = (RandomProjection(2), RandomizedSVD(2), PointApproximation(0.25))
ALIVE = "alive without the backward pass"
FOREIGN = "no actjax operator"


def ones(*shape: int, dtype="float32") -> jax.Array:
    return jnp.asarray(np.ones(shape), dtype)


def held_bytes(fun, *args) -> int:
    """Returns the bytes that `fun` holds for its backward pass, without its arguments."""
    pullback = lambda *args: jax.tree.leaves(jax.vjp(fun, *args)[1])  # noqa: E731
    jaxpr = jax.make_jaxpr(pullback)(*args).jaxpr
    given = {*jaxpr.invars, *jaxpr.constvars}
    held = {x for x in jaxpr.outvars if not isinstance(x, core.Literal)} - given
    return sum(x.aval.size * x.aval.dtype.itemsize for x in held)


def kept(explanation: Explanation) -> dict[str, Residual]:
    """Returns the rows of stored arrays by operator and name."""
    rows = [r for r in explanation.residuals if r.reason != ALIVE]
    found = {f"{r.operator}: {r.name}": r for r in rows}
    assert len(found) == len(rows)
    return found


def exactly(operator: str, name: str, *shape: int, dtype="float32", codec="Exact()") -> Residual:
    nbytes = int(np.prod(shape)) * jnp.dtype(dtype).itemsize
    return Residual(operator, name, shape, dtype, nbytes, nbytes, codec, "")


def argument(name: str, *shape: int, dtype="float32") -> Residual:
    nbytes = int(np.prod(shape)) * jnp.dtype(dtype).itemsize
    return Residual("argument", name, shape, dtype, nbytes, 0, "", ALIVE)


def neg(x):
    """Returns a value that is not an argument and needs no residual."""
    return jax.tree.map(jnp.negative, x)


def attention(x, **options):
    return actjax.attention(x, x[:, :, :2], x[:, :, 2:], **options)


X = ones(2, 5, 4, 8)

# For each operator: a call on values that are not arguments, the arguments, the expected rows.
OPERATORS = {
    "linear": (
        lambda x, w, b: actjax.linear(neg(x), w, bias=b, name="mine"),
        (ones(6, 8), ones(8, 5), ones(5)),
        {exactly("linear", "mine", 6, 8), argument("[1]", 8, 5), argument("[2]", 5)},
    ),
    "linear of bfloat16": (
        lambda x, w: actjax.linear(neg(x), w),
        (ones(6, 8, dtype="bfloat16"), ones(8, 5)),
        {exactly("linear", "input", 6, 8, dtype="bfloat16"), argument("[1]", 8, 5)},
    ),
    "qkv_projection": (
        lambda x, w: actjax.qkv_projection(neg(x), w, w, w),
        (ones(2, 6, 8), ones(8, 5)),
        {exactly("linear", "qkv input", 2, 6, 8), argument("[1]", 8, 5)},
    ),
    "rms_norm": (
        lambda x, scale: actjax.rms_norm(neg(x), scale),
        (ones(6, 8, dtype="bfloat16"), ones(8)),
        {exactly("rms_norm", "norm input", 6, 8, dtype="bfloat16"), argument("[1]", 8)},
    ),
    "swiglu": (
        lambda gate, up: actjax.swiglu(neg(gate), neg(up), name="mlp"),
        (ones(6, 8), ones(6, 8)),
        {exactly("swiglu", "mlp gate", 6, 8), exactly("swiglu", "mlp up", 6, 8)},
    ),
    "rope": (
        lambda x, tables: actjax.rope(neg(x), *tables),
        (X, (ones(5, 4), ones(5, 4))),
        {argument("[1][0]", 5, 4), argument("[1][1]", 5, 4)},
    ),
    "attention": (
        lambda x: attention(x, name="self"),
        (X,),
        {
            exactly("attention", "self q", 2, 5, 4, 8),
            exactly("attention", "self k", 2, 5, 2, 8),
            exactly("attention", "self v", 2, 5, 2, 8),
            exactly("attention", "self output", 2, 5, 32),
            exactly("attention", "self log-sum-exp", 2, 4, 5),
        },
    ),
    "attention, recomputed": (
        lambda x: attention(neg(x), recompute=True),
        (X,),
        {
            exactly("attention", "q", 2, 5, 4, 8),
            exactly("attention", "k", 2, 5, 2, 8),
            exactly("attention", "v", 2, 5, 2, 8),
        },
    ),
    "cross_entropy": (
        lambda x, w: actjax.cross_entropy(neg(x), w, jnp.zeros(6, int), name="next token"),
        (ones(6, 8), ones(8, 9)),
        {
            exactly("cross_entropy", "next token gradient of hidden", 6, 8),
            exactly("cross_entropy", "next token gradient of head", 8, 9),
            exactly("cross_entropy", "next token inverse sum of mask"),
        },
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_each_operator_stores_what_it_documents(name):
    fun, args, want = OPERATORS[name]
    explanation = explain(fun, *args)
    rows = set(explanation.residuals)
    if name == "attention":  # Here q is an argument.
        want = want - {exactly("attention", "self q", 2, 5, 4, 8)} | {argument("[0]", 2, 5, 4, 8)}
    assert len(rows) == len(explanation.residuals)
    assert rows == want
    assert explanation.stored_bytes == explanation.exact_bytes == held_bytes(fun, *args)


@pytest.mark.parametrize("codec", LOSSY, ids=repr)
def test_a_code_of_several_arrays_is_one_row(codec):
    def fun(x, w):
        return actjax.linear(neg(x), (w, w), codec=codec, key=KEY)

    x, w = ones(2, 6, 8), ones(8, 5)
    stored = codec.stored_bytes(x.shape, x.dtype)
    want = Residual("linear", "input", (2, 6, 8), "float32", x.nbytes, stored, repr(codec), "")
    explanation = explain(fun, x, w)
    assert explanation.residuals == (want, argument("[1]", 8, 5))
    assert explanation.stored_bytes == stored == held_bytes(fun, x, w)
    assert explanation.exact_bytes == x.nbytes


def test_an_array_that_two_operators_store_counts_once():
    def fun(x, w):
        return actjax.linear(attention(x, merge_heads=True), w, name="attention_out")

    args = X, ones(32, 3)
    explanation = explain(fun, *args)
    row = kept(explanation)["attention: output, attention_out"]
    assert row == exactly("attention", "output, attention_out", 2, 5, 32)
    assert explanation.stored_bytes == held_bytes(fun, *args)


def test_a_second_code_of_a_stored_array_is_shown():
    def fun(x, w):
        return actjax.linear(attention(x, merge_heads=True), w, codec=RandomProjection(2), key=KEY)

    rows = kept(explain(fun, X, ones(32, 3)))
    assert rows["attention: output"].stored_bytes == 2 * 5 * 32 * 4
    assert rows["linear: input"].stored_bytes == RandomProjection(2).stored_bytes(
        (2, 5, 32), "float32"
    )


# Under transformations of JAX.


@pytest.mark.parametrize("codec", [Exact(), *LOSSY], ids=repr)
def test_a_scan_stacks_the_residuals_of_its_layers(codec):
    def fun(x, ws):
        def layer(x, layer):
            w, key = layer
            return actjax.linear(x, w, codec=codec, key=key, name="layer"), None

        return jax.lax.scan(layer, x, (ws, jax.random.split(KEY, 5)))[0]

    x, ws = ones(6, 8), ones(5, 8, 8)
    stored = 5 * codec.stored_bytes(x.shape, x.dtype)
    explanation = explain(fun, x, ws)
    want = Residual("linear", "layer", (5, 6, 8), "float32", 5 * x.nbytes, stored, repr(codec), "")
    assert kept(explanation) == {"linear: layer": want}
    assert explanation.stored_bytes == held_bytes(fun, x, ws)


@pytest.mark.parametrize("codec", [Exact(), *LOSSY], ids=repr)
def test_vmap_stacks_the_residuals_of_its_examples(codec):
    def fun(xs, w):
        one = lambda x: actjax.linear(neg(x), w, codec=codec, key=KEY)  # noqa: E731
        return jax.vmap(one)(xs)

    xs, w = ones(3, 6, 8), ones(8, 5)
    explanation = explain(fun, xs, w)
    row = kept(explanation)["linear: input"]
    assert row.shape == (3, 6, 8)
    assert row.exact_bytes == xs.nbytes
    assert explanation.stored_bytes == row.stored_bytes == held_bytes(fun, xs, w)


@pytest.mark.parametrize("codec", [Exact(), RandomizedSVD(2)], ids=repr)
def test_residuals_inside_jitted_functions_are_found(codec):
    @jax.jit
    def inner(x, w):
        return actjax.linear(neg(x), w, codec=codec, key=KEY)

    x, w = ones(6, 8), ones(8, 5)
    stored = codec.stored_bytes(x.shape, x.dtype)
    want = Residual("linear", "input", (6, 8), "float32", x.nbytes, stored, repr(codec), "")
    for fun in (inner, jax.jit(inner), lambda x, w: inner(x, w)):
        assert explain(fun, x, w).residuals == (want, argument("[1]", 8, 5))


def test_checkpoint_stores_only_arguments():
    fun = jax.checkpoint(lambda x, w: actjax.linear(neg(x), w, codec=RandomProjection(2), key=KEY))
    explanation = explain(fun, ones(6, 8), ones(8, 5))
    rows = {r for r in explanation.residuals if r.operator == "argument"}
    assert rows == {argument("[0]", 6, 8), argument("[1]", 8, 5)}
    assert explanation.stored_bytes == 0


def test_a_checkpointed_layer_of_a_scan_stores_its_input():
    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(actjax.linear(x, w)), None

    fun = lambda x, ws: jax.lax.scan(layer, x, ws)[0]  # noqa: E731
    x, ws = ones(6, 8), ones(5, 8, 8)
    explanation = explain(fun, x, ws)
    (row,) = kept(explanation).values()
    assert row.shape == (5, 6, 8)
    assert explanation.stored_bytes == 5 * x.nbytes == held_bytes(fun, x, ws)


def test_functions_of_jax_are_explained():
    x = ones(6, 8)
    explanation = explain(lambda x: jnp.sin(jnp.exp(x)), x)
    # exp stores its value and sin its cosine; both are new arrays.
    assert {(r.operator, r.reason, r.codec) for r in explanation.residuals} == {
        ("exp", FOREIGN, ""),
        ("cos", FOREIGN, ""),
    }
    assert all("test_explain.py" in r.name for r in explanation.residuals)
    assert explanation.stored_bytes == 2 * x.nbytes


def test_names_of_checkpoint_policies_are_not_tags():
    fun = lambda x: jnp.sin(jax.ad_checkpoint.checkpoint_name(x * 2, "theirs"))  # noqa: E731
    (row,) = kept(explain(fun, ones(3))).values()
    assert (row.operator, row.codec, row.reason) == ("cos", "", FOREIGN)


# Arguments.


def test_shapes_may_replace_arrays():
    fun, args, _ = OPERATORS["cross_entropy"]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    assert explain(fun, *shapes) == explain(fun, *args)


def test_models_larger_than_memory_are_explained():
    fun = lambda x, w: actjax.linear(neg(x), w, codec=RandomizedSVD(32), key=KEY)  # noqa: E731
    x = jax.ShapeDtypeStruct((2**22, 2**14), jnp.bfloat16)
    row = kept(explain(fun, x, jax.ShapeDtypeStruct((2**14, 2**14), jnp.bfloat16)))["linear: input"]
    assert row.exact_bytes == 2**37
    assert row.stored_bytes == (2**22 + 2**14) * 32 * 2


def test_arguments_may_be_integers_keys_and_numbers():
    tree = {"x": ones(6, 8), "labels": jnp.zeros(6, int), "none": None, "key": KEY, "scale": 2.0}

    def fun(tree, count):
        x = tree["scale"] * jnp.sin(tree["x"]) * count
        y = actjax.linear(x, x.T, codec=RandomProjection(2), key=tree["key"])
        return y, tree["labels"]

    rows = explain(fun, tree, 3).residuals
    assert {"[0]['x']", "[0]['labels']"}.isdisjoint(r.name for r in rows if r.reason == FOREIGN)
    assert {"RandomProjection(rank=2)"} == {r.codec for r in rows if r.operator == "linear"}


@pytest.mark.parametrize("args", [(), (3,), (jnp.arange(3), None), (KEY,)], ids=str)
def test_arguments_without_floating_point_arrays_are_refused(args):
    with pytest.raises(ValueError, match="no argument of `fun` has a floating point array"):
        explain(lambda *args: jnp.ones(3), *args)


# A whole model.

STORED = Storage(RandomizedSVD(4), RandomProjection(4), PointApproximation(points=3), Exact())


@pytest.mark.parametrize("storage", [Storage(), STORED], ids=["exact", "lossy"])
def test_a_decoder_stores_what_its_table_lists(storage):
    model, (tokens, targets) = decoder(), batch()

    def loss(model):
        return model.loss(tokens, targets, storage=storage, key=KEY, compute_dtype="float32")

    explanation = explain(loss, model)
    assert explanation.stored_bytes == held_bytes(loss, model)
    rows = kept(explanation)
    lead, d, f = (2, 11), CONFIG.hidden_size, CONFIG.ffn_size
    for site, width in (("attention_in", d), ("attention_out", d), ("mlp_in", d), ("mlp_out", f)):
        codec = getattr(storage, site)
        shared = site == "attention_out" and codec == Exact()
        row = rows["attention: output, attention_out" if shared else f"linear: {site}"]
        assert (row.codec, row.shape, row.reason) == (repr(codec), (3, *lead, width), "")
        assert row.exact_bytes == 3 * 2 * 11 * width * 4
        assert row.stored_bytes == 3 * codec.stored_bytes((*lead, width), "float32")
    stacked = {
        "rms_norm: attention norm input": (3, *lead, d),
        "rms_norm: mlp norm input": (3, *lead, d),
        "rms_norm: last norm input": (*lead, d),
        "attention: q": (3, *lead, 6, 4),
        "attention: k": (3, *lead, 2, 4),
        "attention: v": (3, *lead, 2, 4),
        "swiglu: gate": (3, *lead, f),
        "swiglu: up": (3, *lead, f),
        "cross_entropy: gradient of hidden": (*lead, d),
        "cross_entropy: gradient of head": (d, CONFIG.vocab_size),
        "cross_entropy: inverse sum of mask": (),
    }
    assert {name: rows[name].shape for name in stacked} == stacked
    # Attention recomputes its output if the projection stores a code of it.
    assert ("attention: log-sum-exp" in rows) == (storage == Storage())
    # The other arrays are small: cosines, sines and the tokens.
    assert sum(r.stored_bytes for r in rows.values() if r.reason == FOREIGN) < 500


def test_every_weight_is_alive_without_the_backward_pass():
    model, (tokens, targets) = decoder(), batch()
    explanation = explain(lambda m: m.loss(tokens, targets, compute_dtype="float32"), model)
    alive = [r for r in explanation.residuals if r.reason == ALIVE]
    assert {r.operator for r in alive} <= {"argument", "constant"}
    assert any(r.name.startswith("[0].layers.attention.q") for r in alive)
    assert all(r.stored_bytes == 0 for r in alive)


# What is printed.


def test_the_table_prints_every_row_and_the_total():
    def fun(x, w):
        y = actjax.linear(neg(x), w, codec=RandomizedSVD(2), key=KEY, name="mine")
        return jnp.sin(y) + attention(X * w[0, 0]).sum()

    explanation = explain(fun, ones(6, 8), ones(8, 5))
    text = str(explanation)
    for r in explanation.residuals:
        if r.reason != ALIVE:
            assert f"{r.operator}: {r.name}" in text
            assert f"{r.dtype}[{','.join(map(str, r.shape))}]" in text
    line = next(line for line in text.splitlines() if "linear: mine" in line)
    assert line.split()[2:] == ["float32[6,8]", "192", "B", "112", "B", "RandomizedSVD(rank=2)"]
    total = next(line for line in text.splitlines() if line.strip().startswith("total"))
    assert f"{explanation.stored_bytes / 1024:.2f} KiB" in total
    assert "arguments, constants" in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_rows_are_sorted_by_size():
    explanation = explain(OPERATORS["attention"][0], X)
    sizes = [r.exact_bytes for r in explanation.residuals]
    assert sizes == sorted(sizes, reverse=True)


def test_small_foreign_arrays_share_a_line():
    fun = lambda x, y: (actjax.swiglu(neg(x), neg(x)), jnp.sin(y), jnp.cos(y))  # noqa: E731
    explanation = explain(fun, ones(1000, 10), ones(3))
    text = str(explanation)
    line = next(line for line in text.splitlines() if "small arrays" in line)
    assert "2 arrays" in line
    assert "cos:" not in text


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 2**20, 3 * 2**30, 2**45])
def test_bytes_are_printed_in_the_unit_that_fits(count):
    row = Residual("linear", "x", (count,), "uint8", count, count, "Exact()", "")
    units = {0: "0 B", 1: "1 B", 1023: "1023 B", 1024: "1.00 KiB", 2**20: "1.00 MiB"}
    want = units.get(count, f"{count / 2**30:.2f} GiB")
    assert want in str(Explanation((row,)))


def test_as_dicts_is_json():
    explanation = explain(OPERATORS["linear"][0], *OPERATORS["linear"][1])
    rows = json.loads(json.dumps(explanation.as_dicts()))
    assert len(rows) == len(explanation.residuals)
    assert rows[0] == {
        "operator": "linear",
        "name": "mine",
        "shape": [6, 8],
        "dtype": "float32",
        "exact_bytes": 192,
        "stored_bytes": 192,
        "codec": "Exact()",
        "reason": "",
    }
