import pytest

from models import ModelConfig

GOOD = {"vocab_size": 8, "hidden_size": 8, "ffn_size": 8, "num_layers": 1, "num_heads": 2}


def test_defaults_follow_from_the_rest():
    config = ModelConfig(**GOOD)
    assert (config.num_kv_heads, config.head_size) == (2, 4)
    assert ModelConfig(**GOOD, num_kv_heads=1, head_size=6).head_size == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "`num_layers` must be an integer >= 1, got 0"),
        ({"num_heads": 0}, "`num_kv_heads` must be an integer >= 1|`num_heads` must be"),
        ({"ffn_size": 2.5}, "`ffn_size` must be an integer"),
        ({"num_heads": 4, "num_kv_heads": 3}, "`num_heads` 4 must be a multiple of"),
        ({"num_heads": 3}, "`hidden_size` 8 is not a multiple of `num_heads` 3: pass `head_size`"),
        ({"head_size": 3}, "`head_size` must be even for RoPE, got 3"),
    ],
)
def test_dimensions_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**GOOD | changes)
