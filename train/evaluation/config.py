"""Settings of `train.evaluate`."""

import dataclasses
import math
import pathlib
from typing import ClassVar

import tyro

from train.evaluation.questions import QuestionConfig
from train.settings.cli import Headings
from train.settings.config import Dtype
from train.settings.data import SpecialTokens
from train.settings.options import check_at_least, check_range, given_fields, shown_flag


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """The text whose perplexity is measured.

    Raises:
      ValueError: settings that contradict each other.
    """

    data: str | None = None
    """Text whose perplexity is measured: a path, or a data set, as for train.pretrain."""
    data_dir: pathlib.Path = pathlib.Path("~/.cache/actjax")
    """Folder of prepared data sets."""
    text_field: str = "text"
    """Field of jsonl records, or column of parquet tables, that holds the text."""
    whole: bool = False
    """Measure all of the text in local files, not only the part that training holds out."""
    seq_len: int | None = None
    """Tokens of a row of text. Rows do not see each other. Default: 1024, or the positions of the
    model if it has fewer."""
    eval_batches: int | None = None
    """Largest number of batches of text. Default: 20 of held-out text, all with `--whole`."""

    RARE: ClassVar[frozenset[str]] = frozenset()
    """Here `--eval-batches` is a flag."""

    def __post_init__(self) -> None:
        check_at_least(1, seq_len=self.seq_len)
        if self.eval_batches is not None and self.eval_batches < 1:
            raise ValueError(f"`--eval-batches` must be at least 1, got {self.eval_batches}.")
        if self.whole and self.data is None:
            raise ValueError("`--whole` has no effect without `--data`: give both, or neither.")


@dataclasses.dataclass(frozen=True)
class WritingConfig:
    """How the model writes: after a beginning, or as answers to questions.

    Raises:
      ValueError: a setting is out of range.
    """

    generate: str | None = None
    """Text that the model continues."""
    max_new_tokens: int = 256
    """Largest number of tokens to write."""
    temperature: float = 0.0
    """Sampling temperature; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that have this probability together."""
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0 for all."""
    seed: int = 0
    """Seed of the samples."""
    chat: bool = False
    """Ask as the user of a chat: `--generate`, or the whole prompt of a question, becomes a
    message, and the chat template writes the text that the model continues."""
    template_argument: tuple[str, ...] = ()
    """Arguments of the template of `--chat`, such as enable_thinking=false."""
    chat_template: pathlib.Path | None = None
    """Jinja template of `--chat` in Hugging Face's form, or a tokenizer_config.json with one.
    Default: the template in the folder of the tokenizer."""

    def __post_init__(self) -> None:
        check_at_least(1, max_new_tokens=self.max_new_tokens)
        check_at_least(0, top_k=self.top_k, seed=self.seed)
        check_range(self, math.inf, "temperature")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`--top-p` must be above 0 and at most 1, got {self.top_p}.")
        if self.chat_template is not None and not self.chat:
            raise ValueError("`--chat-template` has no effect without `--chat`: give both.")
        if self.template_argument and not self.chat:
            raise ValueError("`--template-argument` has no effect without `--chat`: give both.")


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    """Evaluate a model: the perplexity of a text, the accuracy on questions, or what it writes.

    `--data`, `--task` and `--generate` can be combined.

    Raises:
      ValueError: settings that contradict each other, or that have no effect.
    """

    checkpoint: pathlib.Path
    """Hugging Face checkpoint: its folder (config.json and safetensors), or its name at the Hub,
    such as Qwen/Qwen3-0.6B. Or the folder of a run, also of one that trained an adapter."""
    download: tyro.conf.FlagCreatePairsOff[bool] = False
    """Download a checkpoint of the Hugging Face Hub into its cache, as far as it is not there."""
    tokenizer: pathlib.Path | None = None
    """tokenizer.json, a sentencepiece .model, or a folder with one of them. Default: the tokenizer
    in the folder of the checkpoint."""
    adapter: pathlib.Path | None = None
    """Folder of a LoRA adapter in PEFT's form."""
    four_bit: bool = False
    """Hold the weights of the layers in NF4, as qlora and hyc_lora do in training. Adapters trained
    so fit these weights best."""
    batch_size: int = 8
    """Rows of text, or questions, of a batch."""
    compute_dtype: Dtype = "bfloat16"
    """Dtype of activations and matrix products; products are summed in float32."""
    special_tokens: SpecialTokens = "text"
    """Names of special tokens, such as <|im_end|>, in `--generate`, texts and questions: text
    (letters) or parse (these tokens). In templates they are tokens anyway."""
    text: TextConfig = TextConfig()
    asked: QuestionConfig = QuestionConfig()
    writing: WritingConfig = WritingConfig()

    HEADINGS: ClassVar[Headings] = {
        "Common flags": (
            *(
                "checkpoint",
                "download",
                "text.data",
                "asked.task",
                "asked.questions",
                "writing.generate",
            ),
            *("adapter", "four_bit", "batch_size", "chat"),
        ),
        "Model": ("tokenizer", "special_tokens", "compute_dtype"),
        "Perplexity of a text (--data)": ("text",),
        "Questions (--task)": ("asked",),
        "Writing": ("writing",),
    }
    """Order of the help page."""

    def __post_init__(self) -> None:
        check_at_least(1, batch_size=self.batch_size)
        if self.text.data is None and self.asked.task is None and self.writing.generate is None:
            raise ValueError("nothing to do: give `--data`, `--task` or `--generate`.")
        # A given flag must have an effect beside the others.
        text, asked, writing = self.text, self.asked, self.writing
        has_data, has_task = text.data is not None, asked.task is not None
        writes = writing.generate is not None or (has_task and not asked.by_likelihood)
        of_text = ("seq_len", "eval_batches", "text_field", "data_dir")
        of_choice = ("options_field", "choose", "option_template", "normalize")
        of_task = ("question_field", "answer_field", "prompt_template", "shots", "examples",
                   "limit", *of_choice)  # fmt: skip
        sampling = ("top_p", "top_k", "seed")
        rules = (
            (self, ("batch_size",), has_data or has_task, "without `--data` or `--task`"),
            (text, of_text, has_data, "without `--data`"),
            (text, ("data_dir",), not text.whole, "with `--whole`, which reads local files"),
            (asked, of_task, has_task, "without `--task`"),
            (asked, of_choice, asked.task != "gsm8k", "with `--task gsm8k`"),
            (asked, of_choice[2:], asked.by_likelihood, "without `--choose likelihood`"),
            (asked, ("examples",), asked.shots > 0, "without `--shots`"),
            (writing, ("chat",), has_task or writing.generate is not None,
             "without `--generate` or `--task`"),
            (writing, ("max_new_tokens", "temperature", *sampling), writes,
             "without `--generate`, or a `--task` that the model answers in writing"),
            (writing, sampling, writing.temperature > 0, "without `--temperature` above 0"),
        )  # fmt: skip
        for config, names, has_effect, reason in rules:
            for name, value in given_fields(config).items():
                if name in names and not has_effect:
                    shown = shown_flag(name, value, TextConfig.RARE)
                    raise ValueError(
                        f"`{shown}` has no effect {reason}. Drop it, or change the other."
                    )
