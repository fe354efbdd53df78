"""Single equations of a program: their bodies, and how to run them.

This module holds everything that depends on how a version of JAX writes its equations.
"""

import contextlib
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend import core, source_info_util

_CALLS = ("jit", "pjit", "closed_call", "core_call")
"""Equations that only run a program. `jax.jit` has different names in different versions of JAX."""
CUSTOM_VJP = ("custom_vjp_call", "custom_vjp_call_jaxpr")
_CUSTOM = ("custom_jvp_call", *CUSTOM_VJP)
_OWN_CODE = f" at {pathlib.Path(__file__).parents[2]}{os.sep}"
_FOREIGN = "actjax.foreign"
"""Name scope of the forward and backward functions of other people's custom rules."""
_REMAT = ("checkpoint", "remat", "remat2")
_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def body_of(eqn: core.JaxprEqn) -> core.ClosedJaxpr | None:
    """Returns the program that a call, a loop or a custom rule runs; None if there is none.

    The branches of a `cond` are several programs: see `branches_of`.
    """
    for name in _BODIES:
        body: Any = eqn.params.get(name)
        if isinstance(body, core.ClosedJaxpr):
            return body
        if isinstance(body, core.Jaxpr):
            return core.ClosedJaxpr(body, [])
    return None


def branches_of(eqn: core.JaxprEqn) -> tuple[core.ClosedJaxpr, ...]:
    """Returns the branches of a `cond`; an empty tuple for other equations.

    A branch gets all inputs of the `cond` but the first, which selects it.
    """
    return tuple(eqn.params["branches"]) if eqn.primitive.name == "cond" else ()


def called(
    eqn: core.JaxprEqn, custom: bool = False, remat: bool = False
) -> core.ClosedJaxpr | None:
    """Returns the program that an equation only calls; None if the equation does anything else.

    Args:
      eqn: the equation.
      custom: whether functions with custom differentiation rules count as calls.
      remat: whether a second forward pass counts as a call, unless `jax.checkpoint` protects it
        from being merged with the first.
    """
    if remat and eqn.primitive.name in _REMAT and not eqn.params["prevent_cse"]:
        return body_of(eqn)
    if eqn.primitive.name not in (*_CALLS, *(_CUSTOM if custom else ())):
        return None
    return body_of(eqn)


def scope_of(eqn: core.JaxprEqn) -> str:
    """Returns the name scopes that an equation is in, such as "transformer/h/0/mlp".

    Modules of Flax linen and Haiku open one each. Names of transformations are left out.
    """
    stack: Any = eqn.source_info.name_stack.stack
    names = (scope.name for scope in stack if type(scope).__name__ == "Scope")
    return "/".join(name for name in names if not name.startswith(_FOREIGN))


def closed_over(eqn: core.JaxprEqn) -> int:
    """Returns how many of the first inputs of a custom rule its function closes over.

    JAX refuses to differentiate in these.
    """
    return eqn.params.get("num_consts", 0)


def is_foreign_rule(eqn: core.JaxprEqn) -> bool:
    """Returns whether an equation has a custom backward pass that actjax did not write.

    A `cond` with such a branch counts too, and a `shard_map` with one within.
    """
    bodies = branches_of(eqn)
    if eqn.primitive.name == "shard_map" and (body := body_of(eqn)) is not None:
        bodies = (body,)
    if bodies:
        return any(_has_foreign_rule(body.jaxpr) for body in bodies)
    if eqn.primitive.name not in CUSTOM_VJP:
        return False
    body = body_of(eqn)
    source = None if body is None else body.jaxpr.debug_info.func_src_info
    return source is None or _OWN_CODE not in source


def _has_foreign_rule(jaxpr: core.Jaxpr) -> bool:
    bodies = ((eqn, called(eqn)) for eqn in jaxpr.eqns)
    return any(
        is_foreign_rule(eqn) or (body is not None and _has_foreign_rule(body.jaxpr))
        for eqn, body in bodies
    )


def run_marked(eqn: core.JaxprEqn, inputs: Sequence[Any], number: int = 0) -> list[Any]:
    """Runs an equation, and marks the equations of its custom rule for `mark_of`."""
    with jax.named_scope(f"{_FOREIGN} {number}"):
        return run_equation(eqn, inputs)


def mark_of(eqn: core.JaxprEqn) -> int | None:
    """Returns the number of the custom rule of others that an equation belongs to, or None."""
    stack: Any = eqn.source_info.name_stack.stack
    for scope in stack:
        name = getattr(scope, "name", "")
        if name.startswith(_FOREIGN):
            return int(name.removeprefix(_FOREIGN))
    return None


def joined_scopes(*scopes: str) -> str:
    """Returns name scopes, each within the one before it."""
    return "/".join(filter(None, scopes))


def in_scope_of(call: core.JaxprEqn, eqn: core.JaxprEqn) -> core.JaxprEqn:
    """Returns an equation of the body of a call, in the name scopes of the call too."""
    source, outer = eqn.source_info, call.source_info.name_stack
    if not outer.stack:
        return eqn
    return eqn.replace(source_info=source.replace(name_stack=outer + source.name_stack))


def scan_counts(eqn: core.JaxprEqn) -> tuple[int, int]:
    """Returns the numbers of constants and of carried inputs of a `lax.scan`."""
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # Since JAX 0.12 a tree separates constants, carry and scanned inputs.
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)


@contextlib.contextmanager
def context_of(eqn: core.JaxprEqn) -> Iterator[None]:
    """The original context, name scopes and source line of an equation."""
    source = eqn.source_info
    stack = source_info_util.current_name_stack() + source.name_stack
    context: Any = eqn.ctx
    with source_info_util.user_context(source.traceback, name_stack=stack), context.manager:
        yield


def run_equation(eqn: core.JaxprEqn, inputs: Sequence[Any]) -> list[Any]:
    """Returns the outputs of one equation, in its original context and with its source line."""
    with context_of(eqn):
        params = eqn.primitive.get_bind_params(eqn.params)
        outputs = eqn.primitive.bind(*inputs, **params)
    # Always a list: the result of `shard_map` (JAX 0.10) cannot be indexed.
    return list(outputs) if eqn.primitive.multiple_results else [outputs]
