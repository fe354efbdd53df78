"""actjax: train transformers that do not fit, by storing activations in a smaller form."""

from actjax import optim as optim
from actjax.accumulation import accumulate as accumulate
from actjax.codecs import Codec as Codec
from actjax.codecs import Exact as Exact
from actjax.codecs import PointApproximation as PointApproximation
from actjax.codecs import PrincipalPlusRandom as PrincipalPlusRandom
from actjax.codecs import RandomizedSVD as RandomizedSVD
from actjax.codecs import RandomProjection as RandomProjection
from actjax.gradients import Bases as Bases
from actjax.gradients import input_groups as input_groups
from actjax.gradients import value_and_grad as value_and_grad
from actjax.gradients import with_bases as with_bases
from actjax.low_rank import LowRank as LowRank
from actjax.low_rank import clip_by_global_norm as clip_by_global_norm
from actjax.low_rank import global_norm as global_norm
from actjax.ops import attention as attention
from actjax.ops import cross_entropy as cross_entropy
from actjax.ops import linear as linear
from actjax.ops import qkv_projection as qkv_projection
from actjax.ops import rms_norm as rms_norm
from actjax.ops import rope as rope
from actjax.ops import swiglu as swiglu
from actjax.residuals import Explanation as Explanation
from actjax.residuals import Residual as Residual
from actjax.residuals import explain as explain
