"""Functions that XLA computes in several passes over memory, in one.

A kernel is a folder: `api.py`, what to call; `reference.py`, what it means, in plain JAX;
`pallas.py`, the program. Arguments of real models are in `benchmarks/kernel_cases`.
"""

from actjax.kernels.dispatch import Implementation as Implementation
from actjax.kernels.dispatch import use as use
