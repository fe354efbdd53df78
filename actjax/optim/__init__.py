"""Optimizers with small states, and updates that never exist for all weights at once."""

from actjax.kernels.blockwise import Blockwise as Blockwise
from actjax.optim.adam_8bit import scale_by_adam_8bit as scale_by_adam_8bit
from actjax.optim.apply import apply as apply
from actjax.optim.apply import init as init
from actjax.optim.apply import redraw as redraw
from actjax.optim.eight_bit import EightBitState as EightBitState
from actjax.optim.eight_bit import eight_bit as eight_bit
from actjax.optim.in_backward import InBackward as InBackward
from actjax.optim.in_backward import InBackwardState as InBackwardState
from actjax.optim.in_backward import in_backward as in_backward
from actjax.optim.layers import LayerwiseState as LayerwiseState
from actjax.optim.moments import Moments as Moments
from actjax.optim.projections import Side as Side
from actjax.optim.rounding import RoundedState as RoundedState
from actjax.optim.rounding import RoundedTransformation as RoundedTransformation
from actjax.optim.rounding import WeightRounding as WeightRounding
from actjax.optim.rounding import compensated as compensated
from actjax.optim.rounding import stochastic_rounding as stochastic_rounding
from actjax.optim.subspace import Source as Source
from actjax.optim.subspace import Subspace as Subspace
from actjax.optim.subspace import SubspaceState as SubspaceState
from actjax.optim.subspace import SubspaceTransformation as SubspaceTransformation
from actjax.optim.subspace import subspace as subspace
