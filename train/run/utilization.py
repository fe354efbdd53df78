"""Operations of a step, and the share of a GPU's peak that a speed reaches."""

import math

import jax

from train.run.gpus import gpu_of_kind
from train.settings.resolve import ResolvedConfig


def step_flops(config: ResolvedConfig) -> float:
    """Returns the operations of the model's products and attention in a step, two a multiply-add.

    Products of the backward pass count twice, with frozen weights once, and those of attention two
    and a half times. Operations that a method adds or spares are not counted: the share of the peak
    is that of useful work (model FLOPs utilization; Chowdhery et al., 2022).
    """
    model = config.model_config
    d, queries = model.hidden_size, model.num_heads * model.head_size
    layer = 2 * d * (queries + model.num_kv_heads * model.head_size) + 3 * d * model.ffn_size
    weights = layer * model.num_layers + model.vocab_size * d
    keys = min(config.seq_len / 2, model.sliding_window or math.inf)
    attention = 4 * keys * queries * model.num_layers
    passes = 3 if config.lora is None else 2
    return config.batch_size * config.seq_len * (passes * 2 * weights + 3.5 * attention)


def speed_text(tokens: float, flops: float, devices: int = 1) -> str:
    """Returns a speed such as "35,000 tokens/s, 270.1 TFLOP/s (27% of the peak)".

    Args:
      tokens: per second.
      flops: operations per second, over all devices.
      devices: how many there are, all like the first.
    """
    gpu = gpu_of_kind(jax.devices()[0].device_kind)
    share = "" if gpu is None else f" ({flops / gpu.flops / devices:.0%} of the peak)"
    return f"{tokens:,.0f} tokens/s, {flops / 1e12:.3g} TFLOP/s{share}"
