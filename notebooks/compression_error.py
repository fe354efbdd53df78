# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Errors of compressed activations
#
# actjax stores the inputs of linear operators in a smaller form. This notebook trains a small Llama
# on real text, captures its activations, and measures every codec on them: the error of the decoded
# activation, and the error of the weight gradient, which is what matters for training, with its
# bias and its variance. The next part measures the same codecs on a pretrained model. The last part
# repeats Table 5 of Wei et al. (2026), and extends it from activations to gradients.
#
# The pretrained model is a Hugging Face folder of a Llama, Mistral or Qwen, with its tokenizer. Set
# the environment variable `ACTJAX_MODEL` to the folder before you start the notebook. If it is not
# set, that part uses the small model. The outputs here are those of SmolLM2-135M-Instruct, whose
# weights were stored in 4 bits and decoded.

# %%
import dataclasses
import functools
import os
import pathlib
import sys
import typing

# The matrices are small: several threads would mostly wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path[:0] = [".", ".."]  # `models` and `train` are used from a checkout, not installed.

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import actjax
from models import Decoder, ModelConfig, Storage
from models.block import Positions
from models.checkpoints import load_checkpoint
from train.run.recipe import make_recipe
from train.run.step import init_state, make_train_step
from train.settings.config import PretrainConfig
from train.text.corpus import open_corpus
from train.text.data import train_batches
from train.text.tokenizer_files import tokenizer_of
from train.text.trained_tokenizer import default_tokenizer

plt.rcParams.update({"figure.dpi": 80, "axes.grid": True, "grid.alpha": 0.3, "font.size": 9})
console = Console(width=120, force_terminal=False, force_jupyter=False, color_system=None)
# The programs are many and run a few times: compile them quickly, for one thread. Without fusion
# emitters it takes a third of the time; later versions have no such option.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_multi_thread_eigen": False,
}
if jax.__version__.startswith("0.10."):
    QUICK["xla_cpu_use_fusion_emitters"] = False
# The training step runs a hundred times.
SLOWER = {**QUICK, "xla_backend_optimization_level": 1}


def show_table(title, columns, rows, text_columns=1):
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < text_columns else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell if isinstance(cell, str) else f"{cell:.2f}" for cell in row))
    console.print(table)


# %% [markdown]
# ## A trained model
#
# Three layers of width 128, trained for 100 steps on the sources of Python's standard library. At
# initialization activations are close to noise, so errors are measured after some training.

# %%
config = PretrainConfig(
    method="exact", batch_size=4, seq_len=96, steps=100, compute_dtype="float32"
)
model_config = ModelConfig(
    vocab_size=2048, hidden_size=128, ffn_size=352, num_layers=3, num_heads=4
)
data_dir = config.data.data_dir.expanduser()
corpus = open_corpus("stdlib", data_dir)
tokenizer = default_tokenizer(corpus, model_config.vocab_size, data_dir)
batches = train_batches(
    corpus, tokenizer, batch_size=config.batch_size, seq_len=config.seq_len, seed=0
)
recipe = make_recipe(config, model_config)
step = jax.jit(make_train_step(recipe), donate_argnums=0, compiler_options=SLOWER)
state = jax.jit(lambda: init_state(recipe), compiler_options=QUICK)()
losses = []
for _ in range(config.steps):
    state, metrics = step(state, next(batches))
    losses.append(metrics["loss"])
losses = [float(loss) for loss in losses]
earlier, batch = next(batches), next(batches)
batches.close()
del batches
model = state.model

plt.figure(figsize=(5, 2.2), layout="constrained")
plt.plot(np.arange(1, config.steps + 1), losses, color="#0072B2", lw=1.2)
plt.xlabel("step")
plt.ylabel("training loss, nats a token")
plt.show()
print(f"loss {losses[0]:.2f} at step 1, {np.mean(losses[-10:]):.2f} over the last ten")

# %% [markdown]
# ## A codec that records activations
#
# A codec is a frozen dataclass with four methods. This codec stores the activation unchanged, and
# records both factors of each weight gradient, `x` and `dz`. Under `jit` a codec gets tracers, so
# the traced function returns the records.


# %%
@dataclasses.dataclass(frozen=True, repr=False)
class Capture(actjax.Codec):
    """Stores `x` unchanged; records `x` and the gradients of the outputs in `seen`, by site."""

    site: str
    seen: dict = dataclasses.field(hash=False, compare=False)

    biased = False
    needs_key = False

    def encode(self, x, key=None):
        self.seen[self.site] = {"x": x, "dz": []}
        return x

    def decode(self, code):
        return code

    def weight_grad(self, code, dz):
        self.seen[self.site]["dz"].append(dz)
        return jnp.tensordot(code, dz, axes=((0, 1), (0, 1)))

    def stored_bytes(self, shape, dtype):
        return int(np.prod(shape)) * jnp.dtype(dtype).itemsize


SITES = ("attention_in", "attention_out", "mlp_in", "mlp_out")


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def run_block(config, layers, i, x, dy):
    """Forward and backward pass of layer i: its output, `dx`, and the records of its sites."""
    block = jax.tree.map(lambda w: w[i], layers)
    positions = Positions.of(config, x.shape[1])
    seen = {}
    storage = Storage(**{site: Capture(site, seen) for site in SITES})
    y, pullback = jax.vjp(
        lambda block, x: block(x, positions, config, storage, jax.random.key(0)), block, x
    )
    return y, pullback(dy)[1], seen


@functools.partial(jax.jit, compiler_options=QUICK)
def last_loss(model, x, targets):
    def loss(x):
        hidden = actjax.rms_norm(x, model.norm[...], eps=model.config.norm_eps)
        return actjax.cross_entropy(hidden, model.head, targets)

    return jax.value_and_grad(loss)(x)


class Captured(typing.NamedTuple):
    """Of some layers: the residual stream before, and by site x and dz, lists over the layers."""

    loss: float
    streams: list
    x: dict
    dz: dict


