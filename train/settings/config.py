"""Settings of the training programs, as the command line takes them."""

import dataclasses
import math
import pathlib
from typing import Annotated, ClassVar, Literal, get_args

import tyro

from models.lora import TARGETS, LoRAConfig
from models.presets import PRESETS
from train.settings.cli import Headings
from train.settings.data import DataConfig, ExampleConfig
from train.settings.messages import check_known
from train.settings.methods import METHODS
from train.settings.options import (
    ADAPTERS,
    FULL_WEIGHTS,
    MethodOptions,
    check_at_least,
    check_range,
    flag_name,
    given_fields,
    shown_flag,
)
from train.settings.sizes import AUTO, parse_budget

Dtype = Literal["float32", "bfloat16", "float16"]
WeightDtype = Literal["auto", "float32", "bfloat16"]
MomentDtype = Literal[
    "auto", "float32", "bfloat16", "8bit", "4bit",
    "float32-factored", "bfloat16-factored", "8bit-factored", "4bit-factored",
]  # fmt: skip
Optimizer = Literal["adamw", "adafactor", "lion", "sgd", "muon", "fira"]
"""adafactor: a factored second moment, updates relative to the size of a weight. lion: one moment,
whose sign is the update; learning rates of a third to a tenth. sgd: momentum. muon: one moment,
orthogonalized, for the matrices of layers; AdamW for the others. fira: AdamW in a subspace, the
remainder of the gradient with its step sizes."""
WeightRounding = Literal["auto", "nearest", "stochastic"]
_FACTORED = "-factored"


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer with linear warm-up and cosine decay of the learning rate.

    Raises:
      ValueError: a setting is out of range.
    """

    learning_rate: float = 2e-3
    """Peak learning rate."""
    warmup_steps: int = 50
    """Steps of linear warm-up from zero. A cosine then lowers the learning rate to a tenth."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; scales of norms have none."""
    beta1: float = 0.9
    """Decay of the first moment. Unless another value is given, it is 0.95 for muon."""
    beta2: float = 0.95
    """Decay of the second moment; for lion, of its moment. Unless another value is given, it is
    0.99 for lion, and 0.999 for the method galore, as published."""
    clip: float = 1.0
    """Largest global norm of a gradient; inf for no clipping."""
    moment_dtype: MomentDtype = "auto"
    """Dtype of the moments between steps: float32, bfloat16, 8bit (blocks of 256, dynamic map) or
    4bit (a scale for each row and column, first moments in groups of 128 too, rounded
    stochastically). With -factored, the second moments are kept as the mean of each row and of each
    column: not for adafactor, lion and sgd. auto: 8bit for lean, lean_remat and lean_subspace,
    float32 for the others."""
    optimizer: Optimizer = "adamw"
    """Optimizer: how a gradient becomes an update."""
    offload_states: bool = False
    """Keep the moments of the layers in the memory of the host, and fetch those of a layer while
    its gradient is computed. Not for adafactor, which has none."""

    @property
    def factored_second_moment(self) -> bool:
        """Whether second moments are kept as means of their rows and columns."""
        return self.moment_dtype.endswith(_FACTORED)

    @property
    def stored_dtype(self) -> str:
        """Dtype of the moments that are kept one by one: `moment_dtype` without "-factored"."""
        return self.moment_dtype.removesuffix(_FACTORED)

    @property
    def betas(self) -> tuple[float, float]:
        """Decays of the moments, with defaults filled in."""
        usual = type(self).beta1, type(self).beta2
        first, second = _BETAS.get(self.optimizer, usual)
        return (
            first if self.beta1 == usual[0] else self.beta1,
            second if self.beta2 == usual[1] else self.beta2,
        )

    def __post_init__(self) -> None:
        check_range(self, math.inf, "learning_rate", "warmup_steps", "weight_decay")
        # A decay of 1 ignores every gradient, and its bias correction divides by zero.
        check_range(self, 1, "beta1", "beta2")
        check_known("`--optimizer`", self.optimizer, get_args(Optimizer))
        if self.factored_second_moment and self.optimizer in ("adafactor", "lion", "sgd"):
            raise ValueError(
                f"`--moment-dtype {self.moment_dtype}` is for optimizers with the moments of Adam,"
                f" got `--optimizer {self.optimizer}`"
                + (", which has a factored one anyway" if self.optimizer == "adafactor" else "")
                + f": pass `--moment-dtype {self.stored_dtype}`, or drop it."
            )
        if self.optimizer == "adafactor" and self.moment_dtype not in ("auto", "float32"):
            raise ValueError(
                f"`--moment-dtype {self.moment_dtype}` has no effect with `--optimizer adafactor`,"
                " which keeps no moments of the size of the weights: drop it."
            )
        for name in _UNUSED.get(self.optimizer, ()):
            if getattr(self, name) != getattr(type(self), name):
                raise ValueError(
                    f"`{flag_name(name)}` has no effect with `--optimizer {self.optimizer}`: drop"
                    " it."
                )
        if not self.clip > 0:
            raise ValueError(f"`--clip` must be above 0 (inf for no clipping), got {self.clip}.")

    @property
    def projects(self) -> bool:
        """Whether the optimizer projects gradients of the layers itself, and needs them dense."""
        return self.optimizer == "fira"


