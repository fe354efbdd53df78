"""The choice of the implementation of a kernel, in one place for all kernels."""

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import jax
from jax.core import Tracer

from actjax._shards import can_split, is_bound, is_partitioned, on_shards
from actjax.kernels import measured, primitive
from actjax.kernels.format import QuantizedCode

Implementation = Literal["reference", "pallas", "interpreted", "mosaic", "triton", "fastest"]
"""`reference` is plain JAX, fused by XLA; `pallas` is compiled by Triton for an NVIDIA GPU;
`interpreted` is the same program as `pallas`, run slowly by XLA on any device, for tests; `mosaic`
is compiled by Mosaic for a TPU, and elsewhere run slowly; `triton` is written in Triton itself,
for an NVIDIA GPU, and needs jax-triton; `fastest` is the one of `reference`, `pallas` and `triton`
that takes the least time on the GPU of this process, measured once for each shape."""


@dataclasses.dataclass(frozen=True)
class Mosaic:
    """A program for TPUs.

    Attributes:
      program: the program: `program(*args, interpret, **options)`.
      refuses: returns why it cannot take the arguments; None if it can.
    """

    program: Callable[..., Any]
    refuses: Callable[..., str | None]


@dataclasses.dataclass(frozen=True)
class Triton:
    """A program in Triton. Its module needs jax-triton, and is imported when it is asked for.

    Attributes:
      module: the module. It has the program, `refuses`, and `launch`, which returns the
        `actjax.kernels.triton_call.Call` of the arguments.
      program: name of the program.
    """

    module: str
    program: str

    def refuses(self, *args: Any, **options: Any) -> str | None:
        """Returns why it cannot take the arguments; None if it can."""
        if not _has_triton():
            return _NO_TRITON
        return importlib.import_module(self.module).refuses(*args, **options)

    def run(self, *args: Any, **options: Any) -> Any:
        """Computes the function. `jax.vmap` runs it once for each entry of the mapped axis."""
        program = getattr(importlib.import_module(self.module), self.program)
        return jax.custom_batching.sequential_vmap(functools.partial(program, **options))(*args)


_NO_TRITON = "needs jax-triton, which is not installed (`pip install 'actjax[triton]'`)"


def _has_triton() -> bool:
    return importlib.util.find_spec("jax_triton") is not None


_asked: Any = jax.make_user_context(None)


@contextlib.contextmanager
def use(implementation: Implementation | None) -> Iterator[None]:
    """Context in which kernels use one implementation where they can.

    It applies to functions that this thread traces within the context. A function that `jax.jit`
    has compiled before is compiled again. A kernel that cannot take its arguments falls back to the
    reference, and from `triton`, which few kernels have, to the default; an implementation that is
    passed to a call raises instead. On a CPU, kernels of GPUs fall back to the reference, but for
    `pallas` in a function that `jax.jit` compiles, where JAX raises an error.

    Args:
      implementation: one of `Implementation`; None for the best one that applies, the default.

    Raises:
      ValueError: an unknown name, or "triton" without jax-triton.
    """
    _check(implementation)
    if implementation == "triton" and not _has_triton():
        raise ValueError(f"`implementation` 'triton' {_NO_TRITON}.")
    with _asked(implementation):
        yield


