"""A BERT encoder on labeled lines of text: full training, adapters and a subspace.

`python -m examples.bert --steps 300` tells code, comments and docstrings of Python's standard
library apart. The encoder first learns to fill in masked words of the same lines; all methods then
start from it. `--data FILE` takes other text: JSON lines with "text" and "label".
"""

import collections
import dataclasses
import functools
import io
import json
import math
import pathlib
import re
import sysconfig
import tokenize
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import actjax
from examples import compare

PADDING, MASK, FIRST_WORD = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Config(compare.Settings):
    """Flags of the example."""

    batch_size: int = 32
    """Number of lines in a batch."""
    pretraining_steps: int = 300
    """Steps of the encoder on masked words, before all methods."""
    data: pathlib.Path | None = None
    """File of JSON lines with "text" and "label"; the standard library by default."""
    lines: int = 6000
    """Number of lines, as many of each label as of the others."""
    tokens: int = 32
    """Length of a line, in words and signs."""
    vocabulary: int = 4096
    """Number of tokens that words are hashed to."""
    depth: int = 4
    """Number of layers."""
    width: int = 128
    """Number of features, in heads of 32."""
    rank: int = 8
    """Rank of the adapters."""
    subspace_rank: int = 32
    """Rank of the bases of `subspace`."""


# The model. Its layers are stacked, and a linear layer may have an adapter.


class Trained(nnx.Param):
    """A weight that fine-tuning with adapters trains. All others are then frozen."""


class Linear(nnx.Module):
    """A linear layer, plain or with a codec for its input."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(inputs**-0.5 * rngs.normal((inputs, outputs)))
        self.bias = nnx.Param(jnp.zeros(outputs))
        self.a: Trained | None = None
        self.b: Trained | None = None

    def weight(self) -> Any:
        """Returns the weight as operators of actjax take it."""
        if self.a is None or self.b is None:
            return self.kernel[...]
        return actjax.LoRA(self.kernel[...], self.a[...], self.b[...])

    def __call__(self, x: jax.Array, codec: actjax.Codec | None, key: jax.Array) -> jax.Array:
        if codec is None and self.a is None:
            return x @ self.kernel[...] + self.bias[...]
        codec = codec or actjax.Exact()
        return actjax.linear(x, self.weight(), bias=self.bias[...], codec=codec, key=key)


@dataclasses.dataclass(frozen=True)
class Storage:
    """What a layer stores of its activations; None is plain JAX.

    Attributes:
      qkv: input of the query, key and value projections.
      linear: inputs of all linear layers.
      others: what the norms, attention and GELU store.
    """

    qkv: actjax.Codec | None = None
    linear: actjax.Codec | None = None
    others: actjax.Codec | None = None

    def norm(self, norm: nnx.LayerNorm, x: jax.Array) -> jax.Array:
        """Returns the norm of the features."""
        if self.others is None:
            return norm(x)
        scale, bias = norm.scale[...], norm.bias[...]
        return actjax.layer_norm(x, scale, bias, eps=norm.epsilon, codec=self.others)

    def gelu(self, x: jax.Array) -> jax.Array:
        """Returns the activations of a feed-forward network."""
        return nnx.gelu(x) if self.others is None else actjax.gelu(x, codec=self.others)

    def attention(self, *qkv: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns attention. What JAX stores for it is stored as codes."""
        attend = functools.partial(jax.nn.dot_product_attention, mask=mask)
        if self.others is not None:
            attend = actjax.compress_residuals(attend, self.others, activations=(0, 1, 2))
        return attend(*qkv)


