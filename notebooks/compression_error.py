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
# activation, and the error of the weight gradient, which is what matters for training. The last
# part repeats Table 5 of Wei et al. (2026), and extends it from activations to gradients.

# %%
import dataclasses
import functools
import os
import sys

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
from models import ModelConfig, Storage
from models.block import Positions
from train.config import PretrainConfig
from train.corpus import open_corpus
from train.data import train_batches
from train.step import init_state, make_recipe, make_train_step
from train.tokenizer import default_tokenizer

plt.rcParams.update({"figure.dpi": 80, "axes.grid": True, "grid.alpha": 0.3, "font.size": 9})
console = Console(width=110, force_terminal=False, force_jupyter=False, color_system=None)


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
# Four layers of width 128, trained for 100 steps on the sources of Python's standard library. At
# initialization activations are close to noise, so errors are measured after some training.

# %%
config = PretrainConfig(
    method="exact", batch_size=4, seq_len=128, steps=100, compute_dtype="float32"
)
model_config = ModelConfig(
    vocab_size=2048, hidden_size=128, ffn_size=352, num_layers=4, num_heads=4
)
data_dir = config.data.data_dir.expanduser()
corpus = open_corpus("stdlib", data_dir)
tokenizer = default_tokenizer(corpus, model_config.vocab_size, data_dir)
batches = train_batches(
    corpus, tokenizer, batch_size=config.batch_size, seq_len=config.seq_len, seed=0
)
recipe = make_recipe(config, model_config)
step = jax.jit(make_train_step(recipe), donate_argnums=0)
state = init_state(recipe)
losses = []
for _ in range(config.steps):
    state, metrics = step(state, next(batches))
    losses.append(metrics["loss"])
losses = [float(loss) for loss in losses]
batch = next(batches)
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
LAYERS = range(model_config.num_layers)
positions = Positions.of(model_config, config.seq_len)
blocks = [jax.tree.map(lambda w, i=i: w[i], model.layers) for i in LAYERS]


@jax.jit
def run_block(block, x, dy):
    """Forward and backward pass of one layer: its output, `dx`, and the records of its sites."""
    seen = {}
    storage = Storage(**{site: Capture(site, seen) for site in SITES})
    y, pullback = jax.vjp(
        lambda block, x: block(x, positions, model_config, storage, jax.random.key(0)), block, x
    )
    return y, pullback(dy)[1], seen


def last_loss(x):
    hidden = actjax.rms_norm(x, model.norm[...])
    return actjax.cross_entropy(hidden, model.head, batch["targets"])


streams = [model.embed(batch["inputs"], "float32")]  # The residual stream before each layer.
for block in blocks:
    streams.append(run_block(block, streams[-1], jnp.zeros_like(streams[-1]))[0])
dx = jax.jit(jax.grad(last_loss))(streams[-1])
captured = [None] * len(blocks)
for i in reversed(LAYERS):
    _, dx, captured[i] = run_block(blocks[i], streams[i], dx)


def rows(x):
    """[B, S, d] to [T, d]."""
    return np.asarray(x).reshape(-1, x.shape[-1])


# For each site and layer: x [T, d], and the gradients of all outputs side by side, dz [T, n].
inputs = {site: [rows(seen[site]["x"]) for seen in captured] for site in SITES}
gradients = {
    site: [np.concatenate([rows(dz) for dz in seen[site]["dz"]], axis=-1) for seen in captured]
    for site in SITES
}
for site in SITES:
    print(f"{site:14s} x {inputs[site][0].shape}, dz {gradients[site][0].shape}")

# %% [markdown]
# ## Are activations low-rank?
#
# If they were, a randomized SVD would lose nothing. Left: singular values. Right: the share of the
# energy `‖x‖²` in the leading directions. The square root of one minus this share is the smallest
# relative error of any matrix of that rank.

# %%
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]  # Okabe and Ito.


def singular_values(x):
    """Singular values in falling order, from the Gram matrix: float64 is precise enough to draw."""
    x = x.astype(np.float64)
    return np.sqrt(np.maximum(np.linalg.eigvalsh(x.T @ x)[::-1], 0))


def best_error(sigma):
    """Relative error of the best approximation of rank 1, 2, ..., d."""
    outside = np.append(np.cumsum((sigma**2)[::-1])[::-1][1:], 0)
    return np.sqrt(outside / np.sum(sigma**2))


