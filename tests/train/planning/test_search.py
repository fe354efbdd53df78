"""The search of `--budget`: its candidates, bounds, and choices. Nothing is compiled."""

import dataclasses
from unittest import mock

import pytest
from tiny import CONFIG as TINY

from models.presets import PRESETS
from tests.train.runs import quiet
from train.planning import budget, search
from train.planning.budget import check_searched, methods_of, settled
from train.planning.devices import HERE
from train.planning.estimate import Compiled, make_plan
from train.planning.least import is_exact, least_memory, least_work, total
from train.planning.search import stages
from train.run.saved_settings import write_settings
from train.run.utilization import step_flops
from train.settings.config import FinetuneConfig, MomentDtype, OptimizerConfig, PretrainConfig
from train.settings.methods import METHODS
from train.settings.options import ADAPTERS, FULL_WEIGHTS, SEARCHED, MethodOptions
from train.settings.resolve import resolve

WITHOUT_MEMORY = {"gap", "scale", "average_bits", "adapt_every"}
"""Options of methods that the search leaves alone."""


@pytest.fixture(scope="module", autouse=True)
def _tiny():
    with mock.patch.dict(PRESETS, {"tiny": TINY}):
        yield


@pytest.fixture(scope="module")
def train():
    return PretrainConfig(
        model="tiny", batch_size=4, seq_len=16, compute_dtype="float32", weight_dtype="bfloat16"
    )


@pytest.fixture(scope="module")
def groups(train):
    return dict(stages(train, methods_of(train, adapters=False), "h100"))


def settings(candidates):
    return [candidate.config for candidate in candidates]


def test_every_option_is_searched_or_named_as_one_without_memory():
    options = {field.name for field in dataclasses.fields(MethodOptions)}
    assert options - set(SEARCHED) == WITHOUT_MEMORY


def test_candidates_have_all_values_of_the_tables(groups):
    first, *others = groups
    assert first == "every weight"
    assert others == [f"in a subspace of rank {rank}" for rank in (6, 3, 1)]
    full = settings(groups[first])
    assert len(full) == len(set(full))
    methods = {name for name in FULL_WEIGHTS if not METHODS[name].for_comparison}
    every = [config for group in groups.values() for config in settings(group)]
    assert {config.method for config in every} == methods
    resolved = [resolve(config, TINY) for config in full]
    moments = {config.optimizer.moment_dtype for config in resolved}
    assert moments == set(MomentDtype.__args__) - {"auto", "bfloat16", "bfloat16-factored"}
    assert {config.in_backward for config in resolved} == {False, True}
    assert {config.accumulate for config in full} == {1, 2, 4}
    assert {config.optimizer.offload_states for config in full} == {False, True}
    codecs = {text for config in full for text in config.options.codec}
    assert {"Exact()", "Quantized(8)", "Quantized(2)"} <= codecs
    remat = {(c.in_backward, c.optimizer.moment_dtype) for c in full if c.method == "remat"}
    assert {(True, "8bit"), (True, "4bit-factored")} <= remat


def test_settings_of_others_stay_and_unused_options_go(train):
    given = dataclasses.replace(train, batch_size=1, options=MethodOptions(gap=5), z_loss=1e-4)
    for _, group in stages(given, ["remat", "lean_subspace"], HERE):
        for config in settings(group):
            assert config.options.gap == (5 if config.method == "lean_subspace" else 200)
            assert config.z_loss == 1e-4


def test_no_candidate_updates_in_the_backward_pass_where_steps_may_be_skipped(train):
    half = dataclasses.replace(train, compute_dtype="float16")
    for _, group in stages(half, ["exact", "lean"], HERE):
        assert not any(resolve(config, TINY).in_backward for config in settings(group))


def test_adapters_come_last(train):
    tuned = FinetuneConfig("lora", checkpoint="c", batch_size=2, seq_len=16)
    assert methods_of(tuned, adapters=True) == list(ADAPTERS)
    assert methods_of(dataclasses.replace(tuned, method="qlora"), adapters=True) == ["qlora"]
    assert methods_of(train, adapters=False)[0] == "exact"


