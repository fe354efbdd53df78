"""The effect of compression on a gradient: its sensitivity to each stored array, and its error."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from actjax._core.nnx_modules import are_parameters
from actjax.choosing.allocate import error_of_bits
from actjax.codecs import Quantized
from actjax.residuals.arrays_alone import open_function
from actjax.residuals.candidates import Candidate, Recompute, Settings
from actjax.residuals.function import compressed_function
from actjax.residuals.graph.products import product_flops
from actjax.residuals.graph.variables import is_array, is_floating

Gradient = Callable[..., Any]
"""From `{name: codec}`, `{name: key}` and further arguments to a gradient, a pytree of arrays."""
_WIDE = jnp.float32


def sensitivity(
    gradient: Gradient,
    codecs: Mapping[str, Quantized],
    key: jax.Array,
    *args: Any,
    samples: int = 4,
) -> dict[str, float]:
    """Returns `c_l` for each stored tensor: the variance it adds to the gradient, over `S(b_l)`.

    GACT's Algorithm 1: `½ ‖g_0 - g_1‖² / S(b_l)` for two gradients that differ only in the random
    rounding of tensor l. It takes `samples (L + 1)` gradients for L tensors and includes every
    effect of the error.

    Args:
      gradient: the gradient on a batch, a function of `{name: codec}`, `{name: key}` and `args`. It
        passes codecs and keys to the operators, or to `compress_residuals`, that store these
        tensors. It is jitted here.
      codecs: how each tensor is stored. The measurement uses uniform levels and stochastic
        rounding, which the theory assumes, instead of those of the codec.
      key: randomness of the estimate; consumed.
      *args: further arguments of `gradient`, such as parameters and a batch.
      samples: number of estimates to average.

    Raises:
      ValueError: no samples, or no codecs.
      TypeError: a codec that is not a `Quantized`.
    """
    if samples < 1 or not codecs:
        raise ValueError(
            f"`samples` must be at least 1 and `codecs` not empty, got {samples} and {codecs}."
        )
    return Sensitivity(gradient, codecs)(key, *args, samples=samples)


class Sensitivity:
    """As `sensitivity`; it is compiled once for all calls."""

    def __init__(self, gradient: Gradient, codecs: Mapping[str, Quantized]) -> None:
        """As `sensitivity`."""
        for name, codec in codecs.items():
            if not isinstance(codec, Quantized):
                raise TypeError(
                    f"`codecs` of sensitivity must be Quantized, got {codec!r} for {name}."
                )
        random = {
            name: dataclasses.replace(codec, rounding="stochastic", levels="uniform")
            for name, codec in codecs.items()
        }
        self._run = jax.jit(lambda keys, *args: gradient(random, keys, *args))
        self._errors = {name: error_of_bits(codec.bits) for name, codec in codecs.items()}

    def __call__(self, key: jax.Array, *args: Any, samples: int = 1) -> dict[str, float]:
        """As `sensitivity`."""
        totals = dict.fromkeys(self._errors, 0.0)
        for first, second in _pairs_of_keys(key, tuple(self._errors), samples):
            base = self._run(first, *args)
            # In sequence: at most two gradients exist at once.
            for name, error in self._errors.items():
                other = self._run({**first, name: second[name]}, *args)
                variance = float(squared_distance(base, other)) / 2
                totals[name] += variance / error / samples
        return totals


@functools.partial(jax.jit, static_argnums=(1, 2))
def _pairs_of_keys(key: jax.Array, names: tuple[str, ...], samples: int) -> Any:
    """Returns two keys for each name, as two dictionaries, for each sample."""
    return [
        [dict(zip(names, jax.random.split(k, len(names)), strict=True)) for k in pair]
        for pair in map(jax.random.split, jax.random.split(key, samples))
    ]


def sampling_variance(gradients: Sequence[Any]) -> float:
    """Returns the variance of the mean of gradients of independent batches.

    Args:
      gradients: two or more pytrees of arrays.

    Raises:
      ValueError: fewer than two gradients.
    """
    count = len(gradients)
    if count < 2:
        raise ValueError(f"`gradients` must be two or more, got {count}.")
    mean = _mean(gradients)
    spread = sum(float(squared_distance(g, mean)) for g in gradients)
    return spread / (count * (count - 1))


@jax.jit
def _mean(gradients: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *g: sum(g) / len(g), *gradients)


@jax.jit
def squared_distance(gradient: Any, other: Any) -> jax.Array:
    """Returns `‖gradient - other‖²`, in float32."""
    return _sum(jnp.sum((x - y) ** 2) for x, y in _wide(gradient, other))


@jax.jit
def compare(gradient: Any, exact: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns `<gradient, exact>`, `‖gradient‖²` and `‖gradient - exact‖²`, in float32."""
    pairs = _wide(gradient, exact)
    return (
        _sum(jnp.sum(x * y) for x, y in pairs),
        _sum(jnp.sum(x * x) for x, _ in pairs),
        _sum(jnp.sum(jnp.square(x - y)) for x, y in pairs),
    )


def _wide(gradient: Any, other: Any) -> list[tuple[jax.Array, jax.Array]]:
    """Returns the arrays of two gradients, pair by pair, in float32."""
    pairs = zip(jax.tree.leaves(gradient), jax.tree.leaves(other), strict=True)
    return [(x.astype(_WIDE), y.astype(_WIDE)) for x, y in pairs]


def _sum(terms: Any) -> jax.Array:
    return sum(terms, jnp.zeros(()))


