"""Tables of rotary position embeddings (RoPE; Su et al., 2021), with stretched frequencies."""

import math

import jax
import jax.numpy as jnp

from models.config import LinearRopeScaling, ModelConfig, RopeScaling

Tables = tuple[jax.Array, jax.Array]
"""Cosines and sines of the rotary angles, [S, D / 2] each, in float32."""


def rope_tables(config: ModelConfig, length: int) -> Tables:
    """Returns the tables of positions 0 to `length - 1`, [length, head_size / 2] each."""
    exponents = jnp.arange(0, config.head_size, 2, dtype=jnp.float32) / config.head_size
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling is not None:
        frequencies = _scale_frequencies(frequencies, config.rope_scaling)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def _scale_frequencies(
    frequencies: jax.Array, scaling: RopeScaling | LinearRopeScaling
) -> jax.Array:
    if isinstance(scaling, LinearRopeScaling):
        return frequencies / scaling.factor
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    unscaled = jnp.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (unscaled + (1 - unscaled) / scaling.factor)
