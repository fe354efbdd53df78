"""Tests of models/lora.py and models/peft.py: gradients of merged weights and of PEFT; files."""

import dataclasses
import functools
import json
import math

import jax
import numpy as np
import pytest
import safetensors.numpy
import tiny

import actjax
from actjax import NF4Weight, Quantized
from models import CompressedResiduals, Remat, Storage, StorageChoice, huggingface
from models.lora import (
    TARGETS,
    LoRAConfig,
    attach,
    init_adapters,
    merge,
    quantize,
    quantize_layers,
    weight_shape,
)
from models.peft import load_adapters, save_adapters
from models.storage import LINEAR_INPUTS

LORA = LoRAConfig(rank=3, alpha=5.0)
REFERENCE = "needs peft, transformers and torch: pip install -e '.[reference]'"


@functools.cache
def initial(lora=LORA):
    return jax.jit(lambda key: init_adapters(tiny.CONFIG, lora, key))(jax.random.key(0))


def noisy(lora=LORA):
    """Returns adapters whose `b` is not zero."""
    return add_noise(initial(lora))


@jax.jit
def add_noise(adapters):
    key = jax.random.key(7)
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(key, x.shape), adapters)


@pytest.fixture
def problem():
    return tiny.decoder(), noisy(), tiny.batch()


# About 20 programs, each of another storage or of weights of another kind.
@functools.cache
def loss_and_gradient(lora, storage):
    def loss(adapters, model, batch):
        attached = attach(model, adapters, lora)
        return attached.loss(*batch, storage=storage, compute_dtype="float32")

    return jax.jit(jax.value_and_grad(loss))


def gradient(model, adapters, batch, lora=LORA, storage: StorageChoice = Storage()):
    return loss_and_gradient(lora, storage)(adapters, model, batch)


@functools.cache
def merged_gradient():
    def loss(adapters, model, batch):
        return merge(model, adapters, LORA).loss(*batch, compute_dtype="float32")

    return jax.jit(jax.value_and_grad(loss))


plain_loss = jax.jit(lambda model, batch: model.loss(*batch, compute_dtype="float32"))


REBUILT = dict.fromkeys(LINEAR_INPUTS)


@pytest.mark.parametrize(
    "storage",
    [
        Storage(),
        Storage(**REBUILT),
        Storage(**REBUILT, split_adapters=True),
        Storage(split_adapters=True),
        Remat(),
        CompressedResiduals(),
    ],
    ids=["kept", "rebuilt", "split and rebuilt", "split", "remat", "residuals"],
)
def test_gradients_equal_those_of_merged_weights(storage, problem):
    model, adapters, batch = problem

    value, want = merged_gradient()(adapters, model, batch)
    loss, got = gradient(model, adapters, batch, storage=storage)
    np.testing.assert_allclose(loss, value, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # Float32, over three layers.
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())


def test_initial_adapters_leave_the_loss_unchanged(problem):
    model, _, batch = problem
    loss, grads = gradient(model, initial(), batch)
    np.testing.assert_allclose(loss, plain_loss(model, batch), rtol=1e-6)
    first = {name: np.ravel(initial()["layers"][name]["a"]) for name in ("q", "k", "v", "gate")}
    assert len(np.unique(list(first.values()), axis=0)) == len(first)
    for factors in grads["layers"].values():
        a, b = np.asarray(factors["a"]), np.asarray(factors["b"])
        assert not a.any()
        assert b.any(axis=(1, 2)).all()


def test_only_targets_have_adapters(problem):
    model, _, batch = problem
    lora = dataclasses.replace(LORA, targets=("v", "down"))
    adapters = noisy(lora)
    assert set(adapters["layers"]) == {"v", "down"}
    attached = attach(model, adapters, lora)
    assert isinstance(attached.layers.attention.q.get_value(), actjax.FrozenWeight)
    loss, _ = gradient(model, adapters, batch, lora)
    merged = merge(model, adapters, lora)
    np.testing.assert_allclose(loss, plain_loss(merged, batch), rtol=1e-6)
    np.testing.assert_array_equal(
        merged.layers.attention.q.get_value(), model.layers.attention.q.get_value()
    )


def test_attaching_and_merging_do_not_change_the_model(problem):
    model, adapters, _ = problem
    before = jax.tree.map(np.asarray, model)
    attach(model, adapters, LORA)
    merge(model, adapters, LORA)
    jax.tree.map(np.testing.assert_array_equal, model, before)


def test_no_product_gives_the_gradient_of_a_frozen_weight(problem):
    """The backward pass has one product for each input and none for the weights."""
    from train.planning.flops import matmul_flops

    model, adapters, batch = problem
    lora = dataclasses.replace(LORA, rank=1)
    adapters = initial(lora)

    def loss_of(model):
        return model.loss(*batch, compute_dtype="float32")

    whole = matmul_flops(jax.value_and_grad(loss_of), model)
    ours = matmul_flops(
        jax.value_and_grad(lambda adapters: loss_of(attach(model, adapters, lora))), adapters
    )
    tokens = batch[0].size
    weights = [np.prod(weight_shape(model.config, name)) for name in TARGETS]
    dense = 2 * tokens * sum(weights) * model.config.num_layers
    head = 2 * tokens * model.config.hidden_size * model.config.vocab_size
    thin = (
        2
        * tokens
        * model.config.num_layers
        * sum(sum(weight_shape(model.config, name)) for name in TARGETS)
    )
    assert whole - ours == dense + head - 3 * thin


