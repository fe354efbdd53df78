"""The planner as a user runs it, on a model that this machine compiles in a second."""

import dataclasses
import io
import re
import shlex

import pytest
import tyro
from rich.console import Console

from models import preset
from train.config import OptimizerConfig, PretrainConfig
from train.methods import METHODS, MethodOptions
from train.plan import (
    ALL,
    PlanConfig,
    compile_plan,
    flags,
    make_plan,
    parse_bytes,
    run,
    stages,
)

TRAIN = PretrainConfig(method=ALL, batch_size=2, seq_len=32, compute_dtype="float32")


def printed(config: PlanConfig) -> tuple[bool, str]:
    console = Console(file=io.StringIO(), width=160)
    done = run(config, console)
    return done, console.file.getvalue()


def test_sizes():
    assert parse_bytes("24GiB") == parse_bytes(" 24 G ") == 24 * 2**30
    assert parse_bytes("1.5MB") == 1_500_000
    assert parse_bytes("7B") == 7
    assert parse_bytes(str(2**20)) == 2**20
    for text in ("", "GiB", "-1GiB", "0", "24", "12 bananas"):
        with pytest.raises(ValueError, match=re.escape(f"such as 24GiB or 16GB, got {text!r}")):
            parse_bytes(text)


@pytest.mark.parametrize(
    "config",
    [
        PretrainConfig(),
        PretrainConfig(method="frugal", options=MethodOptions(bits=2, sites=("gate", "up"))),
        PretrainConfig(
            model="llama_7b",
            options=MethodOptions(offload=True, average_bits=3.5),
            optimizer=OptimizerConfig(moment_dtype="8bit"),
            in_backward=True,
            weight_dtype="bfloat16",
        ),
    ],
    ids=lambda c: flags(c) or "defaults",
)
def test_flags_say_what_the_settings_are(config):
    read = tyro.cli(
        PretrainConfig, args=shlex.split(flags(config)), config=(tyro.conf.OmitArgPrefixes,)
    )
    assert read == config


def test_plans_begin_with_what_costs_no_quality():
    titles, found = zip(*stages(TRAIN, preset("llama_9m")), strict=True)
    assert titles[:2] == ("full rank, four bits or more", "full rank, fewer bits")
    first, fewer, *subspace = found
    assert {c.options.bits for c in first} <= {0, 4, 8, 16}
    assert {c.options.bits for c in fewer} == {2, 3}
    assert {c.method for stage in subspace for c in stage} == {"frugal_subspace"}
    assert [stage[0].options.rank for stage in subspace[:4]] == [32, 16, 8, 4]
    every = [c for stage in found for c in stage]
    assert len(every) == len(set(every))
    assert {c.method for c in every} < set(METHODS)


def test_the_fastest_plan_that_fits_is_printed_and_holds(capsys):
    # Room for the first choice, which is the fastest, and the only one to be compiled.
    limit = 2**30
    train = dataclasses.replace(TRAIN, method="compressed_remat")
    done, text = printed(PlanConfig(train, budget=str(limit)))
    assert done, text
    command = capsys.readouterr().out.strip().splitlines()[-1]
    assert command.startswith("python -m train.pretrain ")
    read = tyro.cli(
        PretrainConfig,
        args=shlex.split(command.removeprefix("python -m train.pretrain")),
        config=(tyro.conf.OmitArgPrefixes,),
    )
    assert compile_plan(make_plan(read, "here"), "here").peak <= limit


def test_what_fits_nowhere_is_said():
    train = dataclasses.replace(TRAIN, method="remat")
    done, text = printed(PlanConfig(train, budget="1MiB"))
    assert not done
    assert "nothing fits 1MiB" in text


def test_without_a_budget_every_category_of_a_method_is_shown():
    done, text = printed(PlanConfig(dataclasses.replace(TRAIN, method="quantized")))
    assert done
    for word in ("peak", "weights", "gradients", "states", "residuals", "workspace", "quantized"):
        assert word in text


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="unknown device 'abacus'"):
        PlanConfig(TRAIN, device="abacus")
    with pytest.raises(ValueError, match="such as 24GiB"):
        PlanConfig(TRAIN, budget="plenty")
    with pytest.raises(ValueError, match="unknown `--method`"):
        printed(PlanConfig(dataclasses.replace(TRAIN, method="magic")))
