"""Where does my memory go? A table of everything a function keeps for its backward pass."""

import dataclasses
import io
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core, source_info_util
from rich import box
from rich.console import Console
from rich.table import Table

from actjax._core.tags import Tag
from actjax._jaxpr.programs import scan_counts
from actjax.codecs import Exact

_ALIVE = "alive without the backward pass"


@dataclasses.dataclass(frozen=True)
class Residual:
    """One thing that is kept between the forward and the backward pass.

    Attributes:
      operator: the actjax operator that keeps it, or the JAX primitive that made it.
      name: what it is, for example "attention_in"; the path of an argument.
      shape: its shape if it were kept exactly, stacked over layers under `scan`.
      dtype: its dtype if it were kept exactly.
      exact_bytes: what keeping it exactly would take.
      stored_bytes: what is kept; 0 if it is alive without the backward pass.
      codec: the codec, as text; empty if no actjax operator keeps it.
      reason: why it was left alone; empty if a codec took it.
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
    """What a function keeps for its backward pass. Prints as a table.

    Attributes:
      residuals: one entry for each thing kept, the largest first.
    """

    residuals: tuple[Residual, ...]

    @property
    def exact_bytes(self) -> int:
        """Bytes if everything were kept exactly, arguments not counted."""
        return sum(r.exact_bytes for r in self.residuals if r.stored_bytes)

    @property
    def stored_bytes(self) -> int:
        """Bytes that are kept, arguments not counted."""
        return sum(r.stored_bytes for r in self.residuals)

    def as_dicts(self) -> list[dict[str, Any]]:
        """Returns the table as plain data, for JSON or a data frame."""
        return [dataclasses.asdict(r) for r in self.residuals]

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=400).print(self.__rich__())
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def __rich__(self) -> Table:
        """The table; arguments, and arrays below a thousandth of the whole, make one line each."""
        table = Table(box=box.SIMPLE_HEAD, show_footer=True)
        table.add_column("kept for the backward pass", "total", no_wrap=True)
        table.add_column("array", no_wrap=True)
        table.add_column("exact", _bytes(self.exact_bytes), justify="right", no_wrap=True)
        table.add_column("stored", _bytes(self.stored_bytes), justify="right", no_wrap=True)
        table.add_column("codec, or why none", overflow="fold")
        alive = [r for r in self.residuals if r.reason == _ALIVE]
        kept = [r for r in self.residuals if r.reason != _ALIVE]
        coded = [r for r in kept if r.codec not in ("", repr(Exact()))]
        small = [r for r in kept if r not in coded and r.exact_bytes < self.exact_bytes / 1000]
        for r in kept:
            if r not in small:
                shape = f"{r.dtype}[{','.join(map(str, r.shape))}]"
                sizes = _bytes(r.exact_bytes), _bytes(r.stored_bytes)
                table.add_row(f"{r.operator}: {r.name}", shape, *sizes, r.codec or r.reason)
        others = (
            ("small arrays", small, "below a thousandth of the total each"),
            ("arguments, constants", alive, _ALIVE),
        )
        for name, rows, reason in others:
            if rows:
                exact, stored = (
                    sum(r.exact_bytes for r in rows),
                    sum(r.stored_bytes for r in rows),
                )
                table.add_row(name, f"{len(rows)} arrays", _bytes(exact), _bytes(stored), reason)
        return table


def explain(fun: Callable[..., Any], *args: Any) -> Explanation:
    """Returns what `fun(*args)` keeps for its backward pass, with respect to every float argument.

    Nothing is run: `fun` is traced, so arguments may be `jax.ShapeDtypeStruct`s, and a model that
    does not fit this machine can be explained on it. Print the result, or read `.residuals`.

    The table lists what JAX keeps. What the compiled program holds beyond that (workspace, and
    floats that XLA keeps alive in Python-unrolled layers) stands in
    `jax.jit(...).lower(...).compile().memory_analysis()`.

    Args:
      fun: any function of JAX that can be differentiated in reverse mode.
      *args: its arguments: pytrees of arrays or of `jax.ShapeDtypeStruct`.

    Raises:
      ValueError: no argument has a floating point leaf.
    """
    paths, treedef = jax.tree_util.tree_flatten_with_path(args)
    leaves = [leaf for _, leaf in paths]
    floating = [i for i, leaf in enumerate(leaves) if _is_floating(leaf)]
    if not floating:
        raise ValueError("no argument of `fun` has a floating point array: nothing to explain.")

    def residuals(*leaves: Any) -> list[jax.Array]:
        def of_floating(*floats: Any) -> list[jax.Array]:
            merged = list(leaves)
            for i, leaf in zip(floating, floats, strict=True):
                merged[i] = leaf
            outputs = fun(*jax.tree.unflatten(treedef, merged))
            return [y for y in jax.tree.leaves(outputs) if _is_floating(y)]

        return jax.tree.leaves(jax.vjp(of_floating, *(leaves[i] for i in floating))[1])

    jaxpr = jax.make_jaxpr(residuals)(*leaves).jaxpr
    names = [jax.tree_util.keystr(path) for path, _ in paths]
    arguments = dict(zip(jaxpr.invars, names, strict=True))
    return Explanation(tuple(sorted(_rows(jaxpr, arguments), key=lambda r: -r.exact_bytes)))


def _is_floating(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return isinstance(x, float)
    return jnp.issubdtype(dtype, jnp.floating)


def _rows(jaxpr: core.Jaxpr, arguments: dict[core.Var, str]) -> Iterator[Residual]:
    """Yields a row for each residual; the arrays of one code make one row."""
    codes: dict[Tag, list[tuple[Tag, int, int]]] = {}
    for var in dict.fromkeys(v for v in jaxpr.outvars if isinstance(v, core.Var)):
        origin = origin_of(jaxpr, var)
        if origin.tag is not None and origin.tag.is_code:
            code = dataclasses.replace(origin.tag, leaf=0, leaf_size=0)
            codes.setdefault(code, []).append((origin.tag, _size(var), _nbytes(var)))
        else:
            yield _uncoded(var, origin, arguments)
    for code, leaves in codes.items():
        yield _coded(code, leaves)


def _coded(code: Tag, leaves: list[tuple[Tag, int, int]]) -> Residual:
    # How often the operator ran (layers of a scan, a vmapped axis), from the code's first array.
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


def _uncoded(var: core.Var, origin: "Origin", arguments: dict[core.Var, str]) -> Residual:
    nbytes = _nbytes(var)
    operator, name, codec, reason = origin.operator, origin.name, "", ""
    tags = [tag for tag in (origin.tag, *origin.readers) if tag is not None]
    if origin.outer in arguments:
        operator, name = "argument", arguments[origin.outer]
        reason = _ALIVE
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
        stored_bytes=0 if reason == _ALIVE else nbytes,
        codec=codec,
        reason=reason,
    )


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a residual comes from.

    Attributes:
      operator: the primitive that made it; "constant" or "argument" if none did.
      name: where in the user's program, as far as JAX knows.
      tag: the tag it was made under, if one of our operators made it to keep it.
      readers: tags of our operators that read it and keep it exactly.
      outer: the variable of the whole program that it is, if it is passed through unchanged.
      is_slices: whether it is the slices of an argument that a loop runs over, stacked again.
    """

    operator: str
    name: str
    tag: Tag | None
    readers: tuple[Tag, ...]
    outer: core.Var | None
    is_slices: bool = False


