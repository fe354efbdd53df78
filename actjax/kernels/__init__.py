"""Kernels: functions in one pass over memory, for which XLA needs several.

A kernel is a folder: `api.py`, the function to call; `reference.py`, its definition in plain JAX;
`triton.py` and `mosaic.py`, the programs. Arguments of real models are in
`benchmarks/kernel_cases`.
"""

from actjax.kernels.dispatch import Implementation as Implementation
from actjax.kernels.dispatch import use as use
