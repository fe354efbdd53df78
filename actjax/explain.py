"""Where does my memory go? A table of all arrays that a function stores for its backward pass."""

import dataclasses
import io
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from actjax._core.tags import Tag
from actjax.codecs import Exact
from actjax.residuals.arrays_alone import without_statics
from actjax.residuals.candidates import ON_HOST
from actjax.residuals.checks import check_function
from actjax.residuals.graph.origins import Origin, Origins
from actjax.residuals.graph.variables import is_floating, is_on_host
from actjax.residuals.graph.variables import nbytes as nbytes_of

_ALIVE = "alive without the backward pass"


@dataclasses.dataclass(frozen=True)
class Residual:
    """An array, or a code, that is stored between the forward and the backward pass.

    Attributes:
      operator: the actjax operator that stores it, or the JAX primitive that made it.
      name: its name, for example "attention_in", or the path of an argument.
      shape: shape of the exact array, stacked over layers under `scan`.
      dtype: dtype of the exact array.
      exact_bytes: bytes of the exact array.
      stored_bytes: bytes that are stored on the device; 0 if it is alive without the backward
        pass, or in the memory of the host.
      codec: the codec, as text; empty if no actjax operator stores it.
      reason: why no codec stores it; empty if a codec does.
    """

    operator: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    exact_bytes: int
    stored_bytes: int
    codec: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The arrays that a function stores for its backward pass. Prints as a table.

    Attributes:
      residuals: one entry for each array or code, the largest first.
    """

    residuals: tuple[Residual, ...]

    @property
    def exact_bytes(self) -> int:
        """Bytes of all exact arrays, without arguments."""
        return sum(r.exact_bytes for r in self.residuals if r.stored_bytes)

    @property
    def stored_bytes(self) -> int:
        """Bytes that are stored, without arguments."""
        return sum(r.stored_bytes for r in self.residuals)

    def as_dicts(self) -> list[dict[str, Any]]:
        """Returns the table as plain data, for JSON or a data frame."""
        return [dataclasses.asdict(r) for r in self.residuals]

    def __str__(self) -> str:
        return as_text(self.__rich__(), 400)

    def __rich__(self) -> Table:
        """Returns the table. Arguments share a row, and so do arrays below 0.1% of the total."""
        table = Table(box=box.SIMPLE_HEAD, show_footer=True)
        table.add_column("stored for the backward pass", "total", no_wrap=True)
        table.add_column("array", no_wrap=True)
        table.add_column("exact", bytes_text(self.exact_bytes), justify="right", no_wrap=True)
        table.add_column("stored", bytes_text(self.stored_bytes), justify="right", no_wrap=True)
        table.add_column("codec or reason", overflow="fold")
        alive = [r for r in self.residuals if r.reason == _ALIVE]
        listed = [r for r in self.residuals if r.reason != _ALIVE]
        coded = [r for r in listed if r.codec not in ("", repr(Exact()))]
        small = [r for r in listed if r not in coded and r.exact_bytes < self.exact_bytes / 1000]
        for r in listed:
            if r not in small:
                shape = f"{r.dtype}[{','.join(map(str, r.shape))}]"
                sizes = bytes_text(r.exact_bytes), bytes_text(r.stored_bytes)
                # `Text`, since names of a user may look like rich's markup and emoji.
                cells = f"{r.operator}: {r.name}", shape, *sizes, r.codec or r.reason
                table.add_row(*map(Text, cells))
        summaries = (
            ("small arrays", small, "below a thousandth of the total each"),
            ("arguments, constants", alive, _ALIVE),
        )
        for name, rows, reason in summaries:
            if rows:
                exact, stored = (
                    sum(r.exact_bytes for r in rows),
                    sum(r.stored_bytes for r in rows),
                )
                table.add_row(
                    name, f"{len(rows)} arrays", bytes_text(exact), bytes_text(stored), reason
                )
        return table


def explain(fun: Callable[..., Any], *args: Any) -> Explanation:
    """Returns a table of what `fun(*args)` stores for the gradient in all floating point arguments.

    Nothing runs: `fun` is traced, so arguments may be `jax.ShapeDtypeStruct`s, and the model may be
    larger than this machine. Print the result, or read `.residuals`.

    The table lists what JAX stores. The compiled program may hold more: workspace, and, on a CPU,
    floats of Python-unrolled layers. See `jax.jit(...).lower(...).compile().memory_analysis()`.

    Args:
      fun: any function of JAX that can be differentiated in reverse mode.
      *args: its arguments: pytrees of arrays or of `jax.ShapeDtypeStruct`. Leaves of other kinds,
        such as functions and Python numbers, are static.

    Raises:
      ValueError: no argument has a floating point leaf.
    """
    check_function(fun, "explain")
    fun, args = without_statics(fun, args)
    paths, treedef = jax.tree_util.tree_flatten_with_path(args)
    leaves = [leaf for _, leaf in paths]
    floating = [i for i, leaf in enumerate(leaves) if is_floating(leaf)]
    if not floating:
        raise ValueError("no argument of `fun` has a floating point array: nothing to explain.")

    def residuals(*leaves: Any) -> list[jax.Array]:
        def of_floating(*floats: Any) -> list[jax.Array]:
            merged = list(leaves)
            for i, leaf in zip(floating, floats, strict=True):
                merged[i] = leaf
            outputs = fun(*jax.tree.unflatten(treedef, merged))
            return [y for y in jax.tree.leaves(outputs) if is_floating(y)]

        return jax.tree.leaves(jax.vjp(of_floating, *(leaves[i] for i in floating))[1])

    jaxpr = jax.make_jaxpr(residuals)(*leaves).jaxpr
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    arguments = dict(zip(jaxpr.invars, names, strict=True))
    return Explanation(tuple(sorted(_rows(jaxpr, arguments), key=lambda r: -r.exact_bytes)))


def _rows(jaxpr: core.Jaxpr, arguments: dict[core.Var, str]) -> Iterator[Residual]:
    """Yields one row for each residual; all arrays of a code share a row."""
    codes: dict[Tag, list[tuple[Tag, int, int]]] = {}
    origins = Origins(jaxpr)
    for var in dict.fromkeys(v for v in jaxpr.outvars if isinstance(v, core.Var)):
        origin = origins.of(var)
        if origin.tag is not None and origin.tag.is_code:
            code = dataclasses.replace(origin.tag, leaf=0, leaf_size=0)
            codes.setdefault(code, []).append((origin.tag, _size(var), nbytes_of(var)))
        else:
            yield _uncoded(var, origin, arguments)
    for code, leaves in codes.items():
        yield _coded(code, leaves)


def _coded(code: Tag, leaves: list[tuple[Tag, int, int]]) -> Residual:
    # The first array of a code tells how often the operator ran (layers of a scan, a vmapped axis).
    runs = sum(size // max(1, tag.leaf_size) for tag, size, _ in leaves if tag.leaf == 0)
    shape = code.shape if runs == 1 else (runs, *code.shape)
    return Residual(
        operator=code.operator,
        name=code.name,
        shape=shape,
        dtype=code.dtype,
        exact_bytes=math.prod(shape) * jnp.dtype(code.dtype).itemsize,
        stored_bytes=sum(nbytes for _, _, nbytes in leaves),
        codec=code.codec,
        reason="",
    )


def _uncoded(var: core.Var, origin: Origin, arguments: dict[core.Var, str]) -> Residual:
    nbytes = nbytes_of(var)
    operator, name, codec, reason = origin.operator, origin.name, "", ""
    tags = [tag for tag in (origin.tag, *origin.readers) if tag is not None]
    if origin.outer in arguments:
        operator, name = "argument", arguments[origin.outer]
        reason = _ALIVE
    elif is_on_host(var.aval):
        reason = ON_HOST
    elif origin.tag is not None and origin.tag.left:
        operator, name, reason = origin.tag.operator, origin.tag.name, origin.tag.left
    elif tags:
        operator, codec = tags[0].operator, tags[0].codec
        name = ", ".join(dict.fromkeys(tag.name for tag in tags))
    elif origin.operator == "constant":
        operator, reason = "constant", _ALIVE
    else:
        reason = "no actjax operator"
    return Residual(
        operator=operator,
        name=name,
        shape=_shape(var),
        dtype=str(_dtype(var)),
        exact_bytes=nbytes,
        stored_bytes=0 if reason in (_ALIVE, ON_HOST) else nbytes,
        codec=codec,
        reason=reason,
    )


def _shape(var: core.Var) -> tuple[int, ...]:
    aval: Any = var.aval
    return tuple(aval.shape)


def _dtype(var: core.Var) -> Any:
    aval: Any = var.aval
    return aval.dtype


def _size(var: core.Var) -> int:
    return math.prod(_shape(var))


def bytes_text(count: float) -> str:
    """Formats a number of bytes for a reader."""
    power = min(3, max(0, int(math.log2(max(count, 1))) // 10))
    return f"{count} B" if power == 0 else f"{count / 1024**power:.2f} {'KMG'[power - 1]}iB"


def as_text(table: RenderableType, width: int) -> str:
    """Returns a table of rich as plain text, the same on every terminal and in a notebook."""
    text = io.StringIO()
    # Within Jupyter, rich would show the table there and leave the file empty.
    Console(file=text, width=width, force_jupyter=False, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
