"""The error of a storage choice: its gradient against the exact one, on given weights and text."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from actjax import Codec, Exact
from actjax.choosing.measure import compare
from models import Decoder, StorageChoice
from models.storage import SITES
from train.run.loss import Batch, loss_function
from train.run.recipe import Recipe

WHOLE = "all"
"""Name of all places of a storage choice, beside those of its sites."""


@dataclasses.dataclass(frozen=True)
class GradientError:
    """How far a gradient is from the exact one, over batches and keys.

    Attributes:
      error: root mean square of `‖ĝ - g‖ / ‖g‖`.
      cosine: mean of the cosine of the angle between both.
      bias: root mean square over batches of `‖E[ĝ] - g‖ / ‖g‖`, where the mean is over keys. Codecs
        that draw nothing have one key, and their error is their bias; for one key of others it is
        not known: NaN.
      uncertainty: standard error of `error` from the choice of the batches; NaN for one batch.
    """

    error: float
    cosine: float
    bias: float
    uncertainty: float


Places = Mapping[str, np.ndarray]
"""Where codes are used: by site, [L] bool. All other activations are exact."""


def by_site(storage: StorageChoice, num_layers: int) -> dict[str, Places]:
    """Returns all places of a storage choice (`WHOLE`), and those of each site, if it has several.

    Args:
      storage: what each site stores.
      num_layers: L.
    """
    everywhere = {site: np.ones(num_layers, bool) for site in _lossy(storage)}
    sites = {site: {site: places} for site, places in everywhere.items()}
    return {WHOLE: everywhere, **(sites if len(sites) > 1 else {})}


def _lossy(storage: StorageChoice) -> dict[str, Codec]:
    return {site: codec for site, codec in storage.codecs.items() if not isinstance(codec, Exact)}


def measure(
    recipe: Recipe,
    storage: StorageChoice,
    model: Decoder,
    batches: Iterable[Batch],
    choices: Mapping[str, Places],
    *,
    keys: int = 4,
) -> dict[str, GradientError]:
    """Returns the error of the gradient of all weights where codes are used in some places.

    One program computes all of these gradients, and the exact one. At most four exist at once.

    Args:
      recipe: the run; its compute dtype and its loss are used.
      storage: what each site stores. Its codecs hold no arrays.
      model: the weights.
      batches: batches of tokens; one or more.
      choices: by any names, the places.
      keys: gradients of each batch for codecs that draw random numbers.

    Raises:
      ValueError: no batches or keys, or an exact gradient that is zero or not finite.
    """
    if keys < 1:
        raise ValueError(f"`keys` must be at least 1, got {keys}.")
    gradient = _gradient_at_places(recipe, storage)
    draws = any(codec.needs_key for codec in storage.codecs.values())
    needed = keys if draws else 1
    rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in choices}
    for number, batch in enumerate(batches):
        key = jax.random.fold_in(jax.random.key(recipe.config.seed), number)
        true = gradient({}, model, batch, key)
        size = float(compare(true, true)[0])
        if not 0 < size < math.inf:
            raise ValueError(
                f"the exact gradient on batch {number} has the squared norm {size}: with"
                f" `--compute-dtype {recipe.config.compute_dtype}` the activations of this model"
                " overflow, or no target counts. Try `--compute-dtype float32`, or other text."
            )
        for name, places in choices.items():
            of_keys = (gradient(places, model, batch, k) for k in jax.random.split(key, needed))
            rows[name].append(_of_batch(of_keys, true, size, draws))
    if not all(rows.values()):
        raise ValueError("`batches` must have at least one batch.")
    summary = {}
    for name, of_batches in rows.items():
        squares, biases, cosines = zip(*of_batches, strict=True)
        errors = list(map(math.sqrt, squares))
        summary[name] = GradientError(
            error=math.sqrt(statistics.mean(squares)),
            cosine=statistics.mean(cosines),
            bias=math.sqrt(statistics.mean(biases)),
            uncertainty=statistics.stdev(errors) / math.sqrt(len(errors))
            if len(errors) > 1
            else math.nan,
        )
    return summary


def gradient_by_codecs(recipe: Recipe, storage: StorageChoice) -> Callable[..., Any]:
    """Returns a function from codecs of some sites, keys, model and batch to the gradient.

    Its keys are one key, or a key by site; sites without one have codecs that draw nothing.

    Args:
      recipe: the run; its compute dtype and its loss are used.
      storage: what the other sites store.
    """

    def gradient(codecs: Mapping[str, Any], keys: Any, model: Decoder, batch: Batch) -> Any:
        if isinstance(keys, Mapping):
            keys = {**dict.fromkeys(SITES, next(iter(keys.values()))), **keys}
        chosen = dataclasses.replace(storage, **codecs)
        return jax.grad(loss_function(recipe.config, chosen))(model, batch, keys)

    return gradient


def _gradient_at_places(recipe: Recipe, storage: StorageChoice) -> Callable[..., Any]:
    """Returns a function from places, model, batch and key to the gradient."""
    nowhere = np.zeros(recipe.config.model_config.num_layers, bool)
    lossy = _lossy(storage)
    of_codecs = gradient_by_codecs(recipe, storage)

    @jax.jit
    def gradient(used: dict[str, jax.Array], model: Decoder, batch: Batch, key: jax.Array) -> Any:
        codecs = {site: _Switched(codec, used[site]) for site, codec in lossy.items()}
        return of_codecs(codecs, key, model, batch)

    def at(places: Places, model: Decoder, batch: Batch, key: jax.Array) -> Any:
        return gradient({site: places.get(site, nowhere) for site in lossy}, model, batch, key)

    return at


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class _Switched(Codec, holds_arrays=True):
    """Stores what a codec would decode, or the activation itself.

    So one program has codes in any choice of sites and layers. It saves no memory.

    Attributes:
      codec: the codec. Static.
      on: whether it is used, a bool; in a storage choice [L].
    """

    codec: Codec = dataclasses.field(metadata={"static": True})
    on: Any

    @property
    def biased(self) -> bool:
        """As in `Codec`."""
        return self.codec.biased

    @property
    def needs_key(self) -> bool:
        """As in `Codec`."""
        return self.codec.needs_key

    def encode(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        decoded = lambda: self.codec.decode(self.codec.encode(x, key))  # noqa: E731
        return jax.lax.cond(self.on, decoded, lambda: x)

    def decode(self, code: jax.Array) -> jax.Array:
        return code

    def weight_grad(self, code: jax.Array, dz: jax.Array) -> jax.Array:
        return Exact().weight_grad(code, dz)

    def stored_bytes(self, shape: Sequence[int], dtype: jax.typing.DTypeLike) -> int:
        return self.codec.stored_bytes(shape, dtype)


def _of_batch(
    gradients: Iterable[Any], true: Any, size: float, draws: bool
) -> tuple[float, float, float]:
    """Compares the gradients of several keys with the exact one, whose squared norm is `size`.

    Returns squared relative error and bias, and the cosine. `draws` says whether gradients are
    random, so that a single one does not tell the bias.
    """
    errors, cosines, total = [], [], None
    for got in gradients:
        along, square, apart = (float(x) for x in compare(got, true))
        errors.append(apart / size)
        cosines.append(along / math.sqrt(square * size) if square > 0 else 0.0)
        total = got if total is None else optax.tree.add(total, got)
    count = len(errors)
    error = statistics.mean(errors)
    if count == 1:
        return error, math.nan if draws else error, cosines[0]
    # The mean over a few keys has a variance, which is not bias.
    mean = jax.tree.map(lambda g: g / count, total)
    apart = float(compare(mean, true)[2]) / size
    return error, max(0.0, (count * apart - error) / (count - 1)), statistics.mean(cosines)
