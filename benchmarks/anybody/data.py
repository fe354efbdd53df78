"""Data that every machine has: tokens of Python's standard library, and drawn images."""

import functools
import pathlib
import re
import sysconfig
from collections import Counter

import numpy as np

VOCAB = 1024


@functools.cache
def _tokens(limit: int = 400_000) -> np.ndarray:
    """Returns words and signs of source files, numbered by how often they occur."""
    words: list[str] = []
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        words += re.findall(r"\w+|[^\w\s]|\n| +", path.read_text(errors="ignore"))
        if len(words) >= limit:
            break
    ranks = {w: i for i, (w, _) in enumerate(Counter(words).most_common(VOCAB - 1))}
    return np.array([ranks.get(w, VOCAB - 1) for w in words[:limit]], np.int32)


def text(batches: int, rows: int, length: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Returns batches of `inputs` and `targets`: consecutive tokens of text."""
    tokens, rng, result = _tokens(), np.random.default_rng(seed), []
    for _ in range(batches):
        starts = rng.integers(0, len(tokens) - length - 1, rows)
        window = np.stack([tokens[s : s + length + 1] for s in starts])
        result.append({"inputs": window[:, :-1], "targets": window[:, 1:]})
    return result


def images(
    batches: int, rows: int, size: int, classes: int = 10, seed: int = 0
) -> list[dict[str, np.ndarray]]:
    """Returns batches of `image`, [rows, size, size, 3], and `label`: waves with bright discs."""
    rng, result = np.random.default_rng(seed), []
    y, x = np.mgrid[:size, :size] / size
    for _ in range(batches):
        label = rng.integers(0, classes, rows).astype(np.int32)
        angle = (np.pi * label / classes)[:, None, None]
        phase = rng.uniform(0, 2 * np.pi, (rows, 1, 1))
        wave = np.sin(12 * (x * np.cos(angle) + y * np.sin(angle)) + phase)
        cx, cy, r = rng.uniform(0.1, 0.9, (3, rows, 1, 1))
        disc = ((x - cx) ** 2 + (y - cy) ** 2 < (r / 4) ** 2).astype(float)
        color = rng.uniform(0, 1, (rows, 1, 1, 3))
        image = 0.5 * wave[..., None] * color + disc[..., None] * (1 - color)
        image += 0.1 * rng.standard_normal(image.shape)
        result.append({"image": image.astype(np.float32), "label": label})
    return result
