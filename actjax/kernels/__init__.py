"""Functions that XLA computes in several passes over memory, in one.

A kernel is a folder: `api.py`, what to call; `reference.py`, what it means, in plain JAX;
`pallas.py`, the program; `shapes.py`, arguments of real models, for tests and benchmarks.
"""

from actjax.kernels.dispatch import Implementation as Implementation
from actjax.kernels.dispatch import use as use
