"""The choice of what computes a kernel, made in one place for all of them."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import jax
from jax.core import Tracer
from jax.sharding import AxisType

Implementation = Literal["reference", "pallas", "interpreted"]
"""`reference` is plain JAX, fused by XLA; `pallas` is compiled by Triton for an NVIDIA GPU;
`interpreted` is the same program as `pallas`, run by XLA on any device, slowly: for tests."""

_asked: Any = jax.make_user_context(None)


@contextlib.contextmanager
def use(implementation: Implementation | None) -> Iterator[None]:
    """Makes every kernel within that can be computed so be computed so.

    Functions that are traced within, by this thread, keep to it; a function that `jax.jit` has
    compiled before is compiled again. Kernels that cannot take their arguments fall back to the
    reference, unlike where an implementation is given to a call.

    Args:
      implementation: one of `Implementation`; None for the best that applies, as without this.

    Raises:
      ValueError: an unknown name.
    """
    _check(implementation)
    with _asked(implementation):
        yield


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A function with a definition, and a faster program for some arguments and devices.

    Called as `kernel(*args, implementation=None, **options)`: with pytrees of arrays, and hashable
    options by name. By default, and where the arguments allow it, the program for NVIDIA GPUs is
    a branch of `jax.lax.platform_dependent`, so that what is traced once can be lowered for any
    platform. Derivatives are those of the definition.

    Where XLA partitions the program over devices the default is the definition, since XLA would
    gather what a kernel reads: under `jax.set_mesh`, and for arrays with explicit shardings. (What
    is sharded over automatic axes, without `jax.set_mesh`, is not known while a program is traced.)
    So it is within a `jax.shard_map`, unless that has `check_vma=False`.

    Attributes:
      name: for messages.
      reference: the definition.
      pallas: the program: `pallas(*args, interpret, **options)`.
      refuses: from the same arguments to why the program cannot take them; None if it can.
    """

    name: str
    reference: Callable[..., Any]
    pallas: Callable[..., Any]
    refuses: Callable[..., str | None]

    def __call__(
        self, *args: Any, implementation: Implementation | None = None, **options: Any
    ) -> Any:
        """Computes it.

        Args:
          *args: pytrees of arrays.
          implementation: what is to compute it, and nothing else; None for the best that applies.
          **options: static.

        Raises:
          ValueError: an unknown implementation, or one that cannot take these arguments.
        """
        _check(implementation)
        reference = functools.partial(self.reference, **options)
        asked = implementation or _asked.value
        if asked == "reference" or (asked is None and _is_partitioned(args)):
            return reference(*args)
        reason = self.refuses(*args, **options)
        if reason is not None:
            if implementation is None:
                return reference(*args)
            raise ValueError(
                f"`implementation` {implementation!r} of {self.name} {reason}: use 'reference'."
            )
        if asked == "pallas" and jax.default_backend() == "cpu" and not _traced(args):
            raise ValueError(
                f"`implementation` 'pallas' of {self.name} is compiled for NVIDIA GPUs, and this"
                " runs on a CPU: use 'interpreted' or 'reference'."
            )
        run = functools.partial(_traced_once, self.pallas, tuple(sorted(options.items())))
        if asked is None:
            choose = functools.partial(
                jax.lax.platform_dependent,
                cuda=functools.partial(run, False),
                default=reference,
            )
        else:
            choose = functools.partial(run, asked == "interpreted")
        computed = jax.custom_jvp(choose)
        computed.defjvp(lambda primals, tangents: jax.jvp(reference, primals, tangents))
        return computed(*args)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _traced_once(pallas: Callable, options: tuple, interpret: bool, *args: Any) -> Any:
    """Calls a kernel; as a jitted function, so that equal calls share one trace."""
    return pallas(*args, interpret=interpret, **dict(options))


def _traced(args: Any) -> bool:
    """Returns whether a program is being traced, which may be for another device."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(args))


def _check(implementation: object) -> None:
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(
            f"`implementation` must be None or one of {get_args(Implementation)}, got"
            f" {implementation!r}."
        )


def _is_partitioned(args: Any) -> bool:
    """Returns whether XLA, and not the program, spreads arrays over devices here.

    Also within a `jax.shard_map` that checks how results vary over devices, which no kernel says.
    """
    context = jax.sharding.get_abstract_mesh()
    shardings = (getattr(jax.typeof(x), "sharding", None) for x in jax.tree.leaves(args))
    meshes = [context, *(sharding.mesh for sharding in shardings if sharding is not None)]
    if any(
        size > 1 and kind != AxisType.Manual
        for mesh in meshes
        for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    ):
        return True
    kinds = zip(context.axis_names, context.axis_types, strict=True)
    manual = next((name for name, kind in kinds if kind == AxisType.Manual), None)
    if manual is None:
        return False
    # What is known to vary along the axis varies in name only if that is checked.
    index = jax.typeof(jax.lax.axis_index(manual))
    kind = getattr(index, "manual_axis_type", None)
    return bool(kind.varying if kind is not None else getattr(index, "vma", ()))
