"""Settings that are refused, and what each message says."""

import dataclasses
import functools
import math
import pathlib

import pytest
from messages import assert_messages
from tiny import CONFIG as MODEL

from models import preset
from train.settings.codecs import check_sites
from train.settings.config import (
    AdapterConfig,
    DataConfig,
    FinetuneConfig,
    OptimizerConfig,
    PretrainConfig,
)
from train.settings.data import ExampleConfig
from train.settings.methods import coordinate_bits, method
from train.settings.options import MethodOptions, check_flags
from train.settings.resolve import dimensions, resolve

FINETUNE = FinetuneConfig(checkpoint="some/model", adapter=AdapterConfig(lora_rank=4))
SITES = method("lean").sites(MethodOptions())
DENSE = "--no-in-backward --moment-dtype float32 --weight-dtype float32"
NAN = math.nan


def pretrain(method: str, optimizer: str = "", **changes):
    """Returns the resolved settings of a run on a tiny model."""
    changes |= {"optimizer": OptimizerConfig(optimizer=optimizer)} if optimizer else {}
    return resolve(PretrainConfig(method=method, **changes), MODEL)


of = functools.partial

TABLES = {
    "ranges": [
        *((of(PretrainConfig, **{name: 0}),
         f"`--{name.replace('_', '-')}` must be at least 1, got 0")
          for name in ("steps", "batch_size", "seq_len", "save_every")),
        (of(PretrainConfig, keep=0), "`keep` must be at least 1, got 0"),
        (of(PretrainConfig, accumulate=3),
         "`--batch-size` 8 must be a multiple of `--accumulate` 3"),
        (of(PretrainConfig, log_to=("wandb", "tensorbord")),
         "unknown `--log-to` 'tensorbord'. Did you mean tensorboard?"),
        (of(PretrainConfig, seed=-1), "`--seed` must be in"),
        (of(PretrainConfig, z_loss=-1.0), "`z_loss` must be in"),
        (of(PretrainConfig, model_vocab_size=-1),
         "`--model-vocab-size` must be in [0, inf), got -1"),
        (of(PretrainConfig, model_vocab_size=8191),
         "`--model-vocab-size 8191` is below the 8192 tokens"),
        (lambda: DataConfig(tokenizer=pathlib.Path("tokenizer.json"), vocab_size=300),
         "`--vocab-size 300` has no effect with `--tokenizer`"),
        (lambda: dimensions(PretrainConfig(model_vocab_size=9000), 9001),
         "9000` is below the 9001 tokens of the tokenizer: pass at least 9001, or 0"),
        (of(OptimizerConfig, learning_rate=-1e-3),
         "`--learning-rate` must be in [0, inf), got -0.001"),
        (of(OptimizerConfig, learning_rate=NAN), "`--learning-rate` must be in [0, inf), got nan"),
        (of(OptimizerConfig, warmup_steps=-1), "`--warmup-steps` must be in [0, inf), got -1"),
        (of(OptimizerConfig, weight_decay=math.inf),
         "`--weight-decay` must be in [0, inf), got inf"),
        (of(OptimizerConfig, beta1=1.0), "`beta1` must be in [0, 1), got 1.0"),
        (of(OptimizerConfig, beta2=-0.1), "`beta2` must be in [0, 1), got -0.1"),
        (of(OptimizerConfig, clip=0.0), "`--clip` must be above 0 (inf for no clipping), got 0.0"),
        (of(OptimizerConfig, clip=NAN), "`--clip` must be above 0 (inf for no clipping), got nan"),
        (of(MethodOptions, average_bits=9), "`--average-bits` must be 0 or in [1, 8], got 9"),
        (of(MethodOptions, adapt_every=0), "`adapt_every` must be at least 1, got 0"),
        (of(MethodOptions, rank=-1), "`--rank` must be at least 0, got -1"),
        (of(MethodOptions, gap=0), "`--gap` must be at least 1, got 0"),
        (FinetuneConfig, "`--checkpoint` is missing"),
        (of(AdapterConfig, targets=("q_prj",)), "'q_prj'"),
        (of(AdapterConfig, lora_rank=0), "must be at least 1, got 0"),
        (of(AdapterConfig, calibration_batches=0),
         "`calibration_batches` must be at least 1, got 0"),
        *((lambda x=x: ExampleConfig(held_out=x), f"`--held-out` must be in (0, 1), got {x}")
          for x in (0.0, 1.0, NAN)),
        (lambda: ExampleConfig(held_out=0.5, validation="other.jsonl"),
         "`--held-out 0.5` has no effect with `--validation`"),
    ],
    "optimizers": [
        (of(OptimizerConfig, optimizer="adamv"),
         "unknown `--optimizer` 'adamv'. Did you mean adamw"),
        (of(OptimizerConfig, optimizer="lion", moment_dtype="8bit-factored"),
         "moments of Adam, got `--optimizer lion`: pass `--moment-dtype 8bit`"),
        (of(OptimizerConfig, optimizer="adafactor", moment_dtype="4bit"),
         "`--moment-dtype 4bit` has no effect with `--optimizer adafactor`"),
        (of(pretrain, "galore", "fira"), "`--method galore` projects gradients too"),
        (of(pretrain, "subspace", "muon"),
         "`--optimizer muon` reads whole weights, and `--method subspace` shows it gradients in"),
        (of(pretrain, "lean", "fira", options=MethodOptions(rank=9)),
         "`--rank` 9 is above 8, the smallest dimension"),
        (of(pretrain, "low_rank", "fira"),
         "`--optimizer fira` reads whole gradients, and `--method low_rank` makes them two"),
    ],
    "methods": [
        (of(method, "lowrank"), "unknown `--method` 'lowrank'. Did you mean low_rank?"),
        *((lambda former=former: method(former), f"`--method {former}` is now `--method {now}`")
          for former, now in (
              ("frugal", "lean"), ("frugal_subspace", "lean_subspace"),
              ("quantized", f"lean {DENSE}"), ("compressed_remat", f"lean_remat {DENSE}"))),
        (of(pretrain, "lora"),
         "`--method lora` trains adapters of a checkpoint: use train.finetune"),
        (lambda: method("hyc_lora").storage(MethodOptions(remat=True, level="intra")),
         "`--level intra` has no effect"),
        (lambda: method("gact").resolve(
            MethodOptions(average_bits=3, codec=("q=Quantized(4)",)), preset("llama_60m")),
         "`--average-bits 3` and the bits in `--codec q=Quant"),
        (of(pretrain, "lean", options=MethodOptions(adapt_every=5)),
         "`adapt_every: 5` has no effect without `--average-bits`"),
        (of(pretrain, "subspace", options=MethodOptions(rank=25)),
         "`--rank` 25 is above 24, the smallest dimension of a weight of llama_9m"),
    ],
    "flags of other methods": [
        (of(check_flags, "qlora", MethodOptions(offload=True)),
         "`--offload` has no effect with `--method q"),
        (of(check_flags, "exact", MethodOptions(remat=True)), "is for lora, qlora, hyc_l"),
        (of(check_flags, "lean", MethodOptions(gap=5)), "is for subspace, galore, random_projec"),
        (of(check_flags, "galore", MethodOptions(codec=("Quantized(8)",))),
         "`--codec Quantized(8)` has no"),
        (of(check_flags, "remat", MethodOptions(average_bits=3)), "is for gact, lean"),
        (of(check_flags, "exact", AdapterConfig(lora_rank=4)), "is for lora, qlora, hyc_lora"),
        (of(check_flags, "qlora", AdapterConfig(calibration_batches=2)), "is for hyc_lora"),
        (of(check_flags, "lora", PretrainConfig(in_backward=True)),
         "`--in-backward` has no effect"),
        (of(check_flags, "lora", PretrainConfig(in_backward=False)),
         "`--no-in-backward` has no effect"),
        (of(pretrain, "exact", options=MethodOptions(rank=8)),
         "`--rank 8` has no effect with `--method exact`: it is for low_rank, subspace"),
        (of(pretrain, "exact", weight_rounding="stochastic"),
         "`--weight-rounding stochastic` has no effect on float32 weights: drop it, or pass"
         " `--weight-dtype bfloat16`"),
        (lambda: resolve(dataclasses.replace(FINETUNE, method="exact"), MODEL),
         "`--lora-rank 4` has no effect with `--method exact`"),
        (lambda: resolve(dataclasses.replace(FINETUNE, in_backward=True), MODEL),
         "`--in-backward` has no effect with `--method lora`"),
    ],
    "sites": [
        *((lambda site=site: check_sites((f"{site}=Quantized(4)",), "lean", SITES), message)
          for site, message in (
              ("attention_out", "names no site of `--method lean`. Did you mean attention_norm"),
              ("nose", "`--codec nose=...` names no site"), ("nose", " It encodes"))),
        *((lambda name=name, given=given: check_sites(
            ("q=Exact()",), name, method(name).sites(given)), "`--codec q=...` names no site")
          for name, given in (
              ("subspace", MethodOptions()), ("hyc_lora", MethodOptions(remat=True)))),
        *((lambda text=text: coordinate_bits(MethodOptions(codec=(text,))),
           "coordinates in a subspace are stored as")
          for text in ("Quantized(3)", "Quantized(4, group=32)", "RandomizedSVD(4)")),
        (of(MethodOptions, codec=("Quantized(4)", "Quantized(3)")),
         "names two codecs for all sites"),
        (of(MethodOptions, codec=("q=Exact()", "q=Quantized(3)")), "names two codecs for site q"),
    ],
    "texts of codecs": [
        (of(MethodOptions, codec=(text,)), message)
        for text, message in (
            ("Quantised(4)", "is no codec. Did you mean Quantized?"),
            ("Quantized(7)", "`bits` of Quantized must be one of (1, 2, 3, 4, 5, 6, 8), got 7"),
            ("Quantized(True)", "`bits` of Quantized must be one of"),
            ("Quantized(-4)", "got -4"),
            ("Quantized(4, bitz=3)", "Quantized has no field 'bitz'. Did you mean bits?"),
            ("Quantized(4, bits=3)", "gives `bits` twice"),
            ("Quantized(1,2,3,4,5,6,7,8,9,10)", "Quantized has the fields bits, group"),
            ("Quantized(8, levels='normal')", "'normal' for up to 4 bits"),
            ("Quantized", "is no codec. Its parentheses are missing"),
            ("Quantized(4", "is no codec"),
            ("Quantized([4])", "A field takes a number, a quoted word"),
            ("Quantized(bits=print)", "A field takes a number, a quoted word"),
            ("Quantized(4).bits", "is no codec"),
            ("Quantized(**{})", "Quantized has no field None"),
            ("__import__('os')", "\"__import__('os')\" is no codec"),
            ("__import__('os').system('true')", "is no codec"),
            ("q=k=Quantized(4)", "is no codec"),
            ("Calibrated(4)", "is no codec"),
            ("Offloaded(Offloaded(Exact()))", "must be an actjax.Codec that stays on the device"),
            ("PointApproximation(2.0)", "`ratio` of PointApproximation must be in (0, 1]"),
            ("RandomizedSVD(0)", "`rank` of RandomizedSVD must be an integer >= 1, got 0"),
            ("Quantized(4" + " " * 300 + ")", "It has 312 characters"),
            ("(" * 150, "is no codec"),
            ("\0(", "is no codec"),
            ("", "is no codec"),
        )
    ],
}  # fmt: skip


@pytest.mark.parametrize("table", TABLES)
def test_settings_are_refused_with_these_messages(table):
    assert_messages(ValueError, TABLES[table])


def test_messages_about_texts_of_codecs_name_the_flag():
    for call, _ in TABLES["texts of codecs"]:
        with pytest.raises(ValueError, match=r"^`--codec`"):
            call()
