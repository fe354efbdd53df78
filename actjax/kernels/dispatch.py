"""The choice of the implementation of a kernel, in one place for all kernels."""

import contextlib
import dataclasses
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol, get_args

import jax
from jax.core import Tracer

from actjax._gpu import is_before_ampere
from actjax._shards import is_bound, is_partitioned, on_shards
from actjax.formats.code import QuantizedCode
from actjax.kernels import primitive
from actjax.kernels.layers import values_of
from actjax.kernels.tail import Tail

Implementation = Literal["reference", "mosaic", "triton"]
"""`reference` is plain JAX, fused by XLA; `mosaic` is compiled by Mosaic for a TPU, and elsewhere
run slowly; `triton` is written in Triton for an NVIDIA GPU, and needs jax-triton."""

_BACKENDS = {
    "mosaic": ("jax.experimental.pallas.tpu", f"which JAX {jax.__version__} does not have"),
    "triton": ("jax_triton", "which is not installed (`pip install 'actjax[gpu]'`)"),
}
"""The module that each implementation needs, and why it may be missing. JAX may remove one."""

_DEFAULTS: dict[str | None, Implementation] = {
    "cuda": "triton",
    "tpu": "mosaic",
}
"""The implementation of each platform."""


def _lacks(implementation: Implementation) -> str | None:
    """Returns why the backend of an implementation cannot be used; None if it can."""
    if implementation == "triton" and is_before_ampere():
        return "needs an NVIDIA GPU from Ampere on (compute capability 8.0), as Triton does"
    return _missing(implementation)


@functools.cache
def _missing(implementation: Implementation) -> str | None:
    """Returns which module an implementation needs that is not installed; None if none."""
    if implementation not in _BACKENDS:
        return None
    module, reason = _BACKENDS[implementation]
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        return f"needs {module}, {reason}"
    except Exception as error:  # A version that does not go with this one of JAX fails in any way.
        return f"needs {module}, which fails with JAX {jax.__version__} ({error}): install another"
    return None


@functools.cache  # One line in each process.
def _tell_that_definitions_run(platform: str) -> None:
    warnings.warn(
        f"On {platform} some kernels of actjax are their definitions in plain JAX, since a program"
        f" for it {_lacks(_DEFAULTS[platform])}.",
        stacklevel=2,
    )


class Compute(Protocol):
    """Computes a kernel that is a part of another one."""

    def __call__(self, kernel: "Kernel", *args: Any, into: Any = None, **options: Any) -> Any:
        """Returns `kernel(*args, **options)`; `into` as for `primitive.Computation.compute`."""
        ...


_asked: Any = jax.make_user_context(None)


