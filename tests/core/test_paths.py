"""Tests of actjax/_core/paths.py: names of leaves."""

import jax
import jax.numpy as jnp
from flax import nnx

from actjax._core.paths import path_name


def test_paths_are_joined_by_dots():
    w = jnp.ones(3)
    tree = {"layers": [{"q": w}, (w, nnx.Param(w))], "norm": w}
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert paths == ["layers.0.q", "layers.1.0", "layers.1.1", "norm"]
    assert path_name(()) == ""
    attention = {"attention": {"query": w, "value": w}}
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(attention)]
    assert paths == ["attention.query", "attention.value"]
