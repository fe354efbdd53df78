"""`config.json` of Hugging Face folders, converted to and from the dimensions of a decoder."""

from collections.abc import Mapping
from typing import Any

from models.config import LinearRopeScaling, ModelConfig, RopeScaling

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Supported kinds of model, and their classes in `transformers`."""

_SIZES = 2**31
"""Dimensions are below this."""
_NUMBERS = 2.0**127
"""Numbers are below this, and fit into float32."""
_FIXED = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "use_mrope": False,
}
"""Fields that change the computation, with the only supported value of each."""


def config_of(fields: Mapping[str, Any]) -> ModelConfig:
    """Returns the dimensions that a `config.json` describes.

    Files of all versions of `transformers` are read: RoPE is described by `rope_theta` and
    `rope_scaling`, or by `rope_parameters`.

    Args:
      fields: content of the file.

    Raises:
      ValueError: an unsupported kind of model, a missing field, or an unsupported value; the
        message names the field.
    """
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ValueError(
            f"unsupported `model_type` {kind!r}: supported are {', '.join(ARCHITECTURES)}."
        )
    for name, value in _FIXED.items():
        if fields.get(name, value) not in (value, None):
            hint = " Use the checkpoint that is not quantized." if "quant" in name else ""
            raise ValueError(f"`{name}` is {fields[name]!r}: only {value!r} is supported.{hint}")
    if fields.get("attention_bias") and kind != "qwen2":
        raise ValueError(
            "`attention_bias` is true, which also gives the output projection a bias: only the q, k"
            " and v biases of model_type qwen2 are supported."
        )
    theta, scaling = _rope(fields)
    heads = _integer(fields, "num_attention_heads")
    return ModelConfig(
        vocab_size=_integer(fields, "vocab_size"),
        hidden_size=_integer(fields, "hidden_size"),
        ffn_size=_integer(fields, "intermediate_size"),
        num_layers=_integer(fields, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_integer(fields, "num_key_value_heads", heads),
        head_size=_integer(fields, "head_dim", 128 if kind == "qwen3" else 0),
        max_seq_len=_integer(fields, "max_position_embeddings", 2048),
        norm_eps=_number(fields, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=bool(fields.get("tie_word_embeddings", False)),
        attention_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        sliding_window=_window(fields, kind),
        init_std=_number(fields, "initializer_range", 0.02),
    )


def fields_of(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Returns the content of a `config.json` that every version of `transformers` reads.

    Args:
      config: dimensions.
      dtype: dtype of the weights.

    Raises:
      ValueError: biases of q, k and v together with head norms; no supported kind has both.
    """
    if config.attention_bias and config.qk_norm:
        raise ValueError(
            "`attention_bias` and `qk_norm` are both set: no supported model type has both."
        )
    windowed = config.sliding_window is not None
    kind = "qwen3" if config.qk_norm else "qwen2" if config.attention_bias else "llama"
    fields: dict[str, Any] = {}
    if kind != "llama":
        # Layers from `max_window_layers` on have the window.
        fields = {"use_sliding_window": windowed, "sliding_window": config.sliding_window}
        fields["max_window_layers"] = 0 if windowed else config.num_layers
    elif windowed:
        kind, fields = "mistral", {"sliding_window": config.sliding_window}
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "max_position_embeddings": config.max_seq_len,
        "hidden_act": "silu",
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_fields(config),
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
        **fields,
    }


def _rope_fields(config: ModelConfig) -> dict[str, Any] | None:
    scaling = config.rope_scaling
    if scaling is None:
        return None
    if isinstance(scaling, LinearRopeScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_seq_len,
    }


def _integer(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Returns a field, or the default (if there is one) for a missing field and for null."""
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if name not in fields:
        raise ValueError(f"`{name}` is missing.")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _SIZES:
        raise ValueError(f"`{name}` must be an integer in [0, {_SIZES}), got {value!r}.")
    return value


def _rope(fields: Mapping[str, Any]) -> tuple[float, RopeScaling | LinearRopeScaling | None]:
    """Returns the base of the frequencies, and their scaling."""
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"the parameters of RoPE must be a JSON object, got {rope!r}.")
    theta = _number({**fields, **rope}, "rope_theta", 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearRopeScaling(_number(rope, "factor"))
    if kind != "llama3":
        raise ValueError(f"unsupported RoPE scaling {kind!r}: supported are llama3 and linear.")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [name for name in names if name not in rope]
    if missing:
        raise ValueError(f"the RoPE scaling 'llama3' lacks {', '.join(missing)}.")
    factor, low, high = (_number(rope, name) for name in names[:3])
    return theta, RopeScaling(factor, low, high, int(_number(rope, names[3])))


def _number(fields: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = fields.get(name) or default
    # Python's integers are of any size, and its JSON has infinities and NaN.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _NUMBERS:
        raise ValueError(f"`{name}` must be a number, got {value!r}.")
    return float(value)


def _window(fields: Mapping[str, Any], kind: str) -> int | None:
    """Returns the sliding window of all layers."""
    if fields.get("sliding_window") is None or kind == "llama":
        return None
    layers, size = fields["num_hidden_layers"], _integer(fields, "sliding_window")
    types = fields.get("layer_types")
    if not isinstance(types, list | None):
        raise ValueError(f"`layer_types` must be a list, got {types!r}.")
    if kind != "mistral" and not fields.get("use_sliding_window"):
        return None
    if types is not None:
        windowed = sum(layer_type == "sliding_attention" for layer_type in types)
    elif kind == "mistral":
        windowed = layers
    else:
        windowed = max(0, layers - _integer(fields, "max_window_layers", layers))
    if windowed not in (0, layers):
        raise ValueError(
            f"{windowed} of {layers} layers have a `sliding_window`: only all layers or none are"
            " supported."
        )
    return size if windowed else None
