"""Arguments of every kernel: small ones for tests, and those of real models for benchmarks."""

from typing import NamedTuple

from actjax.kernels.adam_4bit import api as adam_4bit
from actjax.kernels.adam_8bit.api import KERNEL as ADAM_8BIT
from actjax.kernels.dequantize.api import KERNEL as DEQUANTIZE
from actjax.kernels.dispatch import Kernel
from actjax.kernels.quantize.api import KERNEL as QUANTIZE
from actjax.kernels.rms_norm_backward.api import KERNEL as RMS_NORM_BACKWARD
from actjax.kernels.rms_norm_encode.api import KERNEL as RMS_NORM_ENCODE
from actjax.kernels.rope_decode.api import KERNEL as ROPE_DECODE
from actjax.kernels.rope_encode.api import KERNEL as ROPE_ENCODE
from actjax.kernels.swiglu_backward.api import KERNEL as SWIGLU_BACKWARD
from actjax.kernels.swiglu_encode.api import KERNEL as SWIGLU_ENCODE
from benchmarks.kernel_cases import optimizers, tokens
from benchmarks.kernel_cases.case import Case


class Entry(NamedTuple):
    """A kernel and its cases."""

    kernel: Kernel
    cases: tuple[Case, ...]


KERNELS: dict[str, Entry] = {
    "quantize": Entry(QUANTIZE, tokens.QUANTIZE),
    "dequantize": Entry(DEQUANTIZE, tokens.DEQUANTIZE),
    "swiglu_backward": Entry(SWIGLU_BACKWARD, tokens.SWIGLU_BACKWARD),
    "swiglu_encode": Entry(SWIGLU_ENCODE, tokens.SWIGLU_ENCODE),
    "rms_norm_backward": Entry(RMS_NORM_BACKWARD, tokens.RMS_NORM_BACKWARD),
    "rms_norm_encode": Entry(RMS_NORM_ENCODE, tokens.RMS_NORM_ENCODE),
    "rope_encode": Entry(ROPE_ENCODE, tokens.ROPE_ENCODE),
    "rope_decode": Entry(ROPE_DECODE, tokens.ROPE_DECODE),
    "adam_8bit": Entry(ADAM_8BIT, optimizers.ADAM_8BIT),
    "adam_4bit_maxima": Entry(adam_4bit.MAXIMA, optimizers.ADAM_4BIT_MAXIMA),
    "adam_4bit": Entry(adam_4bit.KERNEL, optimizers.ADAM_4BIT),
}
