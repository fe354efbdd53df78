from typing import Any

import pytest

from actjax import Quantized
from models import CompressedResiduals, Remat, Storage


@pytest.mark.parametrize(
    ("choice", "arguments", "error", "message"),
    [
        (Storage, {"gate": None}, TypeError, "`Storage.gate` must be an actjax.Codec, got None"),
        (Remat, {"codec": None}, TypeError, "`Remat.codec` must be an actjax.Codec, got None"),
        (
            CompressedResiduals,
            {"attention_out": None},
            TypeError,
            "`CompressedResiduals.attention_out` must be an actjax.Codec, got None",
        ),
        (
            Remat,
            {"policy": "half"},
            ValueError,
            r"`Remat.policy` must be one of .*, got 'half'",
        ),
        (
            Remat,
            {"policy": "dots", "codec": Quantized(4)},
            ValueError,
            r"`Remat.codec` Quantized.* needs policy='full', got policy='dots'",
        ),
    ],
)
def test_a_choice_names_what_does_not_fit(choice: Any, arguments, error, message):
    with pytest.raises(error, match=message):
        choice(**arguments)


def test_former_keywords_name_what_replaces_them():
    storage: Any = Storage
    for keyword, message in {
        "remat": r"no keyword `remat`: use Remat\(policy=...\)",
        "block": r"no keyword `block`: use Remat\(codec=...\)",
        "residuals": "no keyword `residuals`: use CompressedResiduals",
        "compensate": r"no keyword `compensate`: use Storage\(split_adapters=...\)",
    }.items():
        with pytest.raises(TypeError, match=message):
            storage(**{keyword: True})