@contextlib.contextmanager
def use(implementation: Implementation | None) -> Iterator[None]:
    """Context in which kernels use one implementation where they can.

    It applies to functions that this thread traces within the context. A function that `jax.jit`
    has compiled before is compiled again. A kernel that cannot take its arguments falls back to the
    reference; an implementation that is passed to a call raises instead. On a CPU, kernels of GPUs
    are the reference.

    Args:
      implementation: one of `Implementation`; None for the best one that applies, the default.

    Raises:
      ValueError: an unknown name, or an implementation whose backend is missing: "triton" without
        jax-triton or on a GPU older than Ampere.
    """
    _check(implementation)
    if implementation is not None and (reason := _lacks(implementation)):
        raise ValueError(f"`implementation` {implementation!r} {reason}.")
    with _asked(implementation):
        yield


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A function with a definition, and a faster program for some arguments and devices.

    It is called as `kernel(*args, implementation=None, **options)`, with pytrees of arrays and
    hashable options by name. It is one equation of a traced program, which can be lowered for any
    platform: where that is an NVIDIA GPU or a TPU, and the arguments allow it, the program for it
    is imported, traced and used, elsewhere the definition. Derivatives are those of the definition.

    Where XLA partitions the program over devices (under `jax.set_mesh`), each device computes the
    kernel for its part of the arrays, as `dims` tells. A kernel that draws random numbers by their
    place in the whole array is the definition there. So are all kernels for arrays with explicit
    shardings, and within a `jax.shard_map` without `check_vma=False` or over some of the mesh axes.
    (Shardings over automatic axes without `jax.set_mesh` are not known during tracing.)

    A program is the name of a module, which is imported where the program is chosen, since it needs
    a backend that may be missing. The module has a function with the name of the definition,
    `program(*args, interpret, **options)`, and `refuses(*args, **options)`, which returns why the
    program cannot take the arguments; None if it can.

    Attributes:
      name: name in messages.
      reference: the definition.
      dims: `dims(result, *args, **options)` returns the `Dims` of the arguments, a tuple, and those
        of the result, whose shapes are given; None if parts cannot be computed apart.
      mosaic: the program for TPUs; None if there is none. XLA cannot divide it over devices.
      triton: the program in Triton for NVIDIA GPUs, without the argument `interpret`; None if there
        is none. `jax.vmap` runs it once for each entry of the mapped axis.
      converts: whether the first argument is converted to float32, so that one of 16 bits can take
        the place of the same numbers in float32. With `reads_layers` it may be a `Scaled`.
      addend: the number of an argument that may be an array instead of None, which is then added
        to a result, and the number of this result; None if there is none.
      reads_layers: whether arguments of programs for GPUs may be `Layer`s of stacks.
      writes_layers: as for `primitive.Computation`; "results" if they have the argument `into`.
      parts: `parts(compute, *args, into, **options)` computes the function by other kernels, where
        no program takes the arguments; `compute` is a `Compute`. None for the definition.
      takes_tail: whether `triton` has the argument `tail`, a `Tail` behind the first result, and
        then returns what `Tail.on_arrays` returns in the place of this result. Its module has
        `refuses_tail`, as `refuses`.
    """

    name: str
    reference: Callable[..., Any]
    dims: Callable[..., tuple[tuple, Any] | None]
    mosaic: str | None = None
    triton: str | None = None
    addend: tuple[int, int] | None = None
    converts: bool = False
    reads_layers: bool = False
    writes_layers: primitive.Writes = "nothing"
    parts: Callable[..., Any] | None = None
    takes_tail: bool = False

    def __call__(
        self, *args: Any, implementation: Implementation | None = None, **options: Any
    ) -> Any:
        """Computes the function.

        Args:
          *args: pytrees of arrays.
          implementation: the implementation to use; None for the best one that applies.
          **options: static arguments.

        Raises:
          ValueError: the implementation is unknown or cannot take these arguments.
        """
        chosen = self.chosen(implementation, args, options)
        if chosen == "reference":
            return self.reference(*args, **options)
        call = _call_on_shards if is_partitioned(args) else primitive.call
        return call(self, chosen, tuple(sorted(options.items())), *args)

    def chosen(
        self, passed: Implementation | None, args: tuple, options: dict[str, Any]
    ) -> Implementation | None:
        """Returns an implementation that can take the arguments; None for that of the platform.

        Args:
          passed: that of the call; None for the one that `use` asks for.
          args: pytrees of arrays.
          options: static arguments.

        Raises:
          ValueError: as for a call.
        """
        _check(passed)
        asked = passed or _asked.value
        if is_bound(args):
            return "reference"
        if asked is None or asked == "reference":
            return asked
        reason = self.refusal(asked, args, options)
        if asked == "triton" and _is_now_on_a_cpu(args):
            reason = reason or "is compiled for NVIDIA GPUs, and this runs on a CPU"
        elif self.parts is not None and passed is None:
            return asked  # Its parts may have such a program.
        if reason is None:
            return asked
        if passed is not None:
            raise ValueError(
                f"`implementation` {passed!r} of {self.name} {reason}: use 'reference'."
            )
        return "reference"

    def refusal(
        self, implementation: Implementation, args: tuple, options: dict[str, Any]
    ) -> str | None:
        """Returns why an implementation other than "reference" cannot take the arguments."""
        module = self._module(implementation)
        if module is None:
            return "has no such program"
        return _lacks(implementation) or importlib.import_module(module).refuses(*args, **options)

    def compute(
        self,
        platform: str | None,
        chosen: Implementation | None,
        static: primitive.Static,
        *args: Any,
        into: Any = None,
    ) -> Any:
        """Computes the function in a program that is lowered for a platform.

        Args:
          platform: "cuda" or "tpu"; None for any other.
          chosen: result of `chosen`.
          static: the options, as sorted items.
          *args: pytrees of arrays; the last may be a `Tail`.
          into: as for `primitive.Computation.compute`.
        """
        args, tail = (args[:-1], args[-1]) if args and isinstance(args[-1], Tail) else (args, None)
        if self.parts is not None and not self._is_whole(platform, chosen, args, dict(static)):
            compute = functools.partial(_compute_part, platform, chosen)
            return self.parts(compute, *args, into=into, **dict(static))
        if chosen is None:
            chosen = self._default(platform, args, dict(static))
        module = self._module(chosen)
        by_layer = chosen == "triton"
        if tail is not None and not (by_layer and self._takes(tail, chosen)):
            first, *others = self.compute(platform, chosen, static, *args)
            return tail.on_arrays(first), *others
        if not (by_layer and self.reads_layers):
            args = values_of(args)
        if module is None or (chosen == "triton" and platform != "cuda"):
            return primitive.traced_once(self.reference, static, *args)
        program = getattr(importlib.import_module(module), self.reference.__name__)
        by_layer = by_layer and self.writes_layers == "results"
        arrays = {"into": into} if by_layer and jax.tree.leaves(into) else {}
        arrays |= {} if tail is None else {"tail": tail}
        if chosen == "triton":
            one = jax.custom_batching.sequential_vmap(
                lambda args, arrays: program(*args, **arrays, **dict(static))
            )
            return one(args, arrays)
        interpret = ("interpret", platform != "tpu")
        return primitive.traced_once(program, (interpret, *static), *args, **arrays)

    def _takes(self, tail: Tail, implementation: Implementation) -> bool:
        """Returns whether a program for GPUs takes a tail."""
        module = self._module(implementation)
        if not self.takes_tail or module is None:
            return False
        return importlib.import_module(module).refuses_tail(tail) is None

    def _is_whole(
        self,
        platform: str | None,
        chosen: Implementation | None,
        args: tuple,
        options: dict[str, Any],
    ) -> bool:
        """Returns whether the definition or a program computes all of a kernel with `parts`."""
        if chosen == "reference":
            return True
        program = chosen or _DEFAULTS.get(platform)
        if program is None or (program == "triton" and platform != "cuda"):
            return False
        return self.refusal(program, args, options) is None

    def _module(self, implementation: Implementation) -> str | None:
        """Returns the module of the program of an implementation; None if there is none."""
        return None if implementation == "reference" else getattr(self, implementation)

    def _default(
        self, platform: str | None, args: tuple, options: dict[str, Any]
    ) -> Implementation:
        """Returns the implementation for a platform."""
        program = _DEFAULTS.get(platform)
        if program is None or self._module(program) is None:
            return "reference"
        if platform is not None and _lacks(program):
            _tell_that_definitions_run(platform)
            return "reference"
        return "reference" if self.refusal(program, args, options) else program


def _compute_part(
    platform: str | None,
    chosen: Implementation | None,
    kernel: Kernel,
    *args: Any,
    into: Any = None,
    **options: Any,
) -> Any:
    """Computes a kernel that is a part of another one, as `Compute`, by the implementation of it.

    Args:
      platform: as for `Kernel.compute`.
      chosen: as for `Kernel.compute`, of the whole; where the part refuses it, as within `use`.
      kernel: the part.
      *args: its arguments.
      into: as for `Kernel.compute`.
      **options: its options.
    """
    if chosen is not None and kernel.refusal(chosen, args, options) is not None:
        chosen = "reference"
    return kernel.compute(platform, chosen, tuple(sorted(options.items())), *args, into=into)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _call_on_shards(
    kernel: Kernel, chosen: Implementation | None, static: primitive.Static, *args: Any
) -> Any:
    """Computes a kernel on the parts of the arrays that each device holds.

    It is jitted, so that equal calls share one trace and one lowering.
    """
    options = dict(static)
    reference = functools.partial(kernel.reference, **options)
    dims = kernel.dims(jax.eval_shape(reference, *args), *args, **options)
    if dims is None:
        return reference(*args)

    def of_parts(*parts: Any) -> Any:
        return primitive.call(kernel, chosen, static, *map(_of_part, parts))

    # A function that XLA partitions has no derivatives.
    computed = jax.custom_jvp(lambda *args: on_shards(of_parts, args, *dims))
    computed.defjvp(lambda primals, tangents: jax.jvp(reference, primals, tangents))
    return computed(*args)


def _is_now_on_a_cpu(args: Any) -> bool:
    """Returns whether a CPU computes a call now; a program that is traced may be for a GPU."""
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(args))
    return not traced and jax.default_backend() == "cpu"


def _check(implementation: object) -> None:
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(
            f"`implementation` must be None or one of {get_args(Implementation)}, got"
            f" {implementation!r}."
        )


def _of_part(x: Any) -> Any:
    """Returns an argument whose static fields are those of a part."""
    return x.of_part() if isinstance(x, QuantizedCode) else x
