"""actjax: train transformers that do not fit, by storing activations in a smaller form."""

from actjax.codecs import Codec as Codec
from actjax.codecs import Exact as Exact
from actjax.codecs import PointApproximation as PointApproximation
from actjax.codecs import PrincipalPlusRandom as PrincipalPlusRandom
from actjax.codecs import RandomizedSVD as RandomizedSVD
from actjax.codecs import RandomProjection as RandomProjection
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
