"""Tests of `actjax.explain`: it lists exactly what JAX stores for the backward pass.

Nothing runs, so arguments are shapes.
"""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from residuals.residual_helpers import ALIVE, held_bytes
from tiny import CONFIG, decoder

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
FOREIGN = "no actjax operator"


def array(*shape: int, dtype="float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def kept(explanation: Explanation) -> dict[str, Residual]:
    """Returns the rows of stored arrays by operator and name."""
    rows = [r for r in explanation.residuals if r.reason != ALIVE]
    by_name = {f"{r.operator}: {r.name}": r for r in rows}
    assert len(by_name) == len(rows)
    return by_name


def size(shape, dtype) -> int:
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def exactly(operator: str, name: str, *shape: int, dtype="float32", codec="Exact()") -> Residual:
    nbytes = size(shape, dtype)
    return Residual(operator, name, shape, dtype, nbytes, nbytes, codec, "")


def argument(name: str, *shape: int, dtype="float32") -> Residual:
    return Residual("argument", name, shape, dtype, size(shape, dtype), 0, "", ALIVE)


def neg(x):
    """Returns a value that is not an argument and needs no residual."""
    return jax.tree.map(jnp.negative, x)


def attention(x, **options):
    return actjax.attention(x, x[:, :, :2], x[:, :, 2:], **options)


X = array(2, 5, 4, 8)

# A call on values that are not arguments, the arguments, the expected rows. The decoder below has
# the other operators.
OPERATORS = {
    "linear": (
        lambda x, w, b: actjax.linear(neg(x), w, bias=b, name="mine"),
        (array(6, 8, dtype="bfloat16"), array(8, 5), array(5)),
        {
            exactly("linear", "mine", 6, 8, dtype="bfloat16"),
            argument("[1]", 8, 5),
            argument("[2]", 5),
        },
    ),
    "rope": (
        lambda x, tables: actjax.rope(neg(x), *tables),
        (X, (array(5, 4), array(5, 4))),
        {argument("[1][0]", 5, 4), argument("[1][1]", 5, 4)},
    ),
    "attention": (  # Here q is an argument.
        lambda x: attention(x, name="self"),
        (X,),
        {
            argument("[0]", 2, 5, 4, 8),
            exactly("attention", "self k", 2, 5, 2, 8),
            exactly("attention", "self v", 2, 5, 2, 8),
            exactly("attention", "self output", 2, 5, 32),
            exactly("attention", "self log-sum-exp", 2, 4, 5),
        },
    ),
    "cross_entropy": (
        lambda x, w: actjax.cross_entropy(neg(x), w, np.zeros(6, int), name="next token"),
        (array(6, 8), array(8, 9)),
        {
            exactly("cross_entropy", "next token gradient of hidden", 6, 8),
            exactly("cross_entropy", "next token gradient of head", 8, 9),
            exactly("cross_entropy", "next token inverse sum of mask"),
        },
    ),
    "token_log_probs": (
        lambda x, w, labels: actjax.token_log_probs(neg(x), w, labels, name="next"),
        (array(6, 8), array(8, 9), array(6, dtype="int32")),
        {
            exactly("token_log_probs", "next hidden", 6, 8),
            exactly("token_log_probs", "next log-sum-exp", 6),
            argument("[1]", 8, 9),
            argument("[2]", 6, dtype="int32"),
        },
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_each_operator_stores_what_it_documents(name):
    fun, args, want = OPERATORS[name]
    explanation = explain(fun, *args)
    assert set(explanation.residuals) == want
    assert len(explanation.residuals) == len(want)
    assert explanation.stored_bytes == explanation.exact_bytes == held_bytes(fun, *args)
    sizes = [r.exact_bytes for r in explanation.residuals]
    assert sizes == sorted(sizes, reverse=True)


TRANSFORMS = {
    "once": lambda f: lambda x, w: f(x, w, KEY),
    "jit": lambda f: lambda x, w: jax.jit(f)(x, w, KEY),
    "jit of jit": lambda f: lambda x, w: jax.jit(jax.jit(f))(x, w, KEY),
    "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None, 0))(x, w, jax.random.split(KEY, 3)),
    "scan": lambda f: (
        lambda x, w: jax.lax.scan(
            lambda _, it: (None, f(it[0], w, it[1])), None, (x, jax.random.split(KEY, 3))
        )[1]
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(
    "codec",
    [Exact(), RandomProjection(2), RandomizedSVD(2), PointApproximation(0.25)],
    ids=repr,
)
def test_a_code_of_several_arrays_is_one_row(codec, transform):
    fun = TRANSFORMS[transform](
        lambda x, w, key: actjax.linear(neg(x), (w, w), codec=codec, key=key, name="mine")
    )
    lead = (3,) if transform in ("vmap", "scan") else ()
    x, w = array(*lead, 2, 6, 8), array(8, 5)
    stored = math.prod(lead) * codec.stored_bytes((2, 6, 8), x.dtype)
    exact = size(x.shape, x.dtype)
    want = Residual("linear", "mine", x.shape, "float32", exact, stored, repr(codec), "")
    explanation = explain(fun, x, w)
    assert explanation.residuals == (want, argument("[1]", 8, 5))
    assert explanation.stored_bytes == stored == held_bytes(fun, x, w)
    assert explanation.exact_bytes == exact


def test_an_array_that_two_operators_store_counts_once_and_a_second_code_is_shown():
    def fun(x, w, **options):
        return actjax.linear(attention(x, merge_heads=True), w, name="attention_out", **options)

    args = X, array(32, 3)
    explanation = explain(fun, *args)
    row = kept(explanation)["attention: output, attention_out"]
    assert row == exactly("attention", "output, attention_out", 2, 5, 32)
    assert explanation.stored_bytes == held_bytes(fun, *args)
    codec = RandomProjection(2)
    rows = kept(explain(lambda x, w: fun(x, w, codec=codec, key=KEY), *args))
    assert rows["attention: output"].stored_bytes == 2 * 5 * 32 * 4
    code = codec.stored_bytes((2, 5, 32), "float32")
    assert rows["linear: attention_out"].stored_bytes == code


def test_checkpoint_stores_arguments_and_under_scan_inputs_of_layers():
    @jax.checkpoint
    def layer(x, w):
        codec = RandomProjection(2)
        return jnp.tanh(actjax.linear(neg(x), w, codec=codec, key=KEY)), None

    explanation = explain(lambda x, w: layer(x, w)[0], array(6, 8), array(8, 8))
    rows = {r for r in explanation.residuals if r.operator == "argument"}
    assert rows == {argument("[0]", 6, 8), argument("[1]", 8, 8)}
    assert explanation.stored_bytes == 0
    fun = lambda x, ws: jax.lax.scan(layer, x, ws)[0]  # noqa: E731
    args = array(6, 8), array(5, 8, 8)
    (row,) = kept(explain(fun, *args)).values()
    assert row.shape == (5, 6, 8)
    assert row.stored_bytes == 5 * 6 * 8 * 4 == held_bytes(fun, *args)


def test_functions_of_jax_are_explained_and_names_of_policies_are_not_tags():
    name = jax.ad_checkpoint.checkpoint_name
    explanation = explain(lambda x: jnp.sin(name(jnp.exp(x), "theirs")), array(6, 8))
    # exp stores its value and sin its cosine; both are new arrays.
    rows = {(r.operator, r.reason, r.codec) for r in explanation.residuals}
    assert rows == {("exp", FOREIGN, ""), ("cos", FOREIGN, "")}
    assert all("test_explain.py" in r.name for r in explanation.residuals)
    assert explanation.stored_bytes == 2 * 6 * 8 * 4


# Arguments.


def test_arrays_have_the_rows_of_their_shapes():
    fun, args, _ = OPERATORS["cross_entropy"]
    arrays = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), args)
    assert explain(fun, *arrays) == explain(fun, *args)


def test_models_larger_than_memory_are_explained():
    fun = lambda x, w: actjax.linear(neg(x), w, codec=RandomizedSVD(32), key=KEY)  # noqa: E731
    x, w = array(2**22, 2**14, dtype="bfloat16"), array(2**14, 2**14, dtype="bfloat16")
    row = kept(explain(fun, x, w))["linear: input"]
    assert row.exact_bytes == 2**37
    assert row.stored_bytes == (2**22 + 2**14) * 32 * 2


def test_arguments_may_be_integers_keys_and_numbers():
    labels = np.zeros(6, int)
    tree = {"x": array(6, 8), "labels": labels, "none": None, "key": KEY, "scale": 2.0}

    def fun(tree, count):
        x = tree["scale"] * jnp.sin(tree["x"]) * count
        y = actjax.linear(x, x.T, codec=RandomProjection(2), key=tree["key"])
        return y, tree["labels"]

    rows = explain(fun, tree, 3).residuals
    assert {"[0]['x']", "[0]['labels']"}.isdisjoint(r.name for r in rows if r.reason == FOREIGN)
    assert {"RandomProjection(rank=2)"} == {r.codec for r in rows if r.operator == "linear"}


@pytest.mark.parametrize("args", [(), (3,), (np.arange(3), None), (KEY,)], ids=str)
def test_arguments_without_floating_point_arrays_are_refused(args):
    with pytest.raises(ValueError, match="no argument of `fun` has a floating point array"):
        explain(lambda *args: jnp.ones(3), *args)


# A whole model.

STORED = Storage(RandomizedSVD(4), RandomProjection(4), PointApproximation(points=3), Exact())


@pytest.mark.parametrize("storage", [Storage(), STORED], ids=["exact", "lossy"])
def test_a_decoder_stores_what_its_table_lists(storage):
    model, lead = jax.eval_shape(decoder), (2, 11)
    tokens = np.zeros(lead, np.int32)

    def loss(model):
        return model.loss(tokens, tokens, storage=storage, key=KEY, compute_dtype="float32")

    explanation = explain(loss, model)
    rows = kept(explanation)
    assert explanation.stored_bytes == held_bytes(loss, model)
    d, f = CONFIG.hidden_size, CONFIG.stored_ffn_size
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
    alive = [r for r in explanation.residuals if r.reason == ALIVE]
    assert {r.operator for r in alive} <= {"argument", "constant"}
    assert any(r.name.startswith("[0].layers.attention.q") for r in alive)


# Printed tables.


def test_the_table_prints_every_row_and_the_total():
    def fun(x, y, w):
        z = actjax.linear(neg(x), w, codec=RandomizedSVD(2), key=KEY, name="mine")
        return jnp.sin(z) + attention(y).sum()

    explanation = explain(fun, array(6, 8), X, array(8, 5))
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


def test_small_foreign_arrays_share_a_line():
    fun = lambda x, y: (actjax.swiglu(neg(x), neg(x)), jnp.sin(y), jnp.cos(y))  # noqa: E731
    text = str(explain(fun, array(1000, 10), array(3)))
    assert "2 arrays" in next(line for line in text.splitlines() if "small arrays" in line)
    assert "cos:" not in text


def test_the_table_is_the_same_text_in_notebooks_and_terminals_and_names_are_no_markup(monkeypatch):
    row = Residual("dot", "[bold]a:100:", (2,), "float32", 8, 8, "", FOREIGN)
    explanation = Explanation((row,))
    table = str(explanation)
    assert "dot: [bold]a:100:" in table
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(explanation) == table


def test_bytes_are_printed_in_the_unit_that_fits():
    texts = {0: "0 B", 1: "1 B", 1023: "1023 B", 1024: "1.00 KiB", 2**20: "1.00 MiB",
             3 * 2**30: "3.00 GiB", 2**45: "32768.00 GiB"}  # fmt: skip
    for count, want in texts.items():
        row = Residual("linear", "x", (count,), "uint8", count, count, "Exact()", "")
        assert want in str(Explanation((row,)))


def test_as_dicts_is_json():
    fun, args, _ = OPERATORS["attention"]
    explanation = explain(fun, *args)
    rows = json.loads(json.dumps(explanation.as_dicts()))
    want = [dataclasses.asdict(r) | {"shape": list(r.shape)} for r in explanation.residuals]
    assert rows == want
