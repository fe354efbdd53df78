"""What the code in README.md and docs/ takes for granted: arrays, a small model and its loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import actjax

TOKENS, WIDTH, FFN, LAYERS = 64, 128, 256, 2
random = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    """Returns float32 normals, scaled like the weights of a linear layer."""
    return jnp.asarray(random.normal(size=shape) / np.sqrt(shape[-2]), jnp.float32)


key = jax.random.key(0)
x = normal(TOKENS, WIDTH)
w, wq, wk, wv = (normal(WIDTH, WIDTH) for _ in range(4))
scale = jnp.ones(WIDTH)
gate, up = normal(TOKENS, FFN), normal(TOKENS, FFN)
w_gate, w_down = normal(WIDTH, FFN), normal(FFN, WIDTH)
r, alpha = 8, 16
a, b = normal(WIDTH, r), jnp.zeros((r, FFN))
images, filters = normal(2, 8, 8, 3), normal(3, 3, 3, 16)
table, ids = normal(100, WIDTH), jnp.arange(TOKENS)

params = {
    "layers": {
        "w_in": normal(LAYERS, WIDTH, FFN),
        "w_out": normal(LAYERS, FFN, WIDTH),
        "norm": jnp.ones((LAYERS, WIDTH)),
    }
}
batch = {"x": x, "y": normal(TOKENS, WIDTH)}


def layer(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    """One layer of plain JAX."""
    return x + jax.nn.silu(x @ weights["w_in"]) @ weights["w_out"]


def loss(params: dict[str, dict], batch: dict[str, jax.Array]) -> jax.Array:
    """A loss of plain JAX over a scan of layers."""
    y, _ = jax.lax.scan(lambda x, weights: (layer(x, weights), None), batch["x"], params["layers"])
    return jnp.mean((y - batch["y"]) ** 2)


def loss_function(params: dict[str, dict], batch: dict[str, jax.Array]) -> jax.Array:
    """The same, with operators whose inputs are stored with rank 32."""
    linear = functools.partial(actjax.linear, codec=actjax.RandomizedSVD(32))

    def body(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        first, second = jax.random.split(jax.random.key(0))
        h = actjax.rms_norm(x, weights["norm"])
        h = jax.nn.silu(linear(h, weights["w_in"], key=first))
        return x + linear(h, weights["w_out"], key=second), None

    y, _ = jax.lax.scan(body, batch["x"], params["layers"])
    return jnp.mean((y - batch["y"]) ** 2)


tx = optax.adamw(1e-3)
