"""Adam with a factored second moment: the mean of each row and of each column of a matrix.

Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (2018), sections
3 and 4: the second moment of a matrix [d, n] is replaced by the product of its row means and its
column means over its mean, d + n numbers instead of d n. The first moment, the bias correction and
the constant decays are those of Adam, so that learning rates carry over.
"""

import dataclasses
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from actjax._core.flax import in_structure_of, without_variables
from actjax._core.paths import map_named, named_leaves
from actjax._math.precision import accumulation_dtype
from actjax.factored.low_rank import is_low_rank
from actjax.formats.four_bit import GROUP, SignedFourBit
from actjax.kernels.adam_4bit.api import adam_4bit
from actjax.kernels.adam_4bit.reference import Means
from actjax.optim.checks import check_parameters
from actjax.optim.layers import densify
from actjax.optim.states.adam_8bit import Hyper
from actjax.optim.states.four_bit import FourBitState, GroupOf, four_bit


class FactoredAdamState(NamedTuple):
    """State of `scale_by_factored_adam`.

    Attributes:
      count: number of updates, int32.
      mu: first moments, in the structure of the parameters; None if `b1` is 0. Those in 4 bits
        are a `SignedFourBit` each.
      rows: means of the squares of each row, [..., d, 1], in the structure of the parameters; the
        whole second moment of parameters without a factored one.
      columns: means of the squares of each column, [..., 1, n], by the path of a parameter with a
        factored second moment.
    """

    count: Any
    mu: Any
    rows: Any
    columns: dict[str, Any]


