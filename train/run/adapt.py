"""Chooses the bits of each site by the sensitivity of the gradient to the site's error.

GACT (Liu et al., 2022): the sensitivity of the gradient to each stored tensor is measured on a
batch, bits go where they reduce the variance most, and the choice is repeated at an interval.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from actjax import Quantized, allocate_bits, compression_variance, sampling_variance
from actjax.choosing.choice import Chooser
from actjax.choosing.measure import Sensitivity
from models import Decoder, Remat
from models.config import site_width
from train.run.gradient_error import gradient_by_codecs
from train.run.loss import Batch, loss_function
from train.run.recipe import Recipe
from train.run.step import step_key
from train.settings.codecs import read_codecs
from train.settings.methods import CODE_BITS
from train.settings.options import MethodOptions

EARLY_CHOICES = (10, 100)
"""Steps after which bits are chosen whatever the interval is. Before the first step attention is
nearly uniform and insensitive to errors of queries and keys, so that a choice made then would give
them too few bits for the later steps."""


@dataclasses.dataclass(frozen=True)
class SiteBits:
    """Bits of each site, and the measured variances.

    Attributes:
      bits: by site.
      compression_variance: variance that the bits add to the gradient.
      sampling_variance: variance of the gradient from the choice of the batch.
    """

    bits: dict[str, int]
    compression_variance: float
    sampling_variance: float

    def describe(self) -> str:
        """Returns a line for the user, with a warning if compression dominates."""
        bits = ", ".join(f"{site} {n}" for site, n in self.bits.items())
        share = self.compression_variance / max(self.sampling_variance, 1e-30)
        line = f"bits chosen: {bits}; variance of compression {share:.2g} of that of sampling"
        if not share > 1:
            return line
        return (
            f"{line}. [bold yellow]Compression adds more noise to the gradient than the choice of"
            " the batch[/bold yellow]: raise `--average-bits`, or lower the learning rate."
        )


class SiteChooser:
    """Chooses the bits of the sites of a run. Its programs are compiled once for all choices."""

    def __init__(self, recipe: Recipe) -> None:
        """Takes a run whose bits are chosen for each site (`--average-bits`)."""
        self._config, options = recipe.config, recipe.config.options
        uniform = recipe.method.storage(dataclasses.replace(options, offload=False))
        sites = {site: getattr(uniform, site) for site in recipe.method.adaptive}
        codecs = {site: codec for site, codec in sites.items() if isinstance(codec, Quantized)}
        allocate = functools.partial(
            allocate_bits,
            sizes={site: site_width(recipe.config.model_config, site) for site in codecs},
            average_bits=options.average_bits,
            choices=_choices(options),
        )
        self._chooser = Chooser(
            Sensitivity(gradient_by_codecs(recipe, uniform), codecs),
            allocate,
            every=options.adapt_every,
            early=EARLY_CHOICES,
        )
        self._chooser.bits = dict(recipe.bits)
        self._gradient = jax.jit(jax.grad(loss_function(recipe.config, Remat())))

    def is_due(self, step: int) -> bool:
        """Returns whether bits are chosen before the step after `step`."""
        return self._chooser.is_due(step)

    def choose(self, model: Decoder, batch: Batch, step: int) -> dict[str, int]:
        """Returns the bits of each site, chosen on a batch by GACT's Algorithm 1.

        Takes one gradient per site and one more. Two gradients of all weights exist at once; none
        needs more memory than a training step with a gradient of all weights. If a gradient is not
        finite, the bits stay as they are.

        Args:
          model: the weights.
          batch: batch of the gradients; its first micro-batch is used.
          step: steps done; the keys are folded from it.
        """
        self._chooser.choose(step_key(self._config, jnp.asarray(step)), model, self._micro(batch))
        return self._chooser.bits

    def choose_and_compare(self, model: Decoder, batch: Batch, step: int) -> SiteBits:
        """Returns the bits of `choose`, with the variances of compression and of sampling."""
        bits = self.choose(model, batch, step)
        variance = compression_variance(self._chooser.sensitivity, bits)
        return SiteBits(bits, variance, self._sampling_variance(model, batch, step))

    def _micro(self, batch: Batch) -> Batch:
        """Returns the first micro-batch."""
        return {k: x[: len(x) // self._config.accumulate] for k, x in batch.items()}

    def _sampling_variance(self, model: Decoder, batch: Batch, step: int) -> float:
        """Returns the gradient's variance, estimated from halves of a batch; NaN for one row."""
        batch, key = self._micro(batch), step_key(self._config, jnp.asarray(step))
        rows = len(batch["inputs"]) // 2
        if rows == 0:
            return math.nan
        halves: Any = (
            {k: x[part] for k, x in batch.items()} for part in (slice(rows), slice(rows, None))
        )
        return sampling_variance([self._gradient(model, half, key) for half in halves])


def site_chooser(recipe: Recipe) -> SiteChooser | None:
    """Returns the chooser of the bits of a run; None if they are those of its method."""
    return SiteChooser(recipe) if recipe.config.options.average_bits > 0 else None


def _choices(options: MethodOptions) -> tuple[int, ...]:
    """Returns the numbers of bits that a site may have.

    The two uniform levels of one bit are the ends of a group's range. For normally distributed
    numbers their squared error is above three times the variance: worse than storing nothing.
    """
    texts = read_codecs(options.codec).values()
    uniform = any(text.given.get("levels") == "uniform" for text in texts)
    fewest = 2 if uniform and options.average_bits >= 2 else 1
    return tuple(bits for bits in CODE_BITS if bits >= fewest)
