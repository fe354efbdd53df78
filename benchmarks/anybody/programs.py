"""Small programs in which a code of the wrong array ruins the gradient.

Each is written as anybody would write it, and rebuilds something through `exp`, `log`, a division
or a high frequency.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Arrays = dict[str, jax.Array]
ROWS, WIDTH, HIDDEN = 256, 32, 64


@dataclasses.dataclass(frozen=True)
class Program:
    """A loss with its parameters and its batch.

    Attributes:
      kind: the fault that it stands for.
      name: its name.
      loss: from the parameters and the batch to a scalar.
      params: its parameters.
      batch: its other arguments.
    """

    kind: str
    name: str
    loss: Callable[..., jax.Array]
    params: Any
    batch: tuple[Any, ...]


def programs(seed: int = 0) -> list[Program]:
    """Returns all programs, with parameters and data drawn from a seed."""
    return [Program(kind, name, *build(np.random.default_rng(seed))) for kind, name, build in _ALL]


def _normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(scale * rng.standard_normal(shape), jnp.float32)


def _weights(rng: np.random.Generator, *sizes: int, gain: float = 1.0) -> Arrays:
    pairs = enumerate(itertools.pairwise(sizes))
    return {f"w{i}": _normal(rng, a, b, scale=gain / a**0.5) for i, (a, b) in pairs}


def _ctc(rng):
    batch, times, labels, classes = 16, 48, 12, 20
    params = _weights(rng, WIDTH, HIDDEN, classes)
    x = _normal(rng, batch, times, WIDTH)
    y = jnp.asarray(rng.integers(1, classes, (batch, labels)))

    def loss(p, x, y):
        logits = jnp.tanh(x @ p["w0"]) @ p["w1"]
        return optax.ctc_loss(logits, jnp.zeros(x.shape[:2]), y, jnp.zeros(y.shape)).mean()

    return loss, params, (x, y)


def _forward_algorithm(rng):
    states, times, batch = 16, 40, 64
    params = _weights(rng, WIDTH, states) | {"a": _normal(rng, states, states)}
    x = _normal(rng, times, batch, WIDTH)

    def loss(p, x):
        moves = jax.nn.log_softmax(p["a"])
        start = jnp.full((x.shape[1], states), -1e5).at[:, 0].set(0.0)

        def step(alpha, x):
            emitted = jax.nn.log_softmax(x @ p["w0"])
            return jax.nn.logsumexp(alpha[:, :, None] + moves, 1) + emitted, None

        return -jax.nn.logsumexp(jax.lax.scan(step, start, x)[0], 1).mean()

    return loss, params, (x,)


def _log_space_product(rng):
    params = _weights(rng, WIDTH, HIDDEN, HIDDEN)
    x = _normal(rng, ROWS, WIDTH)

    def loss(p, x):
        logs = jnp.cumsum(jax.nn.log_sigmoid(x @ p["w0"]) * 4, 1)
        mixed = jnp.exp(logs - jax.nn.logsumexp(logs, 1, keepdims=True))
        return jnp.mean((mixed @ p["w1"]) ** 2)

    return loss, params, (x,)


def _mixture_of_experts_likelihood(rng):
    params = _weights(rng, WIDTH, HIDDEN) | {"c": _normal(rng, HIDDEN, WIDTH)}
    x = _normal(rng, ROWS, WIDTH)

    def loss(p, x):
        gates = jax.nn.log_softmax(3 * x @ p["w0"])
        distance = jnp.sum((x[:, None] - p["c"]) ** 2, -1)
        return -jax.nn.logsumexp(gates - distance / 2, 1).mean()

    return loss, params, (x,)


def _graph(rng):
    nodes, edges = 128, 1024
    return jnp.asarray(rng.integers(0, nodes, edges)), jnp.asarray(rng.integers(0, nodes, edges))


def _graph_attention(rng):
    params = _weights(rng, WIDTH, HIDDEN, HIDDEN) | {
        "s": _normal(rng, HIDDEN),
        "t": _normal(rng, HIDDEN),
    }
    x = _normal(rng, 128, WIDTH)

    def loss(p, x, source, target):
        for w in (p["w0"], p["w1"]):
            h = (x @ w).reshape(len(x), 4, -1)
            s, t = ((h * p[k].reshape(4, -1)).sum(-1) for k in "st")
            scores = jax.nn.leaky_relu(s[source] + t[target], 0.2)
            top = jax.ops.segment_max(scores, target, len(x))
            e = jnp.exp(scores - top[target])
            total = jax.ops.segment_sum(e, target, len(x))
            a = e / total[target]
            x = jax.nn.elu(jax.ops.segment_sum(a[..., None] * h[source], target, len(x)))
            x = x.reshape(len(x), -1)
        return jnp.mean(x**2)

    return loss, params, (x, *_graph(rng))


def _graph_mean_by_degree(rng):
    params = _weights(rng, WIDTH, HIDDEN, HIDDEN)
    x = _normal(rng, 128, WIDTH)

    def loss(p, x, source, target):
        weight = jax.nn.softplus(4 * (x @ p["w0"])[source])
        total = jax.ops.segment_sum(weight, target, len(x))
        h = jax.ops.segment_sum(weight * jnp.tanh(x @ p["w0"])[source], target, len(x)) / (
            total + 1e-3
        )
        return jnp.mean((h @ p["w1"]) ** 2)

    return loss, params, (x, *_graph(rng))


def _entropy_of_attention(rng):
    params = _weights(rng, WIDTH, HIDDEN) | {"k": _normal(rng, WIDTH, HIDDEN, scale=WIDTH**-0.5)}
    x = _normal(rng, ROWS, WIDTH)

    def loss(p, x):
        a = jax.nn.softmax((x @ p["w0"]) @ (x @ p["k"]).T / 4)
        return -jnp.sum(a * jnp.log(a + 1e-9), 1).mean()

    return loss, params, (x,)


def _linear_attention(rng):
    params = {k: _normal(rng, WIDTH, HIDDEN, scale=WIDTH**-0.5) for k in "qkv"}
    x = _normal(rng, 4, 64, WIDTH)

    def loss(p, x):
        q, k = (x @ p[name] * 4 for name in "qk")
        q = jnp.exp(q - q.max(-1, keepdims=True))
        k = jnp.exp(k - k.max())
        state = jnp.cumsum(k[..., None] * (x @ p["v"])[..., None, :], 1)
        total = jnp.sum(q * jnp.cumsum(k, 1), -1)
        return jnp.mean((jnp.einsum("btd,btde->bte", q, state) / total[..., None]) ** 2)

    return loss, params, (x,)


def _random_features(rng):
    params = {k: _normal(rng, WIDTH, HIDDEN, scale=WIDTH**-0.5) for k in "qkv"}
    x = _normal(rng, 4, 64, WIDTH)

    def loss(p, x):
        q, k = (jnp.exp(x @ p[n] - jnp.sum(x**2, -1, keepdims=True) / 2) + 1e-6 for n in "qk")
        state = jnp.einsum("btd,bte->bde", k, x @ p["v"])
        total = jnp.einsum("btd,bd->bt", q, k.sum(1))
        return jnp.mean((jnp.einsum("btd,bde->bte", q, state) / total[..., None]) ** 2)

    return loss, params, (x,)


def _decay(rng):
    params = _weights(rng, WIDTH, HIDDEN, HIDDEN) | {
        "d": _normal(rng, WIDTH, HIDDEN, scale=WIDTH**-0.5)
    }
    x = _normal(rng, 64, 16, WIDTH)

    def loss(p, x):
        def step(h, x):
            rate = jnp.exp(-jnp.exp(x @ p["d"]))
            return rate * h + (1 - rate) * (x @ p["w0"]), h

        _, ys = jax.lax.scan(step, jnp.zeros((x.shape[1], HIDDEN)), x)
        return jnp.mean((ys @ p["w1"]) ** 2)

    return loss, params, (x,)


def _siren(rng):
    params = _weights(rng, 2, HIDDEN, HIDDEN, HIDDEN)
    params = {k: w / (1 if k == "w0" else 30 / 6**0.5) for k, w in params.items()} | {
        "v": _normal(rng, HIDDEN, 1, scale=0.1)
    }
    x = jnp.asarray(rng.uniform(-1, 1, (ROWS, 2)), jnp.float32)
    y = jnp.sin(9 * x[:, :1]) * x[:, 1:]

    def loss(p, x, y):
        for name in ("w0", "w1", "w2"):
            x = jnp.sin(30 * x @ p[name])
        return jnp.mean((x @ p["v"] - y) ** 2)

    return loss, params, (x, y)


def _fourier_features(rng):
    params = _weights(rng, WIDTH, HIDDEN) | {"v": _normal(rng, 2 * HIDDEN, 4, scale=0.1)}
    x = _normal(rng, ROWS, WIDTH)

    def loss(p, x):
        z = 2 * jnp.pi * 5 * (x @ p["w0"])
        return jnp.mean((jnp.concatenate([jnp.sin(z), jnp.cos(z)], -1) @ p["v"]) ** 2)

    return loss, params, (x,)


def _snake(rng):
    params = _weights(rng, WIDTH, HIDDEN, HIDDEN) | {"a": 10 + jnp.abs(_normal(rng, HIDDEN))}
    x = _normal(rng, ROWS, WIDTH)

    def loss(p, x):
        z = x @ p["w0"]
        return jnp.mean(((z + jnp.sin(20 * z) ** 2 / p["a"]) @ p["w1"]) ** 2)

    return loss, params, (x,)


def _rotary_phases(rng):
    params = _weights(rng, WIDTH, HIDDEN) | {"f": _normal(rng, WIDTH, HIDDEN, scale=WIDTH**-0.5)}
    x = _normal(rng, ROWS, WIDTH)

    def loss(p, x):
        a, b = jnp.split(x @ p["w0"], 2, -1)
        angle = jnp.cumsum(x @ p["f"], 0)[:, : HIDDEN // 2]
        turned = jnp.concatenate(
            [a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1
        )
        return jnp.mean(jnp.tanh(turned) ** 2)

    return loss, params, (x,)


def _spline_flow(rng):
    knots = 8
    params = _weights(rng, WIDTH // 2, HIDDEN, WIDTH // 2 * (3 * knots + 1), gain=1.5)
    x = _normal(rng, ROWS, WIDTH)

    def loss(p, x):
        fixed, x = jnp.split(x, 2, -1)
        h = jax.nn.relu(fixed @ p["w0"]) @ p["w1"]
        w, t, d = jnp.split(h.reshape(*x.shape, -1), [knots, 2 * knots], -1)
        w, t = (0.001 + (1 - 0.001 * knots) * jax.nn.softmax(y) for y in (w, t))
        xs, ys = (jnp.pad(jnp.cumsum(8 * y, -1), [(0, 0)] * 2 + [(1, 0)]) - 4 for y in (w, t))
        d = 0.001 + jax.nn.softplus(d)
        z = jnp.clip(x, -3.99, 3.99)
        k = jnp.sum(z[..., None] >= xs[..., 1:-1], -1, keepdims=True)
        x0, x1, y0, y1, d0, d1 = (
            jnp.take_along_axis(a, k + i, -1)[..., 0] for a in (xs, ys, d) for i in (0, 1)
        )
        slope, u = (y1 - y0) / (x1 - x0), (z - x0) / (x1 - x0)
        below = slope + (d1 + d0 - 2 * slope) * u * (1 - u)
        y = y0 + (y1 - y0) * (slope * u**2 + d0 * u * (1 - u)) / below
        top = slope**2 * (d1 * u**2 + 2 * slope * u * (1 - u) + d0 * (1 - u) ** 2)
        logdet = jnp.log(top) - 2 * jnp.log(below)
        return jnp.mean(jnp.sum(y**2 / 2 - logdet, -1))

    return loss, params, (x,)


def _affine_flow(rng):
    params = _weights(rng, WIDTH // 2, HIDDEN, WIDTH)
    x = _normal(rng, ROWS, WIDTH)

    def loss(p, x):
        a, b = jnp.split(x, 2, -1)
        shift, scale = jnp.split(jnp.tanh(a @ p["w0"]) @ p["w1"], 2, -1)
        return jnp.mean(jnp.sum(((b - shift) * jnp.exp(-2 * scale)) ** 2 / 2 + 2 * scale, -1))

    return loss, params, (x,)


def _gaussian_likelihood(rng):
    params = _weights(rng, WIDTH, HIDDEN) | {
        k: _normal(rng, HIDDEN, WIDTH, scale=1 / 8) for k in ("m", "s")
    }
    x, y = _normal(rng, ROWS, WIDTH), _normal(rng, ROWS, WIDTH)

    def loss(p, x, y):
        h = jnp.tanh(x @ p["w0"])
        s = 2 * h @ p["s"]
        return jnp.mean(jnp.sum(((y - h @ p["m"]) / jnp.exp(s)) ** 2 / 2 + s, -1))

    return loss, params, (x, y)


def _student_likelihood(rng):
    params = _weights(rng, WIDTH, HIDDEN) | {
        k: _normal(rng, HIDDEN, WIDTH, scale=1 / 8) for k in ("m", "s")
    }
    x, y = _normal(rng, ROWS, WIDTH), _normal(rng, ROWS, WIDTH)

    def loss(p, x, y):
        h = jnp.tanh(x @ p["w0"])
        scale = jax.nn.softplus(3 * h @ p["s"]) + 1e-2
        return jnp.mean(
            jnp.sum(jnp.log(scale) + 2 * jnp.log1p(((y - h @ p["m"]) / scale) ** 2 / 3), -1)
        )

    return loss, params, (x, y)


def _gamma_likelihood(rng):
    params = _weights(rng, WIDTH, HIDDEN, WIDTH)
    x, y = _normal(rng, ROWS, WIDTH), jnp.exp(_normal(rng, ROWS, WIDTH))

    def loss(p, x, y):
        rate = jnp.exp(2 * jnp.tanh(x @ p["w0"]) @ p["w1"])
        return jnp.mean(jnp.sum(rate * y - 3 * jnp.log(rate), -1))

    return loss, params, (x, y)


def _cholesky(rng):
    n = 24
    params = _weights(rng, WIDTH, HIDDEN)
    x, y = _normal(rng, 16, n, WIDTH), _normal(rng, 16, n)

    def loss(p, x, y):
        z = jnp.tanh(x @ p["w0"])
        distance = jnp.sum((z[:, :, None] - z[:, None]) ** 2, -1)
        k = jnp.exp(-distance / 8) + 0.1 * jnp.eye(n)
        c = jnp.linalg.cholesky(k)
        u = jax.scipy.linalg.solve_triangular(c, y[..., None], lower=True)
        return jnp.mean(jnp.sum(u**2, (1, 2)) / 2 + jnp.sum(jnp.log(jnp.diagonal(c, 0, 1, 2)), 1))

    return loss, params, (x, y)


def _log_determinant(rng):
    n = 12
    params = _weights(rng, WIDTH, HIDDEN, n * n)
    x = _normal(rng, ROWS, WIDTH)

    def loss(p, x):
        a = (jnp.tanh(x @ p["w0"]) @ p["w1"]).reshape(-1, n, n)
        return -jnp.mean(jnp.linalg.slogdet(a @ a.swapaxes(1, 2) + jnp.eye(n))[1])

    return loss, params, (x,)


def _linear_solve(rng):
    n = 12
    params = _weights(rng, WIDTH, HIDDEN, n * n)
    x, y = _normal(rng, ROWS, WIDTH), _normal(rng, ROWS, n, 1)

    def loss(p, x, y):
        a = (jnp.tanh(x @ p["w0"]) @ p["w1"]).reshape(-1, n, n)
        return jnp.mean(jnp.linalg.solve(a @ a.swapaxes(1, 2) + jnp.eye(n), y) ** 2)

    return loss, params, (x, y)


def _saturated(act, gain):
    def build(rng):
        params = _weights(rng, WIDTH, HIDDEN, HIDDEN, HIDDEN)
        x = _normal(rng, ROWS, WIDTH)

        def loss(p, x):
            h = act(gain * (x @ p["w0"]))
            h = act(gain * (h @ p["w1"]))
            return jnp.mean((h @ p["w2"]) ** 2)

        return loss, params, (x,)

    return build


_saturated_tanh = _saturated(jnp.tanh, 11.0)
_saturated_sigmoid = _saturated(jax.nn.sigmoid, 15.0)
_saturated_erf = _saturated(jax.scipy.special.erf, 8.0)
_sharp_gelu = _saturated(jax.nn.gelu, 6.0)


def _masked_attention(rng):
    params = {k: _normal(rng, HIDDEN, HIDDEN, scale=HIDDEN**-0.5) for k in ("q", "k", "v", "o")}
    x = _normal(rng, 8, 64, HIDDEN)

    def loss(p, x):
        q, k, v = (x @ p[n] for n in "qkv")
        mask = jnp.where(jnp.tril(jnp.ones((64, 64), bool)), 0.0, -1e9)
        a = jnp.exp(jax.nn.log_softmax(q @ k.swapaxes(1, 2) / 4 + mask))
        return jnp.mean(jnp.tanh(a @ v @ p["o"]) ** 2)

    return loss, params, (x,)


def _masked_features(rng):
    params = _weights(rng, WIDTH, HIDDEN, HIDDEN)
    x, keep = _normal(rng, ROWS, WIDTH), jnp.asarray(rng.random((ROWS, HIDDEN)) < 0.7)

    def loss(p, x, keep):
        z = jnp.where(keep, x @ p["w0"], -1e9)
        pooled = jnp.maximum(z[0::2], z[1::2])
        return jnp.mean((jax.nn.softmax(pooled) * jnp.tanh(pooled / 5) @ p["w1"]) ** 2)

    return loss, params, (x, keep)


def _tropical(rng):
    params = _weights(rng, WIDTH, HIDDEN, HIDDEN)
    x, keep = _normal(rng, ROWS, WIDTH), jnp.asarray(rng.random((ROWS, HIDDEN)) < 0.9)

    def loss(p, x, keep):
        z = jnp.where(keep, x @ p["w0"], -jnp.inf)

        def step(best, z):
            best = jnp.logaddexp(best, z)
            return best, best

        ys = jax.lax.scan(step, jnp.full(HIDDEN, -jnp.inf), z)[1][8:]
        return jnp.mean((ys @ p["w1"]) ** 2)

    return loss, params, (x, keep)


_ALL = (
    ("log space", "ctc", _ctc),
    ("log space", "forward_algorithm", _forward_algorithm),
    ("log space", "log_space_product", _log_space_product),
    ("log space", "mixture_of_experts_likelihood", _mixture_of_experts_likelihood),
    ("segment softmax", "graph_attention", _graph_attention),
    ("segment softmax", "graph_mean_by_degree", _graph_mean_by_degree),
    ("segment softmax", "entropy_of_attention", _entropy_of_attention),
    ("exp features", "linear_attention", _linear_attention),
    ("exp features", "random_features", _random_features),
    ("exp features", "decay", _decay),
    ("frequency", "siren", _siren),
    ("frequency", "fourier_features", _fourier_features),
    ("frequency", "snake", _snake),
    ("frequency", "rotary_phases", _rotary_phases),
    ("density", "spline_flow", _spline_flow),
    ("density", "affine_flow", _affine_flow),
    ("density", "gaussian_likelihood", _gaussian_likelihood),
    ("density", "student_likelihood", _student_likelihood),
    ("density", "gamma_likelihood", _gamma_likelihood),
    ("factors", "cholesky", _cholesky),
    ("factors", "log_determinant", _log_determinant),
    ("factors", "linear_solve", _linear_solve),
    ("saturation", "saturated_tanh", _saturated_tanh),
    ("saturation", "saturated_sigmoid", _saturated_sigmoid),
    ("saturation", "saturated_erf", _saturated_erf),
    ("saturation", "sharp_gelu", _sharp_gelu),
    ("masks", "masked_attention", _masked_attention),
    ("masks", "masked_features", _masked_features),
    ("masks", "tropical", _tropical),
)