_LEAST_LEAF = 0.01
"""Root mean square of an array's gradient, over that of the whole, below which it counts as zero:
that of the biases of keys in attention is nothing but rounding."""


@jax.jit
def worst_error(gradient: Sequence[jax.Array], exact: Sequence[jax.Array]) -> jax.Array:
    """Returns the larger of two relative errors of a gradient.

    They are those of the whole gradient, `‖g - g_exact‖ / ‖g_exact‖`, and of its
    arrays, each over its own norm, as an optimizer such as Adam sees them: the root mean square
    over all parameters.

    Args:
      gradient: arrays.
      exact: arrays.
    """
    pairs = [(x.astype(_WIDE), y.astype(_WIDE)) for x, y in zip(gradient, exact, strict=True)]
    wrong = jnp.stack([jnp.sum((x - y) ** 2) for x, y in pairs])
    norms = jnp.stack([jnp.sum(y**2) for _, y in pairs])
    shares = jnp.asarray([y.size for _, y in pairs]) / sum(y.size for _, y in pairs)
    total = jnp.sum(norms)
    least = _LEAST_LEAF**2 * shares * total
    by_array = jnp.sum(shares * wrong / jnp.maximum(norms, least))
    # If the exact gradient is zero everywhere, any difference is an error.
    is_wrong = (jnp.sum(wrong) > 0).astype(_WIDE)
    overall = jnp.where(total > 0, jnp.sum(wrong) / total, is_wrong)
    return jnp.sqrt(jnp.maximum(overall, jnp.where(total > 0, by_array, 0)))


class BoundLoss:
    """A loss and its arguments, as a function of arrays.

    Attributes:
      leaves: its arrays.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        args: tuple[Any, ...],
        argnums: tuple[int, ...],
        has_aux: bool,
    ) -> None:
        """Takes a loss and its arguments, as `actjax.compress`.

        Raises:
          ValueError: an argument that is not there or has nothing to differentiate, or a loss that
            is not a scalar.
        """
        if any(not 0 <= i < len(args) for i in argnums):
            raise ValueError(f"`argnums` is {argnums}, but there are {len(args)} arguments.")
        opened = open_function(fun, args, "compress")
        paths, self._treedef = jax.tree_util.tree_flatten_with_path(opened.args)
        self.leaves = [leaf for _, leaf in paths]
        parameters = are_parameters(opened.args)
        self._wrt = [
            i
            for i, (path, leaf) in enumerate(paths)
            if path[0].idx in argnums and is_floating(leaf) and parameters[i]
        ]
        if not self._wrt:
            raise ValueError(
                f"`argnums` is {argnums}, and these arguments have no floating point array to"
                " differentiate in."
            )

        def value(*args: Any) -> jax.Array:
            output = opened.fun(*args)[0]
            if has_aux and (not isinstance(output, tuple | list) or len(output) != 2):
                raise ValueError(
                    "`fun` must return a floating point scalar and auxiliary data, got one"
                    f" {type(output).__name__}: pass has_aux=False."
                )
            loss: Any = output[0] if has_aux else output
            leaves: list[Any] = jax.tree.leaves(loss)
            # A named array of haliax, for example, is a node.
            is_node = len(leaves) == 1 and not isinstance(loss, tuple | list | dict)
            scalar: Any = leaves[0] if is_node else loss
            self._check(scalar, has_aux)
            return scalar

        self._value = value
        jax.eval_shape(value, *opened.args)

    @staticmethod
    def _check(loss: Any, has_aux: bool) -> None:
        if is_array(loss) and loss.shape == () and is_floating(loss):
            return
        text = jax.tree.map(
            lambda x: f"{x.dtype}{list(x.shape)}" if is_array(x) else type(x).__name__, loss
        )
        raise ValueError(
            f"`fun` must return a floating point scalar{' and auxiliary data' if has_aux else ''},"
            f" got {' '.join(str(text).split())}: return a mean, or pass has_aux={not has_aux}."
        )

    def gradient(
        self, settings: Settings | None, key: Any = None
    ) -> Callable[[Sequence[Any]], list[jax.Array]]:
        """Returns a function from all leaves to the gradient.

        Args:
          settings: of the residuals; None for the function as it is.
          key: randomness of the encoding.
        """
        fun = self._value
        if settings is not None:
            fun = compressed_function(fun, settings, key=key)

        def of_chosen(chosen: Sequence[jax.Array], leaves: Sequence[Any]) -> jax.Array:
            merged = list(leaves)
            for i, x in zip(self._wrt, chosen, strict=True):
                merged[i] = x
            return fun(*jax.tree.unflatten(self._treedef, merged))

        return lambda leaves: jax.grad(of_chosen)([leaves[i] for i in self._wrt], leaves)

    def products(self) -> float:
        """Returns the operations of the matrix products of the loss."""
        args = jax.tree.unflatten(self._treedef, self.leaves)
        return product_flops(jax.make_jaxpr(self._value)(*args).jaxpr)

    def candidates(self, remat: Recompute | None) -> list[Candidate]:
        """Returns the arrays that a rule decides on and that the gradient needs."""
        arrays: dict[str, Candidate] = {}

        def record(what: Candidate) -> None:
            if what.dtype != "bool":  # A bit each: no rule decides on it.
                arrays[what.label] = what

        settings = Settings(lambda _: None, remat=remat, used=record)
        jax.eval_shape(self.gradient(settings), self.leaves)
        return list(arrays.values())
