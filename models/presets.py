"""Dimensions of published models, by name.

`llama_9m` to `llama_7b` are the models of GaLore (Zhao et al., 2024, Table 5 and the configurations
released with it). `llama_3m` is `llama_9m` with the 8,192 tokens of the tokenizer that a run trains
by default; it suits a CPU. `llama3_1b`, `llama3_3b`, `llama3_8b` and `llama3_70b` are Llama 3.2 1B
and 3B, and Llama 3 8B and 70B. `qwen2_5_0_5b`, `qwen3_0_6b`, `qwen3_4b` and `qwen3_8b` are Qwen 2.5
and Qwen 3 models.
"""

import difflib

from models.config import ModelConfig, RopeScaling


def _galore(
    hidden: int, ffn: int, layers: int, heads: int, vocab: int = 32_000, max_seq_len: int = 1024
) -> ModelConfig:
    return ModelConfig(vocab, hidden, ffn, layers, heads, max_seq_len=max_seq_len)


def _qwen3(hidden: int, ffn: int, layers: int, heads: int, tied: bool = True) -> ModelConfig:
    return ModelConfig(
        vocab_size=151_936,
        hidden_size=hidden,
        ffn_size=ffn,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_size=128,
        max_seq_len=40_960,
        rope_theta=1_000_000.0,
        tie_embeddings=tied,
        qk_norm=True,
    )


_LLAMA3_2 = RopeScaling(
    factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192
)

PRESETS: dict[str, ModelConfig] = {
    "llama_3m": _galore(128, 352, 4, 4, vocab=8192),
    "llama_9m": _galore(128, 352, 4, 4),
    "llama_20m": _galore(256, 688, 4, 4),
    "llama_35m": _galore(384, 1024, 6, 8),
    "llama_40m": _galore(416, 1024, 8, 8),
    "llama_60m": _galore(512, 1376, 8, 8),
    "llama_71m": _galore(512, 1368, 12, 8),
    "llama_100m": _galore(640, 1708, 12, 10, vocab=32_100),
    "llama_130m": _galore(768, 2048, 12, 12),
    "llama_250m": _galore(768, 2560, 24, 16),
    "llama_350m": _galore(1024, 2736, 24, 16),
    "llama_1b": _galore(2048, 5461, 24, 32),
    "llama_3b": _galore(2560, 6848, 32, 32),
    "llama_7b": _galore(4096, 11008, 32, 32, max_seq_len=2048),
    "llama3_1b": ModelConfig(
        vocab_size=128_256,
        hidden_size=2048,
        ffn_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_size=64,
        max_seq_len=131_072,
        norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_scaling=_LLAMA3_2,
        tie_embeddings=True,
    ),
    "llama3_3b": ModelConfig(
        vocab_size=128_256,
        hidden_size=3072,
        ffn_size=8192,
        num_layers=28,
        num_heads=24,
        num_kv_heads=8,
        head_size=128,
        max_seq_len=131_072,
        norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_scaling=_LLAMA3_2,
        tie_embeddings=True,
    ),
    "llama3_8b": ModelConfig(
        vocab_size=128_256,
        hidden_size=4096,
        ffn_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        max_seq_len=8192,
        norm_eps=1e-5,
        rope_theta=500_000.0,
    ),
    "llama3_70b": ModelConfig(
        vocab_size=128_256,
        hidden_size=8192,
        ffn_size=28_672,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        max_seq_len=8192,
        norm_eps=1e-5,
        rope_theta=500_000.0,
    ),
    "qwen2_5_0_5b": ModelConfig(
        vocab_size=151_936,
        hidden_size=896,
        ffn_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        max_seq_len=32_768,
        rope_theta=1_000_000.0,
        tie_embeddings=True,
        attention_bias=True,
    ),
    "qwen3_0_6b": _qwen3(1024, 3072, 28, 16),
    "qwen3_4b": _qwen3(2560, 9728, 36, 32),
    "qwen3_8b": _qwen3(4096, 12_288, 36, 32, tied=False),
}


def preset(name: str) -> ModelConfig:
    """Returns the dimensions of a published model.

    Raises:
      ValueError: an unknown name; the message suggests similar names.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.4)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"unknown `--model` {name!r}.{hint} There are: {', '.join(PRESETS)}.")
    return PRESETS[name]
