"""Every kernel, with the arguments to try it on: what tests and benchmarks go through."""

from typing import NamedTuple

from actjax.kernels.adam_8bit import api as adam_8bit
from actjax.kernels.adam_8bit import shapes as adam_8bit_shapes
from actjax.kernels.cases import Case
from actjax.kernels.dequantize import api as dequantize
from actjax.kernels.dequantize import shapes as dequantize_shapes
from actjax.kernels.dispatch import Kernel
from actjax.kernels.point_assignment import api as point_assignment
from actjax.kernels.point_assignment import shapes as point_assignment_shapes
from actjax.kernels.quantize import api as quantize
from actjax.kernels.quantize import shapes as quantize_shapes
from actjax.kernels.rms_norm_backward import api as rms_norm_backward
from actjax.kernels.rms_norm_backward import shapes as rms_norm_backward_shapes
from actjax.kernels.segment_sum import api as segment_sum
from actjax.kernels.segment_sum import shapes as segment_sum_shapes
from actjax.kernels.swiglu_backward import api as swiglu_backward
from actjax.kernels.swiglu_backward import shapes as swiglu_backward_shapes


class Entry(NamedTuple):
    """A kernel and its cases."""

    kernel: Kernel
    cases: tuple[Case, ...]


KERNELS: dict[str, Entry] = {
    "quantize": Entry(quantize.KERNEL, quantize_shapes.CASES),
    "dequantize": Entry(dequantize.KERNEL, dequantize_shapes.CASES),
    "swiglu_backward": Entry(swiglu_backward.KERNEL, swiglu_backward_shapes.CASES),
    "rms_norm_backward": Entry(rms_norm_backward.KERNEL, rms_norm_backward_shapes.CASES),
    "point_assignment": Entry(point_assignment.KERNEL, point_assignment_shapes.CASES),
    "scaled_segment_sum": Entry(segment_sum.KERNEL, segment_sum_shapes.CASES),
    "adam_8bit": Entry(adam_8bit.KERNEL, adam_8bit_shapes.CASES),
}
