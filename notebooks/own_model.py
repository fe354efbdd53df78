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
# # Your own Flax model, in ten minutes
#
# A small transformer in Flax nnx that knows nothing of actjax learns to write Python. Then one line
# changes the memory of its backward pass, and one more the memory of its optimizer:
#
# ```python
# small = actjax.compress(loss, error=0.05).measure(model, batch)
# transform = actjax.optim.eight_bit(optax.adamw(4e-3))
# ```
#
# The notebook shows which arrays are stored before and after, how far the gradient is from the
# exact one, the loss of training each way, and the memory of the compiled steps. Your program needs
# these two lines; the rest of the code here makes text, tables and pictures.

# %%
import os

# XLA's default schedule for CPUs keeps arrays alive; GPUs need no flag.
os.environ["XLA_FLAGS"] = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"

import pathlib
import sysconfig
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from rich.console import Console

import actjax

plt.rcParams.update({"figure.dpi": 100, "font.size": 10, "axes.spines.top": False})
plt.rcParams.update({"axes.spines.right": False, "figure.constrained_layout.use": True})
PLAIN, SMALL, BOTH = "#999999", "#0072B2", "#D55E00"
MIB = 2**20
console = Console(width=160, force_jupyter=False, color_system=None)

# %% [markdown]
# ## Text that every machine has
#
# The sources of Python's standard library, as bytes. The last twentieth is held out.

# %%
BATCH, LENGTH, WARM_UP, STEPS = 8, 128, 20, 100
folder = pathlib.Path(sysconfig.get_path("stdlib"))
text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
data = np.frombuffer(text, np.uint8)
held_out = len(data) * 19 // 20


def draw(random, low, high):
    """Returns token numbers, [BATCH, LENGTH + 1], from random places of the text."""
    starts = random.integers(low, high - LENGTH - 1, size=BATCH)
    return jnp.asarray([data[s : s + LENGTH + 1] for s in starts], jnp.int32)


def training_batches(steps, seed):
    random = np.random.default_rng(seed)
    for _ in range(steps):
        yield draw(random, 0, held_out)


random = np.random.default_rng(1)
validation = [draw(random, held_out, len(data)) for _ in range(4)]
print(f"{len(data) / MIB:.1f} MiB of text")

# %% [markdown]
# ## The model
#
# Four blocks of attention and an MLP. Their weights have a leading axis, and a scan runs them, as
# in large models. In a scan, codes replace the floats completely.

# %%
VOCABULARY, WIDTH, HEADS, BLOCKS = 256, 128, 4, 4


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


@nnx.split_rngs(splits=BLOCKS)
@nnx.vmap(in_axes=0, out_axes=0)
def stack(rngs):
    return Block(rngs)


@nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
def run(block, x):
    return block(x)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = stack(rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, ids):
        x = self.tokens(ids) + self.places(jnp.arange(ids.shape[1]))
        return self.head(self.norm(run(self.blocks, x)))


