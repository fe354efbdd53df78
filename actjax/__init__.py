"""actjax: train transformers that do not fit, by storing activations in a smaller form."""

import importlib as _importlib
import types as _types

from actjax import optim as optim
from actjax.accumulate import accumulate as accumulate
from actjax.checkpoint import checkpoint as checkpoint
from actjax.choosing.allocate import allocate_bits as allocate_bits
from actjax.choosing.allocate import compression_variance as compression_variance
from actjax.choosing.choice import Choice as Choice
from actjax.choosing.compress import Compressed as Compressed
from actjax.choosing.compress import compress as compress
from actjax.choosing.controller import Controller as Controller
from actjax.choosing.measure import sampling_variance as sampling_variance
from actjax.choosing.measure import sensitivity as sensitivity
from actjax.codecs import Calibrated as Calibrated
from actjax.codecs import ChannelRange as ChannelRange
from actjax.codecs import Codec as Codec
from actjax.codecs import Exact as Exact
from actjax.codecs import Offloaded as Offloaded
from actjax.codecs import PointApproximation as PointApproximation
from actjax.codecs import Quantized as Quantized
from actjax.codecs import RandomizedSVD as RandomizedSVD
from actjax.codecs import RandomProjection as RandomProjection
from actjax.explain import Explanation as Explanation
from actjax.explain import Residual as Residual
from actjax.explain import explain as explain
from actjax.factored.low_rank import LowRank as LowRank
from actjax.factored.low_rank import clip_by_global_norm as clip_by_global_norm
from actjax.factored.low_rank import global_norm as global_norm
from actjax.factored.taps import Bases as Bases
from actjax.factored.value_and_grad import input_groups as input_groups
from actjax.factored.value_and_grad import value_and_grad as value_and_grad
from actjax.factored.value_and_grad import with_bases as with_bases
from actjax.formats.code import Levels as Levels
from actjax.formats.code import Rounding as Rounding
from actjax.formats.code import Scaling as Scaling
from actjax.ops import HeadNorm as HeadNorm
from actjax.ops import attention as attention
from actjax.ops import attention_linear as attention_linear
from actjax.ops import conv as conv
from actjax.ops import cross_entropy as cross_entropy
from actjax.ops import embedding as embedding
from actjax.ops import gelu as gelu
from actjax.ops import gelu_linear as gelu_linear
from actjax.ops import layer_norm as layer_norm
from actjax.ops import linear as linear
from actjax.ops import norm_linear as norm_linear
from actjax.ops import qkv_projection as qkv_projection
from actjax.ops import rms_norm as rms_norm
from actjax.ops import rope as rope
from actjax.ops import swiglu as swiglu
from actjax.ops import swiglu_linear as swiglu_linear
from actjax.ops import token_log_probs as token_log_probs
from actjax.residuals.candidates import Candidate as Candidate
from actjax.residuals.function import compress_residuals as compress_residuals
from actjax.weights.frozen import FrozenWeight as FrozenWeight
from actjax.weights.lora import LoRA as LoRA
from actjax.weights.lora import LowRankSum as LowRankSum
from actjax.weights.nf4 import NF4Weight as NF4Weight

_BY_LIBRARY = ("flax", "equinox")


def __getattr__(name: str) -> _types.ModuleType:
    """Imports what needs another library: `actjax.flax` and `actjax.equinox`.

    Args:
      name: name of a module.
    """
    if name in _BY_LIBRARY:
        return _importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.")
