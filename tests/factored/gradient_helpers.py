"""Problems and comparisons for tests of `value_and_grad`, of bases and of `accumulate`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cheap_codecs import Projected, Spanned

import actjax
from actjax import Codec, PointApproximation, linear
from actjax._core.paths import path_name
from actjax.factored.low_rank import is_low_rank

KEY = jax.random.key(7)
BOTH = actjax.value_and_grad, jax.value_and_grad
RP, SVD = Projected(3), Spanned(3)
KINDS = RP, SVD, PointApproximation(1 / 4)
XS = np.random.default_rng(0).standard_normal((4, 12, 8))
"""Four inputs, as NumPy arrays, so that they take the precision of the test."""


def normal(seed: int, *shape: int, dtype=None) -> jax.Array:
    """Returns an array that is drawn and cast in NumPy: in JAX each shape would compile."""
    numbers = np.random.default_rng(seed).standard_normal(shape)
    return jax.device_put(numbers.astype(dtype or jax.dtypes.canonicalize_dtype(float)))


def project(x, w, codec: Codec = RP, key=KEY, **options):
    return linear(x, w, codec=codec, key=key, **options)


def total(*ys: jax.Array) -> jax.Array:
    """Returns a scalar whose cotangents are not constant."""
    return sum((jnp.sum(jnp.sin(y)) for y in ys), jnp.zeros(()))


def by_path(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_low_rank)
    return {path_name(path): leaf for path, leaf in leaves}


def factored(tree: Any) -> set[str]:
    """Returns the paths of the `LowRank`s."""
    return {path for path, leaf in by_path(tree).items() if is_low_rank(leaf)}


def dense(tree: Any) -> Any:
    """Returns the tree with each `LowRank` multiplied out."""
    multiplied = lambda g: g.dense() if is_low_rank(g) else g  # noqa: E731
    return jax.tree.map(multiplied, tree, is_leaf=is_low_rank)


def run_jitted(functions, *args, **kwargs) -> list[Any]:
    """Calls functions on the same arguments in one compiled program.

    Only arrays are arguments of the program: Python numbers stay Python numbers.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]

    @jax.jit
    def run(arrays):
        merged = list(leaves)
        for i, x in zip(at, arrays, strict=True):
            merged[i] = x
        args, kwargs = jax.tree.unflatten(treedef, merged)
        return [fun(*args, **kwargs) for fun in functions]

    return run([leaves[i] for i in at])


def assert_same(got: Any, want: Any) -> None:
    """Compares two trees in float64, a `LowRank` by its product.

    Their sums of some tens of terms may run in another order.
    """
    got, want = by_path(got), by_path(want)
    assert list(got) == list(want)
    for path, leaf in got.items():
        assert (leaf.dtype, leaf.shape) == (want[path].dtype, want[path].shape), path
        array = np.asarray(leaf.left) @ np.asarray(leaf.right) if is_low_rank(leaf) else leaf
        size = np.max(np.abs(want[path]), initial=0)
        np.testing.assert_allclose(array, want[path], rtol=0, atol=1e-12 * size, err_msg=path)


def compare(fun, *args, argnums: Any = 0, **kwargs) -> Any:
    """Returns the gradient, after comparing value and gradient with those of JAX."""
    got, want = run_jitted([f(fun, argnums) for f in BOTH], *args, **kwargs)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-13)
    assert_same(got[1], want[1])
    return got[1]


def mlp_params(dtype=None) -> dict[str, Any]:
    return {
        "in": {"w": normal(0, 8, 8, dtype=dtype), "b": normal(1, 8, dtype=dtype)},
        "out": {"w": normal(2, 8, 8, dtype=dtype), "b": normal(3, 8, dtype=dtype)},
        "scale": normal(4, 8, dtype=dtype),
    }


def mlp(params, x, codec, key=KEY):
    keys = jax.random.split(key)
    h = jnp.tanh(project(x, params["in"]["w"], codec, keys[0], bias=params["in"]["b"]))
    y = project(h, params["out"]["w"], codec, keys[1], bias=params["out"]["b"])
    return total(y * params["scale"])


def stack(layers=3, features=8):
    return {"w": normal(1, layers, features, features), "b": normal(2, layers, features)}


def run_stack(params, x, layer):
    keys = jax.random.split(KEY, 3)
    return jax.lax.scan(lambda x, p: (layer(*p, x), None), x, (params, keys))[0]


def tanh_layer(p, key, x, codec: Codec = RP):
    return jnp.tanh(project(x, p["w"], codec, key, bias=p["b"]))


WEIGHTS = {
    **{f"layers.attention.{name}": "attention_in" for name in "kqv"},
    "layers.attention.o": "attention_out",
    **{f"layers.mlp.{name}": "mlp_in" for name in ("gate", "up")},
    "layers.mlp.down": "mlp_out",
}