def loss(model, ids):
    logits = model(ids[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


model = Model(nnx.Rngs(0))
weights = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
print(f"{weights / 1e6:.2f} million weights, {weights * 4 / MIB:.1f} MiB in float32")

# %% [markdown]
# An ordinary training loop of nnx. The first steps run as they always did: bits are chosen by a
# measurement, and random weights say little about the model that they become.


# %%
def train(loss, model, transform, steps, seed):
    """Trains a copy; returns it, its optimizer, losses, held-out losses, memory, and seconds."""
    model = nnx.clone(model)
    optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)

    def step(model, optimizer, ids):
        value, grads = nnx.value_and_grad(loss)(model, ids)
        optimizer.update(model, grads)
        return value

    step = nnx.jit(step, donate_argnums=(0, 1)).lower(model, optimizer, batch).compile()
    memory = step.memory_analysis().temp_size_in_bytes
    losses, held_out_losses, seconds = [], [(0, float(held_out_loss(model)))], []
    for ids in training_batches(steps, seed):
        start = time.perf_counter()
        losses.append(float(step(model, optimizer, ids)))
        seconds.append(time.perf_counter() - start)
        if len(losses) % 20 == 0:
            held_out_losses.append((len(losses), float(held_out_loss(model))))
    return model, optimizer, losses, held_out_losses, memory, np.median(seconds)


@nnx.jit
def held_out_loss(model):
    return sum(loss(model, ids) for ids in validation) / len(validation)


batch = validation[0]
model = train(loss, model, optax.adamw(2e-3), WARM_UP, seed=2)[0]
print(f"held-out loss after {WARM_UP} steps: {held_out_loss(model):.3f} nats a byte")

# %% [markdown]
# ## What the backward pass stores
#
# `actjax.explain` lists the arrays that are alive between the forward and the backward pass. It
# traces the loss and runs nothing.

# %%
before = actjax.explain(loss, model, batch)
console.print(before)

# %%
PARTS = {
    "attention.py": "attention weights, q, k, v",
    "Block.__call__": "GELU",
    "Linear.__call__": "linear layers",
    "LinearGeneral": "attention weights, q, k, v",
    "normalization.py": "layer norms",
}


def by_part(explanation):
    """Returns MiB stored by part of the model, the largest first."""
    sizes = {}
    for residual in explanation.residuals:
        part = next((p for key, p in PARTS.items() if key in residual.name), "loss and others")
        sizes[part] = sizes.get(part, 0) + residual.stored_bytes / MIB
    return dict(sorted(sizes.items(), key=lambda item: item[1]))


stored = by_part(before)
figure, axes = plt.subplots(figsize=(7, 2.4))
bars = axes.barh(list(stored), list(stored.values()), color=PLAIN)
axes.bar_label(bars, fmt="%.1f", padding=3)
axes.set(xlabel="MiB stored for the backward pass", xlim=(0, 1.12 * max(stored.values())))
axes.set_title(
    f"{before.stored_bytes / MIB:.0f} MiB of activations for {weights * 4 / MIB:.1f} MiB of weights"
)
plt.show()

# %% [markdown]
# Most of it is attention weights (tokens × tokens) and the arrays that the GELU of the wide layer
# keeps.
#
# ## One changed line
#
# `actjax.compress` measures on a batch how much the gradient changes with the error of each array.
# It then tries four ways to store less, and takes the one with the least memory whose gradient has
# at most the error that you allow.

# %%
small = actjax.compress(loss, error=0.05, verbose=False).measure(model, batch)
console.print(small)

# %%
ways = small.choice.tried
figure, axes = plt.subplots(figsize=(7, 2.4))
colors = [SMALL if way.name == small.choice.name else PLAIN for way in ways]
bars = axes.barh([way.name for way in ways], [way.memory / MIB for way in ways], color=colors)
axes.bar_label(
    bars,
    [
        f"{way.memory / MIB:.0f} MiB, "
        + (f"error {way.error:.1%}" if way.error else "exact")
        + (f", {way.recomputed:.0%} computed again" if way.recomputed else "")
        for way in ways
    ],
    padding=3,
)
axes.set_xlim(0, 1.75 * max(way.memory for way in ways) / MIB)
axes.set(xlabel="MiB of temporaries of the compiled gradient", title="Four ways; blue: chosen")
axes.invert_yaxis()
plt.show()

# %% [markdown]
# `remat` is rematerialization of segments that actjax finds by itself, with an exact gradient.
# `codes` stores all arrays in few bits instead. To choose yourself: `remat=False` permits codes
# only, and `budget="30MiB"` asks for the way that computes least again within that memory.
#
# ## How wrong is the gradient?
#
# The loss is the same number. The bound on the error holds for the batch that was measured; here
# are others.


# %%
@nnx.jit
def both_gradients(model, ids):
    values, flat = [], []
    for f in (loss, small):
        value, grads = nnx.value_and_grad(f)(model, ids)
        values.append(value)
        flat.append(jnp.concatenate([x.ravel() for x in jax.tree.leaves(grads)]))
    return values, flat


def print_errors(model):
    for ids in validation:
        values, (exact, inexact) = both_gradients(model, ids)
        error = jnp.linalg.norm(inexact - exact) / jnp.linalg.norm(exact)
        print(f"loss {values[0]:.6f} and {values[1]:.6f}, error of the gradient {error:.1%}")


print_errors(model)

# %% [markdown]
# For comparison, the exact gradients of two batches of this size differ by far more:

# %%
first, second = (both_gradients(model, ids)[1][0] for ids in validation[:2])
print(f"{jnp.linalg.norm(first - second) / jnp.linalg.norm(first):.0%}")

# %% [markdown]
# ## Training three ways
#
# From the same weights, on the same batches: with the loss as it is, with the small loss, and with
# the small loss and Adam's moments in 8 bits, which is the second line.

# %%
adam = optax.adamw(optax.warmup_cosine_decay_schedule(0, 4e-3, 10, STEPS))
runs = {
    "as it is": train(loss, model, adam, STEPS, seed=0),
    "compress": train(small, model, adam, STEPS, seed=0),
    "compress, 8-bit moments": train(small, model, actjax.optim.eight_bit(adam), STEPS, seed=0),
}
for name, (_, _, _, held_out_losses, _, seconds) in runs.items():
    print(f"{name:24} held-out loss {held_out_losses[-1][1]:.3f}, {1000 * seconds:.0f} ms a step")

# %%
figure, axes = plt.subplots(figsize=(7, 3.6))
styles = ((PLAIN, "-"), (SMALL, "-"), (BOTH, "--"))
for (name, run_of_name), (color, style) in zip(runs.items(), styles, strict=True):
    losses, held_out_losses = run_of_name[2:4]
    axes.plot(losses, style, color=color, alpha=0.4, lw=1)
    axes.plot(*zip(*held_out_losses, strict=True), "o" + style, color=color, ms=4, label=name)
axes.set(xlabel="step", ylabel="loss, nats a byte", title="Thin: training. Points: held out")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# The three curves lie on top of each other. One seed of a small model and a short run show large
# differences only:
# [Quality](../docs/results/quality.md) has longer runs with several seeds. Codes cost time, and
# computing layers again does too ([Time](../docs/results/time.md)); these times are of a busy
# machine.
#
# Bits are chosen once, and the model changes. The error of the gradient after this training:

# %%
print_errors(runs["compress"][0])

# %% [markdown]
# It has grown, and stays near the bound. Had the bits been chosen for the random weights before the
# first step, it would be 62% after 20 steps and 81% after 120, and the loss 0.18 higher: where all
# tokens are about equally likely, two bits suffice for the logits, and later they do not. In a long
# run call `small.measure(model, batch)` again and compile the step again, or use
# `actjax.Controller`, which does so at intervals.
#
# ## The memory of a whole step
#
# The compiler's figures. Weights and moments are updated in place; temporaries are gradients,
# activations and workspace.

# %%
figure, axes = plt.subplots(figsize=(7, 2.4))
names = list(runs)[::-1]
states = [
    sum(x.nbytes for x in jax.tree.leaves(nnx.state(runs[name][1], nnx.optimizer.OptState))) / MIB
    for name in names
]
temporaries = [runs[name][4] / MIB for name in names]
left = np.zeros(len(names))
for label, sizes, color in (
    ("weights", [weights * 4 / MIB] * 3, "#56B4E9"),
    ("moments", states, "#009E73"),
    ("temporaries", temporaries, "#E69F00"),
):
    bars = axes.barh(names, sizes, left=left, color=color, label=label)
    left += sizes
axes.bar_label(bars, [f"{total:.0f} MiB" for total in left], padding=3)
axes.set(xlabel="MiB of a compiled training step", xlim=(0, 1.15 * max(left)))
axes.legend(loc="lower right", frameon=False)
plt.show()
for name, size, temporary in zip(names[::-1], states[::-1], temporaries[::-1], strict=True):
    print(f"{name:24} moments {size:4.2f} MiB, temporaries {temporary:6.2f} MiB")

# %% [markdown]
# ## Next
#
# - [Any model in one call](../docs/guides/compress.md): budgets, what is never coded, refusals.
# - [Your own model](../docs/guides/own-model.md): layers with codecs, linen, Equinox.
# - [8-bit and 4-bit Adam for optax](../docs/guides/adam-for-optax.md): the second line.
# - [In Tunix, MaxText and EasyDeL](../docs/guides/other-stacks.md): the same in their trainers.
