"""The planner, on models that this machine compiles in a second."""

import dataclasses
import functools
import json
import re
import shlex

import hub_cache
import jax
import pytest
from tiny import CONFIG as TINY

from models.huggingface import fields_of
from models.presets import PRESETS
from tests.train.runs import quiet
from train import plan
from train.plan import ALL, PlanConfig, PlannedAdapters, PlannedConfig, run
from train.planning import search, tables
from train.planning.devices import HERE
from train.planning.estimate import Compiled, Plan, compile_plan, make_plan
from train.planning.measured import MeasureConfig
from train.planning.search import Found
from train.planning.tables import flags, rare_settings, table_of
from train.run.recipe import build_recipe
from train.run.report import StepMemory, explain_step, step_memory
from train.run.step import init_state
from train.settings import cli
from train.settings.config import DataConfig, FinetuneConfig, OptimizerConfig, PretrainConfig
from train.settings.options import FULL_WEIGHTS, MethodOptions
from train.settings.resolve import dimensions, resolve
from train.settings.sizes import parse_budget as parse_bytes
from train.text.trained_tokenizer import train_bpe

TRAIN = PretrainConfig(method=ALL, batch_size=2, seq_len=32, compute_dtype="float32")


@pytest.fixture
def tiny(monkeypatch):
    """Settings of a tiny model, which is a preset for one test."""
    monkeypatch.setitem(PRESETS, "tiny", TINY)
    return dataclasses.replace(TRAIN, model="tiny", method="exact", batch_size=4, seq_len=16)


def printed(config: PlanConfig) -> tuple[bool, str]:
    console = quiet()
    done = run(config, console)
    return done, console.file.getvalue()


def test_sizes():
    assert parse_bytes("24GiB") == parse_bytes(" 24 G ") == 24 * 2**30
    assert parse_bytes("1.5MB") == 1_500_000
    assert parse_bytes("7B") == 7
    assert parse_bytes(str(2**20)) == 2**20
    for text in ("", "GiB", "-1GiB", "0", "24", "12 bananas"):
        with pytest.raises(
            ValueError, match=re.escape(f"such as 24GiB or 16GB, or auto, got {text!r}")
        ):
            parse_bytes(text)


def test_flags_give_the_settings_back():
    codecs = MethodOptions(codec=("Quantized(2)", "gate=Exact()"))
    for config in (
        PretrainConfig(),
        PretrainConfig(method="lean", options=codecs, in_backward=False),
        PretrainConfig(
            model="llama_7b",
            options=MethodOptions(offload=True, average_bits=3.5),
            optimizer=OptimizerConfig(moment_dtype="8bit"),
            in_backward=True,
            weight_dtype="bfloat16",
        ),
    ):
        assert cli.from_arguments(PretrainConfig, shlex.split(flags(config))) == config
        assert rare_settings(config) == []


def test_rare_settings_are_the_lines_of_a_file(tmp_path):
    config = PretrainConfig(
        method="lean_subspace",
        options=MethodOptions(scale=0.5, gap=5),
        optimizer=OptimizerConfig(beta2=0.99),
        z_loss=1e-5,
        keep=3,
    )
    assert flags(config) == "--method lean_subspace --gap 5"
    lines = rare_settings(config)
    assert lines == ["scale: 0.5", "beta2: 0.99", "z_loss: 1e-05", "keep: 3"]
    (tmp_path / "plan.yaml").write_text("\n".join(lines))
    command = [*shlex.split(flags(config)), "--config", str(tmp_path / "plan.yaml")]
    assert cli.parse(PretrainConfig, "train.pretrain", args=command) == config


def test_a_checkpoint_by_its_name_at_the_hub(tmp_path, monkeypatch, capsys):
    hub_cache.use(monkeypatch, tmp_path / "hub")
    (tmp_path / "config.json").write_text(json.dumps(fields_of(TINY, "float32")))
    hub_cache.put(tmp_path / "hub", "org/tiny", tmp_path)  # Weights are not needed.
    memory = StepMemory(1, 1, 1, 1, 1)
    monkeypatch.setattr(tables, "make_plan", lambda config: Plan(config, memory, 1))

    def found(train, *_, **__):
        one = Compiled(train, 1, 0, 0, 0, {})
        return Found(one, [one], None)

    monkeypatch.setattr(plan, "search", found)
    train = dataclasses.replace(TRAIN, method="remat")
    done, text = printed(
        PlanConfig(dataclasses.replace(train, checkpoint="org/tiny", budget="1GiB"))
    )
    assert done
    assert "tiny, vocabulary of" in text
    command = capsys.readouterr().out.strip().splitlines()[-1]
    assert command.startswith("python -m train.finetune --checkpoint org/tiny --method remat")
    with pytest.raises(ValueError, match="`--checkpoint`: 'org/none' is no folder and is not in"):
        run(PlanConfig(dataclasses.replace(train, checkpoint="org/none")), quiet())


