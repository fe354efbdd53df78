"""Which part of a path is whose."""

import pytest

from actjax.optim.paths import split_path

WEIGHTS = ("layers.attention.q", "q", "norm")


@pytest.mark.parametrize(
    ("name", "fields", "weight"),
    [
        ("0.mu.layers.attention.q", ["0", "mu"], "layers.attention.q"),
        ("0.nu.q", ["0", "nu"], "q"),
        ("q", [], "q"),
        ("count", ["count"], None),
        # The end of a name is not that of a path.
        ("mu.layernorm", ["mu", "layernorm"], None),
    ],
)
def test_a_path_ends_in_that_of_the_longest_parameter(name, fields, weight):
    assert split_path(name, WEIGHTS) == (fields, weight)
