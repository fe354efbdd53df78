import dataclasses
import io

import jax
import pytest
from rich.console import Console
from tiny import CONFIG as MODEL

from actjax import RandomizedSVD
from models import Storage
from train.config import PretrainConfig
from train.report import explain_step, print_opening
from train.step import init_state

CONFIG = PretrainConfig(batch_size=4, seq_len=16)
STORAGE = Storage(mlp_out=RandomizedSVD(4))


@pytest.fixture(scope="module")
def shapes():
    return jax.eval_shape(lambda: init_state(CONFIG, MODEL))


def test_the_table_names_each_site_and_what_it_stores(shapes):
    explanation = explain_step(CONFIG, shapes, STORAGE)
    by_name = {residual.name: residual for residual in explanation.residuals}
    assert by_name["mlp_out"].codec == "RandomizedSVD(rank=4)"
    assert by_name["mlp_out"].stored_bytes == 3 * 2 * 4 * (4 * 16 + 44)
    assert by_name["mlp_in"].codec == "Exact()"


def test_accumulation_keeps_a_micro_batch(shapes):
    whole = explain_step(CONFIG, shapes, Storage())
    half = explain_step(dataclasses.replace(CONFIG, accumulate=2), shapes, Storage())
    row = {r.name: r.stored_bytes for r in half.residuals}["mlp_out"]
    assert 2 * row == {r.name: r.stored_bytes for r in whole.residuals}["mlp_out"]


def test_the_opening_says_where_memory_goes(shapes):
    console = Console(file=io.StringIO(), width=140)
    explanation = explain_step(CONFIG, shapes, STORAGE)
    print_opening(console, CONFIG, MODEL, shapes, explanation)
    text = console.file.getvalue()
    for word in ("parameters", "weights", "gradients", "optimizer", "RandomizedSVD", "total"):
        assert word in text


def test_a_rank_that_does_not_fit_is_found_before_the_first_step(shapes):
    with pytest.raises(ValueError, match=r"`rank` 25 .* is above min\(T, d\) = 24"):
        explain_step(CONFIG, shapes, Storage(mlp_in=RandomizedSVD(25)))
