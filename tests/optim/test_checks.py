"""Arguments that are refused before anything is traced."""

import optax
import pytest

from actjax.optim.checks import check_callable, check_transform


def test_transforms_and_functions_are_accepted():
    check_transform("tx", optax.adam(1e-3))
    check_callable("layers", len)


@pytest.mark.parametrize(
    ("tx", "hint"),
    [(optax.adam, "Call it: it returns a transform."), (None, "got None"), (0.1, "0.1")],
)
def test_other_objects_are_named_with_a_remedy(tx, hint):
    with pytest.raises(TypeError, match=f"`tx` must be an optax transform, .*{hint}"):
        check_transform("tx", tx)


def test_an_object_that_cannot_be_called_is_named():
    with pytest.raises(TypeError, match="`layers` must be a function, got 'layers'"):
        check_callable("layers", "layers")
