"""Sections that compare with a definition or with another run: kernels, operators, determinism."""

import secrets
from typing import Any

import jax
import numpy as np

from actjax import kernels
from benchmarks import operator_check
from benchmarks.gpu.config import Config, find_case, on_gpu, takes_triton
from benchmarks.kernel_check import check
from benchmarks.rivals import ON_DEVICE, Rival, random_batch, rival
from models import preset
from train.settings.config import PretrainConfig


def check_kernel(config: Config, unit: dict[str, str]) -> dict[str, Any]:
    """Compares a kernel with its definition in float64."""
    del config
    kernel, case = find_case(unit)
    seed = secrets.randbits(31)
    found = check(kernel, case, seed, "pallas" if on_gpu() else "interpreted")
    if takes_triton(kernel, case):
        other = check(kernel, case, seed, "triton")
        found |= {"triton": other, "ok": found["ok"] and other["ok"]}
    return {"seed": seed, **found}


def operator_units(config: Config) -> list[dict[str, str]]:
    """Returns the operators."""
    del config
    return [{"operator": name} for name in operator_check.CASES]


def check_operator(config: Config, unit: dict[str, str]) -> dict[str, Any]:
    """Compares gradients of an operator in bfloat16 with those in float64."""
    del config
    seed = secrets.randbits(31)
    implementation = None if on_gpu() else "interpreted"
    found = operator_check.check(operator_check.CASES[unit["operator"]], seed, implementation)
    return {"seed": seed, **found}


def determinism_units(config: Config) -> list[dict[str, str]]:
    """Returns the rivals whose state is on the device."""
    return [{"rival": name} for name in config.rivals if name in ON_DEVICE]


def check_determinism(config: Config, unit: dict[str, str]) -> dict[str, Any]:
    """Takes a step of `llama_3m` twice, and once without kernels."""
    del config
    implementation = "pallas" if on_gpu() else "interpreted"
    train: Any = PretrainConfig(
        model="llama_3m", batch_size=2, seq_len=64, weight_dtype="float32",
        compute_dtype="float32",
    )  # fmt: skip
    one = rival(unit["rival"], train)
    batch = random_batch(train, preset(train.model).vocab_size)
    state = jax.jit(one.init)()
    if one.refresh is not None:
        state, _ = jax.jit(one.refresh)(state, batch)
    program = _step_by(one, implementation)
    first, second = (jax.tree.map(np.asarray, program(state, batch)) for _ in range(2))
    plain = jax.tree.map(np.asarray, _step_by(one, "reference")(state, batch))
    leaves = [jax.tree.leaves(x[0].model) for x in (first, second, plain)]
    start = [np.asarray(x) for x in jax.tree.leaves(state.model)]
    moved = _norm([a - b for a, b in zip(leaves[2], start, strict=True)])
    apart = _norm([a - b for a, b in zip(leaves[0], leaves[2], strict=True)])
    same = all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    )
    return {"ok": same, "same_bits": same, "apart": apart / moved}


def _step_by(one: Rival, implementation: kernels.Implementation) -> Any:
    """Returns a jitted step that computes kernels by an implementation."""

    def step(state: Any, batch: Any) -> Any:
        with kernels.use(implementation):
            return one.step(state, batch)

    return jax.jit(step)


def _norm(arrays: list[np.ndarray]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in arrays)))
