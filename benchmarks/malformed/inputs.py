"""Valid inputs of all programs, with a model small enough that a run takes seconds."""

import functools
import io
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import sentencepiece
from tokenizers import Tokenizer

from models import Decoder, ModelConfig, huggingface
from models.lora import LoRAConfig, init_adapters
from models.peft import save_adapters
from train.text.tokenizer import train_bpe

MODEL = ModelConfig(
    vocab_size=384,
    hidden_size=16,
    ffn_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    max_seq_len=128,
    norm_eps=1e-5,
    tie_embeddings=True,
)
OTHER = ModelConfig(384, 32, 24, 1, 2, tie_embeddings=True, max_seq_len=128)
"""Dimensions of another model."""
LORA = LoRAConfig(rank=2)
TEXT = "One plus two is three. Seven less five is two.\n\nIs two and two four? It is so.\n\n"


def write(folder: pathlib.Path) -> None:
    """Writes a checkpoint, tokenizers, texts, records and an adapter."""
    huggingface.save(_drawn(MODEL), folder / "model")
    huggingface.save(_drawn(OTHER), folder / "other")
    for name in ("model", "other"):
        train_bpe([TEXT], 290).save(folder / name)
    _write_tokenizers(folder)
    (folder / "text.txt").write_text(TEXT * 400)
    (folder / "records.jsonl").write_text(
        "".join(
            json.dumps({"prompt": f"{i} and {j}?", "completion": f" {i + j}."}) + "\n"
            for i in range(5)
            for j in range(5)
        )
    )
    (folder / "sums.jsonl").write_text(
        "".join(
            json.dumps({"question": f"{i} and {i}?", "answer": f"It is\n#### {2 * i}"}) + "\n"
            for i in range(4)
        )
    )
    adapters = jax.jit(functools.partial(init_adapters, MODEL, LORA))(jax.random.key(0))
    save_adapters(adapters, LORA, folder / "adapter", base="model")


def _drawn(config: ModelConfig) -> Decoder:
    # Drawn in NumPy: JAX would compile a program for each shape.
    shapes = jax.eval_shape(functools.partial(Decoder, config), jax.random.key(0))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.1, x.shape), "float32"), shapes)


def _write_tokenizers(folder: pathlib.Path) -> None:
    """Writes the tokenizers that are no tokenizer.json."""
    inner = Tokenizer.from_file(str(folder / "model" / "tokenizer.json"))
    (folder / "pairs").mkdir()
    inner.model.save(str(folder / "pairs"))
    (folder / "pairs" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    pieces = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines() * 20),
        model_writer=pieces,
        model_type="bpe",
        vocab_size=300,
        byte_fallback=True,
        minloglevel=2,
    )
    (folder / "pieces.model").write_bytes(pieces.getvalue())
