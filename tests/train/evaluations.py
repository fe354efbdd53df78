"""A model with a text and questions, and evaluations of it."""

import dataclasses
import functools
import io
import json
import pathlib

import jax
import numpy as np
import tiny
from rich.console import Console

from actjax._core.paths import map_named
from models import Decoder, huggingface
from models.padding import pad, published_shape
from train.evaluate import run
from train.evaluation.config import EvaluateConfig, TextConfig, WritingConfig
from train.evaluation.questions import QuestionConfig
from train.text.trained_tokenizer import train_bpe

MODEL = dataclasses.replace(
    tiny.CONFIG, vocab_size=300, num_layers=2, max_seq_len=256, norm_eps=1e-5, tie_embeddings=True
)
TEXT = "One plus two is three. Seven less five is two.\n\nIs two and two four? It is. "
SUMS = [
    {"question": f"What is {i} + {j}?", "answer": f"It is {i + j}.\n#### {i + j}"}
    for i in range(1, 4)
    for j in range(1, 4)
]
CHOICES = [
    {"question": "Two and two?", "options": ["A)four", "B)five", "C)a sum"], "correct": "A"},
    {"question": "Two less one?", "options": ["A)two", "B)one of them"], "correct": "B"},
    {"question": "None?", "options": ["A)0", "B)naught", "C)it is two"], "correct": "B"},
]


def write_folder(folder: pathlib.Path) -> None:
    """Writes a checkpoint, its tokenizer, a text and questions."""
    # Drawn in NumPy and put on the device: JAX would compile a program per shape.
    shapes = jax.eval_shape(functools.partial(Decoder, MODEL), jax.random.key(0))
    rng = np.random.default_rng(0)

    def drawn(path: str, x: jax.ShapeDtypeStruct) -> jax.Array:
        array = rng.normal(0, 0.3, published_shape(path, x.shape, MODEL)).astype("float32")
        return jax.device_put(pad(path, array, MODEL))

    model = map_named(drawn, shapes)
    huggingface.save(model, folder / "model")
    train_bpe([TEXT], 290).save(folder / "model")
    (folder / "text.txt").write_text(TEXT * 20)
    for name, records in (("sums", SUMS), ("choices", CHOICES)):
        lines = [json.dumps(record) for record in records]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


PARTS = {"text": TextConfig, "asked": QuestionConfig, "writing": WritingConfig}


def config(folder, **changes) -> EvaluateConfig:
    """Returns settings by name, from all parts."""
    values = {"checkpoint": folder / "model", "compute_dtype": "float32", **changes}
    if {"task", "data"} & values.keys():
        values.setdefault("batch_size", 4)
    if "generate" in values or ("task" in values and values.get("choose") != "likelihood"):
        values.setdefault("max_new_tokens", 8)
    parts = {}
    for part, kind in PARTS.items():
        names = [field.name for field in dataclasses.fields(kind) if field.name in values]
        parts[part] = kind(**{name: values.pop(name) for name in names})
    return EvaluateConfig(**values, **parts)


def asked(folder, name: str, **changes) -> EvaluateConfig:
    """Returns settings with a task."""
    task = "gsm8k" if name == "sums" else "choice"
    return config(folder, **{"task": task, "questions": folder / f"{name}.jsonl", **changes})


def quietly(config: EvaluateConfig) -> dict:
    """Returns the report of an evaluation."""
    return run(config, Console(file=io.StringIO(), width=140))


def lines(path: pathlib.Path) -> list[dict]:
    """Returns the lines of `--out`."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@functools.cache
def log_softmax():
    """Returns the compiled log-probabilities of a model."""
    return jax.jit(lambda m, x: jax.nn.log_softmax(m(x, compute_dtype="float32")))
