"""How a weight gets a factored gradient: taps, and finding out which weights can have one.

JAX wants a cotangent shaped like its primal, so a factored gradient cannot be the cotangent of a
weight. It can be that of two zero arrays shaped like its factors, *taps*, that travel with the
weight: a `TappedWeight` is a pytree node, passes through `scan`, `vmap` and user code untouched,
and is opened by `actjax.linear` alone, whose backward pass returns the factors for the taps and
nothing for the weight.

Which weights meet a linear operator, with what rank, and whether anything else reads them, is read
from a trace of the function (`find_uses`). In it, `linear` leaves a primitive that computes nothing
but is told by `vmap` what it maps (`mark_weights`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.interpreters.batching
import jax.interpreters.mlir
import jax.numpy as jnp
from jax.extend import core

from actjax.weights.frozen import WrappedWeight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class TappedWeight(WrappedWeight):
    """A weight [d, n] on its way to `actjax.linear`, and where its gradient will appear.

    Attributes:
      weight: [d, n]. Its cotangent is zero.
      left: zeros, [d, k]; None if another weight of the same operator has it, or `basis` is given.
      right: zeros, [k, n].
      basis: [d, k] if the operator is to store its input in that basis, else None.
      path: where the weight stands in the parameters, for messages. Static.
      bits: what the input in the basis is stored in: 16 for as it is, or 8. Static.
    """

    weight: Any
    left: Any
    right: Any
    basis: Any
    path: str = dataclasses.field(metadata={"static": True})
    bits: int = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        return f"TappedWeight({self.path})"

    def astype(self, dtype: Any) -> "TappedWeight":
        """Returns it with the weight cast. Its gradient keeps the dtype of the parameter."""
        return dataclasses.replace(self, weight=self.weight.astype(dtype))

    def __getitem__(self, index: Any) -> "TappedWeight":
        # `param[...]` is how nnx reads the value of a variable.
        return self if index is Ellipsis else self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            f"the weight `{self.path}` has a factored gradient, so only `actjax.linear` and"
            " `actjax.qkv_projection` can read it, and only `.astype` cast it: use these, give the"
            " operator codec=Exact(), or differentiate with jax.value_and_grad."
        )

    __array__ = __jax_array__ = __add__ = __radd__ = __mul__ = __rmul__ = __matmul__ = _refuse
    __rmatmul__ = __sub__ = __rsub__ = __truediv__ = __pow__ = __neg__ = __iter__ = _refuse

    @property
    def T(self) -> NoReturn:  # noqa: N802
        """No transpose: no operator could give it a gradient."""
        self._refuse()


def plain_weight(w: Any) -> Any:
    """Returns the array of a weight, tapped or not."""
    return w.weight if isinstance(w, TappedWeight) else w


def plain_weights(tree: Any) -> Any:
    """Returns a tree with every tapped weight in it as its array."""
    is_tapped = lambda x: isinstance(x, TappedWeight)  # noqa: E731
    return jax.tree.map(plain_weight, tree, is_leaf=is_tapped)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeldWeight:
    """A `TappedWeight` between the passes, without its taps: their values are never read.

    Attributes:
      weight: [d, n].
      basis: as there; None also where the backward pass does not read it.
      left: shape and dtype of the tap; None if there is none. Static.
      right: likewise. Static.
      path: as there. Static.
      bits: as there. Static.
    """

    weight: Any
    basis: Any
    left: jax.ShapeDtypeStruct | None = dataclasses.field(metadata={"static": True})
    right: jax.ShapeDtypeStruct = dataclasses.field(metadata={"static": True})
    path: str = dataclasses.field(metadata={"static": True})
    bits: int = dataclasses.field(metadata={"static": True})

    def zero_taps(self) -> TappedWeight:
        """Returns the weight with its taps again."""
        left = None if self.left is None else jnp.zeros(self.left.shape, self.left.dtype)
        right = jnp.zeros(self.right.shape, self.right.dtype)
        return TappedWeight(self.weight, left, right, self.basis, self.path, self.bits)

    def cotangent(self, left: jax.Array | None, right: jax.Array) -> TappedWeight:
        """Returns the factors of the gradient as what a custom backward pass gives back."""
        assert self.left is None or left is not None
        return TappedWeight(
            None,
            None if self.left is None or left is None else left.astype(self.left.dtype),
            right.astype(self.right.dtype),
            None,
            self.path,
            self.bits,
        )


def hold_weight(w: Any, keep_basis: bool = True) -> Any:
    """Returns what to keep of a weight for the backward pass: a `HeldWeight` if it is tapped."""
    if not isinstance(w, TappedWeight):
        return w
    left = None if w.left is None else jax.ShapeDtypeStruct(w.left.shape, w.left.dtype)
    right = jax.ShapeDtypeStruct(w.right.shape, w.right.dtype)
    return HeldWeight(w.weight, w.basis if keep_basis else None, left, right, w.path, w.bits)


def hold_weights(tree: Any) -> Any:
    """Returns a tree with every tapped weight in it as a `HeldWeight`."""
    return jax.tree.map(hold_weight, tree, is_leaf=lambda x: isinstance(x, TappedWeight))


def tap_again(tree: Any) -> Any:
    """Inverse of `hold_weights`: taps are zeros, as they always are."""
    is_held = lambda x: isinstance(x, HeldWeight)  # noqa: E731
    return jax.tree.map(lambda x: x.zero_taps() if is_held(x) else x, tree, is_leaf=is_held)


_mark_p = core.Primitive("actjax_linear")
_mark_p.multiple_results = True


def mark_weights(
    weights: Sequence[jax.Array], rank: int | None, *others: jax.Array | None
) -> list[jax.Array]:
    """Returns the weights [d, n] of one operator, marked in the trace. Computes nothing.

    Args:
      weights: what the operator multiplies by.
      rank: of their gradients; None if these are dense.
      *others: what the factors of the gradients depend on besides: under a `vmap` that maps one of
        these and not a weight, the weight is read once for each example.
    """
    times, leading = (1,) * len(weights), (True,) * len(weights)
    given = [x for x in others if x is not None]
    return _mark_p.bind(*weights, *given, rank=rank or 0, times=times, leading=leading)


def _marked(*args: Any, times: tuple[int, ...], **_: Any) -> list[Any]:
    return list(args[: len(times)])


def _mark_batched(args: Any, dims: Any, *, rank: int, times: Any, leading: Any) -> Any:
    """Says of each weight how often it is read now, and whether mapped axes come before [d, n]."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    weights = dims[: len(times)]
    times = tuple(n * size if d is None else n for n, d in zip(times, weights, strict=True))
    leading = tuple(ok and d in (None, 0) for ok, d in zip(leading, weights, strict=True))
    return _mark_p.bind(*args, rank=rank, times=times, leading=leading), weights