def _never(*args: Any, **options: Any) -> bool:
    """Returns False: no case of the kernel was measured to be slower than XLA's program."""
    del args, options
    return False


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A function with a definition, and a faster program for some arguments and devices.

    It is called as `kernel(*args, implementation=None, **options)`, with pytrees of arrays and
    hashable options by name. By default a traced program can be lowered for any platform: where
    it is lowered for an NVIDIA GPU or a TPU, and the arguments allow it, the program for it is
    traced and used, elsewhere the definition. Derivatives are those of the definition.

    Where XLA partitions the program over devices (under `jax.set_mesh`), each device computes the
    kernel for its part of the arrays, as `dims` tells. A kernel that draws random numbers by their
    place in the whole array is the definition there. So are all kernels for arrays with explicit
    shardings, and within a `jax.shard_map` without `check_vma=False` or over some of the mesh axes.
    (Shardings over automatic axes without `jax.set_mesh` are not known during tracing.)

    Attributes:
      name: name in messages.
      reference: the definition.
      pallas: the program: `pallas(*args, interpret, **options)`.
      refuses: returns why the program cannot take the arguments; None if it can.
      dims: `dims(result, *args, **options)` returns the `Dims` of the arguments, a tuple, and those
        of the result, whose shapes are given; None if parts cannot be computed apart.
      mosaic: the program for TPUs; None if there is none. XLA cannot divide it over devices.
      triton: a second program for NVIDIA GPUs; None if there is none.
      slower: `slower(*args, **options)` returns whether XLA's program for the definition took less
        time than `pallas` where a GPU measured both (`benchmarks/results/gpu.json`). Then `pallas`
        is used where it is asked for, and not by default.
    """

    name: str
    reference: Callable[..., Any]
    pallas: Callable[..., Any]
    refuses: Callable[..., str | None]
    dims: Callable[..., tuple[tuple, Any] | None]
    mosaic: Mosaic | None = None
    triton: Triton | None = None
    slower: Callable[..., bool] = _never

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
        _check(implementation)
        reference = functools.partial(self.reference, **options)
        asked = implementation or _asked.value
        if asked == "fastest":
            on_shards = is_partitioned(args) or is_bound(args)
            asked = None if on_shards else measured.fastest(self, args, options)
            implementation = None  # What was measured takes the arguments, and else the default.
        if asked == "reference" or (asked is None and is_bound(args)):
            return reference(*args)
        reason = self.refusal(asked, args, options)
        if reason is not None and implementation is None and asked == "triton":
            asked, reason = None, self.refusal(None, args, options)
        if reason is not None:
            if implementation is None:
                return reference(*args)
            raise ValueError(
                f"`implementation` {implementation!r} of {self.name} {reason}: use 'reference'."
            )
        on_gpus_only = asked in ("pallas", "triton")
        if on_gpus_only and jax.default_backend() == "cpu" and not _traced(args):
            if implementation is None:
                return reference(*args)
            raise ValueError(
                f"`implementation` {asked!r} of {self.name} is compiled for NVIDIA GPUs, and this"
                " runs on a CPU: use 'interpreted' or 'reference'."
            )
        if asked is None and not is_partitioned(args):
            return self._choose(None, options, *args)
        call = _called_once if _traced(args) else Kernel.call
        return call(self, asked, tuple(sorted(options.items())), *args)

    def call(self, asked: Implementation | None, static: tuple, *args: Any) -> Any:
        """Computes the function by a program that can take the arguments."""
        options = dict(static)
        reference = functools.partial(self.reference, **options)
        choose = functools.partial(self._choose, asked, options)
        if is_partitioned(args):
            choose = self._on_shards(choose, reference, args, options)
        computed = jax.custom_jvp(choose)
        computed.defjvp(lambda primals, tangents: jax.jvp(reference, primals, tangents))
        return computed(*args)

    def refusal(
        self, asked: Implementation | None, args: tuple, options: dict[str, Any]
    ) -> str | None:
        """Returns why no program, or not the one that is asked for, can take the arguments."""
        if asked == "triton":
            return self.triton.refuses(*args, **options) if self.triton else "has no such program"
        reason = None if asked == "mosaic" else self.refuses(*args, **options)
        if asked in ("pallas", "interpreted"):
            return reason
        no_mosaic = "has no program for TPUs"
        if self.mosaic is not None:
            no_mosaic = self.mosaic.refuses(*args, **options)
        return no_mosaic if asked == "mosaic" else reason and no_mosaic and reason

    def _choose(self, asked: Implementation | None, options: dict[str, Any], *args: Any) -> Any:
        """Computes the function by the program, if it is asked for or fits the platform."""
        static = tuple(sorted(options.items()))
        if asked == "mosaic" and self.mosaic is not None:
            interpret = ("interpret", jax.default_backend() != "tpu")
            return primitive.traced_once(self.mosaic.program, (interpret, *static), *args)
        if asked == "triton" and self.triton is not None:
            # On other platforms it is the definition.
            return primitive.call(_programs_with(self), static, *args)
        if asked is not None:
            interpret = ("interpret", asked == "interpreted")
            return primitive.traced_once(self.pallas, (interpret, *static), *args)
        # `args` may be a part of an array that a program can take.
        on_cuda = self.refusal("pallas", args, options) is None and not self.slower(
            *args, **options
        )
        on_tpu = self.refusal("mosaic", args, options) is None
        return primitive.call(_programs(self, on_cuda, on_tpu), static, *args)

    def _on_shards(
        self, choose: Callable, reference: Callable, args: tuple, options: dict[str, Any]
    ) -> Callable:
        """Returns the function for the parts of the arrays that each device holds."""
        dims = self.dims(jax.eval_shape(reference, *args), *args, **options)
        if dims is None or not can_split(args):
            return reference
        return lambda *args: on_shards(lambda *own: choose(*map(_of_part, own)), args, *dims)


_called_once = jax.jit(Kernel.call, static_argnums=(0, 1, 2))
"""The same, as a function of the traced program: equal calls share one trace and one lowering."""


@functools.cache
def _programs(kernel: Kernel, on_cuda: bool, on_tpu: bool) -> primitive.Programs:
    """Returns what a kernel is on each platform; always the same object, for caches."""
    cuda = functools.partial(kernel.pallas, interpret=False) if on_cuda else None
    tpu = (
        functools.partial(kernel.mosaic.program, interpret=False)
        if kernel.mosaic and on_tpu
        else None
    )
    return primitive.Programs(kernel.name, kernel.reference, cuda, tpu)


@functools.cache
def _programs_with(kernel: Kernel) -> primitive.Programs:
    """Returns what a kernel is on each platform if its program in Triton is asked for."""
    assert kernel.triton is not None
    return primitive.Programs(kernel.name, kernel.reference, kernel.triton.run)


def _traced(args: Any) -> bool:
    """Returns whether a program is being traced, possibly for another device."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(args))


def _check(implementation: object) -> None:
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(
            f"`implementation` must be None or one of {get_args(Implementation)}, got"
            f" {implementation!r}."
        )


def _of_part(x: Any) -> Any:
    """Returns an argument whose static fields are those of a part."""
    return x.of_part() if isinstance(x, QuantizedCode) else x