def capture(model: Decoder, batch, layers) -> Captured:
    """Returns the arrays of one batch. dz are the gradients of all outputs, side by side."""
    count = model.config.num_layers
    streams = [jnp.asarray(model.embed(batch["inputs"], "float32"))]
    unused = jnp.zeros_like(streams[0])
    for i in range(count):
        streams.append(run_block(model.config, model.layers, i, streams[i], unused)[0])
    loss, dx = last_loss(model, streams[-1], batch["targets"])
    seen = {}
    for i in reversed(range(count)):
        _, dx, records = run_block(model.config, model.layers, i, streams[i], dx)
        if i in layers:
            seen[i] = jax.tree.map(np.asarray, records)
    return Captured(
        float(loss),
        [np.asarray(streams[i]) for i in layers],
        {site: [seen[i][site]["x"] for i in layers] for site in SITES},
        {site: [np.concatenate(seen[i][site]["dz"], axis=-1) for i in layers] for site in SITES},
    )


LAYERS = range(model_config.num_layers)
small = capture(model, batch, LAYERS)
# `Calibrated` takes statistics of an earlier batch.
before = capture(model, earlier, LAYERS)
for site in SITES:
    print(f"{site:14s} x {small.x[site][0].shape}, dz {small.dz[site][0].shape}")

# %% [markdown]
# ## Are activations low-rank?
#
# If they were, a randomized SVD would lose nothing. Left: singular values. Right: the share of the
# energy `‖x‖²` in the leading directions. The square root of one minus this share is the smallest
# relative error of any matrix of that rank.

# %%
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]  # Okabe and Ito.


def rows(x):
    """[B, S, d] to [T, d]."""
    return x.reshape(-1, x.shape[-1])


def singular_values(x):
    """Singular values in falling order, from the Gram matrix: float64 is precise enough to draw."""
    x = rows(x).astype(np.float64)
    return np.sqrt(np.maximum(np.linalg.eigvalsh(x.T @ x)[::-1], 0))


def best_error(sigma):
    """Relative error of the best approximation of rank 1, 2, ..., d."""
    outside = np.append(np.cumsum((sigma**2)[::-1])[::-1][1:], 0)
    return np.sqrt(outside / np.sum(sigma**2))


spectra = {site: [singular_values(x) for x in small.x[site]] for site in SITES}
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
for site, color in zip(SITES, COLORS, strict=False):
    for layer, style in ((0, ":"), (-1, "-")):
        sigma = spectra[site][layer]
        index = np.arange(1, len(sigma) + 1)
        label = f"{site}, {'first' if layer == 0 else 'last'} layer"
        lw = 3 if site == "attention_in" else 1.4  # In the last layer, `mlp_in` lies upon it.
        left.plot(index, sigma / sigma[0], style, color=color, lw=lw)
        right.plot(index, 1 - best_error(sigma) ** 2, style, color=color, lw=lw, label=label)
left.set(yscale="log", xscale="log", xlabel="index", ylabel="singular value / largest")
right.set(xscale="log", xlabel="rank", ylabel="share of energy within", ylim=(0, 1.02))
right.legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.show()
for site in SITES:
    first, *_, last = (1 - best_error(sigma)[8 - 1] ** 2 for sigma in spectra[site])
    print(
        f"{site:14s} energy within rank 8: {first:.2f} in the first layer, {last:.2f} in the last"
    )

# %% [markdown]
# ## Every codec: errors of the copy and of the weight gradient, against bytes
#
# `measure` encodes an activation with several keys. It compares the decoded activation, and the
# gradient that the backward pass computes from it, with the exact ones. All errors are relative, in
# Frobenius norms, as root mean squares over the layers.

# %%
MOST_KEYS = 64
KEYS = jax.random.split(jax.random.key(1), MOST_KEYS)


@functools.partial(jax.jit, static_argnums=1, compiler_options=QUICK)
def measure(codec, backward, x, others, count):
    """Squared relative errors: of the decoded activation and of the gradient, averaged over `count`
    keys; and of the mean gradient over the first n keys, for n up to `count`."""
    exact = backward(actjax.Exact(), x, *others)

    def add(i, carry):
        of_copy, of_gradient, mean, of_means = carry
        code = codec.encode(x, KEYS[i])
        gradient = backward(codec, code, *others)
        mean += (gradient - mean) / (i + 1)
        of_copy += jnp.sum((codec.decode(code) - x) ** 2)
        of_gradient += jnp.sum((gradient - exact) ** 2)
        return of_copy, of_gradient, mean, of_means.at[i].set(jnp.sum((mean - exact) ** 2))

    start = 0.0, 0.0, jnp.zeros_like(exact), jnp.zeros(MOST_KEYS)
    of_copy, of_gradient, _, of_means = jax.lax.fori_loop(0, count, add, start)
    of_copy, of_gradient = of_copy / count, of_gradient / count
    return of_copy / jnp.sum(x**2), of_gradient / jnp.sum(exact**2), of_means / jnp.sum(exact**2)


def linear_backward(codec, code, dz):
    return codec.weight_grad(code, dz)


def relative_errors(codecs, backward, cases, count=1):
    """Root mean squares of `measure` over `cases`: pairs of x and other arguments of `backward`."""
    results = [
        measure(codec, backward, x, others, count)
        for codec, (x, others) in zip(codecs, cases, strict=True)
    ]
    return [np.sqrt(np.mean(np.asarray(column), axis=0)) for column in zip(*results, strict=True)]


def cases_of(captured, site):
    """`dz` padded with zeros to one width, so that sites of one width share a compiled program."""
    width = max(
        captured.dz[other][0].shape[-1]
        for other in SITES
        if captured.x[other][0].shape == captured.x[site][0].shape
    )
    return [
        (x, (np.pad(dz, ((0, 0), (0, 0), (0, width - dz.shape[-1]))),))
        for x, dz in zip(captured.x[site], captured.dz[site], strict=True)
    ]