def test_the_fastest_plan_that_fits_is_printed_with_its_command(
    tiny, capsys, monkeypatch, tmp_path
):
    # The first plan fits and is the fastest, so only that one is compiled.
    compiled = []

    def record(*args):
        compiled.append(compile_plan(*args))
        return compiled[-1]

    monkeypatch.setattr(search, "compile_plan", record)
    limit = 2**30
    train = dataclasses.replace(tiny, method="remat", z_loss=1e-4, batch_size=1)
    done, text = printed(PlanConfig(dataclasses.replace(train, budget=str(limit))))
    assert done, text
    command = capsys.readouterr().out.strip().splitlines()[-1]
    assert command.startswith("python -m train.pretrain ")
    assert "--budget" not in command
    arguments = shlex.split(command.removeprefix("python -m train.pretrain"))
    (one,) = compiled
    assert one.peak <= limit
    assert f": {one.peak / 2**20:.2f} MiB" in " ".join(text.split())
    assert "write this into plan.yaml:\n\nz_loss: 0.0001\n" in text
    (tmp_path / "plan.yaml").write_text("z_loss: 0.0001")
    monkeypatch.chdir(tmp_path)
    chosen = dataclasses.replace(one.config, budget="")
    assert cli.parse(PretrainConfig, "train.pretrain", args=arguments) == chosen
    # Without a budget, the same plan is printed as a table. It is compiled already.
    monkeypatch.setattr(plan, "compile_plan", lambda *_: one)
    done, text = printed(PlanConfig(chosen))
    assert done
    for word in ("peak", "weights", "gradients", "states", "residuals", "workspace", "remat"):
        assert word in text
    assert "tokens/s" not in text  # The time of this machine is not predicted.
    assert "tokens/s" in shown(table_of([dataclasses.replace(one, seconds=0.5)], chosen, "h100"))


def shown(table) -> str:
    console = quiet()
    console.print(table)
    return console.file.getvalue()


def test_micro_batches_and_predicted_times_are_in_the_table(tiny, monkeypatch):
    memory = StepMemory(1, 1, 1, 1, 1)
    monkeypatch.setattr(tables, "make_plan", lambda config: Plan(config, memory, 1))
    halves = dataclasses.replace(tiny, accumulate=2)
    text = shown(table_of([Compiled(halves, 1, 0, 0, 0, {}, seconds=0.064)], halves, "h100"))
    assert "exact --accumulate 2" in text
    assert re.search(r"64 +1,000", text)  # 4 x 16 tokens in 64 ms.


def test_a_budget_that_nothing_fits_is_reported(tiny):
    train = dataclasses.replace(tiny, method="exact", batch_size=1, budget="1KiB")
    done, text = printed(PlanConfig(train))
    assert not done
    assert re.search(
        "nothing fits 1KiB: the smallest plan, exact .*, takes [0-9.]+ MiB; raise", text
    )


@pytest.fixture
def planned(monkeypatch):
    """Settings of the plans that would be made. None is."""
    seen = []

    def stop(config, device):
        seen.append(config)
        raise LookupError

    monkeypatch.setattr(plan, "compile_plan", stop)
    return seen


def test_a_plan_has_the_vocabulary_of_the_preset_unless_another_is_given(planned, tmp_path):
    train_bpe(["some text"], 260).save(tmp_path)
    for changes in ({}, {"model_vocab_size": 9000}, {"data": DataConfig(tokenizer=tmp_path)}):
        with pytest.raises(LookupError):
            run(PlanConfig(dataclasses.replace(TRAIN, method="exact", **changes)), quiet())
    assert [dimensions(config).vocab_size for config in planned] == [32_000, 9000, 384]


