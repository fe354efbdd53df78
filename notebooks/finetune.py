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
# # Fine-tune a Hugging Face checkpoint
#
# A checkpoint and a file of examples go in, an adapter that `transformers` and `peft` read comes
# out. On the way we see the memory of a step, which tokens the loss counts, and what QLoRA and
# HyC-LoRA store for the backward pass. The programs are those of the command line,
# `python -m train.finetune` and others, called from Python.
#
# Without a setting, the notebook needs no download: it pretrains a tiny Llama first. For a real
# model set an environment variable before the notebook starts: `ACTJAX_CHECKPOINT` is a folder or a
# name at the Hub, such as `HuggingFaceTB/SmolLM2-135M` or `Qwen/Qwen3-0.6B`, which is downloaded if
# the cache lacks it. Llama 2 and 3, Mistral, Qwen 2.5 and Qwen 3 work.

# %%
import dataclasses
import functools
import importlib.util
import io
import itertools
import json
import os
import pathlib
import sys
import tempfile
import warnings

sys.path[:0] = [".", ".."]  # `models` and `train` are used from a checkout, not installed.

import jax
import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console

from models.checkpoints import find_checkpoint, load_checkpoint, read_dimensions, stop_ids
from models.generation import generate
from models.lora import attach, quantize
from models.peft import load_adapters
from train import finetune, pretrain
from train.planning.estimate import compiled_peak
from train.run.metrics import read_metrics
from train.run.recipe import make_recipe
from train.run.report import explain_step
from train.run.step import init_state
from train.settings.config import AdapterConfig, FinetuneConfig, OptimizerConfig, PretrainConfig
from train.settings.data import DataConfig, ExampleConfig
from train.settings.options import MethodOptions
from train.text.examples import open_examples
from train.text.tokenizer_files import tokenizer_of

plt.rcParams.update({"figure.dpi": 80, "axes.grid": True, "grid.alpha": 0.3, "font.size": 9})
scratch = tempfile.TemporaryDirectory()
work = pathlib.Path(scratch.name)


def quiet():
    """A console that keeps what a program prints in `file`, and shows nothing in the notebook."""
    return Console(
        file=io.StringIO(), width=140, force_terminal=False, force_jupyter=False, color_system=None
    )


# %% [markdown]
# ## The checkpoint
#
# The tiny Llama has four layers of width 128. It reads the sources of Python's standard library for
# 300 steps. A run is a checkpoint too: its folder holds a Hugging Face `model` with its tokenizer.

# %%
CHECKPOINT = os.environ.get("ACTJAX_CHECKPOINT", "")
IS_TINY = not CHECKPOINT
if IS_TINY:
    config = PretrainConfig(
        model="llama_3m",
        method="exact",
        steps=300,
        batch_size=8,
        seq_len=64,
        optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=10),
        compute_dtype="float32",  # CPUs have no fast bfloat16.
        data=DataConfig("stdlib", vocab_size=512),
        out=work / "tiny",
        log_to=(),
        eval_every=1000,
        save_every=1000,
    )
    pretrain.run(config, quiet())
    CHECKPOINT = str(config.out)
    print(f"held-out loss {read_metrics(config.out / 'metrics.jsonl')[-1]['validation_loss']:.2f}")
checkpoint = find_checkpoint(CHECKPOINT, download=True)
dimensions, dtype = read_dimensions(checkpoint)
tokenizer = tokenizer_of(checkpoint, None)
print(
    f"{dimensions.num_layers} layers of width {dimensions.hidden_size}, weights in {dtype},"
    f" {tokenizer.vocab_size:,} tokens"
)

# %% [markdown]
# ## Examples
#
# A record is a JSON object in a line. Here it has a `prompt` and a `completion`: a comment that
# says what to do, and the line of Python that does it. Conversations have `messages` instead,
# and go through the chat template of the checkpoint; the
# [guide](../docs/guides/fine-tuning.md#data) lists all forms.

