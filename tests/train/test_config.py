import pytest

from train.config import OptimizerConfig, PretrainConfig


@pytest.mark.parametrize("name", ["steps", "batch_size", "seq_len", "save_every", "keep"])
def test_counts_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"`--{name.replace('_', '-')}` must be at least 1, got 0"):
        PretrainConfig(**{name: 0})


def test_batches_that_micro_batches_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="`--batch-size` 8 must be a multiple of `--accumulate` 3"):
        PretrainConfig(accumulate=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -1e-3),
        ("learning_rate", float("nan")),
        ("warmup_steps", -1),
        ("final_learning_rate", 1.5),
        ("weight_decay", float("inf")),
        ("beta1", 1.0),
        ("beta2", -0.1),
        ("clip", 0.0),
        ("clip", float("nan")),
    ],
)
def test_optimizer_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"`--{name.replace('_', '-')}` must be .*, got {value}"):
        OptimizerConfig(**{name: value})


@pytest.mark.parametrize(("name", "value"), [("seed", -1), ("z_loss", -1.0)])
def test_run_settings_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"`--{name.replace('_', '-')}` must be in"):
        PretrainConfig(**{name: value})
