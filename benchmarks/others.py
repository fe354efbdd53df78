"""`compress_residuals` on code of other libraries: memory and gradient error.

`python -m benchmarks.others` differentiates modules of `flax.linen` and `flax.nnx`,
`jax.nn.dot_product_attention` and a loss of `optax`: unchanged, with `jax.checkpoint` around each
layer, and with residuals in few bits. `kept` counts the bytes stored for the backward pass.
`temporaries` are those of the compiled gradient, for this machine or `--device h100`. Errors are
measured on this machine, over keys. `--explain` prints what is stored of each array.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

import actjax
from benchmarks import command, record
from benchmarks.rivals import compiled_memory
from benchmarks.tables import print_table
from train.planning.devices import HERE, compile_for, find_device


@dataclasses.dataclass(frozen=True)
class Config:
    """What to measure."""

    layers: int = 6
    """Number of layers in a stack."""
    width: int = 512
    """Number of features, in heads of 64."""
    batch_size: int = 8
    """Sequences in a batch."""
    seq_len: int = 512
    """Tokens in a sequence."""
    bits: tuple[Literal[8, 4, 3, 2], ...] = (8, 4, 2)
    """Bits of the codes, with stochastic rounding."""
    keys: int = 4
    """Number of gradients whose errors are averaged; 0 measures no error."""
    explain: bool = False
    """Print what is stored of each array."""
    device: str = HERE
    """Device to compile for: here, or a GPU by name: h100, h200, a100_80, a100_40, rtx_4090, ..."""
    results: pathlib.Path = record.RESULTS / "others.json"

    def __post_init__(self) -> None:
        find_device(self.device)
        if self.width % 64:
            raise ValueError(f"`--width` must be a multiple of 64, got {self.width}.")


class Case(NamedTuple):
    """A function of another library.

    Attributes:
      loss: a function of parameters, input and a wrapper of each layer, to a scalar.
      init: a function from a key to parameters.
    """

    loss: Callable[[Any, jax.Array, Callable], jax.Array]
    init: Callable[[jax.Array], Any]


class _LinenLayer(linen.Module):
    width: int

    @linen.compact
    def __call__(self, x):
        return linen.LayerNorm()(linen.gelu(linen.Dense(self.width)(x)))


class _Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(width // 64, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


def cases(config: Config) -> dict[str, Case]:
    """Returns the cases, by name."""
    width, count = config.width, config.layers
    layer = _LinenLayer(width)
    one_input = jnp.zeros((1, width))
    graph, _ = nnx.split(nnx.eval_shape(lambda: _Block(width, nnx.Rngs(0))))

    def block(params: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, params)(x)

    def one_by_one(init: Callable) -> Callable:
        return lambda key: [init(own) for own in jax.random.split(key, count)]

    def unrolled(apply: Callable) -> Callable:
        def loss(params, x, wrap):
            for own in params:
                x = wrap(apply)(own, x)
            return _mean_square(x)

        return loss

    def scanned(params, x, wrap):
        step = wrap(block)
        x, _ = jax.lax.scan(lambda x, own: (step(own, x), None), x, params)
        return _mean_square(x)

    def attend(params, x, wrap):
        def apply(params, x):
            q, k, v = (jnp.einsum("bsd,dhe->bshe", x, w) for w in params)
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)

        return _mean_square(wrap(apply)(params, x))

    def classify(params, x, wrap):
        def apply(params, x):
            logits = jax.nn.gelu(x @ params["in"]) @ params["out"]
            labels = jnp.argmax(x, -1)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

        return wrap(apply)(params, x).mean()

    def init_block(key: jax.Array) -> Any:
        return nnx.state(_Block(width, nnx.Rngs(key)), nnx.Param)

    normal = functools.partial(_normal, width)
    return {
        f"linen MLP, {count} layers": Case(
            unrolled(layer.apply), one_by_one(lambda key: layer.init(key, one_input))
        ),
        f"nnx.MultiHeadAttention and MLP, {count} blocks": Case(
            unrolled(block), one_by_one(init_block)
        ),
        f"the same {count} blocks under lax.scan": Case(
            scanned,
            lambda key: jax.vmap(init_block)(jax.random.split(key, count)),
        ),
        "jax.nn.dot_product_attention": Case(attend, normal(*[(width, width // 64, 64)] * 3)),
        "optax cross-entropy of an MLP": Case(
            classify,
            lambda key: dict(
                zip(("in", "out"), normal((width, 4 * width), (4 * width, width))(key), strict=True)
            ),
        ),
    }


def _normal(width: int, *shapes: tuple[int, ...]) -> Callable[[jax.Array], list[jax.Array]]:
    """Returns an initializer of weights that preserve the scale of their input."""
    return lambda key: [
        jax.random.normal(k, shape) / width**0.5
        for k, shape in zip(jax.random.split(key, len(shapes)), shapes, strict=True)
    ]


def _mean_square(x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(x - 1))


def measure(config: Config) -> list[dict]:
    """Returns one row for each case and way of storing."""
    rows = []
    x = jax.random.normal(jax.random.key(1), (config.batch_size, config.seq_len, config.width))
    for name, case in cases(config).items():
        params = case.init(jax.random.key(0))

        def loss(params, x, key, wrap=lambda f: f, case=case):
            del key
            return case.loss(params, x, wrap)

        def compressed(bits, params, x, key, loss=loss):
            codec = actjax.Quantized(bits, rounding="stochastic")
            # The input is not decided on: it stays alive anyway.
            return actjax.compress_residuals(loss, codec, key=key)(params, x, key)

        ways = {
            "as it is": loss,
            "jax.checkpoint of each layer": functools.partial(loss, wrap=jax.checkpoint),
            **{f"{bits} bits": functools.partial(compressed, bits) for bits in config.bits},
        }
        exact = jax.jit(jax.grad(loss))(params, x, jax.random.key(0)) if config.keys else None
        for way, fun in ways.items():
            gradient = jax.grad(fun)
            row = {
                "case": name,
                "way": way,
                "kept": actjax.explain(fun, params, x, jax.random.key(0)).stored_bytes,
                "temporaries": _temporaries(config, gradient, params, x),
            }
            if exact is not None and way.endswith("bits"):
                row["gradient_error"] = _error(config, jax.jit(gradient), exact, params, x)
            print(row, flush=True)
            rows.append(row)
        if config.explain:
            for bits in config.bits:
                print(actjax.explain(ways[f"{bits} bits"], params, x, jax.random.key(0)))
    return rows


def _temporaries(config: Config, gradient: Callable, params: Any, x: jax.Array) -> int:
    shapes = jax.eval_shape(lambda *y: y, params, x, jax.random.key(0))
    with compile_for(find_device(config.device)) as place:
        program = jax.jit(gradient).lower(*map(place, shapes)).compile()
    return compiled_memory(program)["temporaries"]


def _error(config: Config, gradient: Callable, exact: Any, params: Any, x: jax.Array) -> float:
    """Returns `|gradient - exact| / |exact|`, averaged over keys."""
    total = 0.0
    for seed in range(config.keys):
        got = gradient(params, x, jax.random.key(seed))
        difference = jax.tree.map(jnp.subtract, got, exact)
        total += float(actjax.global_norm(difference) / actjax.global_norm(exact))
    return total / config.keys


def show(config: Config, rows: list[dict]) -> None:
    """Prints the rows, with ratios to autodiff without compression."""
    where = "this CPU" if config.device == HERE else config.device
    shape = f"{config.batch_size} x {config.seq_len} x {config.width}, float32"
    headers = ("function", "residuals", "kept, MiB", "of as it is", "temporaries, MiB",
               "of as it is", "gradient error")  # fmt: skip
    cells = []
    for row in rows:
        plain = next(r for r in rows if r["case"] == row["case"])
        error = row.get("gradient_error")
        cells.append(
            (
                row["case"] if row is plain else "",
                row["way"],
                *(
                    text
                    for what in ("kept", "temporaries")
                    for text in (f"{row[what] / 2**20:,.1f}", f"{row[what] / plain[what]:.2f}")
                ),
                "" if error is None else f"{100 * error:.2f}%",
            )
        )
    print_table(f"Code of other libraries, {shape}, compiled for {where}", headers, cells)


if __name__ == "__main__":
    command.run(Config, __doc__, measure, show)