# %% [markdown]
# The codecs, by family. "All three" is `balance`, `rotate` and normal levels, which the training
# programs use at 4 bits. By channel, one channel of 128 is stored whole (HyC-LoRA). A `Calibrated`
# codec takes the statistics of channels from an earlier batch of the same layer. `Offloaded` keeps
# the code of another codec in host memory. Groups have 128 numbers.

# %%
RANKS = (8, 32, 64)
POINTS = (8, 32, 128)
BITS = (1, 2, 3, 4, 8)
SVD, POWER, RP, PAMM = (
    "randomised SVD",
    "SVD, 1 power iteration",
    "random projection",
    "points (PAMM)",
)
NEAREST, RANDOM, DITHER = "nearest", "stochastic", "dither"
ALL_THREE = {"balance": True, "rotate": True, "levels": "normal"}
BY_CHANNEL = {"scaling": "channel", "outlier_fraction": 0.005}
EACH_BATCH, OFFLOADED = "all three, calibrated", "all three, offloaded"


def quantized(bits=BITS, **options):
    return {f"{b} bits": actjax.Quantized(b, **options) for b in bits}


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def least_error(codec, x):
    return actjax.Calibrated.least_error(codec, x)


def calibrated(codec):
    """A function from an earlier activation to the codec with its statistics."""
    return functools.partial(least_error, codec)


LOW_RANK = {
    SVD: {f"rank {k}": actjax.RandomizedSVD(k) for k in RANKS},
    POWER: {f"rank {k}": actjax.RandomizedSVD(k, power_iterations=1) for k in RANKS},
    RP: {f"rank {k}": actjax.RandomProjection(k) for k in RANKS},
    PAMM: {f"{k} points": actjax.PointApproximation(points=k) for k in POINTS},
}
FEW_BITS = {
    NEAREST: quantized(),
    RANDOM: quantized(rounding="stochastic"),
    DITHER: quantized(rounding="dither"),
    "rotated": quantized(rotate=True),
    "normal levels": quantized(BITS[:-1], levels="normal"),
    "balanced": quantized(balance=True),
    "all three": quantized(BITS[:-1], **ALL_THREE),
    "by channel": quantized(**BY_CHANNEL),
    "by channel, calibrated": {
        name: calibrated(codec) for name, codec in quantized((2, 4), **BY_CHANNEL).items()
    },
    EACH_BATCH: {name: calibrated(codec) for name, codec in quantized((2, 4), **ALL_THREE).items()},
    OFFLOADED: {
        name: actjax.Offloaded(codec) for name, codec in quantized((4,), **ALL_THREE).items()
    },
}
CODECS = LOW_RANK | FEW_BITS
FEW_KEYS = 8
# Measured with all keys, to separate bias from variance at each site.
AVERAGED = {
    SVD: "rank 32",
    POWER: "rank 32",
    RP: "rank 32",
    PAMM: "128 points",
    NEAREST: "2 bits",
    RANDOM: "2 bits",
    DITHER: "2 bits",
}


class Errors(typing.NamedTuple):
    """Bytes stored, and relative errors: of the copy; of dw for one key, its bias, its deviation
    over keys, and the errors of the mean dw over n keys."""

    stored: int
    copy: float
    one_key: float
    bias: float
    deviation: float
    of_means: np.ndarray


def errors_of(codecs, cases, keys):
    count = keys if codecs[0].needs_key else 1
    copy, one_key, of_means = relative_errors(codecs, linear_backward, cases, count)
    # The squared error of a mean over n keys is bias² + variance / n.
    variance = 0.0 if count == 1 else (one_key**2 - of_means[count - 1] ** 2) * count / (count - 1)
    bias = np.sqrt(max(one_key**2 - variance, 0))
    stored = codecs[0].stored_bytes(cases[0][0].shape, "float32")
    return Errors(stored, copy, one_key, bias, np.sqrt(max(variance, 0)), of_means[:count])


def measure_all(captured, before, families=CODECS, most_keys=MOST_KEYS, keys=FEW_KEYS):
    """By site and family: the errors of its codecs, in their order."""
    results = {}
    for site in SITES:
        cases = cases_of(captured, site)
        for family, codecs in families.items():
            results[site, family] = []
            for name, codec in codecs.items():
                given = [
                    codec if isinstance(codec, actjax.Codec) else codec(x) for x in before.x[site]
                ]
                count = most_keys if AVERAGED.get(family) == name else keys
                results[site, family].append(errors_of(given, cases, count))
    return results


found = measure_all(small, before)


# %%
def exact_bytes(captured, site):
    return captured.x[site][0].nbytes


OPEN = {"markerfacecolor": "white", "ls": "--"}
DOTTED = {"markerfacecolor": "white", "ls": ":"}
STYLES = {
    **{
        name: {"color": color, "marker": marker}
        for name, color, marker in zip(LOW_RANK, COLORS, "osv*", strict=False)
    },
    NEAREST: {"color": COLORS[0], "marker": "o", **OPEN},
    RANDOM: {"color": COLORS[1], "marker": "s", **OPEN},
    DITHER: {"color": COLORS[2], "marker": "^", **OPEN},
    "rotated": {"color": COLORS[3], "marker": "v", **OPEN},
    "normal levels": {"color": COLORS[4], "marker": "D", **OPEN},
    "balanced": {"color": COLORS[5], "marker": "*", **OPEN},
    "all three": {"color": "black", "marker": "P", **OPEN},
    "by channel": {"color": "0.55", "marker": "X", **OPEN},
    "by channel, calibrated": {"color": "0.55", "marker": "p", **DOTTED},
    EACH_BATCH: {"color": "black", "marker": "h", **DOTTED},
    OFFLOADED: {"color": "black", "marker": "o", "ls": "", "ms": 9, "markerfacecolor": "none"},
}
STYLES = {name: {"ms": 5, "lw": 1.2} | style for name, style in STYLES.items()}


def finish(figure, ax, columns=5):
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=columns)
    plt.show()


