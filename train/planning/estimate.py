"""The cost of a training step, before and after it is compiled."""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import actjax
from actjax.optim.states.host_states import HOST
from train.planning.collectives import bytes_by_kind
from train.planning.devices import TPUS, compile_for, compile_for_mesh, find_device, gpu_of
from train.planning.flops import causal_loop_length, matmul_flops
from train.planning.least import least_work, total
from train.planning.time import predicted_seconds, work_of
from train.planning.traffic import kernels_of, kernels_written_in
from train.run.loss import whole_batch_shapes
from train.run.recipe import Recipe, make_recipe
from train.run.report import StepMemory, bytes_on_host, explain_step, step_memory, tree_bytes
from train.run.sharding import (
    batch_sharding,
    check_sizes,
    compiler_options,
    formats_of,
    make_mesh,
    mesh_sizes,
    moments_on_host,
    state_shardings,
    with_sharding,
)
from train.run.step import TrainState, init_state, make_refresh_step, make_train_step
from train.settings.config import FinetuneConfig, OptimizerConfig, PretrainConfig
from train.settings.options import ADAPTERS
from train.settings.resolve import dimensions

Config = PretrainConfig | FinetuneConfig


@dataclasses.dataclass(frozen=True)
class Plan:
    """A way to train, and its estimated cost.

    Attributes:
      config: the run.
      memory: by category, without workspace.
      flops: of all matrix products of a step.
    """

    config: Config
    memory: StepMemory
    flops: int


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled plan.

    Attributes:
      config: the run.
      peak: bytes that exist at once in a step, or in a refresh step if that takes more. For more
        than a TPU has, what its compiler says is needed.
      temporaries: bytes of the step that are neither weights nor optimizer states.
      weights: bytes of the weights of a device.
      states: bytes of the optimizer states of a device.
      exchanged: bytes that a device exchanges with others in a step, by kind
        (`train.planning.collectives`); empty for one device, and for TPUs.
      on_host: bytes of a device's optimizer states that are in the memory of the host.
      seconds: time of a step as `train.planning.time` predicts it; None for several devices, and
        for a device that is no known GPU.
      languages: what the kernels of actjax in the step are written in; empty where it has none.
    """

    config: Config
    peak: int
    temporaries: int
    weights: int
    states: int
    exchanged: Mapping[str, int]
    on_host: int = 0
    seconds: float | None = None
    languages: Sequence[str] = ()

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second as predicted; None if the time is not."""
        tokens = self.config.batch_size * self.config.seq_len
        return None if self.seconds is None else tokens / self.seconds


@functools.cache
def make_plan(config: Config) -> Plan:
    """Returns the estimated cost of a run, without compiling it.

    Raises:
      ValueError: an unknown method, or settings that do not fit each other.
    """
    memory = _memory(_without_optimizer(config))
    recipe = _recipe(config)
    states = _shapes(recipe).optimizer
    on_host = bytes_on_host(recipe, states)
    memory = dataclasses.replace(memory, optimizer=tree_bytes(states) - on_host)
    return Plan(config, memory, _gradient(_of_gradient(config))[1])


def _without_optimizer(config: Config) -> Config:
    """Returns settings with the usual optimizer, which the gradient does not depend on."""
    if config.optimizer.projects:
        return config
    optimizer = dataclasses.replace(
        config.optimizer,
        moment_dtype="float32",
        optimizer="adamw",
        beta1=OptimizerConfig.beta1,
        beta2=OptimizerConfig.beta2,
        offload_states=False,
    )
    return dataclasses.replace(config, optimizer=optimizer)


def _of_gradient(config: Config) -> Config:
    """Returns settings without those that the gradient does not depend on."""
    in_backward = None if config.method in ADAPTERS else False
    return dataclasses.replace(_without_optimizer(config), in_backward=in_backward)


# Neighbouring plans of a search differ in few settings, and tracing a model takes 1 to 2 seconds.


@functools.cache
def _memory(config: Config) -> StepMemory:
    recipe = _recipe(config)
    return step_memory(recipe, _shapes(recipe), _gradient(_of_gradient(config))[0])


@functools.cache
def _gradient(config: Config) -> tuple[actjax.Explanation, int]:
    """Returns what a step stores for its backward pass, and the operations of its products."""
    recipe = _recipe(config)
    state, batch = _shapes(recipe), whole_batch_shapes(recipe.config)
    explanation = explain_step(recipe, state)  # First: its errors name flags.
    length = causal_loop_length(config.seq_len)
    flops = matmul_flops(make_train_step(recipe), state, batch, loop_length=length)
    return explanation, flops