_mark_p.def_impl(_marked)
_mark_p.def_abstract_eval(_marked)
jax.interpreters.batching.primitive_batchers[_mark_p] = _mark_batched
jax.interpreters.mlir.register_lowering(
    _mark_p, jax.interpreters.mlir.lower_fun(_marked, multiple_results=True)
)


def path_name(path: Any) -> str:
    """Returns the name of a leaf by its path in a pytree, such as "layers.attention.q"."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


def named_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Returns the leaves of a pytree by the names of their paths, in their order.

    Raises:
      ValueError: two have the same, such as `{"a.b": x, "a": {"b": y}}`.
    """
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        name = path_name(path)
        if name in named:
            raise ValueError(f"two parameters go by the path `{name}`: rename one of them.")
        named[name] = leaf
    return named


@dataclasses.dataclass(frozen=True)
class Use:
    """One place where a parameter is read.

    Attributes:
      operator: "linear", or the JAX primitive that reads it.
      rank: of its gradient there; 0 if that is dense.
      call: which call of the operator, equal for weights of the same call.
      times: how often that place runs with the same parameter.
      leading: whether the axes that `vmap` maps are the first of the parameter.
      alone: whether the call reads no other weight.
    """

    operator: str
    rank: int
    call: tuple[int, ...]
    times: int
    leading: bool = True
    alone: bool = True


def find_uses(jaxpr: core.Jaxpr) -> list[list[Use]]:
    """Returns, for each input of a traced function, where it is read.

    Casts are looked through, and bodies looked into: those of `scan` count as often as they run
    with the same parameter, once for what is sliced over layers, `length` times for what is not;
    all branches of a `cond` count, but for branches that each read the parameter alike, of which
    one does. That a parameter is an auxiliary output is no use.
    """
    found = []
    for var in jaxpr.invars:
        uses, outputs = _follow(jaxpr, {var: False}, (), 1)
        if 0 in outputs:
            uses.append(Use("the value of the function", 0, (), 1))
        found.append(uses)
    return found