_UNUSED = {"adafactor": ("beta1", "beta2", "offload_states"), "sgd": ("beta2",)}
"""Settings that some optimizers have no use for."""
_BETAS = {"lion": (0.9, 0.99), "muon": (0.95, 0.95)}


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Settings that all training programs share.

    Raises:
      ValueError: a setting is out of range, or two exclude each other.
    """

    method: str = "exact"
    """Method: how activations are stored for the backward pass."""
    options: Annotated[MethodOptions, tyro.conf.arg(name="method")] = MethodOptions()
    steps: int = 1000
    """Optimizer steps of the whole run."""
    epochs: float | None = None
    """Passes over the data, in place of `--steps`."""
    budget: str = ""
    """Memory that a step may take, such as 16GiB, or auto for what the device has free. The fastest
    settings that fit are searched, printed and used: the method, unless `--method` names another
    than the default, bits, moments, micro-batches. `--resume` takes them from the run."""
    batch_size: int = 8
    """Sequences of a step, over all devices."""
    seq_len: int = 256
    """Tokens of a sequence."""
    accumulate: int = 1
    """Micro-batches of a step: `--batch-size` is split into this many parts, which run one after
    the other."""
    in_backward: bool | None = None
    """Update each layer within the backward pass, so that the gradients of all layers never exist
    at once. Clips by an estimate of the norm. With `--accumulate`, the codes of all micro-batches
    exist at once, and the workspace of one. Default: on for lean, lean_remat and lean_subspace,
    off for the others."""
    optimizer: OptimizerConfig = OptimizerConfig()
    weight_dtype: WeightDtype = "float32"
    """Dtype of weights and gradients."""
    weight_rounding: WeightRounding = "auto"
    """How bfloat16 weights are rounded after an update: to nearest, which loses small updates, or
    stochastic, which keeps them on average. auto: stochastic where all weights are trained in
    bfloat16."""
    compute_dtype: Dtype = "bfloat16"
    """Dtype of activations and matrix products; products are summed in float32. float16, for GPUs
    without bfloat16, scales the loss and skips steps that overflow; not with `--in-backward`."""
    z_loss: float = 0.0
    """Weight of the squared log-sum-exp of the logits in the loss."""
    download: tyro.conf.FlagCreatePairsOff[bool] = False
    """Download a checkpoint of the Hugging Face Hub into its cache, as far as it is not there."""
    seed: int = 0
    """Seed of the initial weights, the order of the data and the codecs."""
    distributed: tyro.conf.FlagCreatePairsOff[bool] = False
    """Train with several processes, one on each host, all started with the same command. Slurm,
    Open MPI, Kubernetes and TPU pods tell them about each other; elsewhere
    JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and JAX_PROCESS_ID do."""
    mesh: str = ""
    """Devices by axis, such as fsdp=8 or data=2,fsdp=4. fsdp: weights, optimizer states and
    sequences are divided; data: sequences alone. Default: one device; with `--distributed`, fsdp
    over all devices."""
    out: pathlib.Path | None = None
    """Folder of the run: checkpoints, metrics.jsonl, tensorboard, loss.png. Default:
    runs/MODEL-METHOD."""
    export: pathlib.Path | None = None
    """Also write the result to this folder, as Hugging Face has it. If `--out` holds a run and
    `--resume` is not given, nothing is trained: the folder is made of its last checkpoint."""
    resume: bool = False
    """Continue from the last checkpoint in `--out`, or from the start if there is none. The same
    settings give the same bits as an unbroken run. Model, text, batch, seed, weights and the form
    of the optimizer state must be the same; other changed settings are printed."""
    log_to: tuple[str, ...] = ("tensorboard",)
    """Where metrics are shown beside metrics.jsonl: tensorboard (in `--out`), wandb (Weights &
    Biases, the project actjax), or both."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    eval_every: int = 100
    """Steps between two evaluations on held-out text. The last step is always evaluated."""
    eval_batches: int = 20
    """Batches of an evaluation."""
    save_every: int = 100
    """Steps between two checkpoints. The last step is always saved."""
    keep: int = 2
    """Number of latest checkpoints to keep. Those of the best held-out loss and of the best mean
    loss of training stay too."""

    def __post_init__(self) -> None:
        positive = ("steps", "batch_size", "seq_len", "accumulate", "log_every", "eval_every",
                    "eval_batches", "save_every", "keep")  # fmt: skip
        check_at_least(1, **{name: getattr(self, name) for name in positive})
        check_range(self, 2**31, "steps", low=1)
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise ValueError(f"`--epochs` must be above 0, got {self.epochs}.")
        if self.batch_size * self.seq_len >= 2**31:
            raise ValueError(
                f"`--batch-size` {self.batch_size} times `--seq-len` {self.seq_len} must be below"
                " 2^31 tokens: make one of them smaller."
            )
        if self.budget not in ("", AUTO):
            parse_budget(self.budget)
        check_range(self, 2**32, "seed")
        check_range(self, math.inf, "z_loss")
        for name in self.log_to:
            check_known("`--log-to`", name, ("tensorboard", "wandb"))
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"`--batch-size` {self.batch_size} must be a multiple of"
                f" `--accumulate` {self.accumulate}: choose a divisor of it."
            )