spectra = {site: [singular_values(x) for x in inputs[site]] for site in SITES}
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
# ## Error of the decoded activation, against bytes and against rank
#
# `measure` encodes an activation with several keys. It compares the decoded activation, and the
# gradient that the backward pass computes from it, with the exact ones. All errors are relative, in
# Frobenius norms, as root mean squares over the four layers.

# %%
MOST_KEYS = 64
KEYS = jax.random.split(jax.random.key(1), MOST_KEYS)


@functools.partial(
    jax.jit,
    static_argnums=(0, 1),
    # There are many small programs that run a few times: compile them quickly, for one thread.
    compiler_options={"xla_backend_optimization_level": 0, "xla_cpu_multi_thread_eigen": False},
)
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


def relative_errors(codec, backward, cases, count=1):
    """Root mean squares of `measure` over `cases`: pairs of x and other arguments of `backward`."""
    results = [measure(codec, backward, x, others, count) for x, others in cases]
    return [np.sqrt(np.mean(np.asarray(column), axis=0)) for column in zip(*results, strict=True)]


def linear_cases(site):
    """`dz` padded with zeros to one width, so that sites of one width share a compiled program."""
    width = max(
        gradients[other][0].shape[1]
        for other in SITES
        if inputs[other][0].shape == inputs[site][0].shape
    )
    pairs = zip(inputs[site], gradients[site], strict=True)
    return [(x, (np.pad(dz, ((0, 0), (0, width - dz.shape[1]))),)) for x, dz in pairs]


