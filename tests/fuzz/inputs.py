"""Valid inputs of all programs, and the commands that run on them in seconds."""

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
from train.text.trained_tokenizer import train_bpe

Flags = dict[str, str | None]
"""Values by flag; None for a switch."""
_SMALL: Flags = {"--steps": "2", "--batch-size": "2", "--config": "small.yaml", "--out": "new"}
PRETRAIN: Flags = {"--model": "model", "--tokenizer": "model", "--data": "text.txt",
                   "--data-dir": "cache", "--method": "exact", "--seq-len": "16",
                   **_SMALL}  # fmt: skip
FINETUNE: Flags = {"--checkpoint": "model", "--data": "records.jsonl", "--method": "lora",
                   "--lora-rank": "2", "--seq-len": "32", **_SMALL}  # fmt: skip
CHAT: Flags = FINETUNE | {"--data": "chats.jsonl"}
PERPLEXITY: Flags = {"--checkpoint": "model", "--data": "text.txt", "--whole": None,
                     "--seq-len": "16", "--batch-size": "2", "--eval-batches": "1"}  # fmt: skip
ANSWERS: Flags = {"--checkpoint": "model", "--task": "gsm8k", "--questions": "sums.jsonl",
                  "--max-new-tokens": "2", "--batch-size": "2"}  # fmt: skip
WRITING: Flags = {"--checkpoint": "model", "--generate": "one", "--max-new-tokens": "2"}
PLAN: Flags = {"--checkpoint": "model", "--method": "exact", "--batch-size": "2",
               "--seq-len": "16"}  # fmt: skip
COMMANDS: dict[str, tuple[Flags, ...]] = {
    "pretrain": (PRETRAIN,),
    "finetune": (FINETUNE, CHAT),
    "evaluate": (PERPLEXITY, ANSWERS, WRITING),
    "plan": (PLAN,),
}
"""Commands that succeed on these inputs, by program."""
_MODEL = ModelConfig(384, 16, 24, 2, 2, num_kv_heads=1, tie_embeddings=True, max_seq_len=128)
_OTHER = ModelConfig(384, 32, 24, 1, 2, tie_embeddings=True, max_seq_len=128)
_LORA = LoRAConfig(rank=2)
_TEMPLATE = """\
{% for message in messages %}{{ message.role + ': ' + message.content + eos_token }}{% endfor %}
{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
_TEXT = "One plus two is three. Seven less five is two.\n\nIs two and two four? It is so.\n\n"


def words(flags: Flags) -> tuple[str, ...]:
    """Returns the command line of flags."""
    return tuple(w for flag, value in flags.items() for w in (flag, value) if w is not None)


def write(folder: pathlib.Path) -> None:
    """Writes two checkpoints, tokenizers of three kinds, texts, records and an adapter."""
    for name, config in (("model", _MODEL), ("other", _OTHER)):
        huggingface.save(_drawn(config), folder / name)
        train_bpe([_TEXT], 290).save(folder / name)
    (folder / "text.txt").write_text(_TEXT * 400)
    (folder / "small.yaml").write_text("eval_batches: 1\n")
    pairs = [{"prompt": f"{i} and {j}?", "completion": f" {i + j}."}
             for i in range(5) for j in range(5)]  # fmt: skip
    chats = [{"messages": [{"role": "user", "content": f"{i} and {i}?"},
                           {"role": "assistant", "content": f"{2 * i}."}]}
             for i in range(20)]  # fmt: skip
    (folder / "model" / "chat_template.jinja").write_text(_TEMPLATE)
    sums = [{"question": f"{i} and {i}?", "answer": f"It is\n#### {2 * i}"} for i in range(4)]
    texts = [{"text": f"{i} and more. " * 9} for i in range(20)]
    for name, records in (("records", pairs), ("sums", sums), ("texts", texts), ("chats", chats)):
        lines = (json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    adapters = jax.jit(functools.partial(init_adapters, _MODEL, _LORA))(jax.random.key(0))
    save_adapters(adapters, _LORA, folder / "adapter", _MODEL, base="model")
    _write_tokenizers(folder)


def _drawn(config: ModelConfig) -> Decoder:
    # Drawn in NumPy: JAX would compile a program for each shape.
    shapes = jax.eval_shape(functools.partial(Decoder, config), jax.random.key(0))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.1, x.shape), "float32"), shapes)


def _write_tokenizers(folder: pathlib.Path) -> None:
    """Writes tokenizers that are not a tokenizer.json."""
    (folder / "pairs").mkdir()
    Tokenizer.from_file(str(folder / "model" / "tokenizer.json")).model.save(str(folder / "pairs"))
    (folder / "pairs" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    pieces = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_TEXT.splitlines() * 20), model_writer=pieces, model_type="bpe",
        vocab_size=300, byte_fallback=True, minloglevel=2,
    )  # fmt: skip
    (folder / "pieces.model").write_bytes(pieces.getvalue())
