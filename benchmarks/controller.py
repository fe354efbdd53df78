"""What GACT's controller chooses, and what its measurements cost.

`python -m benchmarks.controller` runs `actjax.Controller` on a transformer in plain JAX, once with
its layers unrolled and once under `lax.scan`. It reports how many arrays are measured, the bits
that are spent, the variance of the gradient against equal bits for all arrays, and the time of a
measurement as a share of the steps between two of them, at the default interval. Nothing is
compiled within the times.
"""

import dataclasses
import functools
import pathlib
import statistics
import time
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp

import actjax
from benchmarks import command, record
from benchmarks.tables import print_table


@dataclasses.dataclass(frozen=True)
class Config:
    """What to measure."""

    layers: int = 8
    """Number of layers."""
    width: int = 256
    """Number of features, in heads of 32."""
    batch_size: int = 4
    """Sequences in a batch."""
    seq_len: int = 256
    """Tokens in a sequence."""
    vocab: int = 1000
    """Number of tokens in the vocabulary."""
    average_bits: float = 4.0
    """Bits of a number on average."""
    steps: int = 5
    """Steps and measurements whose times the medians are of."""
    results: pathlib.Path = record.RESULTS / "controller.json"
    """File of the raw results."""


def parameters(config: Config, key: jax.Array) -> dict[str, Any]:
    """Returns random weights, those of layers stacked."""
    d, keys = config.width, jax.random.split(key, 5)
    normal = lambda k, *shape: jax.random.normal(k, shape) / shape[-2] ** 0.5  # noqa: E731
    shapes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    layers = {
        name: normal(k, config.layers, *shape)
        for k, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    return {"embedding": jax.random.normal(keys[4], (config.vocab, d)), "layers": layers}


def block(x: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """Returns the output of a layer [B, S, d]."""
    heads = lambda y: y.reshape(*y.shape[:2], -1, 32)  # noqa: E731
    q, k, v = map(heads, jnp.split(unit(x) @ w["qkv"], 3, -1))
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + attended.reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(unit(x) @ w["up"]) @ w["down"]


def unit(x: jax.Array) -> jax.Array:
    """Returns the RMS norm of the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def loss(params: dict[str, Any], ids: jax.Array, *, scan: bool) -> jax.Array:
    """Returns the mean loss of the next token."""
    x = params["embedding"][ids[:, :-1]]
    if scan:
        x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, params["layers"])
    else:
        for i in range(len(params["layers"]["up"])):
            with jax.named_scope(f"layer/{i}"):
                x = block(x, jax.tree.map(lambda w, i=i: w[i], params["layers"]))
    logits = jax.nn.log_softmax(unit(x) @ params["embedding"].T)
    return -jnp.mean(jnp.take_along_axis(logits, ids[:, 1:, None], -1))


def measure(config: Config, scan: bool) -> dict[str, Any]:
    """Measures one of the two models."""
    key = jax.random.key(0)
    params = parameters(config, key)
    ids = jax.random.randint(key, (config.batch_size, config.seq_len + 1), 0, config.vocab)
    controller = actjax.Controller(functools.partial(loss, scan=scan), config.average_bits)

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(stored: Any, params: Any, ids: jax.Array, key: jax.Array) -> Any:
        return jax.grad(functools.partial(stored, code_key=key))(params, ids)

    # The second measurement is at the chosen bits: it compiles what the timed ones run.
    for _ in range(3):
        controller.measure(params, ids, key=key)
    chosen = controller.stored
    jax.block_until_ready(gradient(chosen, params, ids, key))
    steps, measurements = [], []
    for _ in range(config.steps):
        start = time.perf_counter()
        jax.block_until_ready(gradient(chosen, params, ids, key))
        middle = time.perf_counter()
        controller.measure(params, ids, key=key)
        measurements.append(time.perf_counter() - middle)
        steps.append(middle - start)
    step, cost = statistics.median(steps), statistics.median(measurements)
    sizes = {label: c.size * c.layers for label, c in controller.arrays.items()}
    bits = dict(chosen.bits)
    spent = sum(sizes[label] * n for label, n in bits.items()) / sum(sizes.values())
    equal = dict.fromkeys(bits, round(config.average_bits))
    variance = functools.partial(actjax.compression_variance, controller.sensitivity)
    return {
        "model": "under lax.scan" if scan else "unrolled",
        "arrays": len(bits),
        "bits": ", ".join(f"{n} of {b} bits" for b, n in sorted(Counter(bits.values()).items())),
        "average_bits": spent,
        "variance_over_equal_bits": variance(bits) / variance(equal),
        "step_s": step,
        "measurement_s": cost,
        "every": controller.every,
        "overhead": cost / (controller.every * step),
    }


def run(config: Config) -> list[dict[str, Any]]:
    """Measures both models."""
    return [measure(config, scan) for scan in (False, True)]


def show(config: Config, rows: list[dict[str, Any]]) -> None:
    """Prints a table."""
    headers = (
        "model", "arrays", "bits", "average", "variance, over equal bits", "step, s",
        "measurement, s", "every", "overhead",
    )  # fmt: skip
    cells = [
        [
            row["model"], str(row["arrays"]), row["bits"], f"{row['average_bits']:.3f}",
            f"{row['variance_over_equal_bits']:.2f}", f"{row['step_s']:.2f}",
            f"{row['measurement_s']:.1f}", str(row["every"]), f"{100 * row['overhead']:.2f}%",
        ]
        for row in rows
    ]  # fmt: skip
    shape = f"{config.layers} layers of {config.width}, {config.batch_size} x {config.seq_len}"
    print_table(f"GACT's controller, {shape}", headers, cells)


if __name__ == "__main__":
    command.run(Config, __doc__, run, show)
