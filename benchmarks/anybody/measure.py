"""Measures a case in this process: memory, gradient error, time to trace and compile, loss."""

import contextlib
import functools
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import actjax
from benchmarks import record
from benchmarks.anybody.case import Case
from train.planning.devices import compile_for, find_device

ERROR = 0.05
"""Relative error of a gradient that `actjax.compress` is asked for."""
PLAIN, REMAT, DOTS, BITS, COMPRESS = "plain", "remat", "dots_saveable", "4 bits", "compress"
_ORDER = (PLAIN, COMPRESS, REMAT, BITS, DOTS)
"""Ways by importance: what the limit of time cuts off comes last."""
RUNS = 3
"""Runs of a compiled gradient that the median of times is of."""
OPTIONS = {"xla_cpu_enable_concurrency_optimized_scheduler": False}
"""Of all compilations for CPUs. XLA's default schedule runs what it can at once, and holds arrays
for that, whatever the program says; this one tells what a program needs."""


def measure(
    case: Case, save: Callable[[dict], None], *, steps: int, device: str, runs: int
) -> dict[str, Any]:
    """Measures a case, and saves the results after each part.

    Args:
      case: the model.
      save: is given all results so far.
      steps: steps of Adam for the final loss; 0 measures no loss.
      device: GPU to compile for; an empty name compiles for this machine alone.
      runs: times that each gradient is traced and compiled; the least processor time is the result.
    """
    params = jax.tree.map(jnp.asarray, case.params)
    batches = [jax.tree.map(jnp.asarray, batch) for batch in case.batches]
    batch = batches[0]
    failures: list[str] = []
    out: dict[str, Any] = {
        "case": case.name,
        "remat": case.remat,
        "parameters": sum(x.size for x in jax.tree.leaves(params)),
        "environment": record.environment(),
        "compiler_options": OPTIONS,
        "times": "trace_s and compile_s are processor seconds of all threads",
        "ways": {},
        "gradient_error": {},
        "failures": failures,
    }

    @contextlib.contextmanager
    def part(name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
            print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
        except Exception as error:
            traceback.print_exc()
            failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        save(out)

    ways = {
        PLAIN: case.loss,
        REMAT: case.remat_loss,
        DOTS: jax.checkpoint(case.loss, policy=jax.checkpoint_policies.dots_saveable),
        BITS: actjax.compress_residuals(case.loss, actjax.Quantized(4)),
    }
    with part(COMPRESS):
        start = time.perf_counter()
        small = actjax.compress(case.loss, error=ERROR, verbose=False).measure(params, batch)
        out["measure_s"] = time.perf_counter() - start
        out["shown"], out["choice"] = str(small), small.choice.to_dict()
        ways[COMPRESS] = small

    programs: dict[str, Any] = {}
    times: dict[tuple[str, str], list[float]] = {}

    def compile_each(chosen: Sequence[str]) -> None:
        for way in chosen:
            with part(f"{way}, compile"):
                program, trace_s, compile_s = _compile(ways[way], params, batch)
                programs.setdefault(way, program)
                row = out["ways"].setdefault(way, {})
                row["temporaries"] = program.memory_analysis().temp_size_in_bytes
                for name, seconds in (("trace_s", trace_s), ("compile_s", compile_s)):
                    times.setdefault((way, name), []).append(seconds)
                    # Other processes, and the first use of a library, only add to it.
                    row[name] = min(times[way, name])
                row["compilations"] = len(times[way, "compile_s"])

    order = [way for way in _ORDER if way in ways]
    compile_each(order)
    exact = programs[PLAIN](params, batch)[1]
    for way, program in programs.items():
        row = out["ways"][way]
        with part(f"{way}, run"):
            value, gradient = jax.block_until_ready(program(params, batch))
            row["value"] = float(value)
            row["gradient_error"], row["worst"] = _errors(gradient, exact)
            del gradient
    errors = out["gradient_error"]
    for way in (BITS, COMPRESS):
        errors[way] = out["ways"].get(way, {}).get("gradient_error")

    if device:
        for way in order:
            with part(f"{way}, {device}"):
                loss = ways[way]
                if way == COMPRESS:
                    # Chosen for the device, by what the compiler for it says.
                    memory = functools.partial(_temporaries, device)
                    loss = actjax.compress(case.loss, error=ERROR, memory=memory, verbose=False)
                    out[f"choice, {device}"] = loss.measure(params, batch).choice.to_dict()
                gradient = jax.value_and_grad(loss)
                out["ways"][way][device] = _temporaries(device, gradient, params, batch)
    for _ in range(runs - 1):
        compile_each(order[:2])
    if steps:
        for way in (PLAIN, COMPRESS, BITS):
            if way in programs:
                with part(f"{way}, {steps} steps"):
                    final = _train(programs[way], params, batches, case.learning_rate, steps)
                    out["ways"][way]["first_loss"], out["ways"][way]["final_loss"] = final
    for way, program in programs.items():
        with part(f"{way}, seconds"):
            each = []
            for _ in range(RUNS):
                start = time.perf_counter()
                jax.block_until_ready(program(params, batch))
                each.append(time.perf_counter() - start)
            out["ways"][way]["seconds"] = statistics.median(each)
    for way in (PLAIN, BITS, COMPRESS):
        if way in programs:
            with part(f"{way}, kept"):
                found = actjax.explain(ways[way], params, batch)
                out["ways"][way]["exact"] = found.exact_bytes
                out["ways"][way]["kept"] = found.stored_bytes

    def measure_codec(name: str, codec: actjax.Codec) -> None:
        with part(f"gradient error, {name}"):
            loss = actjax.compress_residuals(case.loss, codec)
            lowered = jax.jit(jax.grad(loss)).lower(params, batch)
            # It runs once: compiling takes longer than a slow program.
            program = lowered.compile(OPTIONS | {"xla_backend_optimization_level": 0})
            errors[name], worst = _errors(program(params, batch), exact)
            if name == "Exact" and errors[name] > 1e-4:
                failures.append(f"Exact() has a gradient error of {errors[name]:.2g}: {worst}")

    for bits in (8, 2):
        measure_codec(f"{bits} bits", actjax.Quantized(bits))
    measure_codec("Exact", actjax.Exact())
    for _ in range(runs - 1):
        compile_each(order[2:])
    out["done"] = True
    save(out)
    return out


def _errors(gradient: Any, exact: Any) -> tuple[float, str]:
    """Returns `|gradient - exact| / |exact|`, and the leaf with the largest ratio in words."""
    paths, _ = jax.tree_util.tree_flatten_with_path(exact)
    squares, worst = [], (-1.0, "")
    for (path, y), x in zip(paths, jax.tree.leaves(gradient), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        squares.append((np.sum((x - y) ** 2), np.sum(y**2)))
        ratio = float(np.sqrt(squares[-1][0] / max(squares[-1][1], 1e-30)))
        worst = max(worst, (ratio, jax.tree_util.keystr(path)))
    top, bottom = np.sum(squares, axis=0)
    return float(np.sqrt(top / bottom)), f"{worst[1]}: {worst[0]:.3g}"


def _compile(loss: Callable, params: Any, batch: Any) -> tuple[Any, float, float]:
    """Returns the compiled gradient, and the processor seconds to trace and to compile it."""
    jax.clear_caches()
    start = time.process_time()
    traced = jax.jit(jax.value_and_grad(loss)).trace(params, batch)
    middle = time.process_time()
    program = traced.lower().compile(OPTIONS)
    return program, middle - start, time.process_time() - middle


def _temporaries(device: str, fun: Callable, *args: Any) -> int:
    """Returns bytes of temporaries of a function, compiled for a GPU that is not there."""
    jax.clear_caches()
    shapes = jax.eval_shape(lambda *x: x, *args)
    with compile_for(find_device(device)) as place:
        program = jax.jit(fun).lower(*map(place, shapes)).compile()
    return program.memory_analysis().temp_size_in_bytes


def _train(
    program: Any, params: Any, batches: list, learning_rate: float, steps: int
) -> tuple[float, float]:
    """Returns the mean loss over the batches before and after training with Adam."""
    tx = optax.adam(learning_rate)

    @jax.jit
    def update(gradient, state, params):
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    def mean_loss(params):
        return statistics.mean(float(program(params, batch)[0]) for batch in batches)

    first, state = mean_loss(params), tx.init(params)
    for i in range(steps):
        _, gradient = program(params, batches[i % len(batches)])
        params, state = update(gradient, state, params)
    return first, mean_loss(params)
