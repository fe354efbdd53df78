"""A decoder layer that consists of operators with a rebuilt input."""

import jax
import jax.numpy as jnp
import numpy as np
from ops.helpers import KEY

from actjax import attention_linear, norm_linear, swiglu_linear

WEIGHTS = {"q": (8, 8), "k": (8, 4), "v": (8, 4), "o": (8, 8)} | {
    "gate": (8, 12), "up": (8, 12), "down": (12, 8)
}  # fmt: skip
INPUTS = {"q": "k", "k": "k", "v": "k", "o": "o", "gate": "gate", "up": "gate", "down": "down"}
"""The input of each weight, named for its first weight in the order of a dictionary's keys."""


def block_params(*lead: int, factor: int = 1) -> dict[str, jax.Array]:
    """Returns weights and scales of norms, `factor` times as wide."""
    dtype = jax.dtypes.canonicalize_dtype(float)
    shapes = WEIGHTS | {"first": (8,), "second": (8,)}
    return {
        name: jax.device_put(
            np.random.default_rng(i)
            .standard_normal((*lead, *(factor * n for n in shape)))
            .astype(dtype)
            / 2
        )
        for i, (name, shape) in enumerate(shapes.items())
    }


def block(x, p, codec, keys):
    """A layer of a decoder."""
    options = [{"codec": codec, "key": key} for key in keys[:2]]
    qkv = norm_linear(x, p["first"], (p["q"], p["k"], p["v"]), **options[0])
    q, k, v = (y.reshape(*x.shape[:2], n, -1) for y, n in zip(qkv, (4, 2, 2), strict=True))
    return mlp_block(x + attention_linear(q, k, v, p["o"], **options[1]), p, codec, keys)


def mlp_block(x, p, codec, keys):
    """The second half of the layer."""
    options = [{"codec": codec, "key": key} for key in keys[2:]]
    gate, up = norm_linear(x, p["second"], (p["gate"], p["up"]), **options[0])
    return x + swiglu_linear(gate, up, p["down"], **options[1])


KEYS = tuple(jax.random.split(KEY, 4))


def scanned(params, x, codec):
    """Returns a loss of layers in a scan."""
    body = lambda x, p: (block(x, p, codec, KEYS), None)  # noqa: E731
    return jnp.sum(jnp.sin(jax.lax.scan(body, x, params)[0]))
