"""Settings with every default filled in: made once, before anything else reads them."""

import dataclasses
import pathlib
from typing import Any

from models import ModelConfig, preset
from models.checkpoints import find_checkpoint, read_dimensions
from models.hub import is_remote
from models.lora import LoRAConfig
from models.presets import PRESETS
from train.settings import methods
from train.settings.codecs import check_sites
from train.settings.config import (
    AdapterConfig,
    FinetuneConfig,
    OptimizerConfig,
    PreferenceConfig,
    PretrainConfig,
    RunConfig,
    run_folder,
)
from train.settings.messages import naming_flag
from train.settings.options import check_flags


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedConfig(RunConfig):
    """Settings of a run without "auto" and without a 0 that stands for a default.

    Everything after the start of a program reads this object and not what the user gave.

    Attributes:
      title: name of the model.
      model_config: its dimensions.
      folder: folder of the run.
      adapter: the settings of the adapters; None if all weights are trained.
      preference: settings of the loss of preference pairs; None for cross-entropy.
      pretrained: whether the weights of a checkpoint are trained: they are evaluated first.
      packed: whether several examples share a sequence without seeing each other.
      positions: longest sequence of the model as published, or as its checkpoint says. The model
        that is trained takes sequences of `seq_len` tokens.
    """

    title: str
    model_config: ModelConfig
    folder: pathlib.Path
    adapter: AdapterConfig | None = None
    preference: PreferenceConfig | None = None
    pretrained: bool = False
    packed: bool = False
    positions: int

    @property
    def info(self) -> methods.Method:
        """The method."""
        return methods.METHODS[self.method]

    @property
    def lora(self) -> LoRAConfig | None:
        """The adapters; None if all weights are trained."""
        return None if self.adapter is None else self.adapter.lora

    @property
    def warnings(self) -> list[str]:
        """Facts that the user should know before the first step."""
        warnings = []
        if self.trains_bfloat16 and self.weight_rounding == "nearest":
            warnings.append(
                "bfloat16 weights are rounded to nearest after each step: updates below 1/512 of a"
                " weight are lost. Use `--weight-rounding stochastic`, or `--weight-dtype float32`"
                " if it fits."
            )
        asked, taken = self.optimizer.warmup_steps, self.steps // 2
        if asked > taken > 0:
            warnings.append(
                f"warm-up takes {taken} steps, half of the run, in place of the {asked} of"
                " `--warmup-steps`."
            )
        if self.seq_len > self.positions:
            warnings.append(
                f"`--seq-len` {self.seq_len} is above the {self.positions} positions of"
                f" {self.title}. "
                + (
                    "The checkpoint has never seen the others: its loss there is high until it has"
                    " learned them."
                    if self.pretrained
                    else f"The model that is trained here has {self.seq_len}."
                )
            )
        return warnings

    @property
    def trains_bfloat16(self) -> bool:
        """Whether the weights that are trained are in bfloat16."""
        return self.weight_dtype == "bfloat16" and self.lora is None


_VOCABULARY_MULTIPLE = 128
"""Matrix units work on multiples of this, and shards divide it."""