def draw_all(captured, results):
    figure, axes = plt.subplots(2, 4, figsize=(12.5, 8.4), layout="constrained", sharey=True)
    for row, field in zip(axes, ("copy", "one_key"), strict=True):
        for ax, site in zip(row, SITES, strict=True):
            for family, style in STYLES.items():
                errors = results[site, family]
                share = [error.stored / exact_bytes(captured, site) for error in errors]
                ax.plot(share, [getattr(error, field) for error in errors], label=family, **style)
            ax.axhline(1, color="gray", lw=1)
            ax.set(title=site, xscale="log", yscale="log", xlabel="bytes stored / exact")
            ticks = (0.03, 0.1, 0.3)
            ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            ax.set_xticks([], minor=True)
    axes[0, 0].set_ylabel("relative error of the copy")
    axes[1, 0].set_ylabel("relative error of dw, one key")
    finish(figure, axes[0, 0])


draw_all(small, found)

# %% [markdown]
# The gray line is the error of storing nothing. Solid lines are low-rank codecs and PAMM, dashed
# and dotted lines are `Quantized`. The table has the same errors. Its first error, of the copy, and
# bias and deviation of `dw`, are root mean squares over the four sites. Bias and deviation come
# from 8 keys (64 for one codec of seven families). A codec without a key has no deviation: its
# error is its bias. A dash means that no bias is visible: it is below a third of the deviation.


# %%
def together(results, field, family, i):
    return np.sqrt(np.mean([getattr(results[site, family][i], field) ** 2 for site in SITES]))


def bytes_share(captured, results, family, i):
    stored = sum(results[site, family][i].stored for site in SITES)
    return stored / sum(exact_bytes(captured, site) for site in SITES)


def table_of_all(captured, results, title, families=CODECS):
    body = []
    for family, codecs in families.items():
        for i, name in enumerate(codecs):
            copy, bias, deviation = (
                together(results, field, family, i) for field in ("copy", "bias", "deviation")
            )
            body.append(
                (
                    family if i == 0 else "",
                    name,
                    f"{100 * bytes_share(captured, results, family, i):.1f}",
                    *(
                        f"{100 * value:.1f}"
                        for value in (copy, *(results[s, family][i].one_key for s in SITES))
                    ),
                    f"{100 * bias:.1f}" if bias > deviation / 3 else "-",
                    f"{100 * deviation:.1f}" if deviation else "",
                )
            )
    columns = ("codec", "size", "bytes", "copy", "att_in", "att_out", "mlp_in", "mlp_out")
    show_table(title, (*columns, "bias", "deviation"), body, text_columns=2)


table_of_all(
    small,
    found,
    "Small model, in % of the exact: bytes; error of the copy; of dw by site; bias and deviation",
)

# %% [markdown]
# A random projection is above the gray line at every rank below `d`: the decoded activation is
# *worse than zeros*, as `E‖x_hat − x‖² = ‖x‖² (d + 1) / k` says. Its advantage is that it has no
# bias. The next figure has the errors of low-rank codecs against the rank. One power iteration
# brings the randomized SVD close to the best approximation of its rank.

# %%
figure, axes = plt.subplots(1, 4, figsize=(12, 3.8), layout="constrained", sharey=True)
for ax, site in zip(axes, SITES, strict=True):
    for family in LOW_RANK:
        sizes = POINTS if family == PAMM else RANKS
        ax.plot(sizes, [e.copy for e in found[site, family]], label=family, **STYLES[family])
    best = [best_error(sigma)[np.array(RANKS) - 1] ** 2 for sigma in spectra[site]]
    ax.plot(RANKS, np.sqrt(np.mean(best, 0)), "k--", lw=1, label="best of this rank (SVD)")
    ax.axhline(1, color="gray", lw=1)
    ax.set(title=site, xscale="log", yscale="log", xlabel="rank, or number of points")
    ax.set_xticks((8, 32, 64, 128), ("8", "32", "64", "128"))
    ax.set_xticks([], minor=True)
axes[0].set_ylabel("relative error of the copy")
finish(figure, axes[0], columns=4)

# %% [markdown]
# The choices of `Quantized` differ by less than the figure above can show. Here their errors of
# `dw` are divided by those of rounding to the nearest with the same number of bits. Their bytes
# differ a little: uniform levels store two numbers for each group, normal levels one, and balanced
# codes two more for each channel and sequence.


# %%
def draw_ratios(results):
    figure, axes = plt.subplots(1, 4, figsize=(12, 3.8), layout="constrained", sharey=True)
    for ax, site in zip(axes, SITES, strict=True):
        unit = dict(zip(CODECS[NEAREST], results[site, NEAREST], strict=True))
        for family, codecs in FEW_BITS.items():
            names = {name: int(name.split()[0]) for name in codecs}
            ratio = [
                error.one_key / unit[name].one_key
                for name, error in zip(names, results[site, family], strict=True)
            ]
            ax.plot([BITS.index(bits) for bits in names.values()], ratio, label=family,
                    **STYLES[family])  # fmt: skip
        ax.set(title=site, xlabel="bits", yscale="log")
        ax.set_xticks(range(len(BITS)), [str(bits) for bits in BITS])
        ticks = (0.5, 0.7, 1, 1.5, 2)
        ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.set_yticks([], minor=True)
    axes[0].set_ylabel("error of dw / that of nearest")
    finish(figure, axes[0], columns=6)


draw_ratios(found)

# %% [markdown]
# In this model:
#
# - Stochastic rounding has 1.1 to 1.4 times the error of the nearest at 2 and 4 bits, dither 0.8 to
#   1.0 times.
# - Rotation helps where there are outliers: in `mlp_out` the error at 4 bits is 7.2% instead of
#   16.5%. At the other sites it changes little at 4 bits.
# - Balanced channels help in `attention_out` (3.4% instead of 7.5%) and `mlp_out` (6.1%).
# - Normal levels alone cut outliers off: in `mlp_out` at 4 bits they more than double the error.
# - All three together are far better than balanced channels alone at 1 and 2 bits. At 4 bits they
#   are better in `mlp_out` alone; at the other sites balanced channels are a little better (6.4%,
#   3.4% and 5.0% instead of 6.7%, 3.5% and 5.3%).
# - By channel, errors are larger than by group in `attention_out` and `mlp_out`, and nearly equal
#   elsewhere. At 2 bits `Calibrated` is much better, since `least_error` chooses levels that do not
#   cover the whole range.
# - All three with the statistics of another batch: at 4 bits the error is 4.6% to 6.7% instead of
#   3.5% to 6.7%, with 12.9% of the bytes instead of 13.9%.
#
# ## Offloaded codes
#
# `Offloaded` moves the code of another codec to host memory. Its error is that of this codec, to
# the last bit. What it moves is what the other codec stores; here that is counted from the shapes
# of the code itself. (On a CPU, host and device share one memory, so nothing is moved.)