def test_all_methods_that_train_weights_are_planned_with_their_options(planned, monkeypatch):
    for name in FULL_WEIGHTS:
        monkeypatch.setattr(plan, "FULL_WEIGHTS", (name,))
        with pytest.raises(LookupError):
            run(PlanConfig(dataclasses.replace(TRAIN, options=MethodOptions(gap=5))), quiet())
    assert [config.method for config in planned] == list(FULL_WEIGHTS)
    subspaces = [config.method for config in planned if config.options.gap == 5]
    assert subspaces == ["subspace", "galore", "random_projection", "lean_subspace"]


def test_a_plan_of_adapters_is_that_of_their_step(tiny):
    adapter = PlannedAdapters(lora_rank=2, targets=("q", "down"))
    train = PlannedConfig(**{f.name: getattr(tiny, f.name) for f in dataclasses.fields(tiny)})
    train = dataclasses.replace(train, method="qlora", adapter=adapter, weight_dtype="bfloat16")
    done, text = printed(PlanConfig(train))
    assert done
    assert "weights NF4 and bfloat16" in " ".join(text.split())
    assert "qlora --lora-rank 2 --targets q down" in " ".join(text.split())
    tuned = FinetuneConfig("qlora", checkpoint="tiny", batch_size=4, seq_len=16,
                           compute_dtype="float32", adapter=adapter)  # fmt: skip
    recipe = build_recipe(resolve(tuned, TINY, "bfloat16"))
    state = jax.eval_shape(functools.partial(init_state, recipe))
    memory = step_memory(recipe, state, explain_step(recipe, state))
    assert make_plan(train).memory == memory
    with pytest.raises(ValueError, match="`--lora-rank 2` has no effect"):
        run(PlanConfig(dataclasses.replace(train, method="exact")), quiet())
    with pytest.raises(ValueError, match="`--measure` compares gradients of all weights"):
        PlanConfig(
            dataclasses.replace(train, checkpoint="c", model=PretrainConfig.model),
            measuring=MeasureConfig(True),
        )


def test_bad_settings_and_settings_without_effect_are_refused():
    eight_bit = OptimizerConfig(moment_dtype="8bit")
    two, exact = (MethodOptions(codec=(text,)) for text in ("Quantized(2)", "Exact()"))
    for changes, device, budget, message in (
        ({}, "abacus", "", "unknown device 'abacus'"),
        ({}, "here", "plenty", "such as 24GiB"),
        ({"mesh": "rows=2"}, "here", "", "'rows=2' is not AXIS=SIZE"),
        ({"method": "lean", "options": two}, "here", "1GiB", "`--codec`: the search"),
        ({"options": exact}, "here", "", "`--codec` is for one met"),
        ({"options": MethodOptions(rank=2)}, "here", "1GiB", "`--rank`: the search"),
        ({"optimizer": eight_bit}, "here", "1GiB", "`--moment-dtype`: the search"),
        ({"method": "pamm"}, "here", "1GiB", "`--method pamm` is not part of the search"),
    ):
        with pytest.raises(ValueError, match=message):
            PlanConfig(dataclasses.replace(TRAIN, budget=budget, **changes), device)
    for changes, message in (
        ({"method": "magic"}, "unknown `--method`"),
        ({"method": "lora"}, "use train.finetune"),
        ({"method": "exact", "options": MethodOptions(rank=4)}, "`--rank 4` has no effect"),
    ):
        with pytest.raises(ValueError, match=message):
            printed(PlanConfig(dataclasses.replace(TRAIN, **changes)))


def test_a_plan_for_four_devices_tells_what_each_of_them_takes(tiny, monkeypatch):
    one, four = (
        compile_plan(dataclasses.replace(tiny, mesh=mesh), HERE) for mesh in ("", "fsdp=4")
    )
    assert not one.exchanged
    # The vocabulary of 61 and the width of the output cannot be divided, norms and embedding can.
    assert one.weights / 4 <= four.weights <= 0.3 * one.weights
    assert four.states <= 0.3 * one.states
    assert four.exchanged["all-gather"] > one.weights
    monkeypatch.setattr(plan, "compile_plan", lambda *_: four)
    done, text = printed(PlanConfig(four.config))
    assert done
    assert "compiled for here x fsdp=4, of each device" in " ".join(text.split())
    for column in ("gathered", "reduced", "moved"):
        assert column in text
