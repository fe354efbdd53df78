"""`config.json` of Hugging Face folders, converted to and from the dimensions of a decoder."""

import reprlib
from collections.abc import Mapping
from typing import Any

from models.config import LinearRopeScaling, ModelConfig, RopeScaling
from models.json_files import check_fields

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
_QWEN = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN,
}
"""Values that `transformers` takes for missing fields. All kinds leave embeddings untied."""
_READ = {
    "attention_bias", "head_dim", "hidden_size", "initializer_range", "intermediate_size",
    "layer_types", "max_position_embeddings", "max_window_layers", "model_type",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "quantization_config",
    "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window",
    "tie_word_embeddings", "use_sliding_window", "vocab_size",
}  # fmt: skip
_HARMLESS = {
    # Where a file comes from, and how it is loaded.
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path",
    "architectures", "attn_implementation", "dtype", "finetuning_task", "is_llama_config",
    "torch_dtype", "torchscript", "transformers.js_config", "transformers_version", "unsloth_fixed",
    "unsloth_version", "use_bfloat16",
    # Tokens and labels.
    "bos_token_id", "decoder_start_token_id", "eos_token_id", "id2label", "label2id",
    "max_sequence_length", "model_max_length", "num_labels", "pad_token_id", "prefix",
    "problem_type", "sep_token_id", "task_specific_params", "tokenizer_class",
    # How `transformers` runs the same computation.
    "chunk_size_feed_forward", "gradient_checkpointing", "output_attentions",
    "output_hidden_states", "pretraining_tp", "return_dict", "use_cache",
    # Dropout, which only training of `transformers` applies.
    "attention_dropout",
    # Generation.
    "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "forced_bos_token_id", "forced_eos_token_id", "length_penalty",
    "max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values",
    "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature", "top_k",
    "top_p", "typical_p",
}  # fmt: skip
"""Fields that do not change the numbers of the model."""
_FIXED = {"hidden_act": "silu", "partial_rotary_factor": 1.0}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "float"}
_FP8_HARMLESS = {
    "dequantize", "expert_dtype", "ignored_layers", "modules_to_convert", "modules_to_not_convert",
}  # fmt: skip
_ROPE = {
    "factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings",
    "rope_theta", "rope_type", "type",
}  # fmt: skip


