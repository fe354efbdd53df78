"""Names of the cases. A module is imported when its case runs: libraries may be missing."""

import importlib

from benchmarks.anybody.case import Case

CASES = {
    "flax_llama": "transformers_llama:make",
    "flax_bert": "transformers_bert:make",
    "linen_resnet": "linen_resnet:make",
    "tunix_llama": "tunix_llama:make",
    "gemma": "gemma_transformer:make",
    "equinox_gpt": "equinox_gpt:make",
    "haliax": "haliax_transformer:make",
    "haiku_stack": "haiku_stack:make",
    "haiku_resnet": "haiku_resnet:make",
    "jraph": "jraph_network:make",
    "flaxdiff": "flaxdiff_unet:make",
    "penzai": "penzai_transformer:make",
    "easydel": "easydel_llama:make",
    "diffrax": "diffrax_ode:make",
    "diffrax_backsolve": "diffrax_ode:make_backsolve",
}
"""Module and function of each case."""


def load(name: str) -> Case:
    """Returns a case by its name."""
    module, function = CASES[name].split(":")
    return getattr(importlib.import_module(f"benchmarks.anybody.{module}"), function)()