def scale_by_factored_adam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    eps_squared: float = 1e-30,
    factored: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Returns Adam whose second moments of matrices are factored (Adafactor, Algorithm 4).

    With `s = g² + eps_squared`, `r <- b2 r + (1 - b2) mean_j(s)` and `c <- b2 c + (1 - b2)
    mean_i(s)`, the second moment is `v_ij = r_i c_j / mean(r)`. It is exact for a matrix of rank
    one, and the sums of its rows and of its columns are exact. The update is that of Adam, without
    its bound: for the gradient [[1000, 0], [0, 1]] the last number is 1000 in the first step, since
    the product knows its row and column as small and all else as large. Where gradients are so
    sparse, clip updates (`optax.clip_by_block_rms(1.0)` after it, as Adafactor does).

    State: that of the first moment, and d + n numbers for a matrix [d, n]. Wrap it in `eight_bit`
    or `four_bit` to store the first moment in few bits; with `b1=0` there is none.

    Args:
      b1: decay of the first moment; 0 for none.
      b2: decay of the second moment.
      eps: added to its root.
      eps_squared: added to squares, so that a row of zeros divides by no zero.
      factored: which parameters have a factored second moment: a tree of bool in their structure,
        or a function from the parameters to one. By default those with two or more axes.

    Raises:
      ValueError: a decay outside [0, 1), a negative `eps`, an `eps_squared` of 0; at `init`, a
        factored moment of a parameter with fewer than two axes.
    """
    settings = _FactoredAdam(b1, b2, eps, eps_squared, factored)
    return optax.GradientTransformationExtraArgs(
        cast(Any, settings.init), cast(Any, settings.update)
    )


def scale_by_factored_adam_4bit(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    eps_squared: float = 1e-30,
    factored: Any = None,
    group: int | GroupOf = GROUP,
    min_size: int = 4096,
) -> optax.GradientTransformationExtraArgs:
    """Returns `four_bit(scale_by_factored_adam(...))` on float32, in few passes over memory.

    It computes the same function with the same state, so checkpoints of both are interchangeable.
    On an NVIDIA GPU, decoded moments exist only in registers. Gradients of any dtype are converted
    to float32, and the returned updates are float32.

    Args:
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to its root.
      eps_squared: as for `scale_by_factored_adam`.
      factored: as for `scale_by_factored_adam`.
      group: as for `scale_by_adam_4bit`.
      min_size: moments with fewer elements, and those of vectors, stay in float32.

    Raises:
      ValueError: as for `scale_by_factored_adam` and `scale_by_adam_4bit`.
    """
    name = "scale_by_factored_adam_4bit"
    b1, b2, eps, _ = Hyper.checked(name, b1, b2, eps, 0.0)
    inner = scale_by_factored_adam(b1, b2, eps, eps_squared=eps_squared, factored=factored)
    stored = four_bit(inner, group=group, min_size=min_size)

    def init(params: optax.Params) -> Any:
        check_parameters(name, params)
        return stored.init(jax.tree.map(lambda x: x.astype(jnp.float32), params))

    def update(
        updates: optax.Updates, state: FourBitState, params: Any = None, **extra: Any
    ) -> tuple[optax.Updates, FourBitState]:
        changes, new = inner.update(updates, state.inner, params, **extra)
        return changes, FourBitState(new)

    return optax.GradientTransformationExtraArgs(cast(Any, init), cast(Any, update))


@dataclasses.dataclass(frozen=True)
class _FactoredAdam:
    """Arguments and functions of `scale_by_factored_adam`."""

    b1: float
    b2: float
    eps: float
    eps_squared: float
    factored: Any

    def __post_init__(self) -> None:
        # An array comes from optax.inject_hyperparams, and its value is not known.
        known = {
            name: value
            for name in ("b1", "b2", "eps", "eps_squared")
            if not isinstance(value := getattr(self, name), jax.Array)
        }
        for name in ("b1", "b2"):
            if name in known and not 0 <= known[name] < 1:
                raise ValueError(
                    f"`{name}` of scale_by_factored_adam must be in [0, 1), got {known[name]!r}."
                )
        if not known.get("eps", 0) >= 0:
            raise ValueError(f"`eps` of scale_by_factored_adam must be >= 0, got {self.eps!r}.")
        if not known.get("eps_squared", 1) > 0:
            raise ValueError(
                "`eps_squared` of scale_by_factored_adam must be above 0, got"
                f" {self.eps_squared!r}: the mean of a gradient of zeros divides."
            )

    @property
    def has_first(self) -> bool:
        """Whether there is a first moment."""
        return isinstance(self.b1, jax.Array) or self.b1 != 0

    def init(self, params: optax.Params) -> FactoredAdamState:
        params = without_variables(params)
        check_parameters("scale_by_factored_adam", params)
        which = _which(params, self.factored)

        def zeros(x: Any, shape: tuple[int, ...]) -> jax.Array:
            return jnp.zeros(shape, accumulation_dtype(x.dtype))

        rows = map_named(
            lambda name, x: zeros(x, (*x.shape[:-1], 1) if name in which else x.shape), params
        )
        columns = {
            name: zeros(x, (*x.shape[:-2], 1, x.shape[-1]))
            for name, x in named_leaves(params).items()
            if name in which
        }
        mu = jax.tree.map(lambda x: zeros(x, x.shape), params) if self.has_first else None
        return FactoredAdamState(jnp.zeros((), jnp.int32), mu, rows, columns)

    def update(
        self, updates: optax.Updates, state: FactoredAdamState, params: Any = None, **extra: Any
    ) -> tuple[optax.Updates, FactoredAdamState]:
        del params, extra
        grads = densify(without_variables(updates))
        count = optax.safe_increment(state.count)
        first, second = (1 - jax.lax.pow(jnp.asarray(b), count) for b in (self.b1, self.b2))
        corrections = first if self.has_first else 1, second
        treedef, columns, changes, rows, mus = jax.tree.structure(grads), {}, [], [], []
        old = treedef.flatten_up_to(state.mu) if self.has_first else [None] * treedef.num_leaves
        leaves = named_leaves(grads).items()
        for (name, g), row, m in zip(leaves, treedef.flatten_up_to(state.rows), old, strict=True):
            means = row, state.columns.get(name)
            change, m, row, column = self._step(g, m, *means, corrections)
            if column is not None:
                columns[name] = column
            for new, kept in ((changes, change), (rows, row), (mus, m)):
                new.append(kept)
        changes, rows = treedef.unflatten(changes), treedef.unflatten(rows)
        mu = treedef.unflatten(mus) if self.has_first else None
        new = FactoredAdamState(count, mu, rows, columns)
        return in_structure_of(changes, updates, is_low_rank), new

    def _step(
        self, g: jax.Array, m: Any, row: jax.Array, column: jax.Array | None, corrections: Any
    ) -> tuple[jax.Array, Any, jax.Array, jax.Array | None]:
        """Returns the update of an array, its first moment, and its means of rows and of columns.

        Args:
          g: gradient, in any dtype.
          m: the old first moment, an array or in 4 bits; None for none.
          row: means of rows so far; the whole second moment if it is not factored.
          column: means of columns so far; None if it is not factored.
          corrections: of the first and of the second moment.
        """
        code = m if isinstance(m, SignedFourBit) else None
        if code is not None and column is not None:
            both = jnp.stack(corrections).astype(jnp.float32)
            args = g, code, Means(row, column), both
            change, code, means = adam_4bit(
                *args, b1=self.b1, b2=self.b2, eps=self.eps, eps_squared=self.eps_squared
            )
            return change, code, means.rows, means.columns
        m = m if code is None else code.decode()
        row, column = self._means(g, row, column)
        second = row if column is None else Means(row, column).decode()
        m = _wide(g) if m is None else self.b1 * m + (1 - self.b1) * _wide(g)
        change = m / corrections[0] / (jnp.sqrt(second / corrections[1]) + self.eps)
        return change, m if code is None else code.encode(m), row, column

    def _means(self, g: jax.Array, row: jax.Array, column: jax.Array | None) -> Any:
        """Returns the new means of rows and of columns; arguments as for `_step`."""
        b2 = self.b2

        def mean(x: jax.Array, axis: int) -> jax.Array:
            return jnp.mean(jnp.square(_wide(x)), axis, keepdims=True) + self.eps_squared

        if column is None:
            return b2 * row + (1 - b2) * (jnp.square(_wide(g)) + self.eps_squared), None
        # Each mean reads the gradient itself: XLA for CPUs would write the squares that both share
        # to memory, which takes longer than all else.
        g = jax.lax.optimization_barrier(g)
        row = b2 * row + (1 - b2) * mean(g, -1)
        g, row = jax.lax.optimization_barrier((g, row))
        return row, b2 * column + (1 - b2) * mean(g, -2)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(accumulation_dtype(x.dtype))


def _which(params: Any, factored: Any) -> set[str]:
    """Returns the paths of the parameters whose second moment is factored.

    Raises:
      ValueError: one of them is not a matrix.
    """
    leaves = named_leaves(params)
    if factored is None:
        return {name for name, x in leaves.items() if x.ndim >= 2}
    chosen = factored(params) if callable(factored) else factored
    flags = jax.tree.structure(params).flatten_up_to(chosen)
    which = {name for name, flag in zip(leaves, flags, strict=True) if flag}
    if vectors := [name for name in which if leaves[name].ndim < 2]:
        name = min(vectors)
        raise ValueError(
            f"`factored` of scale_by_factored_adam names `{name}` of shape"
            f" {tuple(leaves[name].shape)}: a second moment is factored into the means of rows and"
            " of columns, which a vector or a scalar lacks. Leave it out."
        )
    return which
