"""An identity that cannot be differentiated: arrays pass it before they are encoded.

A gradient is computed from codes. Rounding has no derivative, or zero, so the derivative of such a
gradient would be silently wrong. A `custom_jvp` does not help: partial evaluation of a `scan` drops
its rule.
"""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def no_derivative(x: jax.Array) -> jax.Array:
    """Returns `x`. Differentiation of the result raises a `NotImplementedError`."""
    return _no_derivative.bind(x)


_no_derivative = Primitive("no_derivative")
_no_derivative.def_impl(lambda x: x)
_no_derivative.def_abstract_eval(lambda x: x)
mlir.register_lowering(_no_derivative, lambda context, x: [x])


def _batched(arguments: Any, axes: Any) -> Any:
    return _no_derivative.bind(*arguments), axes[0]


def _refuse(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "The gradient is computed from codes, so it has no derivative with respect to what is"
        " stored in them. For second derivatives store it exactly: `codec=Exact()` in an operator;"
        " in compress_residuals, the function itself or a rule that returns None for all arrays."
    )


batching.primitive_batchers[_no_derivative] = _batched
ad.primitive_jvps[_no_derivative] = _refuse