def test_bounds_count_what_is_known(train):
    def bytes_of(**changes):
        return least_memory(resolve(dataclasses.replace(train, **changes), TINY))

    plan = make_plan(dataclasses.replace(train, method="exact"))
    memory = plan.memory
    whole = memory.weights + memory.optimizer + memory.gradients + memory.linear_residuals
    assert whole < bytes_of(method="exact") < memory.total * 1.1
    assert bytes_of(method="exact", in_backward=True) < bytes_of(method="exact")
    assert bytes_of(method="exact", accumulate=4) < bytes_of(method="exact", accumulate=2)
    half = OptimizerConfig(moment_dtype="bfloat16")
    assert bytes_of(method="exact", optimizer=half) < bytes_of(method="exact")
    assert bytes_of(method="remat") < bytes_of(method="exact")


def test_work_counts_the_operations_of_the_trace(train):
    exact = dataclasses.replace(train, method="exact")
    model = dataclasses.replace(TINY, ffn_size=48)  # Without padding, whose products are no use.
    work = total(least_work(resolve(exact, model)))
    assert work.products + work.attention == pytest.approx(step_flops(resolve(exact, model)))
    work = total(least_work(resolve(exact, TINY)))
    remat = total(least_work(resolve(dataclasses.replace(train, method="remat"), TINY)))
    traced = [
        make_plan(dataclasses.replace(train, method=name)).flops for name in ("exact", "remat")
    ]
    assert remat.products - work.products == pytest.approx(traced[1] - traced[0], rel=0.3)


class Compiler:
    """Stands for the compiler: peaks above the bounds, times that a method scales."""

    def __init__(self, workspace=0, factors=None):
        self.compiled, self.workspace, self.factors = [], workspace, factors or {}

    def __call__(self, config, device):
        self.compiled.append(config)
        resolved = resolve(config, TINY)
        seconds, gpu = None, search.gpu_of(device)
        if gpu is not None:
            seconds = search.predicted_seconds(total(least_work(resolved)), gpu)
            seconds *= self.factors.get(config.method, 1.0)
        peak = least_memory(resolved) + self.workspace
        return Compiled(config, peak, 0, 0, 0, {}, seconds=seconds)


def found(monkeypatch, train, size, compiler, accept=lambda _: True, methods=None):
    monkeypatch.setattr(search, "compile_plan", compiler)
    methods = methods or ["exact", "remat", "lean"]
    train = dataclasses.replace(train, batch_size=2)
    return search.search(train, "h100", size, methods=methods, say=lambda _: None, accept=accept)


def test_exact_gradients_are_taken_where_all_fits_and_one_program_is_compiled(monkeypatch, train):
    compiler = Compiler()
    best = found(monkeypatch, train, 2**40, compiler).best
    assert len(compiler.compiled) == 1
    resolved = resolve(best.config, TINY)
    assert is_exact(resolved)
    assert resolved.optimizer.moment_dtype == "float32"


def test_a_method_that_compiles_slower_loses_to_another(monkeypatch, train):
    compiler = Compiler(factors={"exact": 5.0})
    result = found(monkeypatch, train, 2**40, compiler)
    assert result.best.config.method != "exact"
    assert result.fitting[0] is result.best


def test_workspaces_are_learned_and_the_smallest_is_told(monkeypatch, train):
    compiler = Compiler(workspace=2**40)
    result = found(monkeypatch, train, 2**39, compiler, methods=["exact", "remat"])
    assert result.best is None
    assert result.smallest.peak > 2**40
    kinds = {(c.method, c.in_backward, c.accumulate, c.options.offload) for c in compiler.compiled}
    assert len(kinds) == len(compiler.compiled)
    compiler = Compiler()
    nothing = found(monkeypatch, train, 2**10, compiler, methods=["exact", "remat"])
    assert len(compiler.compiled) == 1  # The smallest, to tell its size.
    assert "nothing fits 1KiB: the smallest plan" in budget.nothing_fits("1KiB", nothing)