class Layer(nnx.Module):
    """Attention and a feed-forward network, each after a norm and with a skip."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.query, self.key, self.value, self.out = (Linear(width, width, rngs) for _ in range(4))
        self.up = Linear(width, 4 * width, rngs)
        self.down = Linear(4 * width, width, rngs)

    def __call__(
        self, x: jax.Array, mask: jax.Array, storage: Storage, keys: jax.Array
    ) -> jax.Array:
        h, linear = storage.norm(self.norms[0], x), storage.linear
        projections = self.query, self.key, self.value
        if storage.qkv is not None:
            weights, biases = zip(*((p.weight(), p.bias[...]) for p in projections), strict=True)
            qkv = actjax.qkv_projection(h, *weights, bias=biases, codec=storage.qkv, key=keys[0])
        else:
            qkv = [p(h, linear, key) for p, key in zip(projections, keys, strict=False)]
        q, k, v = (y.reshape(*y.shape[:2], -1, 32) for y in qkv)
        attended = storage.attention(q, k, v, mask=mask).reshape(x.shape)
        x = x + self.out(attended, linear, keys[3])
        h = self.up(storage.norm(self.norms[1], x), linear, keys[4])
        return x + self.down(storage.gelu(h), linear, keys[5])


class Bert(nnx.Module):
    """An encoder with two heads: words at each place, and the label of a line."""

    def __init__(self, config: Config, labels: int, rngs: nnx.Rngs) -> None:
        width = config.width

        @nnx.split_rngs(splits=config.depth)
        @nnx.vmap(in_axes=0, out_axes=0)
        def layers(rngs: nnx.Rngs) -> Layer:
            return Layer(width, rngs)

        self.words = nnx.Embed(config.vocabulary, width, rngs=rngs)
        self.positions = nnx.Param(0.02 * rngs.normal((config.tokens, width)))
        self.layers = layers(rngs)
        self.layers.number = nnx.Variable(jnp.arange(config.depth))
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = Linear(width, labels, rngs)

    def encode(
        self, tokens: jax.Array, key: jax.Array, storage: Storage = Storage(), **how: bool
    ) -> jax.Array:
        """Returns the features of each place."""
        mask = (tokens != PADDING)[:, None, None]

        def run(layer: Any, x: jax.Array) -> jax.Array:
            keys = jax.random.split(jax.random.fold_in(key, layer.number[...]), 6)
            return layer(x, mask, storage, keys)

        x = self.words(tokens) + self.positions[...]
        return self.norm(compare.run_blocks(self.layers, x, call=run, **how))

    def __call__(
        self, tokens: jax.Array, key: jax.Array, storage: Storage = Storage(), **how: bool
    ) -> jax.Array:
        x, is_word = self.encode(tokens, key, storage, **how), (tokens != PADDING)[..., None]
        return self.head(jnp.mean(x, 1, where=is_word), None, key)


def loss(model: Bert, batch: compare.Batch, **how: Any) -> jax.Array:
    """Returns the mean cross-entropy of the labels."""
    logits = model(batch["tokens"], batch["key"], **how)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def masked_loss(model: Bert, batch: compare.Batch) -> jax.Array:
    """Returns the mean cross-entropy of words that are masked, 15% of all."""
    tokens, key = batch["tokens"], batch["key"]
    masked = jax.random.bernoulli(key, 0.15, tokens.shape) & (tokens != PADDING)
    logits = model.words.attend(model.encode(jnp.where(masked, MASK, tokens), key))
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
    return jnp.sum(entropy, where=masked) / jnp.maximum(masked.sum(), 1)


# The methods.


def with_adapters(model: Bert, config: Config, *, four_bit: bool, key: jax.Array) -> Bert:
    """Returns a copy whose layers have adapters; `four_bit` holds their frozen weights in NF4."""
    model = nnx.clone(model)
    names = "query", "key", "value", "out", "up", "down"
    for name, own in zip(names, jax.random.split(key, len(names)), strict=True):
        linear = getattr(model.layers, name)
        depth, inputs, outputs = linear.kernel.shape
        bound = inputs**-0.5
        shape = depth, inputs, config.rank
        drawn = jax.random.uniform(own, shape, minval=-bound, maxval=bound)
        linear.a = nnx.data(Trained(drawn))
        linear.b = nnx.data(Trained(jnp.zeros((depth, config.rank, outputs))))
        if four_bit:
            linear.kernel.set_value(jax.lax.map(actjax.NF4Weight.quantize, linear.kernel[...]))
    for name in ("kernel", "bias"):
        setattr(model.head, name, Trained(getattr(model.head, name)[...]))
    return model


class WithAdapters(compare.Method):
    """Adapters of frozen weights, and the head."""

    def __init__(self, loss: compare.Loss, optimizer: Any, config: Config, four_bit: bool) -> None:
        super().__init__(loss, optimizer, Trained)
        self.config, self.four_bit = config, four_bit

    def init(self, model: Any) -> compare.State:
        key = jax.random.key(0)
        return super().init(with_adapters(model, self.config, four_bit=self.four_bit, key=key))


class InSubspace(compare.Method):
    """Inputs, gradients and moments in a subspace (Wei et al., 2026; GaLore)."""

    gap = 50

    def __init__(self, loss: compare.Loss, config: Config, model: Any, batch: Any) -> None:
        super().__init__(loss, None)
        graph, weights, rest = self.split(model)
        state = compare.State(weights, rest, None, graph)
        groups = actjax.input_groups(lambda w: self.value(w, state, batch)[0], weights)
        self.optimizer = compare.adamw(config, functools.partial(_subspace, config, groups))
        self._refresh = jax.jit(functools.partial(self._step, refresh=True))
        self._between, self.steps = self.step, 0
        self.step = self._next

    def init(self, model: Any) -> compare.State:
        self.steps = 0
        graph, weights, rest = self.split(model)
        return compare.State(weights, rest, actjax.optim.init(self.optimizer, weights), graph)

    def gradient(self, state: compare.State, batch: Any, *, refresh: bool = False) -> Any:
        bases = None if refresh else self.optimizer.bases(state.optimizer)
        differentiated = actjax.value_and_grad(self.value, has_aux=True, bases=bases)
        return differentiated(state.weights, state, batch)

    def explain(self, state: compare.State, batch: Any) -> actjax.Explanation:
        def value(weights: Any) -> jax.Array:
            return self.value(weights, state, batch)[0]

        stored = actjax.with_bases(value, self.optimizer.bases(state.optimizer))
        return actjax.explain(stored, state.weights)

    def _step(self, state: compare.State, batch: Any, *, refresh: bool = False) -> Any:
        (value, rest), gradient = self.gradient(state, batch, refresh=refresh)
        weights, optimizer = actjax.optim.apply(
            self.optimizer, gradient, state.optimizer, state.weights, refresh=refresh
        )
        return compare.State(weights, rest, optimizer, state.graph), value

    def _next(self, state: compare.State, batch: Any) -> Any:
        step = self._refresh if self.steps % self.gap == 0 else self._between
        self.steps += 1
        return step(state, batch)


def _subspace(config: Config, groups: dict[str, str], schedule: Any) -> Any:
    outer = optax.chain(optax.add_decayed_weights(1e-4), optax.scale_by_learning_rate(schedule))
    return actjax.optim.subspace(
        optax.scale_by_adam(), config.subspace_rank, gap=InSubspace.gap, groups=groups, outer=outer
    )


def methods(config: Config, model: Bert, batch: compare.Batch) -> dict[str, compare.Method]:
    """Returns the methods beside those of all examples."""
    optimizer = compare.adamw(config)
    # HyC-LoRA's codes: 2 bits, channels balanced, outlier channels whole.
    hybrid = actjax.Quantized(2, levels="normal", rotate=True, balance=True, outlier_fraction=0.01)
    codes = Storage(linear=hybrid, others=hybrid)
    points = Storage(qkv=actjax.PointApproximation(ratio=1 / 64))
    factors = Storage(linear=actjax.RandomizedSVD(config.subspace_rank))
    return {
        "pamm": compare.Method(functools.partial(loss, storage=points), optimizer),
        "subspace": InSubspace(functools.partial(loss, storage=factors), config, model, batch),
        "lora": WithAdapters(loss, optimizer, config, four_bit=False),
        "hyc_lora, 2 bits": WithAdapters(
            functools.partial(loss, storage=codes), optimizer, config, four_bit=True
        ),
    }


# The text.


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of text. Lines of one group are all held out, or none."""

    text: str
    label: str
    group: str