# %%
RANKS = (8, 32, 64)
POINTS = (8, 32, 128)
SVD, POWER, ROWS, RP, BOTH, PAMM = (
    "randomised SVD",
    "SVD, 1 power iteration",
    "SVD, row sketch",
    "random projection",
    "principal + random",
    "points (PAMM)",
)
CODECS = {
    SVD: [actjax.RandomizedSVD(k) for k in RANKS],
    POWER: [actjax.RandomizedSVD(k, power_iterations=1) for k in RANKS],
    ROWS: [actjax.RandomizedSVD(k, sketch="rows") for k in RANKS],
    RP: [actjax.RandomProjection(k) for k in RANKS],
    BOTH: [actjax.PrincipalPlusRandom(k // 2, k // 2) for k in RANKS],
    PAMM: [actjax.PointApproximation(points=k) for k in POINTS],
}
sizes = {name: POINTS if name == PAMM else RANKS for name in CODECS}
share, of_copy, of_gradient = {}, {}, {}
for site in SITES:
    shape, cases = inputs[site][0].shape, linear_cases(site)
    exact_bytes = actjax.Exact().stored_bytes(shape, "float32")
    for name, codecs in CODECS.items():
        at = site, name
        share[at] = [codec.stored_bytes(shape, "float32") / exact_bytes for codec in codecs]
        errors = [relative_errors(codec, linear_backward, cases) for codec in codecs]
        of_copy[at] = np.array([error[0] for error in errors])
        of_gradient[at] = np.array([error[1] for error in errors])
best = {
    site: np.sqrt(np.mean([best_error(s)[np.array(RANKS) - 1] ** 2 for s in spectra[site]], 0))
    for site in SITES
}

# %%
STYLES = dict(zip(CODECS, zip(COLORS, "os^vD*", strict=True), strict=True))


def draw(axes, errors, against, xlabel, ticks):
    for ax, site in zip(axes, SITES, strict=True):
        for name, (color, marker) in STYLES.items():
            x = share[site, name] if against == "bytes" else sizes[name]
            ax.plot(x, errors[site, name], marker + "-", color=color, ms=5, lw=1.2, label=name)
        if errors is of_copy:
            x = share[site, SVD] if against == "bytes" else RANKS
            ax.plot(x, best[site], "k--", lw=1, label="best of this rank (SVD)")
        ax.axhline(1, color="gray", lw=1)
        ax.set(title=site, xscale="log", yscale="log", xlabel=xlabel)
        ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.set_xticks([], minor=True)


def draw_legend(figure, ax):
    figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=4)


figure, axes = plt.subplots(2, 4, figsize=(12, 6.4), layout="constrained", sharey=True)
draw(axes[0], of_copy, "bytes", "bytes stored / exact", (0.03, 0.1, 0.3))
draw(axes[1], of_copy, "rank", "rank, or number of points", (8, 32, 64, 128))
for ax in axes[:, 0]:
    ax.set_ylabel("relative error of the copy")
draw_legend(figure, axes[0, 0])
plt.show()

# %% [markdown]
# The grey line is the error of storing nothing. A random projection is above it at every rank below
# `d`: the decoded activation is *worse than zeros*, as `E‖x_hat − x‖² = ‖x‖² (d + 1) / k` says. Its
# advantage is that it has no bias. One power iteration brings the randomized SVD close to the best
# approximation of its rank.
#
# ## Error of the weight gradient
#
# Training does not use the decoded activation itself, only the weight gradient `dw = x_hatᵀ dz`.
# The figure uses the real `dz` of this batch and one key, as in one training step.

# %%
figure, axes = plt.subplots(1, 4, figsize=(12, 3.8), layout="constrained", sharey=True)
draw(axes, of_gradient, "bytes", "bytes stored / exact", (0.03, 0.1, 0.3))
axes[0].set_ylabel("relative error of dw, one key")
draw_legend(figure, axes[0])
plt.show()

# %% [markdown]
# ## Bias and variance
#
# An unbiased codec has a large error in one step, but not in the mean. The squared error of the
# mean gradient over `n` keys is `bias² + variance / n`. Markers show the error of such means, for
# codecs of rank 32 (principal + random: 16 and 16; 128 points). Lines show the formula, with bias
# and variance from all 64 keys.

# %%
AVERAGED = (SVD, POWER, RP, BOTH, PAMM)
LARGE = {name: CODECS[name][2 if name == PAMM else 1] for name in AVERAGED}
one_key, of_mean = {}, {}
for site in SITES:
    cases = linear_cases(site)
    for name, codec in LARGE.items():
        _, one_key[site, name], of_mean[site, name] = relative_errors(
            codec, linear_backward, cases, MOST_KEYS
        )
variance = {
    at: (one_key[at] ** 2 - of_mean[at][-1] ** 2) * MOST_KEYS / (MOST_KEYS - 1) for at in one_key
}

counts = 2 ** np.arange(7)
figure, axes = plt.subplots(1, 4, figsize=(12, 3.8), layout="constrained", sharey=True)
for ax, site in zip(axes, SITES, strict=True):
    for name in AVERAGED:
        (color, marker), at = STYLES[name], (site, name)
        bias_squared = max(one_key[at] ** 2 - variance[at], 0)
        ax.plot(counts, np.sqrt(bias_squared + variance[at] / counts), color=color, lw=1.2)
        ax.plot(counts, of_mean[at][counts - 1], marker, color=color, ms=5, label=name)
    ax.axhline(1, color="gray", lw=1)
    ax.set(title=site, xscale="log", yscale="log", xlabel="keys averaged, n")
    ax.set_xticks(counts, [str(n) for n in counts])
    ax.set_xticks([], minor=True)
axes[0].set_ylabel("relative error of the mean dw")
draw_legend(figure, axes[0])
plt.show()

# %% [markdown]
# The last two columns of the table separate bias from variance: if the error of the mean over 64
# keys is at most an eighth of the standard deviation, no bias is visible. "Keys to match" is the
# number of gradients that an unbiased codec must average to have the error of *one* gradient of the
# randomized SVD.

# %%
body = []
for site in SITES:
    for name in AVERAGED:
        at = site, name
        keys_to_match = variance[at] / one_key[site, SVD] ** 2
        unbiased = not LARGE[name].biased
        body.append(
            (
                site if name == SVD else "",
                name,
                share[at][list(CODECS[name]).index(LARGE[name])],
                one_key[at],
                f"{keys_to_match:.0f}" if unbiased else "",
                f"{of_mean[at][-1]:.3f}",
                f"{np.sqrt(variance[at] / MOST_KEYS):.3f}",
            )
        )
columns = ("site", "codec", "bytes", "one key", "keys to match", "mean of 64", "deviation / 8")
show_table("Relative error of dw", columns, body, text_columns=2)

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
    attention, mlp = blocks[i].attention, blocks[i].mlp
    wq, wk, wv, wo = (
        np.asarray(w[...]) for w in (attention.q, attention.k, attention.v, attention.o)
    )
    gate, up, down = (np.asarray(w[...]) for w in (mlp.gate, mlp.up, mlp.down))
    h, dqkv = inputs["attention_in"][i], gradients["attention_in"][i]
    shape = (config.batch_size, config.seq_len, model_config.num_heads, -1)
    q, k = (actjax.rope((h @ w).reshape(shape), *positions.rope) for w in (wq, wk))
    q, k = (heads(np.asarray(y).reshape(h.shape)) for y in (q, k))
    scores = np.where(CAUSAL, q @ np.swapaxes(k, 1, 2) / np.sqrt(q.shape[-1]), -np.inf)
    p = np.asarray(jax.nn.softmax(scores))
    dp = heads(gradients["attention_out"][i] @ wo.T) @ np.swapaxes(heads(h @ wv), 1, 2)
    some = [i % model_config.num_heads, -1 - i]  # Two heads; others in other layers.
    m, dsilu = inputs["mlp_in"][i], gradients["mlp_out"][i] @ down.T * (inputs["mlp_in"][i] @ up)
    norm = (np.asarray(blocks[i].attention_norm[...]), dqkv @ np.concatenate([wq, wk, wv], 1).T)
    return {
        "RMSNorm": [(rows(streams[i]), norm)],
        "SiLU": [(m @ gate, (dsilu,))],
        "Softmax": [(matrix, (dy,)) for matrix, dy in zip(p[some], dp[some], strict=True)],
    }


by_layer = [operator_cases(i) for i in LAYERS]
OPERATORS = {
    "Linear": (linear_backward, linear_cases("attention_in") + linear_cases("mlp_in")),
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
    dgate = gradients["mlp_in"][i][:, : model_config.ffn_size]
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
            ours[name, codec] = relative_errors(codec, backward, cases, SOME_KEYS)

body, formula = [], {}
for name, (printed, d) in PAPER.items():
    for rank, (paper_svd, paper_rp) in printed.items():
        svd, rp = (
            ours[name, c][0] for c in (actjax.RandomizedSVD(rank), actjax.RandomProjection(rank))
        )
        formula[name, rank] = np.sqrt((OPERATORS[name][1][0][0].shape[1] + 1) / rank)
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
# its error in one step is the largest.
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

assert all((of_copy[site, RP] > 1).all() for site in SITES)
for (name, rank), value in formula.items():
    error = ours[name, actjax.RandomProjection(rank)][0]
    svd = actjax.RandomizedSVD(rank)
    paper_svd, paper_rp = PAPER[name][0][rank]
    assert abs(error / value - 1) < 0.1
    assert error / ours[name, svd][0] < paper_rp / paper_svd
for name, (printed, _) in PAPER.items():
    gain = ours[name, actjax.RandomizedSVD(8)][0] / ours[name, actjax.RandomizedSVD(32)][0]
    assert gain > printed[8][0] / printed[32][0]

ratios = [one_key[site, RP] / one_key[site, SVD] for site in SITES]
assert min(ratios) > 3
assert all(one_key[site, POWER] < one_key[site, SVD] for site in SITES)
print("- The decoded activation of a random projection is worse than zeros at every rank, as its")
print(f"  formula says. At rank 32, in one step, the error of its dw is {span(ratios)} times")
print("  that of a randomized SVD. A power iteration, two thin products, lowers the error of the")
print("  SVD at each site.")

unbiased = [one_key[site, name] / of_mean[site, name][-1] for site in SITES for name in (RP, BOTH)]
biased = [one_key[at] / of_mean[at][-1] for at in one_key if at[1] not in (RP, BOTH)]
keys = [variance[site, RP] / one_key[site, SVD] ** 2 for site in SITES]
assert min(unbiased) > 5 > 3 > max(biased)
print(f"- Averaged over 64 keys, the error of unbiased codecs falls by {span(unbiased)},")
print(f"  of biased codecs by {span(biased)}. Yet it takes {span(keys, 0)} gradients of a random")
print("  projection to reach the error of one gradient of a randomized SVD.")

assert all(one_key[site, BOTH] < one_key[site, RP] for site in SITES)
assert all(of_gradient[site, PAMM][0] < of_gradient[site, RP][-1] for site in SITES)
print("- With a principal part, an unbiased codec of rank 32 has less variance at each site.")
print(
    f"  {POINTS[0]} points out of {inputs['mlp_in'][0].shape[0]} have a smaller error in one step"
)
print(f"  than a random projection of rank {RANKS[-1]}, at each site.")

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
