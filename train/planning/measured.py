"""The error that a method makes in the gradient of a checkpoint: `train.plan --measure`."""

import contextlib
import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Callable

import jax.numpy as jnp
from rich import box
from rich.table import Table

from models import Decoder
from models.checkpoints import load_checkpoint
from train.run.adapt import site_chooser
from train.run.gradient_error import WHOLE, GradientError, by_site, measure
from train.run.loss import Batch
from train.run.recipe import build_recipe, make_recipe
from train.settings.config import FinetuneConfig, PretrainConfig
from train.settings.messages import naming_flag
from train.settings.options import check_at_least, check_range
from train.settings.resolve import dimensions
from train.text.corpus import Corpus, open_corpus
from train.text.data import train_batches
from train.text.records import FieldTemplate, read_records
from train.text.tokenizer_files import fit_vocabulary, tokenizer_of


@dataclasses.dataclass(frozen=True)
class MeasureConfig:
    """How the error of gradients is measured.

    Raises:
      ValueError: a setting is out of range.
    """

    measure: bool = False
    """Also measure the error of each plan's gradient, with the weights of `--checkpoint` on the
    text of `--data`: takes time for some gradients a method."""
    error: float = 0.0
    """Largest relative error of the gradient of a plan that `--budget` may choose. 0: any. Implies
    `--measure`."""
    template: str = ""
    r"""Text of a JSON record of `--data`: a Python format string over its fields, for example
    "Question: {question}\nAnswer: {answer}". Default: the field of `--text-field`."""
    batches: int = 3
    """Batches to measure on. Their spread gives the uncertainty that is printed."""
    keys: int = 4
    """Gradients of each batch for methods that draw random numbers."""

    def __post_init__(self) -> None:
        check_at_least(1, batches=self.batches, keys=self.keys)
        check_range(self, math.inf, "error")

    @property
    def wanted(self) -> bool:
        """Whether anything is measured."""
        return self.measure or self.error > 0


@dataclasses.dataclass(frozen=True)
class Measured:
    """A checkpoint and batches of text.

    Attributes:
      model: weights in float32, so that their gradient is not rounded further.
      batches: tokens.
      config: how to measure.
    """

    model: Decoder
    batches: tuple[Batch, ...]
    config: MeasureConfig

    def errors(self, config: PretrainConfig | FinetuneConfig) -> dict[str, GradientError]:
        """Returns the error of a plan's gradient, by site and as a whole (`WHOLE`).

        For a method with a subspace it is that of its refresh steps, whose gradients have all
        directions that the code kept. With `--average-bits` the bits are those that a run would
        choose on the first batch.

        Raises:
          ValueError: a gradient that is not finite.
        """
        neutral = PretrainConfig()  # For settings that the gradient does not depend on.
        return self._errors(
            dataclasses.replace(
                config,
                optimizer=neutral.optimizer,
                in_backward=False,
                weight_dtype="float32",
                weight_rounding="auto",
                options=dataclasses.replace(config.options, offload=False),
            )
        )

    @functools.cached_property
    def _errors(self) -> Callable[[PretrainConfig | FinetuneConfig], dict[str, GradientError]]:
        return functools.cache(self._measure)

    def _measure(self, config: PretrainConfig | FinetuneConfig) -> dict[str, GradientError]:
        recipe = make_recipe(config, dimensions(config))
        if (chooser := site_chooser(recipe)) is not None:
            bits = chooser.choose(self.model, self.batches[0], step=0)
            recipe = build_recipe(recipe.config, bits)
        places = by_site(recipe.storage, recipe.config.model_config.num_layers)
        arguments = (recipe, recipe.storage, self.model, self.batches, places)
        return measure(*arguments, keys=self.config.keys)


def open_measured(
    config: MeasureConfig, train: PretrainConfig, checkpoint: pathlib.Path
) -> Measured:
    """Returns the weights and the text to measure on.

    Args:
      config: how to measure.
      train: the run; its batch size, sequence length, seed and text are used.
      checkpoint: folder or file of the weights.

    Raises:
      ValueError: text that does not fill a batch, records that the template does not fit, or a
        damaged checkpoint.
      OSError: a file that cannot be read.
    """
    tokenizer = tokenizer_of(checkpoint, train.data.tokenizer)
    with naming_flag("--checkpoint"):
        model = load_checkpoint(checkpoint, dtype="float32")
    flag = "--checkpoint" if train.data.tokenizer is None else "--tokenizer"
    fit_vocabulary(tokenizer, flag, f"the model in '{checkpoint}'", model.config.vocab_size)
    data = train.data
    if config.template:
        template = FieldTemplate("--template", config.template, {})
        texts = [
            record.apply(lambda r: template.fill(r.fields))
            for record in read_records(data.data, "--data")
        ]
        corpus = Corpus(data.data, texts, texts[:1], fingerprint="")
    else:
        corpus = open_corpus(data.data, data.data_dir.expanduser(), text_field=data.text_field)
    rows_of = functools.partial(
        train_batches, batch_size=train.batch_size, seq_len=train.seq_len, seed=train.seed
    )
    special = data.special_tokens
    with contextlib.closing(rows_of(corpus, tokenizer, special_tokens=special)) as rows:
        taken = itertools.islice(rows, config.batches)
        batches = tuple({name: jnp.asarray(x) for name, x in batch.items()} for batch in taken)
    return Measured(model, batches, config)


def table_of_errors(plans: dict[str, dict[str, GradientError]], measured: Measured) -> Table:
    """Returns the errors of plans as a table.

    Args:
      plans: by plan, its errors by site.
      measured: what they were measured on.
    """
    rows, length = measured.batches[0]["inputs"].shape
    title = (
        f"gradient against the exact one, {len(measured.batches)} batches of {rows} x {length}"
        " tokens; by site, of several: the error of each alone"
    )
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for name in ("plan", "error", "±", "cosine", "bias", "by site"):
        right = name not in ("plan", "by site")
        table.add_column(name, justify="right" if right else "left", no_wrap=right)
    for plan, errors in plans.items():
        total = errors[WHOLE]
        sites = [f"{site} {alone.error:.3f}" for site, alone in errors.items() if site != WHOLE]
        cells = (total.error, total.uncertainty, total.cosine, total.bias)
        # One batch tells no uncertainty.
        shown = ("" if math.isnan(x) else f"{x:.4f}" for x in cells)
        table.add_row(plan, *shown, ", ".join(sites))
    return table
