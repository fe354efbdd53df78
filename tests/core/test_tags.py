"""Tests of actjax/_core/tags.py: tags are names of arrays, and change nothing else."""

import jax
import jax.numpy as jnp
import numpy as np

from actjax import Exact, RandomizedSVD, RandomProjection
from actjax._core.tags import Tag, keep, keep_output

PIECES = (
    "a",
    "linear",
    "é",
    "☃",
    " ",
    "\n",
    "[1, 2]",
    ",",
    ":",
    "=",
    "%",
    "/",
    "'",
    '"',
    "0",
    "-1",
    "",
)


def drawn_text(rng):
    return "".join(rng.choice(PIECES, rng.integers(6)))


def drawn_tag(rng):
    return Tag(
        operator=str(rng.choice(["linear", "rms_norm", "attention_2"])),
        name=drawn_text(rng),
        codec=str(rng.choice([repr(Exact()), repr(RandomizedSVD(4, 1)), "Mine(a=[1, 2])"])),
        shape=tuple(map(int, rng.integers(0, 2**40, rng.integers(6)))),
        dtype=str(rng.choice(["float32", "bfloat16", "float8_e4m3fn"])),
        leaf=int(rng.integers(100)),
        leaf_size=int(rng.integers(2**40)),
    )


def test_decode_is_the_inverse_of_encode_and_foreign_names_give_none():
    rng = np.random.default_rng(0)
    for _ in range(200):
        tag, text = drawn_tag(rng), drawn_text(rng)
        assert Tag.decode(tag.encode()) == tag
        assert Tag.decode(text) is None
        assert Tag.decode("|".join([text, *tag.encode().split("|")[1:]])) is None


def test_the_separator_in_a_name_is_replaced():
    tag = Tag("linear", "a|b", "Exact()", (2, 3), "float32", 0, 6)
    decoded = Tag.decode(tag.encode())
    assert decoded is not None
    assert decoded.name == "a/b"
    assert decoded.shape == (2, 3)


def test_malformed_tags_give_none():
    name = Tag("linear", "input", "Exact()", (2,), "float32", 0, 2).encode()
    assert [Tag.decode(changed) for changed in ("x" + name, name + "x", name[1:])] == [None] * 3


def names(fun, *args) -> list[Tag | None]:
    """Returns the tags in the program of `fun`, in order."""
    eqns = jax.make_jaxpr(fun)(*args).jaxpr.eqns
    return [Tag.decode(eqn.params["name"]) for eqn in eqns if eqn.primitive.name == "name"]


def test_an_exact_input_is_tagged_for_the_forward_pass_only():
    x = np.ones((2, 3), np.float32)
    jaxpr = jax.make_jaxpr(lambda x: keep(x, Exact(), None, "linear", "input"))(x).jaxpr
    assert jaxpr.outvars[0] is not jaxpr.invars[0]
    assert jaxpr.outvars[1] is jaxpr.invars[0]
    in_program = names(lambda x: keep(x, Exact(), None, "linear", "input")[0], x)
    assert in_program == [Tag("linear", "input", "Exact()", (2, 3), "float32", 0, 6)]


def test_each_array_of_a_code_is_tagged_with_the_encoded_shape():
    x, codec, key = np.ones((4, 3), jnp.bfloat16), RandomProjection(2), jax.random.key(0)
    encoded, (_, code) = jax.eval_shape(
        lambda x: (codec.encode(x, key), keep(x, codec, key, "linear", "qkv input")), x
    )
    assert jax.tree.structure(code) == jax.tree.structure(encoded)
    in_program = names(lambda x: jax.tree.leaves(keep(x, codec, key, "linear", "qkv input")[1]), x)
    tag = Tag("linear", "qkv input", "RandomProjection(rank=2)", (4, 3), "bfloat16", 0, 8)
    assert in_program == [tag, Tag(**{**vars(tag), "leaf": 1, "leaf_size": 2})]


def test_an_output_is_returned_and_stored_as_one_array():
    assert names(lambda y: keep_output(y, "attention", "output"), np.ones(3, np.float32)) == [
        Tag("attention", "output", "Exact()", (3,), "float32", 0, 3)
    ]


def test_a_tag_costs_nothing_in_the_compiled_program():
    def instructions(fun) -> int:
        compiled = jax.jit(fun).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32)).compile()
        return compiled.as_text().count(" = ")

    tagged = lambda x: jnp.cos(keep_output(jnp.sin(x), "linear", "output"))  # noqa: E731
    assert instructions(tagged) == instructions(lambda x: jnp.cos(jnp.sin(x)))
