"""The storage choices of `--method`, by name."""

import dataclasses
import difflib
from collections.abc import Callable

from actjax import Codec, PointApproximation, RandomizedSVD, RandomProjection
from actjax.codecs.low_rank import Sketch
from models import Storage


@dataclasses.dataclass(frozen=True)
class MethodOptions:
    """What a method can be told. A method ignores what is not its own."""

    rank: int = 32
    """Rank of what `low_rank` and `random_projection` store of each linear input."""
    ratio: float = 1 / 512
    """Share of the tokens that `pamm` stores."""
    tolerance: float = float("inf")
    """`pamm` drops tokens whose relative error is above this; infinite keeps all."""
    power_iterations: int = 0
    """Passes of `low_rank` over its sketch: each costs two thin products and lowers its error."""
    sketch: Sketch = "gaussian"
    """What `low_rank` multiplies by: random normals, or random rows of the activation."""


@dataclasses.dataclass(frozen=True)
class Method:
    """A named choice of what is stored.

    Attributes:
      summary: one line for a user.
      storage: from options to what each site stores.
    """

    summary: str
    storage: Callable[[MethodOptions], Storage]


def _linear_inputs(codec: Codec) -> Storage:
    return Storage(attention_in=codec, attention_out=codec, mlp_in=codec, mlp_out=codec)


METHODS: dict[str, Method] = {
    "exact": Method(
        "our operators, every linear input stored as it is: exact gradients", lambda _: Storage()
    ),
    "remat": Method(
        "jax.checkpoint around each block: exact gradients, a third more compute",
        lambda _: Storage(remat="full"),
    ),
    "pamm": Method(
        "the input of q, k and v as a few tokens, an index and a scale (PAMM): biased",
        lambda o: Storage(attention_in=PointApproximation(o.ratio, tolerance=o.tolerance)),
    ),
    "random_projection": Method(
        "linear inputs times a random matrix (CompAct): unbiased, high variance",
        lambda o: _linear_inputs(RandomProjection(o.rank)),
    ),
    "low_rank": Method(
        "linear inputs as a randomised SVD (Wei et al., Ours): biased, low variance",
        lambda o: _linear_inputs(RandomizedSVD(o.rank, o.power_iterations, o.sketch)),
    ),
}


def storage(method: str, options: MethodOptions) -> Storage:
    """Returns what each site stores under a method.

    Raises:
      ValueError: an unknown method, or options out of range.
    """
    if method not in METHODS:
        near = difflib.get_close_matches(method, METHODS, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"unknown `--method` {method!r}.{hint} There are: {', '.join(METHODS)}.")
    return METHODS[method].storage(options)