# %%
for inner in (actjax.Exact(), actjax.Quantized(4, **ALL_THREE)):
    moved = exact = 0
    for site in SITES:
        x = jnp.asarray(small.x[site][0])
        code = jax.tree.leaves(jax.eval_shape(actjax.Offloaded(inner).encode, x))
        of_site = sum(leaf.size * leaf.dtype.itemsize for leaf in code)
        assert of_site == inner.stored_bytes(x.shape, x.dtype)
        moved, exact = moved + of_site, exact + x.nbytes
    print(f"Offloaded({inner}): moves {moved / 1024:.0f} KiB of {exact / 1024:.0f} KiB a layer")
for site in SITES:
    inside = found[site, "all three"][BITS.index(4)]
    assert found[site, OFFLOADED][0][:5] == inside[:5]
print("Errors of the offloaded code: equal to those of the code inside, at each site")

# %% [markdown]
# ## Bias and variance
#
# An unbiased codec has a large error in one step, but not in the mean. The squared error of the
# mean gradient over `n` keys is `bias² + variance / n`. Markers show the error of such means, for
# codecs of rank 32 (128 points) and of 2 bits. Lines show the formula, with bias and variance from
# all 64 keys.

# %%
measured = {
    (site, family): found[site, family][list(CODECS[family]).index(name)]
    for site in SITES
    for family, name in AVERAGED.items()
}
counts = 2 ** np.arange(7)
figure, axes = plt.subplots(1, 4, figsize=(12, 3.8), layout="constrained", sharey=True)
for ax, site in zip(axes, SITES, strict=True):
    for family in AVERAGED:
        errors, style = measured[site, family], dict(STYLES[family])
        line = style.pop("ls", "-")
        formula = np.sqrt(errors.bias**2 + errors.deviation**2 / counts)
        ax.plot(counts, formula, line, color=style["color"], lw=1.2)
        means = errors.of_means if len(errors.of_means) > 1 else np.repeat(errors.of_means, 64)
        ax.plot(counts, means[counts - 1], ls="", label=family, **style)
    ax.axhline(1, color="gray", lw=1)
    ax.set(title=site, xscale="log", yscale="log", xlabel="keys averaged, n")
    ax.set_xticks(counts, [str(n) for n in counts])
    ax.set_xticks([], minor=True)
axes[0].set_ylabel("relative error of the mean dw")
finish(figure, axes[0], columns=4)

# %% [markdown]
# The last two columns of the table separate bias from variance: if the error of the mean over 64
# keys is at most an eighth of the standard deviation, no bias is visible. "To match" is the
# number of gradients that an unbiased codec must average to have the error of *one* gradient of the
# randomized SVD.

# %%
body = []
for site in SITES:
    for family, name in AVERAGED.items():
        errors, codec = measured[site, family], CODECS[family][name]
        keys_to_match = errors.deviation**2 / measured[site, SVD].one_key ** 2
        body.append(
            (
                site if family == SVD else "",
                f"{family}, {name}",
                errors.stored / exact_bytes(small, site),
                f"{errors.one_key:.3f}",
                "" if codec.biased else f"{max(keys_to_match, 1):.0f}",
                f"{errors.of_means[-1]:.3f}",
                f"{errors.deviation / 8:.3f}" if codec.needs_key else "",
            )
        )
columns = ("site", "codec", "bytes", "one key", "to match", "mean of 64", "deviation / 8")
show_table("Relative error of dw", columns, body, text_columns=2)

# %% [markdown]
# Random projection, stochastic rounding and dither have no visible bias. The mean error of the
# others stops at their bias. But a bias can be smaller than the noise of an unbiased codec: it
# takes 28 to 239 gradients of a random projection to match one of a randomized SVD. With 2 bits and
# dither it takes 1 to 8, with 7% of the bytes where the SVD has 17% to 33%.
#
# ## The same on a pretrained model
#
# A small model early in training may be easier or harder than a model that people use. This part
# takes the model in `ACTJAX_MODEL` and two sequences of 128 tokens of the same text, and measures
# all codecs on its first, middle and last layer.

# %%
folder = os.environ.get("ACTJAX_MODEL")
if folder:
    folder = pathlib.Path(folder)
    pretrained, name = load_checkpoint(folder, dtype="float32"), folder.name
    batches = train_batches(corpus, tokenizer_of(folder, None), batch_size=2, seq_len=128, seed=0)
    texts = [next(batches) for _ in range(2)]
    batches.close()
    del batches
else:
    # The shapes of the first part, so that nothing is compiled again.
    pretrained, name, texts = model, "the small model", [earlier, batch]
    print("ACTJAX_MODEL is not set: this part measures the small model again.")
