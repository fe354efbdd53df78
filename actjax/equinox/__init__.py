"""Layers of Equinox whose backward passes store codes of their inputs. Needs the package `equinox`.

Each is a subclass of a layer of Equinox, with the same parameters and one more argument, `codec`,
and is mapped over tokens or examples in the same way: `jax.vmap(layer)(x)`. Mapping makes one call
with all of them, so a weight has one gradient, and a codec sees all tokens.
`replace(model, rules)` puts them into an existing model.
"""

from actjax.equinox.attention import MultiheadAttention as MultiheadAttention
from actjax.equinox.layers import LayerNorm as LayerNorm
from actjax.equinox.layers import Linear as Linear
from actjax.equinox.layers import RMSNorm as RMSNorm
from actjax.equinox.replace import replace as replace
from actjax.equinox.replace import with_keys as with_keys
from actjax.equinox.traced import Conv as Conv
from actjax.equinox.traced import Conv1d as Conv1d
from actjax.equinox.traced import Conv2d as Conv2d
from actjax.equinox.traced import Conv3d as Conv3d
from actjax.equinox.traced import GroupNorm as GroupNorm
from actjax.equinox.traced import GRUCell as GRUCell
from actjax.equinox.traced import LSTMCell as LSTMCell