def standard_library() -> Iterator[Line]:
    """Yields lines of Python's standard library: code, comments and docstrings without marks."""
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8")
        lines, kinds, previous = source.splitlines(), {}, tokenize.NEWLINE
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            first, last = token.start[0], token.end[0]
            if token.type == tokenize.COMMENT:
                if token.line.lstrip().startswith("#"):
                    kinds[first] = "comment"
            elif token.type == tokenize.STRING and previous in (tokenize.NEWLINE, tokenize.INDENT):
                kinds |= dict.fromkeys(range(first, last + 1), "docstring")
            elif token.string.strip():
                kinds.setdefault(first, "code")
            if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.DEDENT):
                previous = token.type
        for number, kind in kinds.items():
            yield Line(lines[number - 1].strip("#\"' \t"), kind, path.name)


def read_lines(path: pathlib.Path) -> Iterator[Line]:
    """Yields the lines of a file of JSON lines."""
    for text in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(text)
        yield Line(record["text"], str(record["label"]), record["text"])


def to_tokens(config: Config, text: str) -> list[int]:
    """Returns the words and signs of a line as numbers, padded to one length."""
    words = re.findall(r"\w+|[^\w\s]", text)[: config.tokens]
    hashed = [zlib.crc32(word.encode()) % (config.vocabulary - FIRST_WORD) for word in words]
    padding = [PADDING] * (config.tokens - len(words))
    return [number + FIRST_WORD for number in hashed] + padding


