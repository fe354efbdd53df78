"""Arguments of every kernel: small ones for tests, and those of real models for benchmarks.

One file a kernel, and `case.py` with what they share.
"""

from typing import NamedTuple

from actjax.kernels.adam_4bit.api import KERNEL as ADAM_4BIT
from actjax.kernels.adam_4bit.api import MAXIMA as ADAM_4BIT_MAXIMA
from actjax.kernels.adam_8bit.api import KERNEL as ADAM_8BIT
from actjax.kernels.dequantize.api import KERNEL as DEQUANTIZE
from actjax.kernels.dispatch import Kernel
from actjax.kernels.quantize.api import KERNEL as QUANTIZE
from actjax.kernels.rms_norm_backward.api import KERNEL as RMS_NORM_BACKWARD
from actjax.kernels.swiglu_backward.api import KERNEL as SWIGLU_BACKWARD
from benchmarks.kernel_cases import (
    adam_4bit,
    adam_8bit,
    dequantize,
    quantize,
    rms_norm_backward,
    swiglu_backward,
)
from benchmarks.kernel_cases.case import Case


class Entry(NamedTuple):
    """A kernel and its cases."""

    kernel: Kernel
    cases: tuple[Case, ...]


KERNELS: dict[str, Entry] = {
    "quantize": Entry(QUANTIZE, quantize.CASES),
    "dequantize": Entry(DEQUANTIZE, dequantize.CASES),
    "swiglu_backward": Entry(SWIGLU_BACKWARD, swiglu_backward.CASES),
    "rms_norm_backward": Entry(RMS_NORM_BACKWARD, rms_norm_backward.CASES),
    "adam_8bit": Entry(ADAM_8BIT, adam_8bit.CASES),
    "adam_4bit_maxima": Entry(ADAM_4BIT_MAXIMA, adam_4bit.MAXIMA_CASES),
    "adam_4bit": Entry(ADAM_4BIT, adam_4bit.CASES),
}