def dimensions(
    config: PretrainConfig | FinetuneConfig, tokenizer_size: int | None = None
) -> ModelConfig:
    """Returns the dimensions of the model to train.

    Args:
      config: what the user gave.
      tokenizer_size: vocabulary size of the tokenizer. None without a tokenizer: the vocabulary is
        that of the preset, unless `--model-vocab-size` is given.

    Raises:
      ValueError: an unknown model, one with fewer tokens than the tokenizer, or `--download` for a
        preset.
    """
    if config.checkpoint or isinstance(config, FinetuneConfig):
        with naming_flag("--checkpoint"):
            return read_dimensions(find_checkpoint(config.checkpoint, weights=False))[0]
    asked, path = config.model_vocab_size, pathlib.Path(config.model)
    known = config.model in PRESETS or not (path.exists() or is_remote(config.model))
    with naming_flag("--model"):
        if known:
            model = preset(config.model)
        else:
            folder = find_checkpoint(config.model, config.download, weights=False)
            model = read_dimensions(folder)[0]
    if known and config.download:
        raise ValueError(
            f"`--download` has no effect with `--model {config.model}`, whose dimensions are known:"
            " drop it."
        )
    if tokenizer_size is None:
        return dataclasses.replace(model, vocab_size=asked or model.vocab_size)
    if 0 < asked < tokenizer_size:
        raise ValueError(
            f"`--model-vocab-size {asked}` is below the {tokenizer_size} tokens of the tokenizer:"
            f" pass at least {tokenizer_size}, or 0 to follow the tokenizer."
        )
    follows = -(-tokenizer_size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    return dataclasses.replace(model, vocab_size=asked or follows)


def resolve(
    config: PretrainConfig | FinetuneConfig, model: ModelConfig, checkpoint_dtype: str = "float32"
) -> ResolvedConfig:
    """Returns the settings of a run with every default filled in.

    Args:
      config: what the user gave.
      model: dimensions of the model.
      checkpoint_dtype: dtype of the pretrained weights, if there are any.

    Raises:
      ValueError: an unknown method, flags that it does not use, or settings that exclude each
        other or are out of range.
    """
    method = methods.method(config.method)
    # A plan has settings of adapters too, whichever program its step belongs to.
    adapter: AdapterConfig | None = getattr(config, "adapter", None)
    if method.adapters and adapter is None:
        raise ValueError(
            f"`--method {config.method}` trains adapters of a checkpoint: use train.finetune."
        )
    check_flags(config.method, config, config.options, *([] if adapter is None else [adapter]))
    check_sites(config.options.codec, config.method, method.sites(config.options))
    projects = config.optimizer.projects
    options = method.resolve(config.options, model, projects=projects)
    if config.options.adapt_every != type(options).adapt_every and not options.average_bits:
        raise ValueError(
            f"`adapt_every: {options.adapt_every}` has no effect without `--average-bits`: give"
            " both, or neither."
        )
    subspace = methods.Subspace(side="smaller") if projects else method.subspace
    if subspace is not None and options.rank > (largest := subspace.largest_rank(model)):
        name = config.method if method.subspace else f"--optimizer {config.optimizer.optimizer}"
        raise ValueError(
            f"`--rank` {options.rank} is above {largest}, the smallest dimension of a weight of"
            f" {config.title} that {name} projects: lower it."
        )
    with naming_flag(" ".join(["--codec", *options.codec])):
        method.storage_of(options, {})  # Raises for options that do not fit each other.
    optimizer = _optimizer(config, method, model)
    weight_dtype, weight_rounding = _weights(config, method, checkpoint_dtype)
    shared = {field.name: getattr(config, field.name) for field in dataclasses.fields(RunConfig)}
    resolved: dict[str, Any] = {
        "options": options,
        "optimizer": optimizer,
        "weight_dtype": weight_dtype,
        "weight_rounding": weight_rounding,
        "in_backward": _in_backward(config, method),
        "title": config.title,
        "model_config": model,
        "positions": model.max_seq_len,
        "folder": run_folder(config),
        "adapter": adapter if method.adapters else None,
        "preference": _preference(config),
        "pretrained": bool(config.checkpoint),
        "packed": method.adapters or isinstance(config, FinetuneConfig),
    }
    return ResolvedConfig(**{**shared, **resolved})


def _optimizer(
    config: PretrainConfig | FinetuneConfig, method: methods.Method, model: ModelConfig
) -> OptimizerConfig:
    """Returns the settings of the optimizer with their defaults filled in.

    Raises:
      ValueError: an optimizer that the method excludes, or a rank above the width of the model.
    """
    optimizer = config.optimizer
    if optimizer.projects:
        if method.subspace is not None or method.adapters:
            why = "trains adapters" if method.adapters else "projects gradients too"
            raise ValueError(
                f"`--optimizer {optimizer.optimizer}` projects the gradients of all weights of the"
                f" layers, and `--method {config.method}` {why}: choose another method, such as"
                " lean, or `--optimizer adamw`."
            )
        if config.method == "low_rank":
            raise ValueError(
                f"`--optimizer {optimizer.optimizer}` reads whole gradients, and"
                " `--method low_rank` makes them two factors: choose another method, such as lean."
            )
    if method.subspace is not None and optimizer.optimizer in ("muon", "adafactor"):
        raise ValueError(
            f"`--optimizer {optimizer.optimizer}` reads whole weights, and"
            f" `--method {config.method}` shows it gradients in a subspace: choose adamw, lion or"
            " sgd, or another method."
        )
    is_published = config.method == "galore" and optimizer.optimizer == "adamw"
    if is_published and optimizer.beta2 == OptimizerConfig.beta2:
        optimizer = dataclasses.replace(optimizer, beta2=methods.GALORE_BETA2)
    b1, b2 = optimizer.betas
    moments = optimizer.moment_dtype
    if moments == "auto":
        moments = "8bit" if method.lean and optimizer.optimizer != "adafactor" else "float32"
    return dataclasses.replace(optimizer, beta1=b1, beta2=b2, moment_dtype=moments)


def _preference(config: PretrainConfig | FinetuneConfig) -> PreferenceConfig | None:
    if isinstance(config, FinetuneConfig) and config.loss == "dpo":
        return config.preference
    return None


def _in_backward(config: RunConfig, method: methods.Method) -> bool:
    """Returns whether layers are updated in the backward pass.

    Raises:
      ValueError: they are, with a step that may be skipped.
    """
    is_skippable = config.compute_dtype == "float16"
    if is_skippable and config.in_backward:
        raise ValueError(
            "`--in-backward` updates layers before the whole gradient is known, and"
            " `--compute-dtype float16` skips steps whose gradient overflows: drop `--in-backward`,"
            " or pass `--compute-dtype bfloat16`."
        )
    default = method.lean and not is_skippable
    return default if config.in_backward is None else config.in_backward


def _weights(config: RunConfig, method: methods.Method, checkpoint_dtype: str) -> tuple[str, str]:
    """Returns dtype and rounding of the weights.

    Raises:
      ValueError: stochastic rounding of weights that are not in bfloat16, or are not trained.
    """
    dtype, rounding = config.weight_dtype, config.weight_rounding
    if dtype == "auto" and not method.adapters:
        # For every checkpoint: bfloat16 weights learn if they are rounded stochastically.
        dtype = "bfloat16" if method.lean else "float32"
    elif dtype == "auto":
        # bfloat16 has the range of float32, and float16 has not.
        dtype = "bfloat16" if checkpoint_dtype == "float16" else checkpoint_dtype
    if dtype == "bfloat16" and not method.adapters:
        return dtype, "stochastic" if rounding == "auto" else rounding
    if rounding == "stochastic":
        raise ValueError(
            "`--weight-rounding stochastic` has no effect on float32 weights: drop"
            " it, or pass `--weight-dtype bfloat16`."
        )
    return dtype, "nearest"