@dataclasses.dataclass(frozen=True)
class Text:
    """Tokens [n, tokens] and labels [n], to train on and held out.

    Attributes:
      labels: names of the labels.
      train: arrays to train on.
      test: arrays that are held out.
    """

    labels: list[str]
    train: dict[str, np.ndarray]
    test: dict[str, np.ndarray]

    def batches(self, size: int, seed: int) -> Iterator[compare.Batch]:
        """Yields random batches without end."""
        generator, key = np.random.default_rng(seed), jax.random.key(seed)
        for step in range(2**31):
            rows = generator.integers(len(self.train["labels"]), size=size)
            batch = {name: jnp.asarray(x[rows]) for name, x in self.train.items()}
            yield batch | {"key": jax.random.fold_in(key, step)}


def load_text(config: Config) -> Text:
    """Returns the text, with as many lines of each label."""
    lines = standard_library() if config.data is None else read_lines(config.data)
    by_label = collections.defaultdict(dict)
    for line in lines:
        if len(line.text.split()) >= 3:
            by_label[line.label].setdefault(line.text, line)  # Each text once.
    if len(by_label) < 2:
        raise ValueError(f"`data` needs at least two labels, got {sorted(by_label)}.")
    count = min(config.lines // len(by_label), *map(len, by_label.values()))
    names, generator = sorted(by_label), np.random.default_rng(0)
    split: dict[bool, list[tuple[list[int], int]]] = {False: [], True: []}
    for number, name in enumerate(names):
        own = list(by_label[name].values())
        for i in generator.permutation(len(own))[:count]:
            held_out = zlib.crc32(own[i].group.encode()) % 6 == 0
            split[held_out].append((to_tokens(config, own[i].text), number))

    def arrays(rows: list[tuple[list[int], int]]) -> dict[str, np.ndarray]:
        tokens, labels = zip(*rows, strict=True)
        return {"tokens": np.asarray(tokens, np.int32), "labels": np.asarray(labels, np.int32)}

    return Text(names, arrays(split[False]), arrays(split[True]))


def run(config: Config) -> tuple[compare.Example, list[dict[str, Any]]]:
    """Returns the example and its rows."""
    text = load_text(config)
    print(
        f"{len(text.train['labels']):,} lines, {len(text.test['labels']):,} held out:", text.labels
    )
    test = {name: jnp.asarray(x) for name, x in text.test.items()}

    def batches(seed: int) -> Iterator[compare.Batch]:
        return text.batches(config.batch_size, seed)

    @functools.cache
    def pretrained(seed: int) -> compare.State:
        optimizer = compare.adamw(config, steps=config.pretraining_steps)
        method = compare.Method(masked_loss, optimizer)
        state, value = method.init(Bert(config, len(text.labels), nnx.Rngs(seed))), math.nan
        for _, batch in zip(range(config.pretraining_steps), batches(seed), strict=False):
            state, value = method.step(state, batch)
        print(f"masked words: loss {value:.3f} after {config.pretraining_steps} steps")
        return state

    def evaluate(model: Bert) -> dict[str, jax.Array]:
        logits, labels = model(test["tokens"], jax.random.key(0)), test["labels"]
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return {"loss": entropy.mean(), "accuracy": (logits.argmax(-1) == labels).mean()}

    example = compare.Example(
        "BERT on lines of text", lambda seed: pretrained(seed).model, loss, batches, evaluate
    )
    own = methods(config, example.init(0), next(batches(0)))
    return example, compare.compare(config, example, own)


if __name__ == "__main__":
    compare.run(Config, __doc__, run)