def config_of(fields: Mapping[str, Any]) -> ModelConfig:
    """Returns the dimensions that a `config.json` describes.

    Files of all versions of `transformers` are read: RoPE is described by `rope_theta` and
    `rope_scaling`, or by `rope_parameters`. Dropout of attention is ignored.

    Args:
      fields: content of the file.

    Raises:
      ValueError: an unsupported kind of model, a missing field, an unsupported value, or a field
        that is not known and not empty; the message names the field.
    """
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ValueError(
            f"unsupported `model_type` {kind!r}: supported are {', '.join(ARCHITECTURES)}."
        )
    check_fields(fields, _READ | _HARMLESS, _FIXED)
    fp8_block_of(fields)
    fields = _DEFAULTS[kind] | dict(fields)
    if fields.get("attention_bias") and kind != "qwen2":
        raise ValueError(
            "`attention_bias` is true, which also gives the output projection a bias: only the q, k"
            " and v biases of model_type qwen2 are supported."
        )
    vocab_size = _integer(fields, "vocab_size")
    for name in ("bos_token_id", "pad_token_id"):  # Some name ids that the model does not have.
        ids_of(fields, name)
    if any(index >= vocab_size for index in ids_of(fields, "eos_token_id")):
        raise ValueError(
            f"`eos_token_id` is {fields['eos_token_id']!r}, but `vocab_size` is {vocab_size}: no"
            " text would end."
        )
    theta, scaling = _rope(fields)
    heads = _integer(fields, "num_attention_heads")
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=_integer(fields, "hidden_size"),
        ffn_size=_integer(fields, "intermediate_size"),
        num_layers=_integer(fields, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_integer(fields, "num_key_value_heads", heads, least=1),
        head_size=_integer(fields, "head_dim", 128 if kind == "qwen3" else 0, least=1),
        max_seq_len=_integer(fields, "max_position_embeddings", 2048),
        norm_eps=_number(fields, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=_flag(fields, "tie_word_embeddings"),
        attention_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        sliding_window=_window(fields, kind),
        init_std=_number(fields, "initializer_range", 0.02),
    )


def ids_of(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Returns the ids that a field names; none for null.

    Args:
      fields: content of `config.json` or `generation_config.json`.
      name: the field: an id, or a list of ids.

    Raises:
      ValueError: something else; the message names the field.
    """
    value = fields.get(name)
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list) else (value,)
    # Some files say so that there is none.
    if not all(isinstance(x, int) and not isinstance(x, bool) and -1 <= x < _SIZES for x in ids):
        raise ValueError(f"`{name}` must be an id or a list of ids, got {reprlib.repr(value)}.")
    return tuple(x for x in ids if x >= 0)


def fp8_block_of(fields: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns the rows and columns of a block of FP8 weights that have one scale, or None.

    The format is that of DeepSeek-V3 (2024, Section 3.3) and of the FP8 checkpoints of Qwen 3: a
    weight in `float8_e4m3fn`, and a `weight_scale_inv` by which its blocks are multiplied.

    Args:
      fields: content of `config.json`.

    Raises:
      ValueError: any other `quantization_config`.
    """
    quantization = fields.get("quantization_config")
    if not quantization:
        return None
    try:
        if not isinstance(quantization, dict):
            raise ValueError("it must be an object.")
        if "quant_method" not in quantization:
            raise ValueError("`quant_method` is missing.")
        check_fields(quantization, {"weight_block_size", *_FP8_HARMLESS}, _FP8)
        match quantization.get("weight_block_size"):
            case [int(rows), int(columns)] if rows > 0 and columns > 0:
                return rows, columns
        raise ValueError("`weight_block_size` must be two sizes.")
    except ValueError as error:
        raise ValueError(
            f"`quantization_config` is not supported: {error} Use the checkpoint that is not"
            " quantized, or one in FP8 with a scale for each block."
        ) from error


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


def _integer(
    fields: Mapping[str, Any], name: str, default: int | None = None, *, least: int = 0
) -> int:
    """Returns a field, or the default (if there is one) for a missing field and for null."""
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if name not in fields:
        raise ValueError(f"`{name}` is missing.")
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _SIZES:
        raise ValueError(f"`{name}` must be an integer in [{least}, {_SIZES}), got {value!r}.")
    return value


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if not isinstance(value, bool | None):
        raise ValueError(f"`{name}` must be true or false, got {value!r}.")
    return bool(value)


def _rope(fields: Mapping[str, Any]) -> tuple[float, RopeScaling | LinearRopeScaling | None]:
    """Returns the base of the frequencies, and their scaling."""
    # `transformers` reads the first that is not empty, in this order.
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"the parameters of RoPE must be a JSON object, got {rope!r}.")
    theta = _number({**fields, **rope}, "rope_theta", 10_000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(f"unsupported RoPE scaling {kind!r}: supported are llama3 and linear.")
    try:
        check_fields(rope, _ROPE, _FIXED)
    except ValueError as error:
        raise ValueError(f"the parameters of RoPE: {error}") from error
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearRopeScaling(_positive(rope, "factor"))
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [name for name in names if name not in rope]
    if missing:
        raise ValueError(f"the RoPE scaling 'llama3' lacks {', '.join(missing)}.")
    factor, low, high, length = (_positive(rope, name) for name in names)
    if not low < high:
        raise ValueError(f"`high_freq_factor` {high} must be above `low_freq_factor` {low}.")
    return theta, RopeScaling(factor, low, high, int(length))


def _number(fields: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = fields.get(name)
    value = default if value is None else value
    # Python's integers are of any size, and its JSON has infinities and NaN.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _NUMBERS:
        raise ValueError(f"`{name}` must be a number, got {value!r}.")
    return float(value)


def _positive(fields: Mapping[str, Any], name: str) -> float:
    value = _number(fields, name)
    if not value > 0:
        raise ValueError(f"`{name}` of the RoPE scaling must be above 0, got {value}.")
    return value


def _window(fields: Mapping[str, Any], kind: str) -> int | None:
    """Returns the sliding window of all layers."""
    layers, types = fields["num_hidden_layers"], fields.get("layer_types")
    size = fields.get("sliding_window")
    if kind == "llama" and size:
        raise ValueError(f"`sliding_window` is {size!r}, but the model type llama has no window.")
    if size is None or (kind != "mistral" and not _flag(fields, "use_sliding_window")):
        size, windowed = None, 0
    elif kind == "mistral":
        windowed = layers
    else:
        windowed = max(0, layers - _integer(fields, "max_window_layers", layers))
    if types is not None:
        kinds = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != layers or set(map(str, types)) - {*kinds}:
            raise ValueError(
                f"`layer_types` must be a list of {layers}, each {' or '.join(kinds)}, got"
                f" {reprlib.repr(types)}."
            )
        if kind.startswith("qwen"):  # Their layers follow the list, those of other kinds do not.
            windowed = types.count(kinds[1])
        if types.count(kinds[1]) != windowed or (windowed and size is None):
            raise ValueError(
                f"`layer_types` gives {types.count(kinds[1])} of {layers} layers a window, but the"
                f" other fields give {windowed if size else 0} of them one."
            )
    if windowed not in (0, layers):
        raise ValueError(
            f"{windowed} of {layers} layers have a `sliding_window`: only all layers or none are"
            " supported."
        )
    return _integer(fields, "sliding_window") if windowed else None