@functools.cache
def quantized():
    return jax.jit(quantize_layers)


def test_dropout_follows_the_key_and_is_off_without_one(problem):
    model, adapters, batch = problem
    lora = dataclasses.replace(LORA, dropout=0.5)

    @jax.jit
    def loss(key):
        return attach(model, adapters, lora, key).loss(*batch, compute_dtype="float32")

    first, again, other = (float(loss(jax.random.key(i))) for i in (0, 0, 1))
    assert first == again != other
    exact, want = (plain_loss(attach(model, adapters, one), batch) for one in (lora, LORA))
    assert float(exact) == float(want)


def test_each_adapter_of_each_layer_has_its_own_dropout(problem):
    model, adapters, _ = problem
    lora = dataclasses.replace(LORA, dropout=0.5)

    @jax.jit
    def keys(key):
        attached = attach(model, adapters, lora, key)
        weights = jax.tree.leaves(attached, is_leaf=lambda x: isinstance(x, actjax.LoRA))
        return [jax.random.key_data(w.key) for w in weights if isinstance(w, actjax.LoRA)]

    found = np.concatenate(keys(jax.random.key(0)))
    assert len(found) == len(TARGETS) * tiny.CONFIG.num_layers
    assert len(np.unique(found, axis=0)) == len(found)


def test_weights_in_four_bits_equal_the_decoded_weights(problem):
    model, adapters, batch = problem
    four = quantized()(model)
    assert isinstance(four.layers.mlp.up.get_value(), NF4Weight)
    decoded = merge(four, jax.tree.map(np.zeros_like, adapters), LORA)
    loss, got = gradient(four, adapters, batch)
    value, want = gradient(decoded, adapters, batch)
    np.testing.assert_allclose(loss, value, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())


def test_a_model_is_quantized_while_it_is_read(problem, tmp_path):
    model, _, _ = problem
    huggingface.save(model, tmp_path / "model")
    read = huggingface.load(tmp_path / "model", convert=quantize)
    jax.tree.map(np.testing.assert_array_equal, read, quantized()(model))


def test_split_adapters_encode_only_the_frozen_part(problem):
    """The error does not grow with the adapters."""
    model, adapters, batch = problem
    large = jax.tree.map(lambda x: 30 * np.asarray(x), adapters)
    sites = dict.fromkeys(("q", "k", "v", "gate", "up"), Quantized(4, group=8))
    _, exact = gradient(model, large, batch)
    errors = {}
    for split in (False, True):
        storage = Storage(**REBUILT, **sites, split_adapters=split)
        _, got = gradient(model, large, batch, storage=storage)
        flat, want = (
            np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (got, exact)
        )
        errors[split] = np.linalg.norm(flat - want) / np.linalg.norm(want)
    assert errors[True] < errors[False] / 3


