"""What a gradient takes and how wrong it is, for each way to run its backward pass."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from actjax._core.nnx_modules import are_parameters
from actjax._jaxpr.products import product_flops
from actjax._jaxpr.variables import is_floating
from actjax.codecs import Codec, Quantized
from actjax.codecs.levels import AnyLevels
from actjax.transforms.candidates import Candidate, Remat, Settings
from actjax.transforms.choice import (
    BITS,
    KEEP,
    MEASURED_BITS,
    Choice,
    Tried,
    codable,
    fewer_codes,
    fewest_bits,
    groups_of,
    rule_of,
    with_bits,
)
from actjax.transforms.opened import open_function
from actjax.transforms.residuals import compressed_function
from actjax.transforms.stored_by import fitted

_MOST_MEASURED = 64
"""With more arrays than these, arrays of a kind are measured together."""
_PARTS = 8
"""Parts of a function that may be computed again, each as well as all before it."""
_ROUNDS = 4
"""How often bits are chosen anew because the error of all arrays together was above the bound."""
_TOP = 255.0
_WIDE = jnp.float32
_SMALLER_HEAP = {"xla_cpu_enable_concurrency_optimized_scheduler": False}
"""XLA's default schedule for CPUs runs what it can at once, and holds arrays for that, whatever the
program says. The other one tells what a program needs."""


Memory = Callable[..., int]
"""From a function and its arguments to the bytes of its temporaries."""


@dataclasses.dataclass(frozen=True)
class _Program:
    """A compiled gradient.

    Attributes:
      run: the compiled function.
      memory: bytes of its temporaries.
      products: operations of its matrix products.
    """

    run: Any
    memory: int
    products: float


class Loss:
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
            if not has_aux:
                return output
            if not isinstance(output, tuple | list) or len(output) != 2:
                raise ValueError(
                    "`fun` must return a floating point scalar and auxiliary data, got one"
                    f" {type(output).__name__}: pass has_aux=False."
                )
            return output[0]

        self._value = value
        self._check(jax.eval_shape(value, *opened.args), has_aux)

    @staticmethod
    def _check(shape: Any, has_aux: bool) -> None:
        if hasattr(shape, "shape") and shape.shape == () and is_floating(shape):
            return
        text = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", shape)
        raise ValueError(
            f"`fun` must return a floating point scalar{' and auxiliary data' if has_aux else ''},"
            f" got {text}: return a mean, or pass has_aux={not has_aux}."
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
        given = jax.tree.unflatten(self._treedef, self.leaves)
        return product_flops(jax.make_jaxpr(self._value)(*given).jaxpr)

    def candidates(self, remat: Remat | None) -> list[Candidate]:
        """Returns the arrays that a rule decides on."""
        found: dict[str, Candidate] = {}

        def record(what: Candidate) -> None:
            found[what.label] = what

        jax.eval_shape(self.gradient(Settings(record, remat=remat)), self.leaves)
        return list(found.values())


class Measuring:
    """Compiles and runs the gradient of a loss on one batch."""

    def __init__(self, loss: Loss, codec: Quantized, memory: Memory | None = None) -> None:
        """Takes a loss with its arguments.

        Args:
          loss: the loss.
          codec: how arrays are stored; its bits are chosen.
          memory: tells what a gradient takes; None for what the compiler says here.
        """
        self.gradient, self._leaves, self._codec = loss.gradient, loss.leaves, codec
        self._compile = functools.partial(_compiled, memory_of=memory)
        self._candidates = functools.cache(loss.candidates)
        self._forward_products = loss.products()
        self._exact: list[jax.Array] = []

    def ways(
        self, error: float, budget: int | None, remat: bool, offload: bool
    ) -> Iterator[Choice]:
        """Yields choices with what was measured of them, those first that compute least again.

        Args:
          error: the largest relative error of the gradient.
          budget: of the device's memory, in bytes; only for which of the ways are tried.
          remat: whether segments may be computed again.
          offload: whether codes may be kept on the host.
        """
        exact = self._compile(self.gradient(None), self._leaves)
        tried = Tried("exact", exact.memory, 0.0, 0.0)
        yield Choice("exact", {}, False, False, False, (tried,))
        self._exact_products = exact.products
        settings = Settings(_keep, remat=Remat())
        again = self._compile(self.gradient(settings), self._leaves) if remat else exact
        # The way that takes less memory computes the gradient that the others are compared with.
        self._exact = min((exact, again), key=lambda p: p.memory).run(self._leaves)
        if not all(jnp.isfinite(g).all() for g in self._exact):
            raise ValueError(
                "compress: the exact gradient of the measured batch is not finite, so no error can"
                " be measured against it: measure on a batch without nan and inf, after steps whose"
                " loss is finite."
            )
        yield self._with_codes("codes", None, error, False)
        if remat:
            tried = Tried("remat", again.memory, 0.0, self._recomputed(again))
            if budget is not None and again.memory <= budget:
                yield from self._in_part(budget, again.products)
            yield Choice("remat", {}, True, False, False, (tried,))
            yield self._with_codes("remat and codes", Remat(codes=True), error, False)
        if offload and budget is not None:
            yield self._with_codes("codes on the host", None, error, True)
            if remat:
                yield self._with_codes("remat and codes on the host", Remat(True), error, True)

    def untouched(self) -> float:
        """Returns the share of the parameters in arrays whose gradient is zero on the batch."""
        zero = sum(g.size for g in self._exact if not jnp.any(g))
        return zero / sum(g.size for g in self._exact) if zero else 0.0

    def _in_part(self, budget: int, most: float) -> Iterator[Choice]:
        """Yields the way that computes least again within a budget, if it is less than `most`."""
        best: tuple[float, _Program] | None = None
        low, high = 0, _PARTS
        while high - low > 1:
            middle = (low + high) // 2
            settings = Settings(_keep, remat=Remat(share=middle / _PARTS))
            program = self._compile(self.gradient(settings), self._leaves)
            if program.memory > budget:
                low = middle
                continue
            high = middle
            if program.products < most:
                best = middle / _PARTS, program
        if best is not None:
            share, program = best
            tried = Tried("remat in part", program.memory, 0.0, self._recomputed(program))
            yield Choice(tried.name, {}, True, False, False, (tried,), share)

    def arrays_of(self, choice: Choice) -> tuple[tuple[Candidate, int], ...]:
        """Returns the arrays that a choice stores, with the bytes that each takes in a layer."""
        result = []
        for what in self._candidates(choice.remat_settings):
            bits, nbytes = choice.bits.get(what.label, KEEP), what.nbytes
            if bits != KEEP:
                codec = with_bits(self._codec, bits)
                if fitted(codec, what.shape, what.dtype) is not None:
                    nbytes = codec.stored_bytes(codec.grouped_shape(what.shape), what.dtype)
            result.append((what, nbytes))
        return tuple(result)

    def _with_codes(self, name: str, remat: Remat | None, error: float, offload: bool) -> Choice:
        """Chooses bits for one way, and measures it."""
        found = codable(self._candidates(remat))
        bits = self._choose(found, remat, error)
        while True:
            settings = Settings(rule_of(bits, self._codec, offload), remat=remat)
            program = self._compile(self.gradient(settings), self._leaves)
            got = self._error(program.run(self._leaves))
            # The bits were chosen with codes of 8 bits in place of what is kept, and with uniform
            # levels, so the error may still be above the bound. Each round stores more exactly.
            if got <= error or not any(bits.values()):
                break
            bits = fewer_codes(bits)
        tried = Tried(name, program.memory, got, self._recomputed(program))
        return Choice(name, bits, remat is not None, remat is not None, offload, (tried,))

    def _choose(
        self, found: Sequence[Candidate], remat: Remat | None, error: float
    ) -> dict[str, int]:
        """Returns bits for arrays, by the error of the gradient for each of them."""
        groups = groups_of(found, _MOST_MEASURED)
        number = {c.label: i for i, group in enumerate(groups) for c in group}
        if not groups:
            return {}

        def gradient(tops: jax.Array, leaves: Any) -> list[jax.Array]:
            def rule(what: Candidate) -> Codec | None:
                i = number.get(what.label)
                return None if i is None else AnyLevels(tops[i], self._codec)

            return self.gradient(Settings(rule, remat=remat))(leaves)

        highest = np.full(len(groups), _TOP, np.float32)
        run = _compiled(gradient, highest, self._leaves).run
        error_at = lambda tops: self._error(run(tops, self._leaves))  # noqa: E731
        base = error_at(highest) ** 2
        variances, sizes = {}, {}
        for i, group in enumerate(groups):
            tops = highest.copy()
            tops[i] = 2.0**MEASURED_BITS - 1
            # What rounding leaves of a difference of nearly equal numbers is not zero.
            variance = max(error_at(tops) ** 2 - base, 1e-6 * base, 1e-30)
            total = sum(c.size * c.layers for c in group)
            for c in group:
                sizes[c.label] = c.size * c.layers
                variances[c.label] = variance * sizes[c.label] / total
        bits: dict[str, int] = {}
        scale = 1.0
        for _ in range(_ROUNDS):
            scaled = {name: v * scale for name, v in variances.items()}
            bits = fewest_bits(scaled, sizes, error**2)
            fewest = [min(bits[c.label] or max(BITS) for c in group) for group in groups]
            got = error_at(np.asarray([2.0**n - 1 for n in fewest], np.float32))
            if got <= error or not math.isfinite(got):
                break
            scale *= (got / error) ** 2 * 1.05
        return bits

    def _error(self, gradient: Sequence[jax.Array]) -> float:
        return float(gradient_error(gradient, self._exact))

    def _recomputed(self, program: _Program) -> float:
        """Returns the products that are computed again, as a share of the forward pass."""
        again = max(0.0, program.products - self._exact_products)
        return round(again / max(self._forward_products, 1.0), 3)


def _keep(_: Candidate) -> None:
    """A rule that keeps everything."""


def _compiled(fun: Callable[..., Any], *args: Any, memory_of: Memory | None = None) -> _Program:
    traced = jax.jit(fun).trace(*args)
    options: Any = _SMALLER_HEAP if jax.default_backend() == "cpu" else None
    compiled = traced.lower().compile(options)
    if memory_of is None:
        analysis: Any = compiled.memory_analysis()
        memory = analysis.temp_size_in_bytes
    else:
        memory = memory_of(fun, *args)
    return _Program(compiled, memory, product_flops(traced.jaxpr.jaxpr))


_LEAST_LEAF = 0.01
"""Root mean square of an array's gradient, over that of the whole, below which it counts as zero:
that of the biases of keys in attention is nothing but rounding."""


@jax.jit
def gradient_error(gradient: Sequence[jax.Array], exact: Sequence[jax.Array]) -> jax.Array:
    """Returns the relative error of a gradient.

    The larger of two: of the whole gradient, `‖g - g_exact‖ / ‖g_exact‖`, and of its arrays, each
    over its own norm, as an optimizer such as Adam sees them: the root mean square over all
    parameters.

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
    # Of a gradient that is zero everywhere, any difference is an error.
    whole = jnp.where(total > 0, jnp.sum(wrong) / total, jnp.sum(wrong) > 0)
    return jnp.sqrt(jnp.maximum(whole, jnp.where(total > 0, by_array, 0)))
