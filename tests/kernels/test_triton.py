"""Tests of the kernels that are written in Triton: interpreted, assembled, and chosen."""

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.kernel_cases import gpu_named

import actjax
from actjax.formats.code import QuantizeInputs
from actjax.kernels import dispatch
from actjax.kernels.tail import Elementwise, Tail
from benchmarks.kernel_cases import KERNELS

NEEDED = ("jax_triton", "jax_cuda12_plugin")
needs_triton = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in NEEDED),
    reason="needs jax-triton: pip install -e '.[compile]'",
)
ROTATED = actjax.Quantized(4, balance=True, rotate=True, levels="normal")


def run(*arguments, **environment):
    """Runs a program in its own process: Triton reads the environment at import."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", **environment}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True, text=True, timeout=900, check=False, env=environment,
    )  # fmt: skip


# Kernels, and in how many ways they are called.
INTERPRETED = {
    "quantize": 10,
    "dequantize": 4,
    "swiglu_encode": 4,
    "swiglu_backward": 2,
    "rms_norm_encode rope_encode rope_decode": 12,
    "rms_norm_backward": 3,
    "adam_8bit elementwise copies": 9,
    "adam_4bit_maxima adam_4bit": 13,
}


@needs_triton
@pytest.mark.slow  # 2 min of processor time: the interpreter runs a program at a time.
@pytest.mark.parametrize("names", INTERPRETED)
def test_interpreted_programs_agree_with_the_definitions_in_float64(names):
    pytest.importorskip("torch")
    program, path = pathlib.Path(__file__).with_name("triton_interpreter.py"), sys.path
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, path))}
    done = run(program, *names.split(), **environment)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {row["kernel"] for row in rows} == set(names.split())
    assert len(rows) == INTERPRETED[names]
    # Not a code differs.
    assert all(row["ok"] and row["differing"] == 0 for row in rows), rows


@needs_triton
@pytest.mark.slow  # 90 s of processor time, most of it the compiler's.
def test_assembled_programs_fit_a_core_without_spills(tmp_path):
    results = tmp_path / "triton.json"
    cases = [
        "llama_1b gate, 4 bits, normal levels, balanced, rotated",
        "llama_1b, 4 bits, normal levels, balanced, rotated",
        "llama_1b gate",
        "llama_1b query, 5 bits, balanced, rotated",
        "llama_1b, exact",
    ]
    done = run("-m", "benchmarks.triton_kernels", "--cases", *cases, "--results", str(results))
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [r for r in json.loads(results.read_text())["rows"] if r["program"] == "triton"]
    assert {row["case"] for row in rows} == set(cases)
    assert {row["capability"] for row in rows} == {"8.0", "8.9", "9.0"}
    largest = {"8.0": 166912, "8.9": 101376, "9.0": 232448}
    for row in rows:
        assert row["spilled"] == 0, row
        assert row["shared"] <= largest[row["capability"]], row


@needs_triton
@pytest.mark.slow  # 8 s of processor time: each choice of blocks is compiled where it is lowered.
def test_a_program_that_is_asked_for_is_lowered():
    x = jax.ShapeDtypeStruct((16, 128), jnp.bfloat16)
    with gpu_named(), actjax.kernels.use("triton"):
        traced = jax.jit(lambda x: ROTATED.decode(ROTATED.encode(x))).trace(x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("triton_kernel_call") == 2


STEP = """
import actjax, dataclasses, jax, re, warnings
from actjax.optim.stepping import tails
from benchmarks.traffic import Config, _program