# PEFT.


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A random model of transformers, with random adapters of PEFT, in folders."""
    peft = pytest.importorskip("peft", reason=REFERENCE)
    transformers = pytest.importorskip("transformers", reason=REFERENCE)
    import torch

    folder = tmp_path_factory.mktemp("reference")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=44, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    base = transformers.LlamaForCausalLM(config)
    base.save_pretrained(folder / "base")
    names = [f"{name}_proj" for name in TARGETS]
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=3, lora_alpha=5.0, target_modules=names, task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder / "adapter")
    return model, folder


def test_gradients_equal_those_of_peft(reference):
    import torch

    theirs, folder = reference
    model = huggingface.load(folder / "base")
    adapters, lora = load_adapters(folder / "adapter", model.config)
    assert (lora.rank, lora.alpha, lora.targets) == (3, 5.0, tuple(TARGETS))
    tokens = np.random.default_rng(0).integers(0, 61, (2, 18))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    loss, got = gradient(model, adapters, (inputs, targets), lora)
    output = theirs(torch.asarray(tokens[:, :-1])).logits
    wanted = torch.nn.functional.cross_entropy(
        output.flatten(0, 1), torch.asarray(tokens[:, 1:]).flatten()
    )
    wanted.backward()
    assert abs(loss - wanted.item()) <= 1e-5 * wanted.item()
    found = 0
    for name, parameter in theirs.named_parameters():
        if "lora_" not in name:
            continue
        parts = name.split(".")
        target, layer = parts[-4].removesuffix("_proj"), int(parts[4])
        one = np.asarray(got["layers"][target]["a" if "lora_A" in name else "b"])[layer].T
        want = parameter.grad.numpy()
        assert np.abs(one - want).max() <= 1e-3 * np.abs(want).max(), name
        found += 1
    assert found == 2 * 2 * len(TARGETS)


def test_logits_of_merged_weights_equal_those_of_peft(reference):
    import torch

    theirs, folder = reference
    model = huggingface.load(folder / "base")
    adapters, lora = load_adapters(folder / "adapter", model.config)
    tokens = np.random.default_rng(1).integers(0, 61, (2, 18))
    logits = jax.jit(lambda model, tokens: model(tokens, compute_dtype="float32"))
    apart = logits(attach(model, adapters, lora), tokens)
    merged = logits(merge(model, adapters, lora), tokens)
    with torch.no_grad():
        want = theirs(torch.asarray(tokens)).logits.numpy()
    assert np.abs(apart - want).max() <= 1e-4
    assert np.abs(merged - want).max() <= 1e-4


def test_peft_loads_what_is_saved(reference, tmp_path):
    import peft
    import torch
    import transformers

    theirs, folder = reference
    config = huggingface.read_config(folder / "base")
    adapters, lora = load_adapters(folder / "adapter", config)
    save_adapters(adapters, lora, tmp_path / "ours", base=str(folder / "base"))
    base = transformers.LlamaForCausalLM.from_pretrained(folder / "base")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "ours")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, theirs(tokens).logits)


# Files.


def test_saved_adapters_are_read_back(problem, tmp_path):
    model, adapters, _ = problem
    lora = dataclasses.replace(LORA, dropout=0.25)
    save_adapters(adapters, lora, tmp_path / "adapter", base="somewhere")
    again, settings = load_adapters(tmp_path / "adapter", model.config)
    assert settings == lora
    jax.tree.map(np.testing.assert_array_equal, again, adapters)
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        save_adapters(adapters, lora, tmp_path / "adapter")


def edit(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "LOHA"}, "`peft_type` is 'LOHA': only 'LORA' is supported"),
        ({"use_dora": True}, "`use_dora` is True"),
        ({"bias": "all"}, "`bias` is 'all'"),
        ({"r": "3"}, "`r` must be a number, got '3'"),
        ({"r": 2.5}, "`r` must be an integer, got 2.5"),
        ({"lora_alpha": [16]}, r"`lora_alpha` must be a number, got \[16\]"),
        ({"lora_alpha": 10**400}, "`lora_alpha` must be a number"),
        ({"lora_dropout": None}, "`lora_dropout` must be a number, got None"),
        ({"target_modules": ["q_proj", 1]}, "`target_modules` must be a list of names"),
        ({"r": 4}, r"shape \[3, 24\], but the model and the rank require \[4, 24\]"),
        ({"target_modules": "all-linear"}, "`target_modules` must be a list of names"),
        ({"target_modules": ["q_proj", "lm_head"]}, "unknown adapter target 'lm_head'"),
        ({"target_modules": ["q_proj"]}, "no adapter for the tensor"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_adapters_that_do_not_fit_are_refused(changes, message, problem, tmp_path):
    model, adapters, _ = problem
    save_adapters(adapters, LORA, tmp_path / "adapter")
    edit(tmp_path / "adapter", **changes)
    with pytest.raises(ValueError, match=message):
        load_adapters(tmp_path / "adapter", model.config)


def test_damaged_adapters_are_named(problem, tmp_path):
    model, adapters, _ = problem
    save_adapters(adapters, LORA, tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_model.safetensors"
    whole, given = path.read_bytes(), safetensors.numpy.load_file(path)
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="truncated or damaged"):
        load_adapters(tmp_path / "adapter", model.config)
    for value in (np.nan, np.inf):
        damaged = {name: x.copy() for name, x in given.items()}
        damaged[min(given)].flat[-1] = value
        safetensors.numpy.save_file(damaged, path)
        with pytest.raises(ValueError, match="must hold finite floating point numbers"):
            load_adapters(tmp_path / "adapter", model.config)
    given.pop(min(given))
    safetensors.numpy.save_file(given, path)
    with pytest.raises(ValueError, match=r"mlp.down_proj.lora_A.weight' is missing"):
        load_adapters(tmp_path / "adapter", model.config)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"no adapter_model.safetensors in it"):
        load_adapters(tmp_path / "adapter", model.config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "`rank` of the adapters must be at least 1, got 0"),
        ({"alpha": 0.0}, r"`alpha` of the adapters must be in \(0, inf\), got 0"),
        ({"alpha": math.inf}, r"`alpha` of the adapters must be in \(0, inf\), got inf"),
        ({"dropout": 1.0}, r"`dropout` of the adapters must be in \[0, 1\)"),
        ({"targets": ()}, "is empty: name at least one"),
        ({"targets": ("q", "q")}, "has duplicates"),
        ({"targets": ("gat",)}, "unknown adapter target 'gat' in `targets`. Did you mean 'gate'"),
        ({"targets": ("embed",)}, "Targets are: q, k, v, o, gate, up, down"),
    ],
    ids=str,
)
def test_settings_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        LoRAConfig(**changes)
