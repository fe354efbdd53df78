"""SwiGLU that encodes its inputs for the backward pass while it reads them."""

from typing import Any

import jax

from actjax._math.padding import check_features, zero_beyond
from actjax._shards import is_partitioned
from actjax.formats.code import Format, QuantizedCode, QuantizeInputs
from actjax.kernels.checks import check_shape
from actjax.kernels.dispatch import Compute, Implementation, Kernel
from actjax.kernels.quantize.api import KERNEL as QUANTIZE
from actjax.kernels.quantize.api import check_inputs, dims_of_inputs
from actjax.kernels.swiglu_encode import reference


def swiglu_encode(
    gate: QuantizeInputs,
    up: QuantizeInputs,
    *,
    formats: tuple[Format, Format],
    features: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, QuantizedCode, QuantizedCode]:
    """Returns `silu(gate) * up`, and the codes of both: reads each once, and writes each once.

    Args:
      gate: an activation [..., f], and arrays that its format needs.
      up: another of the same shape and dtype.
      formats: how numbers of `gate` and of `up` are stored.
      features: number of features that are not padding; None for all. The value is zero beyond it.
      implementation: what computes it; None for the best one that applies. Where no program does
        all of it, `quantize` encodes, and plain JAX computes the value.

    Returns:
      The value, [..., f] in the dtype of `gate`, computed in float32; and both codes, as
      `actjax.kernels.quantize.api.quantize` returns them.

    Raises:
      TypeError: an input that is not floating point.
      ValueError: shapes or dtypes differ; as for `quantize`; an implementation that cannot take
        the arguments.
    """
    for inputs, format in zip((gate, up), formats, strict=True):
        check_inputs("swiglu_encode", inputs, format)
    check_shape("swiglu_encode", "up", up.x, gate.x.shape)
    if up.x.dtype != gate.x.dtype:
        raise ValueError(
            f"`up` of swiglu_encode must be {gate.x.dtype}, as `gate` is, got {up.x.dtype}."
        )
    features = check_features(features, gate.x.shape[-1])
    options: dict[str, Any] = {"formats": formats, "implementation": implementation}
    if features is None or not is_partitioned((gate, up)):
        return KERNEL(gate, up, features=features, **options)
    # A device that computes some of the features does not know which of them are padding.
    value, gate_code, up_code = KERNEL(gate, up, features=None, **options)
    return zero_beyond(features, value), gate_code, up_code


def _dims(
    result: Any,
    gate: QuantizeInputs,
    up: QuantizeInputs,
    *,
    formats: tuple[Format, Format],
    features: int | None,
) -> tuple[tuple, tuple] | None:
    del formats, features
    _, *codes = result
    of_gate, of_up = map(dims_of_inputs, codes, (gate, up))
    if of_gate is None or of_up is None or of_gate[1].planes[0] != of_up[1].planes[0]:
        return None
    return (of_gate[0], of_up[0]), (of_gate[1].planes[0], of_gate[1], of_up[1])


def _parts(
    compute: Compute,
    gate: QuantizeInputs,
    up: QuantizeInputs,
    *,
    formats: tuple[Format, Format],
    features: int | None,
    into: Any = None,
) -> tuple[jax.Array, QuantizedCode, QuantizedCode]:
    """Encodes by `quantize`."""
    _, *places = (None, None, None) if into is None else into
    codes = (
        compute(QUANTIZE, gate, into=places[0], format=formats[0]),
        compute(QUANTIZE, up, into=places[1], format=formats[1]),
    )
    return reference.value(gate.x, up.x, features), *codes


KERNEL = Kernel(
    "swiglu_encode",
    reference.swiglu_encode,
    _dims,
    mosaic="actjax.kernels.swiglu_encode.mosaic",
    triton="actjax.kernels.swiglu_encode.triton",
    parts=_parts,
    writes_layers="results",
)