def compile_plan(config: Config, device: str) -> Compiled:
    """Compiles the steps of a run. With a mesh, all figures are those of one device.

    Raises:
      ValueError: the compiler for the device is not installed, or the batch does not divide over
        the mesh.
    """
    recipe = _recipe(config)
    steps, state = _compiled_steps(recipe, device)
    peak, (_, temporaries, program) = max(size for size, _, _ in steps), steps[0]
    exchanged: dict[str, int] = {}
    # Programs for TPUs do not say how often a loop runs.
    if config.mesh and device not in TPUS:
        exchanged = bytes_by_kind(program.as_text())
    weights, states = map(_bytes_of_device, ((state.model, state.frozen), state.optimizer))
    on_host = _bytes_of_device(state.optimizer, on_host=True)
    seconds, gpu = None, gpu_of(device)
    if gpu is not None and not config.mesh:
        # Copies between device and host are no kernels.
        bus = total(least_work(recipe.config)).bus
        seconds = predicted_seconds(work_of(kernels_of(program.as_text()), bus), gpu)
    languages = kernels_written_in(program.as_text())
    return Compiled(
        config, peak, temporaries, weights, states, exchanged, on_host, seconds, languages
    )


def compiled_peak(recipe: Recipe, device: str) -> int:
    """Returns the bytes that exist at once in a step, or in a refresh step if that takes more.

    Raises:
      ValueError: the compiler for the device is not installed.
    """
    return max(peak for peak, _, _ in _compiled_steps(recipe, device)[0])


def least_bytes(recipe: Recipe) -> int:
    """Returns the bytes of weights and optimizer states, without compiling."""
    state = _shapes(recipe)
    return tree_bytes((state.model, state.frozen, state.optimizer))


def _compiled_steps(recipe: Recipe, device: str) -> tuple[list[tuple[int, int, Any]], TrainState]:
    """Returns the step and, if there is one, the refresh step, and the shapes of their state."""
    state, batch = _shapes(recipe), whole_batch_shapes(recipe.config)
    with _placed(recipe, state, batch, device) as (state, batch, options):
        if recipe.config.optimizer.offload_states:
            state = dataclasses.replace(state, optimizer=moments_on_host(state.optimizer))
        steps = [make_train_step(recipe)]
        if recipe.refreshes(0):
            steps.append(make_refresh_step(recipe))
        return [_compile(step, state, batch, options, device) for step in steps], state


def _recipe(config: Config) -> Recipe:
    return make_recipe(config, dimensions(config))


def _shapes(recipe: Recipe) -> TrainState:
    return jax.eval_shape(functools.partial(init_state, recipe))


@contextlib.contextmanager
def _placed(recipe: Recipe, state: Any, batch: Any, device: str) -> Iterator[tuple]:
    """Gives state and batch on the devices to compile for, and options of the compiler."""
    text, kind = recipe.config.mesh, find_device(device)
    if not text:
        with compile_for(kind) as place:
            state, batch = place(state), place(batch)
            sharding = jax.tree.leaves(state)[0].sharding
            mesh = make_mesh("") if sharding is None else sharding.mesh
            yield state, batch, compiler_options(mesh)
        return
    with contextlib.ExitStack() as stack:
        if kind is None:
            mesh = make_mesh(text)
            stack.enter_context(jax.set_mesh(mesh))
        else:
            mesh = stack.enter_context(compile_for_mesh(kind, mesh_sizes(text)))
        check_sizes(recipe.config, mesh)
        state = jax.tree.map(with_sharding, state, state_shardings(state, mesh))
        batch = {name: with_sharding(x, batch_sharding(mesh)) for name, x in batch.items()}
        yield state, batch, compiler_options(mesh)


def _compile(
    step: Any, state: Any, batch: Any, options: dict[str, Any], device: str
) -> tuple[int, int, Any]:
    """Returns peak and temporaries of a step, in bytes, and the program if it was compiled."""
    places = None
    if jax.tree.leaves(state)[0].sharding is not None:
        formats = formats_of(state)
        state, places = jax.tree.map(with_sharding, state, formats), (formats, None)
    lowered = jax.jit(step, donate_argnums=0, out_shardings=places).lower(state, batch)
    try:
        program = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        # The compiler of a TPU refuses a program that takes more memory than the chip has.
        needed = re.search(r"Ran out of memory .*?\(([\d.]+)([MG])\) exceeds", str(error))
        if needed is None:
            raise
        size = int(float(needed[1]) * {"M": 2**20, "G": 2**30}[needed[2]])
        return size, max(0, size - _bytes_of_device(state)), None
    stats: Any = program.memory_analysis()
    if device in TPUS:
        # The sum below counts buffers that never exist at once.
        peak = stats.peak_memory_in_bytes
        return peak, max(0, peak - stats.argument_size_in_bytes), program
    live = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return live + stats.temp_size_in_bytes, stats.temp_size_in_bytes, program


def _bytes_of_device(tree: Any, *, on_host: bool = False) -> int:
    """Returns the bytes of a device's part of arrays, of those on the device or on the host."""

    def size(x: Any) -> int:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return 0
        if on_host != (getattr(x.sharding, "memory_kind", None) == HOST):
            return 0
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        return math.prod(shape) * jnp.dtype(x.dtype).itemsize

    return sum(map(size, jax.tree.leaves(tree)))
