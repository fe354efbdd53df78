"""Layers of Flax whose backward passes store codes. Needs the package `flax`.

`actjax.flax.nnx` and `actjax.flax.linen` have layers that replace layers of Flax, and
`replace(model, rules)` swaps them into a model that exists.
"""

from actjax.flax import linen as linen
from actjax.flax import nnx as nnx
from actjax.flax.replace import replace as replace
