"""How a weight gets a factored gradient: taps, and finding out which weights can have one.

JAX wants a cotangent shaped like its primal, so a factored gradient cannot be the cotangent of a
weight. It can be that of two zero arrays shaped like its factors, *taps*, that travel with the
weight: a `TappedWeight` is a pytree node, passes through `scan`, `vmap` and user code untouched,
and is opened by `actjax.linear` alone, whose backward pass returns the factors for the taps and
nothing for the weight.

Which weights meet a linear operator, with what rank, and whether anything else reads them, is read
from a trace of the function (`find_uses`): in it, `linear` marks its weights by name.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class TappedWeight:
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

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.weight.shape

    @property
    def ndim(self) -> int:
        """Axes of the weight."""
        return self.weight.ndim

    @property
    def dtype(self) -> Any:
        """Dtype of the weight."""
        return self.weight.dtype

    def astype(self, dtype: Any) -> "TappedWeight":
        """Returns it with the weight cast. Its gradient keeps the dtype of the parameter."""
        return dataclasses.replace(self, weight=self.weight.astype(dtype))

    def __getitem__(self, index: Any) -> "TappedWeight":
        # `param[...]` is how nnx reads the value of a variable.
        return self if index is Ellipsis else self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            f"the weight `{self.path}` has a factored gradient, so only `actjax.linear` and"
            " `actjax.qkv_projection` can read it: use one of these, give the operator"
            " codec=Exact(), or differentiate with jax.value_and_grad."
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


_WEIGHT, _INPUT = "actjax.weight|", "actjax.input|"


def mark_weight(w: jax.Array, rank: int | None) -> jax.Array:
    """Marks a weight [d, n] in the trace, with the rank of its gradient; None if that is dense."""
    return checkpoint_name(w, f"{_WEIGHT}{rank or 0}")


def mark_input(x: jax.Array) -> jax.Array:
    """Marks the input that marked weights meet, with the number of its axes."""
    return checkpoint_name(x, f"{_INPUT}{x.ndim}")


def path_name(path: Any) -> str:
    """Returns the name of a leaf by its path in a pytree, such as "layers.attention.q"."""
    return jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")


@dataclasses.dataclass(frozen=True)
class Use:
    """One place where a parameter is read.

    Attributes:
      operator: "linear", or the JAX primitive that reads it.
      rank: of its gradient there; 0 if that is dense.
      call: which call of the operator, equal for weights of the same call.
      times: how often that place runs with the same parameter.
    """

    operator: str
    rank: int
    call: tuple[int, ...]
    times: int


def find_uses(jaxpr: core.Jaxpr) -> list[list[Use]]:
    """Returns, for each input of a traced function, where it is read.

    Casts are looked through. Bodies of `scan` count as often as they run with the same parameter:
    once for what is sliced over layers, `length` times for what is not. Of the branches of a `cond`
    the one counts that reads it most.
    """
    output = Use("the value of the function", 0, (), 1)
    returned = [[output] if var is jaxpr.outvars[0] else [] for var in jaxpr.invars]
    found = [list(_uses(jaxpr, var, (), 1)) for var in jaxpr.invars]
    return [a + b for a, b in zip(found, returned, strict=True)]


_LOOKED_THROUGH = ("convert_element_type", "sharding_constraint", "copy", "copy_p")


def _uses(jaxpr: core.Jaxpr, var: core.Var, call: tuple[int, ...], times: int) -> Iterator[Use]:
    for number, eqn in enumerate(jaxpr.eqns):
        name = eqn.primitive.name
        inner = (*call, number)
        for position, invar in enumerate(eqn.invars):
            if invar is not var:
                continue
            if name == "name" and str(eqn.params["name"]).startswith(_WEIGHT):
                rank = int(str(eqn.params["name"])[len(_WEIGHT) :])
                yield Use("linear", rank, call, times * _vmapped(jaxpr, invar))
            elif name in _LOOKED_THROUGH or name == "name":
                yield from _uses(jaxpr, eqn.outvars[0], call, times)
            elif bodies := _bodies(eqn, position):
                body, body_var = bodies[0]
                # A loop slices what it runs over, and passes on as a whole what it only reads.
                whole = name == "scan" and _shape(body_var) == _shape(var)
                repeated = eqn.params["length"] if whole else 1
                per_body = [list(_uses(b, v, inner, times * repeated)) for b, v in bodies]
                yield from max(per_body, key=len)
                for outer, out in zip(eqn.outvars, body.outvars, strict=False):
                    if out is body_var:
                        yield from _uses(jaxpr, outer, call, times)
            else:
                yield Use(name, 0, inner, times)


def _bodies(eqn: core.JaxprEqn, position: int) -> list[tuple[core.Jaxpr, core.Var]]:
    """Returns the bodies that an equation runs and what its input is called in each."""
    if eqn.primitive.name == "cond":
        branches = [branch.jaxpr for branch in eqn.params["branches"]]
        return [(b, b.invars[position - 1]) for b in branches] if position else []
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = eqn.params.get(name)
        body = getattr(body, "jaxpr", body)
        if isinstance(body, core.Jaxpr) and len(body.invars) == len(eqn.invars):
            return [(body, body.invars[position])]
    return []


def _vmapped(jaxpr: core.Jaxpr, weight: core.Var | core.Literal) -> int:
    """Returns how many examples share a marked weight under `vmap`: 1 if it has their axis too."""
    for eqn in jaxpr.eqns:
        text = str(eqn.params.get("name", "")) if eqn.primitive.name == "name" else ""
        if text.startswith(_INPUT):
            shape = _shape(eqn.invars[0])
            mapped = len(shape) - int(text[len(_INPUT) :])
            return 1 if len(_shape(weight)) > 2 or mapped <= 0 else shape[0]
    return 1


def _shape(var: Any) -> Sequence[int]:
    return var.aval.shape
