"""Bits chosen for each site of a model, by how much its gradient suffers from their error.

GACT (Liu et al., 2022): the sensitivity of the gradient to each stored tensor is measured on a
batch, bits go where they lower the variance most, and the choice is made again at an interval.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import actjax
from actjax import Estimate
from models import Decoder, Remat, StorageChoice
from models.config import site_width
from models.storage import SITES
from train.options import CODE_BITS, MethodOptions
from train.step import Batch, Recipe, loss_function, step_key

EARLY_CHOICES = (10, 100)
"""Steps after which bits are chosen whatever the interval. Before the first, attention is nearly
uniform, and queries and keys can bear any error: a choice made then ruins what follows."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """Bits for each site, and what was measured.

    Attributes:
      bits: by site.
      compression_variance: what they add to the variance of the gradient.
      sampling_variance: that variance without them.
    """

    bits: dict[str, int]
    compression_variance: float
    sampling_variance: float

    def describe(self) -> str:
        """Returns a line for a reader, with an alarm where compression dominates."""
        bits = ", ".join(f"{site} {n}" for site, n in self.bits.items())
        share = self.compression_variance / max(self.sampling_variance, 1e-30)
        line = f"bits chosen: {bits}; variance of compression {share:.2g} of that of sampling"
        if not share > 1:
            return line
        return (
            f"{line}. [bold yellow]Compression adds more noise to the gradient than the choice of"
            " the batch does[/bold yellow]: raise `--average-bits`, or lower the learning rate."
        )


def is_adaptive(recipe: Recipe) -> bool:
    """Returns whether bits are chosen for each site."""
    return recipe.config.options.average_bits > 0


def is_due(recipe: Recipe, step: int) -> bool:
    """Returns whether bits are to be chosen before the step after `step`."""
    return is_adaptive(recipe) and (
        step in EARLY_CHOICES or step % recipe.config.options.adapt_every == 0
    )


def choose_bits(recipe: Recipe, model: Decoder, batch: Batch, step: int) -> Choice:
    """Returns bits for the sites of a model, chosen on a batch.

    By GACT's Algorithm 1, which takes a gradient for each site and one more: none of them needs
    more memory than a training step that has a gradient of all weights, and two such exist at once.

    Args:
      recipe: the run.
      model: the weights.
      batch: what the gradients are of.
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
    estimate: Estimate = "algorithm 1",
    samples: int = 1,
) -> dict[str, float]:
    """Returns how much the gradient suffers from the error of each adaptive site of a method.

    Args:
      recipe: the run.
      model: the weights.
      batch: what the gradients are of; one of its micro-batches is taken.
      key: randomness, consumed.
      estimate: as in `actjax.sensitivity`.
      samples: likewise.
    """
    config, method = recipe.config, recipe.method
    uniform = method.storage(dataclasses.replace(config.options, offload=False))
    codecs: Any = {site: getattr(uniform, site) for site in method.adaptive}
    gradient = gradient_by_codecs(recipe, uniform)
    micro = _micro(recipe, batch)
    return actjax.sensitivity(
        gradient, codecs, key, model, micro, estimate=estimate, samples=samples
    )


def gradient_by_codecs(recipe: Recipe, storage: StorageChoice) -> Callable[..., Any]:
    """Returns the gradient as a function of the codecs of some sites, their keys, model, batch."""

    def gradient(codecs: Any, keys: Mapping[str, jax.Array], model: Decoder, batch: Batch) -> Any:
        # Sites that draw nothing read no key.
        every = {**dict.fromkeys(SITES, next(iter(keys.values()))), **keys}
        # What a codec holds, as one of a probe does, is the same in all layers.
        count = recipe.model_config.num_layers
        stacked = jax.tree.map(lambda a: jnp.broadcast_to(a, (count, *a.shape)), codecs)
        chosen = dataclasses.replace(storage, **stacked)
        return jax.grad(loss_function(recipe.config, chosen))(model, batch, every)

    return gradient


def _micro(recipe: Recipe, batch: Batch) -> Batch:
    return {k: x[: len(x) // recipe.config.accumulate] for k, x in batch.items()}


def _choices(options: MethodOptions) -> tuple[int, ...]:
    """Returns the numbers of bits that a site may have.

    Uniform levels in one bit are the two ends of a group, of which the error of normally
    distributed numbers is above three times their variance: to drop them would be better.
    """
    fewest = 1 if options.levels == "normal" or options.average_bits < 2 else 2
    return tuple(bits for bits in CODE_BITS if bits >= fewest)


def _sampling_variance(recipe: Recipe, model: Decoder, batch: Batch, key: jax.Array) -> float:
    """Returns the variance of the gradient of a batch from those of its halves; NaN of one row."""
    rows = len(batch["inputs"]) // 2
    if rows == 0:
        return math.nan
    gradient = jax.jit(jax.grad(loss_function(recipe.config, Remat())))
    halves = ({k: x[part] for k, x in batch.items()} for part in (slice(rows), slice(rows, None)))
    return actjax.sampling_variance([gradient(model, half, key) for half in halves])