tails._LEAST = 0  # Small arrays are otherwise left to XLA.
train = dataclasses.replace(Config().train, model="llama_3m", batch_size=2, seq_len=128)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    text = _program("STEP", Config(train))
print(len([w for w in said if "definitions in plain JAX" in str(w.message)]))
calls = re.findall(r'custom_call_target="triton_kernel_call.*?(actjax_\\w+)/', text)
print(*sorted(set(calls)))
"""


@needs_triton
@pytest.mark.slow  # 60 s of processor time: three whole steps are compiled.
@pytest.mark.parametrize(
    ("step", "kernels"),
    [
        (
            "lean",
            "actjax_adam_8bit actjax_copies actjax_dequantize actjax_quantize"
            " actjax_rms_norm_backward actjax_rms_norm_encode actjax_rms_norm_gradient"
            " actjax_rms_norm_sums actjax_rope_decode actjax_rope_encode actjax_swiglu_backward"
            " actjax_swiglu_encode",
        ),
        ("exact", "actjax_copies actjax_elementwise actjax_rms_norm_backward"),
        (
            "exact, 4-bit and factored",
            "actjax_adam_4bit actjax_adam_4bit_maxima actjax_copies actjax_rms_norm_backward",
        ),
    ],
)
def test_a_step_has_the_programs_in_triton(step, kernels):
    path = os.pathsep.join(filter(None, sys.path))
    done = run("-c", STEP.replace("STEP", step), PYTHONPATH=path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == ["0", kernels]


def tail(function, *shapes, has_first=False):
    """Returns the `Tail` of a function of matrices."""
    jaxpr = jax.make_jaxpr(function)(*shapes).jaxpr
    program = Elementwise(
        tuple(jaxpr.eqns), tuple(jaxpr.invars), tuple(jaxpr.outvars), has_first, len(shapes), (),
        (None,) * len(jaxpr.outvars), (),
    )  # fmt: skip
    return Tail(shapes, (), program)


@needs_triton
def test_programs_in_triton_are_the_default_and_take_groups_that_small_gpus_hold(monkeypatch):
    kernel, inputs = KERNELS["quantize"].kernel, QuantizeInputs(jnp.ones((16, 256), jnp.bfloat16))

    def chosen(group):
        options = {"format": dataclasses.replace(ROTATED, group=group).format_of(256)}
        default = kernel._default("cuda", (inputs,), options)
        return default, kernel.refusal("triton", (inputs,), options)

    assert chosen(128) == ("triton", None)
    assert chosen(256) == ("reference", "takes groups of (32, 64, 128) features, got group=256")
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    monkeypatch.setattr(dispatch, "_missing", dispatch._missing.__wrapped__)
    tell = dispatch._tell_that_definitions_run.__wrapped__
    monkeypatch.setattr(dispatch, "_tell_that_definitions_run", tell)
    with pytest.warns(UserWarning, match=r"are their definitions.*pip install 'actjax\[gpu\]'"):
        assert chosen(128)[0] == "reference"


@needs_triton
def test_chains_that_a_program_cannot_take_are_named():
    from actjax.kernels.triton_tail import refuses

    def of(dtype, count=1):
        return [jax.ShapeDtypeStruct((4, 8), dtype)] * count

    shift = functools.partial(jax.lax.shift_right_logical, jnp.uint8(4) * jnp.ones((4, 8), "uint8"))
    rows = [
        (tail(lambda x: (x, jnp.square(x)), *of("float32")), None),
        (tail(lambda *x: x[0], *of("float32", 7)), "takes a tail of up to 6 matrices, got 7"),
        (tail(lambda x: (x,) * 5, *of("float32")), "takes a tail of up to 4 outputs, got 5"),
        (tail(jax.lax.erf_inv, *of("float32")), "has no operation erf_inv"),
        (tail(lambda x: jax.lax.integer_pow(x, 9), *of("float32")), "has no power of 9"),
        (tail(jax.lax.div, *of("int32", 2)), "divides floating point numbers only"),
        (tail(shift, *of("uint8")), "shifts numbers of 32 bits only"),
        (tail(lambda x: x > 0, *of("float32")), "takes no matrices of bools"),
    ]
    for chain, message in rows:
        assert refuses(chain) == message


def test_without_jax_triton_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    monkeypatch.setattr(dispatch, "_missing", dispatch._missing.__wrapped__)
    within = actjax.kernels.use("triton")
    with pytest.raises(ValueError, match=r"'triton' needs jax_triton.*pip install"), within:
        pass
    kernel, cases = KERNELS["quantize"]
    with pytest.raises(ValueError, match=r"'triton' of quantize needs jax_triton"):
        jax.jit(functools.partial(kernel, implementation="triton", **cases[0].options)).trace(
            *cases[0].shapes()
        )


def test_a_version_that_does_not_go_with_jax_is_named(monkeypatch, tmp_path):
    (tmp_path / "jax_triton.py").write_text("import jax; jax.no_such_name")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jax_triton", raising=False)
    monkeypatch.setattr(dispatch, "_missing", dispatch._missing.__wrapped__)
    within = actjax.kernels.use("triton")
    with (
        pytest.raises(ValueError, match=r"jax_triton, which fails with JAX .*no_such_name"),
        within,
    ):
        pass


def test_kernels_without_such_a_program_say_so():
    kernel, cases = KERNELS["adam_4bit"]
    with pytest.raises(ValueError, match="'mosaic' of adam_4bit has no such program"):
        jax.eval_shape(
            functools.partial(kernel, implementation="mosaic", **cases[0].options),
            *cases[0].shapes(),
        )


def test_programs_for_gpus_fall_back_on_a_cpu():
    x = np.random.default_rng(0).normal(size=(4, 256)).astype("float32")
    kernel, format, codes = KERNELS["quantize"].kernel, actjax.Quantized(4).format, []
    installed = all(importlib.util.find_spec(name) for name in NEEDED)
    for name in (None, *(["triton"] if installed else [])):
        with actjax.kernels.use(name):
            run = functools.partial(kernel, format=format)
            codes += [run(QuantizeInputs(x)), jax.jit(run)(QuantizeInputs(x))]
    for code in codes[1:]:
        jax.tree.map(np.testing.assert_array_equal, code, codes[0])