_TRAINING: Headings = {
    "Memory": (
        *("budget", "accumulate", "in_backward", "weight_rounding", "moment_dtype"),
        *("offload_states", "compute_dtype"),
    ),
    "Devices": ("mesh", "distributed"),
    "Method options": ("options",),
}
_OUTPUT: Headings = {
    "Optimizer": ("optimizer", "z_loss", "seed"),
    "Logging, evaluation and checkpoints": (
        *("log_to", "log_every", "eval_every", "eval_batches", "save_every", "keep", "check"),
    ),
}


@dataclasses.dataclass(frozen=True)
class PretrainConfig(RunConfig):
    """Pretrain a Llama on text, with activations stored in a smaller form.

    The defaults train on the sources of Python's standard library and need no download.

    Raises:
      ValueError: a setting is out of range, or two exclude each other.
    """

    method: str = "lean"
    """Method: how activations are stored for the backward pass."""
    weight_dtype: WeightDtype = "auto"
    """Dtype of weights and gradients. auto: bfloat16 for lean, lean_remat and lean_subspace,
    float32 for the others."""
    model: str = "llama_9m"
    """Dimensions of the model, or a checkpoint (a folder, or a name such as Qwen/Qwen3-0.6B) whose
    dimensions it has. Its vocabulary is that of the tokenizer."""
    checkpoint: str = ""
    """Begin with the weights and the tokenizer of this checkpoint (a Hugging Face folder, a name at
    the Hub, or a run) instead of random weights of `--model`."""
    model_vocab_size: int = 0
    """Vocabulary size of the model, at least that of the tokenizer. 0: that of the tokenizer,
    rounded up to a multiple of 128."""
    data: DataConfig = DataConfig()
    check: pathlib.Path | None = None
    """Compare the folder of a run, also of train.finetune, with the digests of what was written
    there, and train nothing. Exits with 2 if a part is damaged."""

    HEADINGS: ClassVar[Headings] = {
        "Common flags": (
            *("model", "checkpoint", "method", "data.data", "steps", "epochs", "batch_size"),
            *("seq_len", "learning_rate", "weight_dtype", "out", "resume", "export"),
        ),
        **_TRAINING,
        "Text and tokenizer": ("data", "model_vocab_size", "download"),
        **_OUTPUT,
    }
    """Order of the help page."""

    @staticmethod
    def choices() -> dict[str, dict[str, str]]:
        """Returns the names that flags take, and a line about each."""
        models = {
            name: f"{model.num_layers} layers of {model.hidden_size},"
            f" vocabulary of {model.vocab_size:,}"
            for name, model in PRESETS.items()
        }
        methods = {name: METHODS[name].summary for name in FULL_WEIGHTS}
        return {"--model": models, "--method": methods}

    @property
    def title(self) -> str:
        """Name of the model."""
        return name_of(self.checkpoint) if self.checkpoint else self.model

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, math.inf, "model_vocab_size")
        if self.checkpoint and (self.model != type(self).model or self.model_vocab_size):
            name = "--model" if self.model != type(self).model else "--model-vocab-size"
            raise ValueError(
                f"`{name}` has no effect with `--checkpoint`, whose dimensions the model has: drop"
                " one of both."
            )
        trains_tokenizer = self.data.tokenizer is None
        if trains_tokenizer and 0 < self.model_vocab_size < self.data.vocab_size:
            raise ValueError(
                f"`--model-vocab-size {self.model_vocab_size}` is below the"
                f" {self.data.vocab_size} tokens of the tokenizer (`--vocab-size`): raise it, or"
                " lower `--vocab-size`."
            )


