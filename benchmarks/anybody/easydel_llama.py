"""Llama of EasyDeL: not measured.

With easydel 0.3.0, pip chooses jax 0.9.2, and actjax needs jax 0.10. The model was not tried with
a newer jax than easydel asks for.
"""

from benchmarks.anybody.case import Case


def make() -> Case:
    raise ImportError("pip chooses jax 0.9.2 for easydel 0.3.0, and actjax needs jax 0.10")
