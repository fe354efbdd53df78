"""Tests of actjax/_core/tags.py: tags are names of arrays, and change nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actjax import Exact, RandomizedSVD, RandomProjection
from actjax._core.tags import Tag, keep, keep_output

sizes = st.integers(0, 2**40)
tags = st.builds(
    Tag,
    operator=st.from_regex(r"[a-z_0-9]+", fullmatch=True),
    name=st.text().filter(lambda name: "|" not in name),
    codec=st.sampled_from([repr(Exact()), repr(RandomizedSVD(4, 1)), "Mine(a=[1, 2])"]),
    shape=st.lists(sizes, max_size=5).map(tuple),
    dtype=st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]),
    leaf=st.integers(0, 100),
    leaf_size=sizes,
)


@given(tags)
def test_decode_is_the_inverse_of_encode(tag):
    assert Tag.decode(tag.encode()) == tag


def test_the_separator_in_a_name_is_replaced():
    tag = Tag("linear", "a|b", "Exact()", (2, 3), "float32", 0, 6)
    decoded = Tag.decode(tag.encode())
    assert decoded is not None
    assert decoded.name == "a/b"
    assert decoded.shape == (2, 3)


@given(st.text())
def test_foreign_names_give_none(text):
    assert Tag.decode(text) is None


@pytest.mark.parametrize("change", [lambda s: "x" + s, lambda s: s + "x", lambda s: s[1:]])
def test_malformed_tags_give_none(change):
    name = Tag("linear", "input", "Exact()", (2,), "float32", 0, 2).encode()
    assert Tag.decode(name) is not None
    assert Tag.decode(change(name)) is None


def names(fun, *args) -> list[Tag | None]:
    """Returns the tags in the program of `fun`, in order."""
    eqns = jax.make_jaxpr(fun)(*args).jaxpr.eqns
    return [Tag.decode(eqn.params["name"]) for eqn in eqns if eqn.primitive.name == "name"]


def test_an_exact_input_is_tagged_for_the_forward_pass_only():
    x = jnp.ones((2, 3))
    for array in keep(x, Exact(), None, "linear", "input"):
        np.testing.assert_array_equal(array, x)
    jaxpr = jax.make_jaxpr(lambda x: keep(x, Exact(), None, "linear", "input"))(x).jaxpr
    assert jaxpr.outvars[0] is not jaxpr.invars[0]
    assert jaxpr.outvars[1] is jaxpr.invars[0]
    found = names(lambda x: keep(x, Exact(), None, "linear", "input")[0], x)
    assert found == [Tag("linear", "input", "Exact()", (2, 3), "float32", 0, 6)]


def test_each_array_of_a_code_is_tagged_with_the_encoded_shape():
    x, codec, key = jnp.ones((4, 3), jnp.bfloat16), RandomProjection(2), jax.random.key(0)
    forward, code = keep(x, codec, key, "linear", "qkv input")
    np.testing.assert_array_equal(forward, x)
    assert jax.tree.structure(code) == jax.tree.structure(codec.encode(x, key))
    found = names(lambda x: jax.tree.leaves(keep(x, codec, key, "linear", "qkv input")[1]), x)
    tag = Tag("linear", "qkv input", "RandomProjection(rank=2)", (4, 3), "bfloat16", 0, 8)
    assert found == [tag, Tag(**{**vars(tag), "leaf": 1, "leaf_size": 2})]


def test_an_output_is_returned_and_stored_as_one_array():
    assert names(lambda y: keep_output(y, "attention", "output"), jnp.ones(3)) == [
        Tag("attention", "output", "Exact()", (3,), "float32", 0, 3)
    ]


def test_a_tag_costs_nothing_in_the_compiled_program():
    def instructions(fun) -> int:
        compiled = jax.jit(fun).lower(jax.ShapeDtypeStruct((64, 64), jnp.float32)).compile()
        return compiled.as_text().count(" = ")

    tagged = lambda x: jnp.cos(keep_output(jnp.sin(x), "linear", "output"))  # noqa: E731
    assert instructions(tagged) == instructions(lambda x: jnp.cos(jnp.sin(x)))
