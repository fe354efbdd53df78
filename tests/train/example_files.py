"""Files of examples, and how they are read back."""

import itertools
import json
import pathlib

from bytes_tokenizer import Bytes

from train.settings.data import ExampleConfig
from train.text.examples import Example, Examples, open_examples

PAIR = {"prompt": "Why?", "completion": " Because."}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Because."},
        {"role": "user", "content": "Really?"},
        {"role": "assistant", "content": "Yes."},
    ]
}
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def write(path: pathlib.Path, data: bytes | str) -> pathlib.Path:
    """Writes a file, and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def write_rows(path: pathlib.Path, rows: list) -> pathlib.Path:
    """Writes a .jsonl file, and returns its path."""
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def open_path(path, tokenizer=None, seq_len=1000, folder=None, **options) -> Examples:
    """Opens a file. By default all of it is for training and all of it for validation."""
    if "held_out" not in options:
        options = {"validation": str(path)} | options
    config = ExampleConfig(data=str(path), **options)
    return open_examples(config, tokenizer or Bytes(), seq_len, folder)


def learned(example: Example, tokenizer=None) -> list[tuple[str, bool]]:
    """Returns runs of uncounted and counted text, without special tokens."""
    tokenizer, runs, end = tokenizer or Bytes(), [], 0
    for counts, group in itertools.groupby(example.counted.tolist()):
        before = tokenizer.decode(example.tokens[:end])
        end += len(list(group))
        runs.append((tokenizer.decode(example.tokens[:end])[len(before) :], counts))
    return runs


def numbered(count: int) -> list[dict]:
    """Returns records with numbers in them."""
    return [{"prompt": f"number {i}?", "completion": f" {i}."} for i in range(count)]


def texts_of(examples, tokenizer=None) -> list[str]:
    """Returns the texts of examples."""
    return [(tokenizer or Bytes()).decode(example.tokens) for example in examples]