def run_folder(config: "PretrainConfig | FinetuneConfig") -> pathlib.Path:
    """Returns the folder of a run."""
    return config.out or pathlib.Path("runs") / f"{config.title}-{config.method}"


def name_of(checkpoint: str) -> str:
    """Returns the name of a checkpoint: of its folder, or of the run that holds it."""
    path = pathlib.Path(checkpoint).expanduser()
    return path.parent.name if path.name == "model" and path.parent.name else path.name


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """Low-rank adapters, for lora, qlora and hyc_lora.

    Raises:
      ValueError: a setting is out of range.
    """

    lora_rank: int = 16
    """Rank r of the adapters."""
    lora_alpha: float = 16.0
    """The output of an adapter is multiplied by alpha / rank."""
    lora_dropout: float = 0.0
    """Share of an adapter's inputs that is set to zero in training."""
    targets: tuple[str, ...] = tuple(TARGETS)
    """Weights that have an adapter."""
    calibration_batches: int = 5
    """Batches on which means and spreads, or scales, of channels are measured before the first
    step."""
    recalibrate_every: int = 0
    """Steps between two such measurements, each on the current batch; 0 for none."""
    merge: bool = False
    """Also write the model with its adapters merged when the run is done."""

    def __post_init__(self) -> None:
        check_at_least(1, lora_rank=self.lora_rank, calibration_batches=self.calibration_batches)
        if not 0 < self.lora_alpha < math.inf:
            raise ValueError(f"`--lora-alpha` must be in (0, inf), got {self.lora_alpha}.")
        check_range(self, 1, "lora_dropout")
        check_range(self, math.inf, "recalibrate_every")
        assert self.lora is not None  # Raises for an unknown target.

    @property
    def lora(self) -> LoRAConfig:
        """The adapters."""
        return LoRAConfig(self.lora_rank, self.lora_alpha, self.lora_dropout, self.targets)