def origin_of(jaxpr: core.Jaxpr, var: core.Var) -> Origin:
    """Follows a variable to what made it, into the bodies of calls and loops."""
    readers = tuple(_readers(jaxpr, var))
    eqn = next((e for e in jaxpr.eqns if var in e.outvars), None)
    if eqn is None:
        known = "constant" if var in jaxpr.constvars else "argument"
        return Origin(known, "", None, readers, var)
    if eqn.primitive.name == "optimization_barrier":
        passed = eqn.invars[eqn.outvars.index(var)]
        if isinstance(passed, core.Var):
            origin = origin_of(jaxpr, passed)
            return dataclasses.replace(origin, readers=(*readers, *origin.readers))
    body = _body(eqn)
    inner = body.outvars[eqn.outvars.index(var)] if body is not None else None
    if body is None or not isinstance(inner, core.Var):
        tag = Tag.decode(eqn.params["name"]) if eqn.primitive.name == "name" else None
        return Origin(eqn.primitive.name, _where(eqn), tag, readers, None)
    origin = origin_of(body, inner)
    readers = (*readers, *origin.readers)
    if origin.outer not in body.invars:
        return dataclasses.replace(origin, readers=readers, outer=None)
    given = eqn.invars[body.invars.index(origin.outer)]
    # What a loop stacks of its carry is another array than what it was given.
    if isinstance(given, core.Var) and _shape(given) == _shape(var):
        return dataclasses.replace(origin_of(jaxpr, given), readers=readers)
    position = body.invars.index(origin.outer)
    is_slices = eqn.primitive.name == "scan" and position >= sum(scan_counts(eqn))
    return Origin(eqn.primitive.name, _where(eqn), None, readers, None, is_slices)


def _readers(jaxpr: core.Jaxpr, var: core.Var) -> Iterator[Tag]:
    """Yields the tags under which `var` is read, calls included."""
    for eqn in jaxpr.eqns:
        for position, invar in enumerate(eqn.invars):
            if invar is not var:
                continue
            body = _body(eqn)
            if eqn.primitive.name == "name":
                tag = Tag.decode(eqn.params["name"])
                if tag is not None:
                    yield tag
            elif body is not None and eqn.primitive.name != "scan":
                yield from _readers(body, body.invars[position])


def _body(eqn: core.JaxprEqn) -> core.Jaxpr | None:
    """Returns the body of a call or a scan whose inputs and outputs match those of the equation."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = eqn.params.get(name)
        body = getattr(body, "jaxpr", body)
        if isinstance(body, core.Jaxpr) and len(body.outvars) == len(eqn.outvars):
            return body if len(body.invars) == len(eqn.invars) else None
    return None


def _where(eqn: core.JaxprEqn) -> str:
    """Returns the line of the user's program that an equation comes from, its path shortened."""
    return source_info_util.summarize(eqn.source_info).rsplit("/", 1)[-1]


def _shape(var: core.Var) -> tuple[int, ...]:
    aval: Any = var.aval
    return tuple(aval.shape)


def _dtype(var: core.Var) -> Any:
    aval: Any = var.aval
    return aval.dtype


def _size(var: core.Var) -> int:
    return math.prod(_shape(var))


def _nbytes(var: core.Var) -> int:
    return _size(var) * _dtype(var).itemsize


def _bytes(count: int) -> str:
    """Formats a number of bytes for a reader."""
    power = min(3, max(0, int(math.log2(max(count, 1))) // 10))
    return f"{count} B" if power == 0 else f"{count / 1024**power:.2f} {'KMG'[power - 1]}iB"