# %%
NAMES = ["name", "value", "path", "data", "line", "key", "item", "list"]
FORMS = {
    "append {a} to {b}": "{b}.append({a})",
    "the length of {a}": "len({a})",
    "sort {a} by {b}": "{a}.sort(key={b})",
    "the {a} of {b}": "{b}.{a}",
    "the larger of {a} and {b}": "max({a}, {b})",
    "is {a} in {b}": "{a} in {b}",
}
answer_of = {
    f"# {form.format(a=a, b=b)}\n": FORMS[form].format(a=a, b=b)
    for form in FORMS
    for a, b in itertools.permutations(NAMES, 2)
}
records = [{"prompt": x, "completion": answer} for x, answer in answer_of.items()]
data = work / "examples.jsonl"
data.write_text("\n".join(map(json.dumps, records)))
print(*data.read_text().splitlines()[:3], "...", sep="\n")

# %% [markdown]
# The loss counts completions and the token that ends a text, not prompts. An `Example` has its
# tokens and which of them count. Below each token is in brackets if it counts.

# %%
example_config = ExampleConfig(str(data), held_out=0.1)
examples = open_examples(example_config, tokenizer, seq_len=64)
print(f"{len(examples.train)} examples to train on, {len(examples.validation)} held out")
example = examples.train[0]
for token, counted in zip(example.tokens, example.counted, strict=True):
    text = tokenizer.decode([token]) or "<end>"
    print(f"[{text}]" if counted else text, end="")

# %% [markdown]
# ## Methods and memory
#
# All three methods hold the weights of the layers in four bits (NF4) and train adapters of rank 16.
# `qlora` stores activations exactly for the backward pass, `hyc_lora` in four or two bits. All
# other settings are the same.
#
# Before training, `explain_step` counts the bytes stored for the backward pass, and `compiled_peak`
# compiles the step for a GPU that need not be there: here a Tesla T4, which computes in float16.
# This needs the CUDA plugin of JAX; without it, the step is compiled for this machine. For methods
# that train all weights, `python -m train.plan --device t4` prints the same figures in a table.

# %%
base = FinetuneConfig(
    checkpoint=str(checkpoint),
    data=example_config,
    optimizer=OptimizerConfig(learning_rate=5e-3 if IS_TINY else 1e-3, warmup_steps=10,
                              weight_decay=0.0),
    adapter=AdapterConfig(lora_rank=16, lora_alpha=32.0, merge=True),
    steps=200 if IS_TINY else 60,
    batch_size=8,
    seq_len=64,
    compute_dtype="float32",
    log_to=(),
    eval_every=20,
    eval_batches=4,
    save_every=1000,
)  # fmt: skip


def with_method(name, method, *codec):
    options = MethodOptions(codec=codec)
    return dataclasses.replace(base, method=method, options=options, out=work / name)


RUNS = {
    "QLoRA": with_method("qlora", "qlora"),
    "HyC-LoRA, 4 bits": with_method("hyc4", "hyc_lora", "Quantized(4)"),
    "HyC-LoRA, 2 bits": with_method("hyc2", "hyc_lora", "Quantized(2)"),
}
has_plugin = importlib.util.find_spec("jax_cuda12_plugin") is not None
device, dtype = ("t4", "float16") if has_plugin else ("here", "float32")
recipes = {
    name: make_recipe(dataclasses.replace(config, compute_dtype=dtype), dimensions)
    for name, config in RUNS.items()
}
print(f"8 x 64 tokens, {dtype}")
for name, recipe in recipes.items():
    state = jax.eval_shape(functools.partial(init_state, recipe))
    stored = explain_step(recipe, state).stored_bytes
    print(f"{name:18s} stores {stored / 2**20:5.2f} MiB for the backward pass")
# On a T4, which has no Triton, actjax warns that its kernels run as plain JAX.
warnings.filterwarnings("ignore", "On cuda all kernels of actjax")
for name in ("QLoRA", "HyC-LoRA, 2 bits"):
    peak = compiled_peak(recipes[name], device) / 2**20
    print(f"{name:18s} peak of a step on {device}: {peak:.1f} MiB")

# %% [markdown]
# ## Training
#
# `finetune.run` is the program `python -m train.finetune`. It writes losses to `metrics.jsonl`, a
# checkpoint to resume from, and at its end an `adapter` in PEFT's format. With `merge`, it also
# writes a `model` that contains the adapter. Each run opens with what it stores and its memory on
# this machine; below is that of HyC-LoRA with 4 bits.