@dataclasses.dataclass(frozen=True)
class PreferenceConfig:
    """Direct preference optimization, for `--loss dpo`.

    Raises:
      ValueError: a setting is out of range.
    """

    beta: float = 0.1
    """Factor of the reward: the larger, the closer the model stays to the reference, which is the
    checkpoint. With `length_normalization` larger values, such as 5."""
    label_smoothing: float = 0.0
    """Probability that the labels of a pair are exchanged, for data with wrong ones."""
    length_normalization: bool = False
    """Take means over the tokens of a response in place of sums."""

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise ValueError(f"`--beta` must be above 0, got {self.beta}.")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"`label_smoothing` must be in [0, 0.5), got {self.label_smoothing}.")


@dataclasses.dataclass(frozen=True)
class FinetuneConfig(RunConfig):
    """Fine-tune a checkpoint on examples, with activations stored in a smaller form.

    Raises:
      ValueError: a setting is out of range or missing, or two exclude each other.
    """

    checkpoint: str = ""
    """Required: a Hugging Face checkpoint (Llama, Mistral, Qwen 2.5 or 3) with its tokenizer: its
    folder, or its name at the Hub, such as Qwen/Qwen3-0.6B. Or the folder of a run with a
    model."""
    tokenizer: pathlib.Path | None = None
    """tokenizer.json, a sentencepiece .model, or a folder with one of them. Default: the tokenizer
    of the checkpoint."""
    method: str = "lora"
    """Method: which weights are trained, how activations are stored for the backward pass."""
    loss: Literal["sft", "dpo"] = "sft"
    """sft: cross-entropy of completions and answers. dpo: preference of a chosen over a rejected
    response (Rafailov et al., 2023); records have prompt, chosen and rejected."""
    preference: PreferenceConfig = PreferenceConfig()
    adapter: AdapterConfig = AdapterConfig()
    data: ExampleConfig = ExampleConfig()
    optimizer: OptimizerConfig = OptimizerConfig(
        learning_rate=3e-4, weight_decay=0.0, warmup_steps=20
    )
    steps: int = 300
    """Optimizer steps of the whole run."""
    weight_dtype: WeightDtype = "auto"
    """Dtype of the weights. auto: where all weights are trained, bfloat16 for lean,
    lean_remat and lean_subspace and float32 for the others; with adapters, whose weights are
    frozen, the dtype of the checkpoint (bfloat16 for float16). Adapters are in float32."""

    HEADINGS: ClassVar[Headings] = {
        "Common flags": (
            *("checkpoint", "download", "data.data", "method", "steps", "epochs", "batch_size"),
            *("seq_len", "learning_rate", "lora_rank", "weight_dtype", "out", "resume", "export"),
        ),
        "Examples": ("loss", "preference", "tokenizer", "data"),
        "Adapters": ("adapter",),
        **_TRAINING,
        **_OUTPUT,
    }
    """Order of the help page."""

    @staticmethod
    def choices() -> dict[str, dict[str, str]]:
        """Returns the names that flags take, and a line about each."""
        return {"--method": {name: METHODS[name].summary for name in (*ADAPTERS, *FULL_WEIGHTS)}}

    @property
    def title(self) -> str:
        """Name of the checkpoint."""
        return name_of(self.checkpoint)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.checkpoint:
            raise ValueError("`--checkpoint` is missing: name the folder of a checkpoint.")
        if self.loss == "sft":
            for name, value in given_fields(self.preference).items():
                raise ValueError(f"`{shown_flag(name, value)}` has no effect without `--loss dpo`.")
        elif self.z_loss:
            raise ValueError("`z_loss` has no effect with `--loss dpo`: drop it.")
        elif (self.batch_size // self.accumulate) % 2:
            raise ValueError(
                f"`--batch-size` {self.batch_size} over `--accumulate` {self.accumulate} must be"
                " even with `--loss dpo`: a pair takes two sequences."
            )
