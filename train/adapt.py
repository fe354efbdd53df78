"""Chooses the bits of each site by the sensitivity of the gradient to the site's error.

GACT (Liu et al., 2022): the sensitivity of the gradient to each stored tensor is measured on a
batch, bits go where they reduce the variance most, and the choice is repeated at an interval.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import actjax
from models import Decoder, Remat, StorageChoice
from models.config import site_width
from models.storage import SITES
from train.options import CODE_BITS, MethodOptions
from train.step import Batch, Recipe, loss_function, step_key

EARLY_CHOICES = (10, 100)
"""Steps after which bits are chosen whatever the interval is. Before the first step attention is
nearly uniform and insensitive to errors of queries and keys, so that a choice made then would give
them too few bits for the later steps."""


@dataclasses.dataclass(frozen=True)
class Choice:
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


def is_adaptive(recipe: Recipe) -> bool:
    """Returns whether bits are chosen for each site."""
    return recipe.config.options.average_bits > 0


def is_due(recipe: Recipe, step: int) -> bool:
    """Returns whether bits are chosen before the step after `step`."""
    return is_adaptive(recipe) and (
        step in EARLY_CHOICES or step % recipe.config.options.adapt_every == 0
    )


def choose_bits(recipe: Recipe, model: Decoder, batch: Batch, step: int) -> Choice:
    """Returns bits for the sites of a model, chosen on a batch by GACT's Algorithm 1.

    Takes one gradient per site and one more. Two gradients of all weights exist at once; none
    needs more memory than a training step with a gradient of all weights.

    Args:
      recipe: the run.
      model: the weights.
      batch: batch of the gradients.
      step: steps done; the keys are folded from it.
    """
    key = step_key(recipe.config, jnp.asarray(step))
    found = measure_sensitivity(recipe, model, batch, key)
    options = recipe.config.options
    widths = {site: site_width(recipe.model_config, site) for site in found}
    bits = actjax.allocate_bits(found, widths, options.average_bits, _choices(options))
    return Choice(
        bits,
        actjax.compression_variance(found, bits),
        _sampling_variance(recipe, model, _micro(recipe, batch), key),
    )


def measure_sensitivity(
    recipe: Recipe,
    model: Decoder,
    batch: Batch,
    key: jax.Array,
    samples: int = 1,
) -> dict[str, float]:
    """Returns the sensitivity of the gradient to the error of each adaptive site of a method.

    Args:
      recipe: the run.
      model: the weights.
      batch: batch of the gradients; its first micro-batch is used.
      key: randomness, consumed.
      samples: as in `actjax.sensitivity`.
    """
    config, method = recipe.config, recipe.method
    uniform = method.storage(dataclasses.replace(config.options, offload=False))
    codecs: Any = {site: getattr(uniform, site) for site in method.adaptive}
    gradient = gradient_by_codecs(recipe, uniform)
    micro = _micro(recipe, batch)
    return actjax.sensitivity(gradient, codecs, key, model, micro, samples=samples)


def gradient_by_codecs(recipe: Recipe, storage: StorageChoice) -> Callable[..., Any]:
    """Returns a function from codecs of some sites, their keys, model and batch to the gradient."""

    def gradient(codecs: Any, keys: Mapping[str, jax.Array], model: Decoder, batch: Batch) -> Any:
        # The other sites take any key: their codecs are not random.
        every = {**dict.fromkeys(SITES, next(iter(keys.values()))), **keys}
        chosen = dataclasses.replace(storage, **codecs)
        return jax.grad(loss_function(recipe.config, chosen))(model, batch, every)

    return gradient


def _micro(recipe: Recipe, batch: Batch) -> Batch:
    return {k: x[: len(x) // recipe.config.accumulate] for k, x in batch.items()}


def _choices(options: MethodOptions) -> tuple[int, ...]:
    """Returns the numbers of bits that a site may have.

    The two uniform levels of one bit are the ends of a group's range. For normally distributed
    numbers their squared error is above three times the variance: worse than storing nothing.
    """
    fewest = 1 if options.levels != "uniform" or options.average_bits < 2 else 2
    return tuple(bits for bits in CODE_BITS if bits >= fewest)


def _sampling_variance(recipe: Recipe, model: Decoder, batch: Batch, key: jax.Array) -> float:
    """Returns the gradient's variance, estimated from the halves of a batch; NaN for one row."""
    rows = len(batch["inputs"]) // 2
    if rows == 0:
        return math.nan
    gradient = jax.jit(jax.grad(loss_function(recipe.config, Remat())))
    halves = ({k: x[part] for k, x in batch.items()} for part in (slice(rows), slice(rows, None)))
    return actjax.sampling_variance([gradient(model, half, key) for half in halves])