# %%
logs = {name: quiet() for name in RUNS}
for name, config in RUNS.items():
    finetune.run(config, logs[name])
print(logs["HyC-LoRA, 4 bits"].file.getvalue().split("step 0:")[0])

# %%
figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
for (name, config), color in zip(RUNS.items(), ("#0072B2", "#009E73", "#D55E00"), strict=True):
    lines = read_metrics(config.out / "metrics.jsonl")
    steps, losses = zip(*((x["step"], x["validation_loss"]) for x in lines
                          if "validation_loss" in x), strict=True)  # fmt: skip
    axis.plot(steps, losses, "o-", ms=3, color=color, label=name)
    print(f"{name:18s} held-out loss {losses[0]:.3f} before, {losses[-1]:.3f} after")
axis.set(xlabel="step", ylabel="held-out loss, nats per token", title="Held-out examples")
axis.legend()
plt.show()

# %% [markdown]
# ## Samples before and after
#
# Each model answers the held-out prompts. An adapter of `qlora` or `hyc_lora` belongs to the 4-bit
# weights that it was trained with, so the weights are read in four bits here too.

# %%
model = load_checkpoint(checkpoint, convert=quantize)
stop = sorted({tokenizer.eos_id, *stop_ids(checkpoint)})


def split(example):
    """Returns the ids of a prompt, and the text of its completion without its end."""
    start = int(np.argmax(example.counted))
    return example.tokens[:start].tolist(), tokenizer.decode(example.tokens[start:-1])


prompts, completions = zip(*map(split, examples.validation), strict=True)


def answers_of(model):
    ids = generate(model, prompts, max_new_tokens=24, stop=stop, compute_dtype="float32")
    return [tokenizer.decode(x) for x in ids]


answers = {"before": answers_of(model)}
for name, config in RUNS.items():
    adapters, lora = load_adapters(config.out / "adapter", dimensions)
    answers[name] = answers_of(attach(model, adapters, lora))
for i in range(3):
    print(tokenizer.decode(prompts[i]).strip())
    for name, texts in answers.items():
        print(f"    {name:18s}{texts[i]!r}")
for name, texts in answers.items():
    right = sum(text == completion for text, completion in zip(texts, completions, strict=True))
    print(f"{name:18s} {right} of {len(texts)} held-out answers are right")

# %% [markdown]
# Before, the tiny model writes dashes. After 200 steps it writes the right form, and in a fifth to
# a half of the answers the right names. With four bits HyC-LoRA stores a quarter of QLoRA's bytes,
# with two bits about a sixth, and its held-out loss is close to QLoRA's. Each is a single run of a
# very small model, so the order of the three is noise:
# [Quality](../docs/results/quality.md) has results of real ones.
#
# ## Use the result elsewhere
#
# The folder `adapter` is PEFT's, the folder `model` is a Hugging Face checkpoint with its
# tokenizer. `--export DIR` writes the result of any run, finished or not, to another folder.

# %%
out = RUNS["HyC-LoRA, 4 bits"].out
for folder in ("adapter", "model"):
    print(f"{folder}:", *sorted(path.name for path in (out / folder).iterdir()))
if all(map(importlib.util.find_spec, ("torch", "transformers", "peft"))):
    warnings.simplefilter("ignore")  # Of progress bars, and of names that will change.
    import torch
    import transformers
    from peft import PeftModel

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out / "model", dtype="float32")
    ids = torch.tensor([prompts[0]])
    with torch.no_grad():
        new = loaded.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24,
                              do_sample=False, eos_token_id=stop, pad_token_id=stop[0])  # fmt: skip
    text = tokenizer.decode(new[0, ids.shape[1] :].tolist())
    print("transformers, merged model:", repr(text.removesuffix(tokenizer.decode(stop[:1]))))
    full = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
    adapted = PeftModel.from_pretrained(full, out / "adapter")
    count = sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)
    print(f"peft: {count:,} weights in adapters")
else:
    print("torch, transformers and peft are not installed: the folders are not loaded here.")
scratch.cleanup()