def test_subspaces_are_only_taken_if_nothing_else_fits(monkeypatch, train):
    compiler = Compiler()
    methods = ["remat", "lean_subspace"]
    size = found(monkeypatch, train, 2**40, compiler, methods=methods).best.peak
    assert {config.method for config in compiler.compiled} == {"remat"}

    def accept(compiled):
        return compiled.config.method == "lean_subspace"

    best = found(monkeypatch, train, size, compiler, accept, methods).best
    assert best.config.options.rank == TINY.hidden_size // 4


def test_plans_that_share_a_gradient_are_refused_together(monkeypatch, train):
    compiler = Compiler()
    methods = ["exact", "remat", "lean"]
    best = found(
        monkeypatch, train, 2**40, compiler, lambda x: x.config.method == "lean", methods
    ).best
    assert best.config.method == "lean"
    names = [config.method for config in compiler.compiled]
    assert names.count("exact") <= 1
    assert names.count("remat") <= 1


def test_what_a_search_would_overwrite_is_refused(train):
    for changes, message in (
        ({"options": MethodOptions(rank=2)}, "`--rank`: the search of `--budget` chooses it"),
        ({"optimizer": OptimizerConfig(moment_dtype="8bit")}, "`--moment-dtype`: the search"),
        ({"accumulate": 2, "in_backward": True}, "`--accumulate`, `--in-backward`: the search"),
        ({"method": "pamm"}, "`--method pamm` is not part of the search"),
    ):
        with pytest.raises(ValueError, match=message):
            check_searched(dataclasses.replace(train, **changes))


def test_budgets_of_a_run_are_refused_in_one_line(train, tmp_path):
    train = dataclasses.replace(train, budget="auto")
    with pytest.raises(ValueError, match=r"`--budget auto`: the device .* pass a size such as"):
        settled(train, 61, quiet())
    with pytest.raises(ValueError, match="`--budget auto` chooses the settings of a new run"):
        settled(dataclasses.replace(train, resume=True), 61, quiet())
    with pytest.raises(ValueError, match="`--budget` is for one process"):
        settled(dataclasses.replace(train, distributed=True), 61, quiet())
    with pytest.raises(ValueError, match="or auto, got 'plenty'"):
        dataclasses.replace(train, budget="plenty")


def test_a_run_takes_what_the_search_chose_and_continues_with_it(monkeypatch, train, tmp_path):
    monkeypatch.setattr(search, "compile_plan", Compiler())
    monkeypatch.setattr(budget, "table_of", lambda *_: "the table")
    asked = PretrainConfig(model="tiny", method="remat", batch_size=1, seq_len=16, out=tmp_path,
                           budget="1GiB")  # fmt: skip
    console = quiet()
    chosen = settled(asked, 384, console)
    text = console.file.getvalue()
    assert "the table" in text
    assert "the same as: python -m train.pretrain --method remat" in text
    assert "budget" not in text.split("the same as:")[1]
    assert (chosen.method, chosen.weight_dtype) == ("remat", "bfloat16")
    assert (chosen.budget, chosen.model_vocab_size) == ("1GiB", 0)
    chosen = dataclasses.replace(chosen, in_backward=True, accumulate=1)
    write_settings(tmp_path, chosen)
    again = PretrainConfig(model="tiny", batch_size=1, seq_len=16, out=tmp_path, resume=True)
    assert settled(again, 61, console) == dataclasses.replace(chosen, resume=True)
    given = dataclasses.replace(again, optimizer=OptimizerConfig(moment_dtype="4bit"))
    assert settled(given, 61, console).optimizer.moment_dtype == "4bit"
    # A run without a budget continues with the settings that are given.
    write_settings(tmp_path, dataclasses.replace(chosen, budget=""))
    assert settled(again, 61, console) == again
