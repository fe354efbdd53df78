"""The backward pass of SwiGLU from codes of its inputs, which are decoded in registers only."""

from typing import Any

import jax

from actjax._math.padding import check_features, zero_beyond
from actjax._shards import is_partitioned
from actjax.formats.code import QuantizedCode
from actjax.kernels.checks import check_code, check_floating
from actjax.kernels.dispatch import Implementation, Kernel
from actjax.kernels.swiglu_backward import reference


def swiglu_backward(
    gate: QuantizedCode,
    up: QuantizedCode,
    dy: jax.Array,
    *,
    with_value: bool = True,
    features: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array | None, jax.Array, jax.Array]:
    """Returns `silu(gate) * up` and the gradients of `gate` and `up`, at the decoded inputs.

    It reads each code and `dy` once, and writes each result once. A linear operator that follows
    needs the value for its weight gradient.

    Args:
      gate: code of [..., f].
      up: code with the same shape, dtype and group.
      dy: gradient of the value, [..., f].
      with_value: whether to return the value.
      features: number of features that are not padding; None for all. Decoded inputs are zero
        beyond it, and so are the value and both gradients.
      implementation: what computes it; None for the best one that applies.

    Returns:
      The value (None without `with_value`) and both gradients, [..., f] in the dtype of `gate`,
      computed in float32.

    Raises:
      TypeError: `gate` or `up` is not a code, or `dy` is not floating point.
      ValueError: shapes differ; an implementation that cannot take the arguments.
    """
    check_floating("swiglu_backward", "dy", dy)
    check_code("swiglu_backward", "gate", gate, dy.shape)
    check_code("swiglu_backward", "up", up, dy.shape)
    features = check_features(features, dy.shape[-1])
    options: dict[str, Any] = {"with_value": with_value, "implementation": implementation}
    if features is None or not is_partitioned((gate, up, dy)):
        return KERNEL(gate, up, dy, features=features, **options)
    # A device that computes some of the features does not know which of them are padding.
    results = KERNEL(gate, up, dy, features=None, **options)
    return jax.tree.map(lambda x: zero_beyond(features, x), results)


def _dims(
    result: Any,
    gate: QuantizedCode,
    up: QuantizedCode,
    dy: jax.Array,
    *,
    with_value: bool,
    features: int | None = None,
) -> tuple[tuple, tuple] | None:
    del dy, with_value, features
    if gate.seed is not None or up.seed is not None:
        return None
    codes = gate.dims(), up.dims()
    # Both or neither: groups may differ, and only one of the two may have outliers.
    names = {code.planes[0] for code in codes}
    if len(names) > 1:
        codes = gate.dims(features=None), up.dims(features=None)
    rows = codes[0].planes[0]
    return (*codes, rows), (None if result[0] is None else rows, rows, rows)


KERNEL = Kernel(
    "swiglu_backward",
    reference.swiglu_backward,
    _dims,
    mosaic="actjax.kernels.swiglu_backward.mosaic",
    triton="actjax.kernels.swiglu_backward.triton",
    reads_layers=True,
)
