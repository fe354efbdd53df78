"""The error of a storage choice: its gradient against the exact one, on given weights and text."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from actjax import Exact
from models import Decoder, Storage, StorageChoice
from train.step import Batch, Recipe, loss_function

WHOLE = "all"
"""Name of the storage choice itself, beside those of its sites."""


@dataclasses.dataclass(frozen=True)
class GradientError:
    """How far a gradient is from the exact one, over batches and keys.

    Attributes:
      error: root mean square of `‖ĝ - g‖ / ‖g‖`.
      cosine: mean of the cosine of the angle between both.
      bias: root mean square over batches of `‖E[ĝ] - g‖ / ‖g‖`, where the mean is over keys. Codecs
        that draw nothing have one key, and their error is their bias.
      uncertainty: standard error of `error` from the choice of the batches; NaN for one batch.
    """

    error: float
    cosine: float
    bias: float
    uncertainty: float


def by_site(storage: StorageChoice) -> dict[str, StorageChoice]:
    """Returns a storage choice and, for each site that it does not store exactly, that site alone.

    Args:
      storage: what each site stores. Its codecs hold no arrays.
    """
    lossy = [name for name, codec in storage.codecs.items() if not isinstance(codec, Exact)]
    found = {WHOLE: storage}
    for site in lossy if len(lossy) > 1 else ():
        others: Any = {name: Exact() for name in lossy if name != site}
        found[site] = dataclasses.replace(storage, **others)
    return found


def measure(
    recipe: Recipe,
    storages: Mapping[str, StorageChoice],
    model: Decoder,
    batches: Iterable[Batch],
    *,
    keys: int = 4,
) -> dict[str, GradientError]:
    """Returns the error of the gradient of all weights, for each of some storage choices.

    Three gradients exist at once.

    Args:
      recipe: the run; its compute dtype and its loss are used.
      storages: storage choices, by any names.
      model: the weights.
      batches: batches of tokens; one or more.
      keys: gradients of each batch for codecs that draw random numbers.

    Raises:
      ValueError: no batches or keys, or an exact gradient that is not finite or zero.
    """
    if keys < 1:
        raise ValueError(f"`keys` must be at least 1, got {keys}.")
    exact = _gradient(recipe, Storage())
    gradients = {name: _gradient(recipe, storage) for name, storage in storages.items()}
    found: dict[str, list[_OfBatch]] = {name: [] for name in storages}
    for number, batch in enumerate(batches):
        key = jax.random.fold_in(jax.random.key(recipe.config.seed), number)
        true = exact(model, batch, key)
        size = float(_products(true, true)[0])
        if not 0 < size < math.inf:
            raise ValueError(
                f"the exact gradient on batch {number} has the squared norm {size}: with"
                f" `--compute-dtype {recipe.config.compute_dtype}` the activations of this model"
                " overflow, or no target counts. Try `--compute-dtype float32`, or other text."
            )
        for name, gradient in gradients.items():
            draws = any(codec.needs_key for codec in storages[name].codecs.values())
            of_keys = jax.random.split(key, keys if draws else 1)
            found[name].append(_of_batch(gradient, model, batch, of_keys, true, size))
    if not all(found.values()):
        raise ValueError("`batches` must have at least one batch.")
    return {name: _summary(rows) for name, rows in found.items()}


@dataclasses.dataclass(frozen=True)
class _OfBatch:
    """Squared relative error and bias, and cosine, on one batch."""

    error: float
    bias: float
    cosine: float


def _of_batch(
    gradient: Any, model: Decoder, batch: Batch, keys: jax.Array, true: Any, size: float
) -> _OfBatch:
    errors, cosines, total = [], [], None
    for key in keys:
        got = gradient(model, batch, key)
        along, square, apart = (float(x) for x in _products(got, true))
        errors.append(apart / size)
        cosines.append(along / math.sqrt(square * size) if square > 0 else 0.0)
        total = got if total is None else jax.tree.map(jnp.add, total, got)
    count = len(errors)
    error = statistics.mean(errors)
    if count == 1:
        return _OfBatch(error, error, cosines[0])
    mean = jax.tree.map(lambda g: g / count, total)
    # The mean over a few keys has a variance, which is not bias.
    apart = float(_products(mean, true)[2]) / size
    return _OfBatch(
        error, max(0.0, (count * apart - error) / (count - 1)), statistics.mean(cosines)
    )


def _summary(rows: Sequence[_OfBatch]) -> GradientError:
    error = math.sqrt(statistics.mean(row.error for row in rows))
    each = [math.sqrt(row.error) for row in rows]
    spread = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else math.nan
    return GradientError(
        error=error,
        cosine=statistics.mean(row.cosine for row in rows),
        bias=math.sqrt(statistics.mean(row.bias for row in rows)),
        uncertainty=spread,
    )


def _gradient(recipe: Recipe, storage: StorageChoice) -> Any:
    return jax.jit(jax.grad(loss_function(recipe.config, storage)))


@jax.jit
def _products(got: Any, true: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns `<got, true>`, `‖got‖²` and `‖got - true‖²`, in float32."""
    sums = [jnp.zeros(()) for _ in range(3)]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(true), strict=True):
        x, y = a.astype(jnp.float32), b.astype(jnp.float32)
        parts = (x * y, x * x, jnp.square(x - y))
        sums = [total + jnp.sum(part) for total, part in zip(sums, parts, strict=True)]
    along, square, apart = sums
    return along, square, apart
