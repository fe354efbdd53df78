"""Optimizers with small states, and updates that never exist for all weights at once."""

from actjax.formats.blockwise import Blockwise as Blockwise
from actjax.formats.four_bit import RankOneFourBit as RankOneFourBit
from actjax.formats.four_bit import SignedFourBit as SignedFourBit
from actjax.optim.layers import LayerwiseState as LayerwiseState
from actjax.optim.projected.projections import Side as Side
from actjax.optim.projected.remainders import ScaledRemainder as ScaledRemainder
from actjax.optim.projected.subspace import Source as Source
from actjax.optim.projected.subspace import Subspace as Subspace
from actjax.optim.projected.subspace import SubspaceState as SubspaceState
from actjax.optim.projected.subspace import SubspaceTransformation as SubspaceTransformation
from actjax.optim.projected.subspace import subspace as subspace
from actjax.optim.rounding.stochastic import RoundedState as RoundedState
from actjax.optim.rounding.stochastic import RoundedTransformation as RoundedTransformation
from actjax.optim.rounding.stochastic import WeightRounding as WeightRounding
from actjax.optim.rounding.stochastic import stochastic_rounding as stochastic_rounding
from actjax.optim.states.adam_4bit import scale_by_adam_4bit as scale_by_adam_4bit
from actjax.optim.states.adam_8bit import scale_by_adam_8bit as scale_by_adam_8bit
from actjax.optim.states.eight_bit import EightBitState as EightBitState
from actjax.optim.states.eight_bit import eight_bit as eight_bit
from actjax.optim.states.factored import FactoredAdamState as FactoredAdamState
from actjax.optim.states.factored import scale_by_factored_adam as scale_by_factored_adam
from actjax.optim.states.factored import (
    scale_by_factored_adam_4bit as scale_by_factored_adam_4bit,
)
from actjax.optim.states.four_bit import FourBitState as FourBitState
from actjax.optim.states.four_bit import four_bit as four_bit
from actjax.optim.states.host_states import to_host as to_host
from actjax.optim.stepping.apply import apply as apply
from actjax.optim.stepping.apply import redraw as redraw
from actjax.optim.stepping.backward_step import InBackwardState as InBackwardState
from actjax.optim.stepping.clipping import clip_by_global_norm as clip_by_global_norm
from actjax.optim.stepping.in_backward import InBackward as InBackward
from actjax.optim.stepping.in_backward import in_backward as in_backward
from actjax.optim.stepping.init import init as init