shape = pretrained.config
print(f"{name}: {shape.num_layers} layers of {shape.hidden_size}, ffn {shape.ffn_size}")
chosen = sorted({0, shape.num_layers // 2, shape.num_layers - 1})
earlier_real, real = (capture(pretrained, text, chosen) for text in texts)
print(f"loss {real.loss:.2f} nats a token; layers {', '.join(str(i + 1) for i in chosen)} of all")
print(f"{'site':14s} largest token / median   share of energy within rank 8, 32, 64")
for site in SITES:
    norms = [np.linalg.norm(rows(x), axis=-1) for x in real.x[site]]
    largest = ", ".join(f"{n.max() / np.median(n):.1f}" for n in norms)
    energy = [1 - best_error(singular_values(x))[np.array(RANKS) - 1] ** 2 for x in real.x[site]]
    shares = "; ".join(" ".join(f"{value:.2f}" for value in layer) for layer in energy)
    print(f"{site:14s} {largest:22s}   {shares}")

# %%
keys = FEW_KEYS if folder else 2  # The small model has been measured: be quick.
found_real = measure_all(real, earlier_real, most_keys=keys, keys=keys)
draw_all(real, found_real)
table_of_all(
    real,
    found_real,
    f"{name}, in % of the exact: bytes; error of the copy; of dw by site; bias and deviation",
)

# %%
draw_ratios(found_real)

# %% [markdown]
# How much larger are the errors of `dw` than in the small model? The bars show the ratio for one
# codec of each family, of equal size in both models.

# %%
COMPARED = {
    SVD: "rank 32",
    RP: "rank 32",
    PAMM: "128 points",
    NEAREST: "4 bits",
    "rotated": "4 bits",
    "all three": "4 bits",
    "by channel": "4 bits",
}
figure, ax = plt.subplots(figsize=(9, 3), layout="constrained")
body = []
for j, (family, size) in enumerate(COMPARED.items()):
    at = list(CODECS[family]).index(size)
    pairs = [(found_real[s, family][at].one_key, found[s, family][at].one_key) for s in SITES]
    ratios = [here / there for here, there in pairs]
    places = np.arange(len(SITES)) + (j - 3) * 0.11
    style = STYLES[family]
    ax.bar(places, ratios, 0.1, color=style["color"], label=f"{family}, {size}",
           hatch="//" if family in FEW_BITS else "", edgecolor="white")  # fmt: skip
    body.append((f"{family}, {size}", *ratios))
ax.axhline(1, color="gray", lw=1)
ax.set_xticks(range(len(SITES)), SITES)
ax.set(ylabel="error of dw / small model")
ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.show()
show_table(f"Error of dw: {name} / small model", ("codec", *SITES), body)

# %% [markdown]
# In SmolLM2-135M (256 tokens, three layers, exact `dz`):
#
# - A random projection of rank 32 has twice the error that it has in the small model, as the
#   formula says for a width of 576 instead of 128. A randomized SVD of rank 32 has 1.2 to 2.1 times
#   the error. (Rank 32 is a quarter of the small model's width and an eighteenth of this one.)
# - Plain groups have up to 2.5 times the error of the small model, but rotated groups and all three
#   have about the same, 0.8 to 1.3 times. So the choice matters more here: at 4 bits, all three
#   have 0.3 to 0.4 times the error of plain groups at each site, and less than balanced channels or
#   rotation alone.
# - Normal levels without rotation have 2.0 to 2.7 times the error of plain groups at 4 bits.
# - By channel with outliers is better than plain groups at three sites, not in `mlp_out`.
#   `Calibrated` by channel is better at 2 bits and worse at 4 bits than statistics of the same
#   batch. With all three, `Calibrated` costs little: 4.8% to 6.1% instead of 4.0% to 5.7%.
# - Bits beat rank here too: all three with 3 bits, 11% of the bytes, have a smaller error at each
#   site than the best low-rank codec, a randomized SVD of rank 64 with a power iteration, with 33%.
#
# The largest token of these sites is at most 6.7 times the median in norm. The residual stream, q,
# k, v, gate and up, which other operators store, are not measured in this part.

# %% [markdown]
# ## Table 5 of Wei et al. (2026): activations
#
# Wei et al. compare a randomized SVD and a random projection at ranks 8 and 32, on the activations
# that four kinds of operators store. They report `‖ΔX‖_F`, the Frobenius norm of the error, not
# relative to `‖X‖_F`, over 100 matrices sampled while LLaMA3-3B is fine-tuned on GSM8K. We measure
# the same four operators in our model: the inputs of linear operators (`attention_in` and
# `mlp_in`), the input of the attention norm (the residual stream), the input of SiLU (the gate),
# and the attention weights of a head, since a softmax stores its output (the paper does not say
# which array they took).
#
# Norms of another model's activations cannot be compared with ours, but ratios can. The closed form
# `E‖ΔX‖² = ‖X‖² (d + 1) / k` of the random projection gives the `‖X‖` that they do not report, and
# hence the relative error of their randomized SVD ("implied"), if `d` is 3,072 for linear operators
# and norms (their down projection has 8,192) and 8,192 for SiLU. Their sequence length, which is
# the `d` of the softmax, is not given.


# %%
def heads(y):
    """[B, S, H D] to [B H, S, D]."""
    y = y.reshape(config.batch_size, config.seq_len, model_config.num_heads, -1)
    return np.swapaxes(y, 1, 2).reshape(-1, config.seq_len, y.shape[-1])


CAUSAL = np.tril(np.ones((config.seq_len, config.seq_len), bool))


def rms_norm_backward(codec, code, scale, dy):
    x_hat = codec.decode(code)
    return jax.vjp(lambda x: actjax.rms_norm(x, scale), x_hat)[1](dy)[0]


def silu_backward(codec, code, dy):
    return jax.vjp(jax.nn.silu, codec.decode(code))[1](dy)[0]


def softmax_backward(codec, code, dy):
    p_hat = codec.decode(code)
    return CAUSAL * p_hat * (dy - jnp.sum(p_hat * dy, axis=-1, keepdims=True))


def operator_cases(i):
    """What each nonlinear operator of layer i stores, and what else its backward pass reads."""
    block = jax.tree.map(lambda w: np.asarray(w[i]), model.layers)
    attention, mlp = block.attention, block.mlp
    wq, wk, wv, wo = (
        np.asarray(w[...]) for w in (attention.q, attention.k, attention.v, attention.o)
    )
    gate, up, down = (np.asarray(w[...]) for w in (mlp.gate, mlp.up, mlp.down))
    h, dqkv = (rows(y["attention_in"][i]) for y in (small.x, small.dz))
    shape = (config.batch_size, config.seq_len, model_config.num_heads, -1)
    rope = Positions.of(model_config, config.seq_len).rope
    q, k = (actjax.rope((h @ w).reshape(shape), *rope) for w in (wq, wk))
    q, k = (heads(np.asarray(y).reshape(h.shape)) for y in (q, k))
    scores = np.where(CAUSAL, q @ np.swapaxes(k, 1, 2) / np.sqrt(q.shape[-1]), -np.inf)
    p = np.asarray(jax.nn.softmax(scores))
    dp = heads(rows(small.dz["attention_out"][i]) @ wo.T) @ np.swapaxes(heads(h @ wv), 1, 2)
    some = [i % model_config.num_heads, -1 - i]  # Two heads; others in other layers.
    m = rows(small.x["mlp_in"][i])
    dsilu = rows(small.dz["mlp_out"][i]) @ down.T * (m @ up)
    norm = (np.asarray(block.attention_norm[...]), dqkv @ np.concatenate([wq, wk, wv], 1).T)
    return {
        "RMSNorm": [(rows(small.streams[i]), norm)],
        "SiLU": [(m @ gate, (dsilu,))],
        "Softmax": [(matrix, (dy,)) for matrix, dy in zip(p[some], dp[some], strict=True)],
    }


by_layer = [operator_cases(i) for i in LAYERS]
OPERATORS = {
    "Linear": (linear_backward, cases_of(small, "attention_in") + cases_of(small, "mlp_in")),
    **{
        name: (backward, [case for layer in by_layer for case in layer[name]])
        for name, backward in (
            ("RMSNorm", rms_norm_backward),
            ("SiLU", silu_backward),
            ("Softmax", softmax_backward),
        )
    },
}
# The gradient of SiLU's input was recorded as that of the gate, so it checks the cotangents.
for i in LAYERS:
    gate, others = by_layer[i]["SiLU"][0]
    dgate = rows(small.dz["mlp_in"][i])[:, : model_config.ffn_size]
    np.testing.assert_allclose(
        silu_backward(actjax.Exact(), gate, *others), dgate, atol=1e-4 * np.abs(dgate).max()
    )

# From the paper: by rank, ‖ΔX‖_F of the randomized SVD and of the random projection; d, if known.
PAPER = {
    "Linear": ({8: (745.965, 22398.720), 32: (625.418, 11178.960)}, 3072),
    "RMSNorm": ({8: (966.600, 28327.680), 32: (812.140, 13894.080)}, 3072),
    "SiLU": ({8: (1508.120, 99136.000), 32: (1233.960, 52348.160)}, 8192),
    "Softmax": ({8: (51.116, 1983.520), 32: (44.729, 961.320)}, None),
}

SOME_KEYS = 32
ours = {}
for name, (backward, cases) in OPERATORS.items():
    for rank in (8, 32):
        for codec in (actjax.RandomizedSVD(rank), actjax.RandomProjection(rank)):
            ours[name, codec] = relative_errors([codec] * len(cases), backward, cases, SOME_KEYS)

body, formula = [], {}
for name, (printed, d) in PAPER.items():
    for rank, (paper_svd, paper_rp) in printed.items():
        svd, rp = (
            ours[name, c][0] for c in (actjax.RandomizedSVD(rank), actjax.RandomProjection(rank))
        )
        formula[name, rank] = np.sqrt((OPERATORS[name][1][0][0].shape[-1] + 1) / rank)
        implied = paper_svd * np.sqrt((d + 1) / rank) / paper_rp if d else "-"
        printed_cells = (f"{paper_svd:.3f}", f"{paper_rp:.3f}", f"{paper_rp / paper_svd:.1f}")
        cells = (svd, rp, formula[name, rank], f"{rp / svd:.1f}")
        body.append((name if rank == 8 else "", str(rank), *cells, *printed_cells, implied))
columns = ("operator", "rank", "SVD", "RP", "formula", "RP/SVD")
columns += ("paper SVD", "paper RP", "RP/SVD", "implied SVD")
show_table("Ours: ‖ΔX‖ / ‖X‖. Paper: ‖ΔX‖ as printed", columns, body)

# %% [markdown]
# Agreement: a random projection is many times worse than a randomized SVD; its error halves from
# rank 8 to 32, as `1 / sqrt(k)` predicts; and activations are not low-rank: at rank 8 the error of
# a randomized SVD is a large part of the norm for all four operators. (These are means over layers.
# As the spectra show, the first layer is far from low-rank, the last is much closer.)
#
# Differences: our ratios are smaller, and our SVD gains more from rank 8 to 32. The first follows
# from the width: the error of a random projection grows with `sqrt(d)`, and our `d` is 128, theirs
# 3,072. The second is expected too, as rank 32 is a quarter of our `d` and a hundredth of theirs.
# Also, our matrices come from one batch of a small model early in training from scratch, theirs
# from fine-tuning a large one.
#
# ## From activations to gradients
#
# Theorem 3.2 of the paper says: if the decoded activation is unbiased, so is the gradient of a
# linear operator, but not that of a nonlinear operator. Theorem 3.3 says that the error of a
# nonlinear operator propagates upstream. The table shows the relative error of the gradient, with
# real incoming gradients: `dw` of linear operators (their `dx` does not read the decoded
# activation, so it is exact), and `dx` of the others. Without bias, the error of the mean over 32
# keys is smaller by a factor of 5.7, the square root of 32. The paper reports no figures for this.

# %%
body = []
for name in OPERATORS:
    for rank in (8, 32):
        cells = []
        for codec in (actjax.RandomizedSVD(rank), actjax.RandomProjection(rank)):
            _, single, means = ours[name, codec]
            last = means[SOME_KEYS - 1]
            cells += [single, last, f"{single / last:.1f}"]
        gradient = "dw" if name == "Linear" else "dx"
        body.append((f"{name}, {gradient}" if rank == 8 else "", str(rank), *cells))
columns = ("operator", "rank", "SVD, one key", "mean of 32", "fell by")
columns += ("RP, one key", "mean of 32", "fell by")
show_table("Relative error of the operator's gradient", columns, body)

# %% [markdown]
# For linear operators the theorem is visible: the whole error of a random projection averages out.
# For RMSNorm nothing averages out. Its `dx` is inversely proportional to the norm of the input, and
# a random projection is longer than `x` by the square root of `1 + (d + 1) / k`, so `dx` is too
# short by this factor for every key. SiLU is in between. The softmax multiplies two decoded arrays:
# its error in one step is the largest. Over 32 keys it falls as that of linear operators does: the
# bias that the theorem predicts is hidden by the deviation.
#
# A relative error below one is not small: each operator is measured alone here, and the `dx` of a
# nonlinear operator enters all gradients upstream. This is why actjax stores these inputs exactly
# by default.
#
# ## Summary
#
# The statements below are computed and asserted each time the notebook runs.


# %%
def span(values, digits=1):
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def fell_by(name, codec):
    return ours[name, codec][1] / ours[name, codec][2][SOME_KEYS - 1]


projections = [actjax.RandomProjection(rank) for rank in (8, 32)]
rank_8 = [ours[name, actjax.RandomizedSVD(8)][0] for name in OPERATORS]
assert all(0.15 < error < 0.8 for error in rank_8)
print(
    f"- Activations are not low-rank: the relative error of an SVD at rank 8 is {span(rank_8, 2)}."
)

assert all(error.copy > 1 for site in SITES for error in found[site, RP])
for (name, rank), value in formula.items():
    error = ours[name, actjax.RandomProjection(rank)][0]
    svd = actjax.RandomizedSVD(rank)
    paper_svd, paper_rp = PAPER[name][0][rank]
    assert abs(error / value - 1) < 0.1
    assert error / ours[name, svd][0] < paper_rp / paper_svd
for name, (printed, _) in PAPER.items():
    gain = ours[name, actjax.RandomizedSVD(8)][0] / ours[name, actjax.RandomizedSVD(32)][0]
    assert gain > printed[8][0] / printed[32][0]


def at_sites(field, family, size):
    at = list(CODECS[family]).index(size)
    return [getattr(found[site, family][at], field) for site in SITES]


ratios = [measured[site, RP].one_key / measured[site, SVD].one_key for site in SITES]
assert min(ratios) > 3
assert all(measured[site, POWER].one_key < measured[site, SVD].one_key for site in SITES)
print("- The decoded activation of a random projection is worse than zeros at every rank, as its")
print(f"  formula says. At rank 32, in one step, the error of its dw is {span(ratios)} times")
print("  that of a randomized SVD. A power iteration, two thin products, lowers the error of the")
print("  SVD at each site.")

UNBIASED = (RP, RANDOM, DITHER)
fell = {at: errors.one_key / errors.of_means[-1] for at, errors in measured.items()}
unbiased = [value for (_, family), value in fell.items() if family in UNBIASED]
biased = [value for (_, family), value in fell.items() if family not in UNBIASED]
keys = [measured[s, RP].deviation ** 2 / measured[s, SVD].one_key ** 2 for s in SITES]
assert min(unbiased) > 5 > 3 > max(biased)
print(f"- Averaged over 64 keys, the error of unbiased codecs falls by {span(unbiased)},")
print(f"  of biased codecs by {span(biased)}. Yet it takes {span(keys, 0)} gradients of a random")
print("  projection to reach the error of one gradient of a randomized SVD.")

assert all(found[site, PAMM][0].one_key < found[site, RP][-1].one_key for site in SITES)
tokens = config.batch_size * config.seq_len
print(f"- {POINTS[0]} points out of {tokens} have a smaller error in one step")
print(f"  than a random projection of rank {RANKS[-1]}, at each site.")

near, dithered, random, three = (
    at_sites("one_key", family, "2 bits") for family in (NEAREST, DITHER, RANDOM, "all three")
)
to_dither = [a / b for a, b in zip(random, dithered, strict=True)]
assert 1.2 < min(to_dither) < max(to_dither) < 1.7
assert max(a / b for a, b in zip(dithered, near, strict=True)) < 1.1
print(
    f"- At 2 bits the error of dw is {span(to_dither)} times as large with stochastic rounding as"
)
print("  with dither. Dither is unbiased, and its error is not above that of the nearest.")

four = [
    a / b
    for a, b in zip(
        *(at_sites("one_key", f, "4 bits") for f in ("all three", NEAREST)), strict=True
    )
]
assert max(four) < 1
print(
    f"- Balanced and rotated groups with normal levels have {span(four, 2)} times the error of dw"
)
print("  of plain groups at 4 bits, without a key.")

pairs = zip(
    at_sites("one_key", "all three", "3 bits"), at_sites("one_key", SVD, "rank 32"), strict=True
)
assert all(bits < rank for bits, rank in pairs)
shares = [bytes_share(small, found, *at) for at in (("all three", 2), (SVD, RANKS.index(32)))]
print(
    "- Bits beat rank: with 3 bits, the error is below that of a randomized SVD of rank 32 at each"
)
print(f"  site, with {shares[0]:.0%} instead of {shares[1]:.0%} of the bytes.")

linear, norm = ([fell_by(name, codec) for codec in projections] for name in ("Linear", "RMSNorm"))
silu = [fell_by("SiLU", codec) for codec in projections]
assert min(linear) > 4 > 1.5 > max(norm)
assert max(norm) < min(silu) < max(silu) < min(linear)
assert all(ours["Softmax", codec][1] > ours["Linear", codec][1] for codec in projections)
for codec in projections:
    too_short = 1 - 1 / np.sqrt(1 + formula["RMSNorm", codec.rank] ** 2)
    assert abs(ours["RMSNorm", codec][2][SOME_KEYS - 1] / too_short - 1) < 0.1
print(f"- Only linear operators have unbiased gradients: over {SOME_KEYS} keys their error")
print(f"  falls by {span(linear)}, but for RMSNorm by {span(norm)}.")
