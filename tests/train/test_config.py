import pytest

from train.config import PretrainConfig


@pytest.mark.parametrize("name", ["steps", "batch_size", "seq_len", "save_every", "keep"])
def test_counts_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"`--{name.replace('_', '-')}` must be at least 1, got 0"):
        PretrainConfig(**{name: 0})


def test_batches_that_cannot_be_cut_are_refused():
    with pytest.raises(ValueError, match="`--batch-size` 8 must be a multiple of `--accumulate` 3"):
        PretrainConfig(accumulate=3)