_LOOKED_THROUGH = ("convert_element_type", "sharding_constraint", "copy", "copy_p", "name")

_Names = dict[Any, bool]
"""Variables, or positions of outputs, that are a parameter; True if only a copy, such as a stack of
slices, through which no factor finds its way back: to read it is a use of another kind."""


def _follow(
    jaxpr: core.Jaxpr, names: _Names, call: tuple[int, ...], times: int
) -> tuple[list[Use], _Names]:
    """Returns the uses of what goes by `names`, and which outputs of the jaxpr it is."""
    uses: list[Use] = []
    for number, eqn in enumerate(jaxpr.eqns):
        read = {i: names[x] for i, x in enumerate(eqn.invars) if _is_named(x, names)}
        if not read:
            continue
        inner, is_copy = (*call, number), any(read.values())
        if eqn.primitive.name in _LOOKED_THROUGH:
            names = names | {eqn.outvars[0]: is_copy}
        elif bodies := _bodies(eqn):
            branches = []
            for branch, (body, offset) in enumerate(bodies):
                within = {body.invars[i - offset]: c for i, c in read.items() if i >= offset}
                more, outputs = _follow_body(eqn, body, within, (*inner, branch), times)
                branches.append(more)
                names = names | {eqn.outvars[i]: c for i, c in outputs.items()}
            uses += _of_branches(branches)
            if any(i < bodies[0][1] for i in read):
                uses.append(Use(eqn.primitive.name, 0, inner, times))
        elif eqn.primitive is _mark_p and not is_copy:
            mark = eqn.params
            uses += [
                Use(
                    "linear",
                    mark["rank"],
                    call,
                    times * mark["times"][i],
                    mark["leading"][i],
                    len(mark["times"]) == 1,
                )
                for i in read
                if i < len(mark["times"])
            ]
        else:
            uses.append(Use(eqn.primitive.name, 0, inner, times))
    return uses, {i: names[x] for i, x in enumerate(jaxpr.outvars) if _is_named(x, names)}


def _is_named(x: core.Var | core.Literal, names: _Names) -> bool:
    return isinstance(x, core.Var) and x in names


def _of_branches(branches: list[list[Use]]) -> list[Use]:
    """Returns the uses in all branches; in one, if each reads the parameter once and alike."""
    reading = [uses for uses in branches if uses]
    alike = {(len(uses), dataclasses.replace(uses[0], call=())) for uses in reading}
    if len(alike) == 1 and len(reading[0]) == 1 and reading[0][0].alone:
        return reading[0]
    return [use for uses in reading for use in uses]


def _follow_body(
    eqn: core.JaxprEqn, body: core.Jaxpr, names: _Names, call: tuple[int, ...], times: int
) -> tuple[list[Use], _Names]:
    """Follows into one body of an equation, and out of it again."""
    if eqn.primitive.name != "scan":
        return _follow(body, names, call, times)
    # A loop slices what it runs over, and passes on as a whole what it only reads.
    pairs = list(zip(eqn.invars, body.invars, strict=True))
    whole = all(_shape(x) == _shape(y) for x, y in pairs if y in names)
    uses, outputs = _follow(body, names, call, times * (eqn.params["length"] if whole else 1))
    # What a loop carries unchanged is the same outside. What it stacks, or carries on in the place
    # of something else, is a copy.
    carried = [i for i, x in enumerate(eqn.outvars) if _shape(x) == _shape(body.outvars[i])]
    constants = len(pairs) - len(carried) - sum(_shape(x) != _shape(y) for x, y in pairs)
    return uses, {
        i: c or i not in carried or body.outvars[i] is not body.invars[constants + i]
        for i, c in outputs.items()
    }


def _bodies(eqn: core.JaxprEqn) -> list[tuple[core.Jaxpr, int]]:
    """Returns the bodies that an equation runs, and how many of its inputs they do not have."""
    if eqn.primitive.name == "cond":
        return [(branch.jaxpr, 1) for branch in eqn.params["branches"]]
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = eqn.params.get(name)
        body = getattr(body, "jaxpr", body)
        if isinstance(body, core.Jaxpr) and len(body.invars) == len(eqn.invars):
            return [(body, 0)]
    return []


def _shape(var: Any) -> Sequence[int]:
    return var.aval.shape
