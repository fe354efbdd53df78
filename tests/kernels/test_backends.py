"""Tests of actjax/kernels without the backends of the kernels, which JAX may remove."""

import ast
import os
import pathlib
import subprocess
import sys

import actjax.kernels

PROGRAM = """
import sys, warnings

BLOCKED = ("jax.experimental.pallas", "jax_triton")

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(BLOCKED):
            raise ModuleNotFoundError(f"no {name}")

sys.meta_path.insert(0, Blocked())
import actjax, jax, numpy as np
from actjax.formats.code import QuantizeInputs
from actjax.kernels.quantize.api import quantize
assert not [name for name in sys.modules if name.startswith(BLOCKED)]

X, W = np.random.default_rng(0).normal(size=(2, 4, 128, 128)).astype("float32")
CODEC = actjax.Quantized(4, levels="normal", rotate=True, balance=True)

def loss(x, w):
    return actjax.linear(actjax.rms_norm(x, w[0, 0], codec=CODEC), w[0], codec=CODEC).sum()

step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
with warnings.catch_warnings():
    warnings.simplefilter("error")
    value, gradients = step(X, W)  # A CPU has no use for a backend.
with actjax.kernels.use("reference"):
    want = step(X, W)
jax.tree.map(np.testing.assert_array_equal, (value, gradients), want)

for name in ("mosaic", "triton"):
    for ask in (
        lambda: actjax.kernels.use(name).__enter__(),
        lambda: quantize(QuantizeInputs(X), format=CODEC.format, implementation=name),
    ):
        try:
            ask()
        except ValueError as error:
            assert f"`implementation` {name!r}" in str(error), error
            assert "needs jax" in str(error), error
        else:
            raise AssertionError(name)

for platform in ("cuda", "tpu"):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            text = jax.jit(loss).trace(X, W).lower(lowering_platforms=(platform,)).as_text()
            jax.jit(jax.grad(loss)).trace(X, W).lower(lowering_platforms=(platform,))
    messages = [str(w.message) for w in said if "actjax" in str(w.message)]
    assert len(messages) == 1, messages
    assert f"On {platform} some kernels of actjax are their definitions" in messages[0]
    assert ("pip install 'actjax[gpu]'" in messages[0]) == (platform == "cuda")
    assert "custom_call @__gpu" not in text and "tpu_custom_call" not in text
print("done")
"""


def test_without_pallas_and_jax_triton_all_kernels_are_their_definitions():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True, text=True, timeout=600, check=False, env=environment,
    )  # fmt: skip
    assert done.stdout.strip() == "done", done.stderr[-3000:]


def imports_of(path):
    """Returns the modules that a file imports from."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from names if node.module == "actjax.kernels" else [node.module]


def test_the_meaning_of_bits_needs_no_program_and_no_choice_of_one():
    # A reader needs `actjax.formats` and the definitions, and no others, to understand a code.
    kernels = pathlib.Path(actjax.kernels.__path__[0])
    formats = [*(kernels.parent / "formats").glob("*.py")]
    definitions = [*kernels.glob("*/reference.py")]
    plain = {f"actjax.kernels.{path.parent.name}.reference" for path in definitions}
    assert len(formats) > 10
    assert len(definitions) > 3
    for path in (*formats, *definitions):
        for module in imports_of(path):
            assert "pallas" not in module, (path, module)
            assert module in plain or not module.startswith("actjax.kernels"), (path, module)
