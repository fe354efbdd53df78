"""Everything a run can be told."""

import dataclasses
import math
import pathlib
from typing import Annotated, Literal

import tyro

from models.lora import TARGETS, LoRAConfig
from train.examples import ExampleConfig
from train.methods import MethodOptions

Dtype = Literal["float32", "bfloat16"]
WeightDtype = Literal["auto", "float32", "bfloat16"]
MomentDtype = Literal["auto", "float32", "bfloat16", "8bit"]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is read."""

    data: str = "stdlib"
    """`stdlib` (the sources of Python's standard library, which every machine has), a path to text,
    jsonl or parquet (a file or a folder), or the name of a TFDS data set prepared in `--data-dir`,
    such as c4/en."""
    data_dir: pathlib.Path = pathlib.Path("~/.cache/actjax")
    """Where data sets and trained tokenizers are prepared, once."""
    text_field: str = "text"
    """Field of jsonl records, or column of parquet tables, that holds the text."""
    tokenizer: pathlib.Path | None = None
    """tokenizer.json, a sentencepiece .model, or a folder with vocab.json and merges.txt. By
    default a byte-level BPE is trained on the text, once."""
    vocab_size: int = 8192
    """Size of the tokenizer that is trained where none is given."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, with a linear warm-up and a cosine decay of the learning rate."""

    learning_rate: float = 2e-3
    """Peak learning rate."""
    warmup_steps: int = 50
    """Steps of linear warm-up from zero."""
    final_learning_rate: float = 0.1
    """Share of the peak that the cosine ends at."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; norms have none."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    clip: float = 1.0
    """Largest global norm of a gradient."""
    moment_dtype: MomentDtype = "auto"
    """What both moments are kept in between steps: float32, bfloat16, or 8bit (blockwise, dynamic
    map). auto: 8bit for the frugal methods, float32 for others."""

    def __post_init__(self) -> None:
        _check_range("learning-rate", self.learning_rate, 0, math.inf)
        _check_range("warmup-steps", self.warmup_steps, 0, math.inf)
        _check_range("weight-decay", self.weight_decay, 0, math.inf)
        # A decay of one would never take up a gradient, and its bias correction divides by zero.
        _check_range("beta1", self.beta1, 0, 1)
        _check_range("beta2", self.beta2, 0, 1)
        if not 0 <= self.final_learning_rate <= 1:
            raise ValueError(
                f"`--final-learning-rate` must be in [0, 1], got {self.final_learning_rate}."
            )
        if not self.clip > 0:
            raise ValueError(f"`--clip` must be above 0 (inf for no clipping), got {self.clip}.")


def _check_range(flag: str, value: float, low: float, end: float) -> None:
    """Raises a `ValueError` unless `low <= value < end`."""
    if not low <= value < end:
        raise ValueError(f"`--{flag}` must be in [{low}, {end}), got {value}.")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What every training run can be told.

    Raises:
      ValueError: settings that contradict one another.
    """

    method: str = "exact"
    """What is stored: exact (no compression), remat (jax.checkpoint), pamm (the input of q, k and v
    as a few tokens), low_rank (linear inputs and gradients in two factors), subspace (linear
    inputs, gradients and moments in a subspace), galore (moments alone), random_projection (as
    subspace, but a random one), gact (what JAX keeps, in bits chosen for each array), quantized
    (every kept value once, in a few bits), compressed_remat (remat from a few bits), frugal
    (quantized, 8-bit moments, updates in the backward pass: our advice), frugal_subspace (the
    smallest)."""
    options: Annotated[MethodOptions, tyro.conf.arg(name="method")] = dataclasses.field(
        default_factory=MethodOptions
    )
    steps: int = 1000
    """Optimizer steps of the whole run."""
    batch_size: int = 8
    """Sequences a step, over all devices."""
    seq_len: int = 256
    """Tokens a sequence."""
    accumulate: int = 1
    """Micro-batches a step: `--batch-size` is cut into so many, one after the other."""
    in_backward: bool = False
    """Update each layer within the backward pass, so that no gradient of all weights exists. Clips
    by an estimate of the norm. Not with `--accumulate`. The frugal methods do so anyway."""
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    weight_dtype: WeightDtype = "float32"
    """Dtype that weights and gradients are stored in."""
    compute_dtype: Dtype = "bfloat16"
    """Dtype of activations and products; sums are in float32."""
    z_loss: float = 0.0
    """Weight of the squared log-sum-exp of the logits."""
    seed: int = 0
    """Of weights, order of the data and codecs."""
    mesh: str = ""
    """Devices to shard over, for example fsdp=4: weights, states and batch. One device if empty."""
    out: pathlib.Path | None = None
    """Folder of the run: checkpoints, metrics.jsonl, tensorboard, loss.png. runs/MODEL-METHOD by
    default."""
    resume: bool = False
    """Go on from the last checkpoint in `--out`; from the start if there is none. To the same bits
    with the same settings. Model, text, batch, seed, weights and the form of the optimizer's states
    must be the same; what else changed is said."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    eval_every: int = 100
    """Steps between two evaluations on held-out text; there is one at the end in any case."""
    eval_batches: int = 20
    """Batches of an evaluation."""
    save_every: int = 100
    """Steps between two checkpoints; there is one at the end in any case."""
    keep: int = 2
    """Checkpoints that are kept."""

    @property
    def title(self) -> str:
        """What the model is called."""
        raise NotImplementedError

    @property
    def adapters(self) -> LoRAConfig | None:
        """The adapters that a method may train; None if a run has no place for any."""
        return None

    @property
    def recalibrate_every(self) -> int:
        """Steps between two measurements of scales of channels; 0 for none."""
        return 0

    @property
    def begins_trained(self) -> bool:
        """Whether the weights that it begins with are worth an evaluation."""
        return False

    @property
    def packed(self) -> bool:
        """Whether several examples share a sequence without seeing one another."""
        return False

    @property
    def folder(self) -> pathlib.Path:
        """Folder of the run."""
        return self.out or pathlib.Path("runs") / f"{self.title}-{self.method}"

    def __post_init__(self) -> None:
        positive = ("steps", "batch_size", "seq_len", "accumulate", "log_every", "eval_every",
                    "eval_batches", "save_every", "keep")  # fmt: skip
        for name in positive:
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise ValueError(f"`--{flag}` must be at least 1, got {getattr(self, name)}.")
        _check_range("seed", self.seed, 0, 2**32)
        _check_range("z-loss", self.z_loss, 0, math.inf)
        if self.in_backward and self.accumulate > 1:
            raise ValueError(
                "`--in-backward`, which frugal methods set, updates the weights in each backward"
                f" pass, so micro-batches cannot be accumulated: drop it, or"
                f" `--accumulate` {self.accumulate}."
            )
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"`--batch-size` {self.batch_size} must be a multiple of"
                f" `--accumulate` {self.accumulate}."
            )


@dataclasses.dataclass(frozen=True)
class PretrainConfig(RunConfig):
    """Pretrain a Llama on text, with activations stored in a smaller form.

    The defaults train on the sources of Python's standard library: no download is needed.

    Raises:
      ValueError: settings that contradict one another.
    """

    model: str = "llama_9m"
    """llama_3m, 9m, 20m, 35m, 40m, 60m, 71m, 100m, 130m, 250m, 350m, 1b, 3b, 7b (GaLore's
    dimensions), llama3_1b, llama3_3b, llama3_8b, qwen2_5_0_5b, qwen3_0_6b or qwen3_4b."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)

    @property
    def title(self) -> str:
        """What the model is called."""
        return self.model


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """Low-rank adapters, which lora, qlora and hyc_lora train."""

    lora_rank: int = 16
    """Rank r of the adapters."""
    lora_alpha: float = 16.0
    """What an adapter gives is multiplied by alpha / rank."""
    lora_dropout: float = 0.0
    """Share of an adapter's inputs that are set to zero in training."""
    targets: tuple[str, ...] = tuple(TARGETS)
    """Weights that have an adapter."""
    calibration_batches: int = 5
    """Batches that hyc_lora measures the scales of channels on, before the first step."""
    recalibrate_every: int = 0
    """Steps between two measurements of these scales, on the batch at hand; 0 for none."""
    merge: bool = False
    """Write the model with its adapters merged, too, when the run is done."""

    def __post_init__(self) -> None:
        if self.calibration_batches < 1:
            raise ValueError(
                f"`--calibration-batches` must be at least 1, got {self.calibration_batches}."
            )
        _check_range("recalibrate-every", self.recalibrate_every, 0, math.inf)


@dataclasses.dataclass(frozen=True)
class FinetuneConfig(RunConfig):
    """Fine-tune a checkpoint on examples, with activations stored in a smaller form.

    Raises:
      ValueError: settings that contradict one another.
    """

    checkpoint: str = ""
    """To begin with, and needed: the folder of a Hugging Face checkpoint (Llama, Mistral, Qwen 2.5
    or 3) with its tokenizer, or a llama2.c file."""
    tokenizer: pathlib.Path | None = None
    """tokenizer.json, a sentencepiece .model, a folder with one, or llama2.c's .bin; that of the
    checkpoint by default."""
    method: str = "lora"
    """What is trained, and what is stored. Adapters: lora, qlora (of weights in 4 bits), hyc_lora
    (activations in a few bits too). All weights: exact, remat, pamm, low_rank, subspace, galore,
    random_projection, gact, quantized, compressed_remat, frugal (our advice), frugal_subspace; see
    train.pretrain."""
    adapter: AdapterConfig = dataclasses.field(default_factory=AdapterConfig)
    data: ExampleConfig = dataclasses.field(default_factory=ExampleConfig)
    optimizer: OptimizerConfig = dataclasses.field(
        default_factory=lambda: OptimizerConfig(
            learning_rate=3e-4, weight_decay=0.0, warmup_steps=20
        )
    )
    steps: int = 300
    """Optimizer steps of the whole run."""
    weight_dtype: WeightDtype = "auto"
    """Dtype that weights are held in; auto: that of the checkpoint (bfloat16 for float16). Adapters
    are in float32."""

    @property
    def title(self) -> str:
        """What the model is called."""
        return pathlib.Path(self.checkpoint).stem

    @property
    def adapters(self) -> LoRAConfig | None:
        """The adapters that a method may train."""
        one = self.adapter
        return LoRAConfig(one.lora_rank, one.lora_alpha, one.lora_dropout, one.targets)

    @property
    def recalibrate_every(self) -> int:
        """Steps between two measurements of scales of channels; 0 for none."""
        return self.adapter.recalibrate_every

    @property
    def begins_trained(self) -> bool:
        """Whether the weights that it begins with are worth an evaluation."""
        return True

    @property
    def packed(self) -> bool:
        """Whether several examples share a sequence without seeing one another."""
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.adapters is not None  # Raises where they are out of range.
        if not self.checkpoint:
            raise ValueError("`--checkpoint` is missing: name the folder of a checkpoint.")
