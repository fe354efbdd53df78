"""The least work and memory of a step, by formula from its settings: nothing is traced.

Each element-wise stage reads its inputs and writes its outputs once. With T tokens, a model of
width d, feed-forward width f, q query and kv key and value numbers in a token, and s bytes for a
number, a layer moves outside of products and attention:

- forward: T s (8 d + 2 (q + kv) + 3 f): two norms, each with the addition before it; RoPE; SwiGLU.
  An encoder reads its input once more and writes the code.
- backward: T s (8 d + 2 (q + kv) + 6 f), and the codes. Rematerialization repeats the forward part.
- update: weights are read and written, gradients read (twice if they are clipped together), moments
  read and written. Micro-batches after the first add to a gradient: two reads and a write.
- loss: logits are read in float32, their gradients written: T (4 + s) times the vocabulary.

Numbers of kernels are no bounds: they are those of compiled steps, per layer.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from actjax import Codec, Exact, Offloaded
from actjax.optim.states.host_states import HOST
from models import Remat, StorageChoice
from train.planning.time import Work
from train.run.recipe import build_recipe
from train.run.report import tree_bytes
from train.run.sharding import mesh_sizes, moments_on_host
from train.run.step import init_state
from train.settings.methods import METHODS
from train.settings.options import MethodOptions
from train.settings.resolve import ResolvedConfig

FORWARD, BACKWARD, UPDATE, LOSS = "forward", "backward", "update", "loss"
_KERNELS, _KERNELS_OF_CODE = 70, 6
"""Kernels of a layer and a micro-batch, and of the code of each of its sites."""
_KERNELS_OF_UPDATE = {
    "4bit": 110, "float32-factored": 100, "bfloat16-factored": 100, "8bit-factored": 125,
    "4bit-factored": 105,
}  # fmt: skip
"""Kernels that update a layer, by the dtype of moments; 45 for others."""


@dataclasses.dataclass(frozen=True)
class _Layer:
    """Numbers of a token in a layer, and what is stored of them.

    Attributes:
      sites: width of each site that can be stored.
      codecs: codecs of the sites that are stored.
      is_remat: whether the forward pass runs again.
    """

    sites: dict[str, int]
    codecs: dict[str, Codec]
    is_remat: bool


def _layer(config: ResolvedConfig) -> _Layer:
    model = config.model_config
    d, f = model.hidden_size, model.stored_ffn_size
    queries, keys = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    sites = {"attention_in": d, "attention_out": queries, "mlp_in": d, "mlp_out": f}
    sites |= {"attention_norm": d, "q": queries, "k": keys, "v": keys, "mlp_norm": d}
    sites |= {"gate": f, "up": f}
    storage = _storage(config.method, config.options)
    if isinstance(storage, Remat):
        return _Layer({"block": d}, {"block": storage.codec}, is_remat=True)
    return _Layer(sites, storage.codecs, is_remat=False)


@functools.cache
def _storage(method: str, options: MethodOptions) -> StorageChoice:
    return METHODS[method].storage_of(options, {})


def is_exact(config: ResolvedConfig) -> bool:
    """Returns whether gradients are exact: every stored array is, and no gradient is projected."""
    codecs = _storage(config.method, config.options).codecs.values()
    return config.info.subspace is None and all(map(_is_exact, codecs))


def least_bits(config: ResolvedConfig) -> int:
    """Returns the fewest bits that a stored number has; 16 if all are exact."""
    codecs = _storage(config.method, config.options).codecs.values()
    return min((_bits(codec) for codec in codecs), default=16)


def _bits(codec: Codec) -> int:
    inner = codec.codec if isinstance(codec, Offloaded) else codec
    return getattr(inner, "bits", 16)


def _is_exact(codec: Codec) -> bool:
    return isinstance(codec.codec if isinstance(codec, Offloaded) else codec, Exact)


def least_work(config: ResolvedConfig) -> dict[str, Work]:
    """Returns the work of each pass of a step: forward, backward, update, loss."""
    run = kept(config)
    reads = 1 if config.in_backward else 2
    added = 3 * (config.accumulate - 1)
    gradient = run.trained * (reads + added) if config.info.subspace is None else 0
    changed = 2 * run.trained + gradient + 2 * (run.states + run.on_host)
    kernels = _KERNELS_OF_UPDATE.get(config.optimizer.moment_dtype, 45)
    kernels *= config.model_config.num_layers
    update = Work(moved=changed, kernels=kernels, bus=2 * run.on_host)
    return {**_gradient_work(config), UPDATE: update}


def _gradient_work(config: ResolvedConfig) -> dict[str, Work]:
    """Returns the work of the forward pass, the backward pass and the loss."""
    model, layer = config.model_config, _layer(config)
    tokens, layers = config.batch_size * config.seq_len, model.num_layers
    d, f = model.hidden_size, model.stored_ffn_size
    queries, keys = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    weights = sum(a * b for a, b in _groups(config))
    size = _size(config.compute_dtype)
    numbers = tokens * layers * size
    span = min(config.seq_len / 2, model.sliding_window or math.inf)
    attention = 4 * tokens * span * queries * layers
    products = 2 * tokens * weights * layers
    shared = (8 * d + 2 * (queries + keys)) * numbers
    swiglu = 3 * f * numbers
    on_device, on_host = _stored(config, layer)
    coded = [site for site, codec in layer.codecs.items() if not _is_exact(codec)]
    codes = on_device if coded else 0
    passes = layers * config.accumulate
    forward = Work(
        products=products,
        attention=attention,
        moved=shared + swiglu + numbers * sum(layer.sites[site] for site in coded) + codes,
        kernels=passes * (_KERNELS / 2 + _KERNELS_OF_CODE * len(coded)),
        bus=on_host,
    )
    backward = Work(
        products=2 * products - _spared(config),
        attention=2.5 * attention,
        moved=shared + 2 * swiglu + codes,
        kernels=passes * _KERNELS / 2,
        bus=on_host,
    )
    if layer.is_remat:
        # The last product of a block is not needed.
        again = {"products": products - 2 * tokens * f * d * layers, "attention": attention}
        again["moved"] = shared + swiglu
        backward = _sum([backward, Work(**again)])
    elif "attention_out" not in layer.codecs or "attention_out" in coded:
        backward = backward._replace(attention=backward.attention + attention)
    vocabulary = tokens * model.vocab_size
    loss = Work(products=6 * vocabulary * d, moved=vocabulary * (4 + size))
    return {FORWARD: forward, BACKWARD: backward, LOSS: loss}


def _sum(parts: Iterable[Work]) -> Work:
    return Work(*map(sum, zip(*parts, strict=True)))


def total(parts: dict[str, Work]) -> Work:
    """Returns the sum of the work of all passes."""
    return _sum(parts.values())


def _spared(config: ResolvedConfig) -> float:
    """Returns the operations of weight gradients that are not computed."""
    groups = _groups(config)
    count = 2 * config.batch_size * config.seq_len * config.model_config.num_layers
    whole = count * sum(a * b for a, b in groups)
    if config.lora is not None:
        return whole
    if config.info.subspace is None or config.info.subspace.side != "input":
        return 0.0
    rank = config.options.rank
    return whole - count * rank * sum(a + b for a, b in groups)


def _stored(config: ResolvedConfig, layer: _Layer) -> tuple[int, int]:
    """Returns the bytes that all layers store on the device, and those that go to the host."""
    shape = (config.batch_size, config.seq_len)
    on_device, on_host = 0, 0
    for site, codec in layer.codecs.items():
        size = codec.stored_bytes((*shape, layer.sites[site]), jnp.dtype(config.compute_dtype))
        if isinstance(codec, Offloaded):
            on_host += size * config.model_config.num_layers
        else:
            on_device += size * config.model_config.num_layers
    return on_device, on_host


@dataclasses.dataclass(frozen=True)
class Kept:
    """Bytes that exist for the whole run.

    Attributes:
      weights: weights, frozen ones too.
      trained: weights that have a gradient.
      states: optimizer states on the device.
      on_host: optimizer states on the host.
    """

    weights: int
    trained: int
    states: int
    on_host: int


def kept(config: ResolvedConfig) -> Kept:
    """Returns the bytes of weights and optimizer states.

    States of a subspace are in proportion to the numbers of its moments; its bases are in bfloat16.
    """
    optimizer, method = config.optimizer, config.info
    same: dict[str, Any] = {"batch_size": 1, "accumulate": 1, "seq_len": 16}
    same |= {"folder": pathlib.Path(), "options": MethodOptions()}
    same["optimizer"] = dataclasses.replace(optimizer, offload_states=False)
    same |= {} if method.adapters else {"method": "exact", "in_backward": False}
    weights, trained, states, on_host = _kept(dataclasses.replace(config, **same))
    if method.subspace is not None and method.subspace.side == "input":
        groups, rank, share = _groups(config), config.options.rank, _share_of_layers(config)
        smaller = sum(rank * b for _, b in groups) / sum(a * b for a, b in groups)
        bases = 2 * sum(rank * a for a, _ in groups) * config.model_config.num_layers
        states = round(states * (1 - share + share * smaller)) + bases
        on_host = round(on_host * smaller)
    if not optimizer.offload_states:
        on_host = 0
    return Kept(weights, trained, states - on_host, on_host)


@functools.cache
def _kept(config: ResolvedConfig) -> tuple[int, int, int, int]:
    """Returns the bytes of all weights, trained weights, states, and states that could be moved."""
    recipe = build_recipe(config)
    state = jax.eval_shape(functools.partial(init_state, recipe))
    movable = moments_on_host(state.optimizer)
    moved = [x for x in jax.tree.leaves(movable) if x.sharding.memory_kind == HOST]
    trained = tree_bytes(state.model)
    weights = trained + tree_bytes(state.frozen)
    return weights, trained, tree_bytes(state.optimizer), tree_bytes(moved)


def _share_of_layers(config: ResolvedConfig) -> float:
    """Returns the share of the weights that is in the layers: all with adapters."""
    if config.lora is not None:
        return 1.0
    model = config.model_config
    layers = sum(a * b for a, b in _groups(config)) * model.num_layers
    others = model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    return layers / (layers + others)


def _groups(config: ResolvedConfig) -> tuple[tuple[int, int], ...]:
    """Returns inputs and outputs of the linear operators of a layer, of those that share one."""
    model = config.model_config
    d, f = model.hidden_size, model.stored_ffn_size
    queries, keys = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    return (d, queries + 2 * keys), (queries, d), (d, 2 * f), (f, d)


def least_memory(config: ResolvedConfig) -> int:
    """Returns bytes that a step certainly takes: weights, states, gradients and stored arrays.

    Beside them, the backward pass of a layer holds three arrays of the width of its feed-forward
    network, and after rematerialization all that `exact` stores of it. With a mesh, the bytes are
    those of a device if all is divided evenly.
    """
    model, layer, run = config.model_config, _layer(config), kept(config)
    size = _size(config.compute_dtype)
    stored, _ = _stored(config, layer)
    part = config.accumulate
    if not config.in_backward:
        stored //= part  # In the backward pass, the codes of all micro-batches exist at once.
    tokens = config.batch_size * config.seq_len // part
    held = 3 * model.stored_ffn_size
    if layer.is_remat:
        exact = dataclasses.replace(config, method="exact", options=MethodOptions())
        held = max(held, sum(_layer(exact).sites.values()))
    lasting = run.weights + run.states
    if config.info.subspace is None or config.info.subspace.side != "input":
        lasting += _gradient_bytes(config, run.trained)
    axes = mesh_sizes(config.mesh)
    devices = math.prod(axes.values())
    return lasting * axes["data"] // devices + (stored + tokens * held * size) // devices


def _gradient_bytes(config: ResolvedConfig, trained: int) -> int:
    """Returns the bytes of gradients that exist at once."""
    if not config.in_backward:
        # The sum over micro-batches is in float32, beside the gradient of one of them.
        size = 4 if config.lora is not None else _size(config.weight_dtype)
        return trained + (trained * 4 // size if config.accumulate > 1 else 0)
    share, model = _share_of_layers(config), config.model_config
    # The gradient of the embedding is computed after the stored arrays are freed.
    others = trained * (1 - share) / (1 if model.tie_embeddings else 2)
    return round(trained * share / model.num_layers + others)


def _size(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize
