"""Tests of models/lora.py: gradients as of merged weights and of PEFT, files that PEFT reads."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny

import actjax
from actjax import NF4Weight, Quantized
from models import CompressedResiduals, Remat, Storage, huggingface
from models.lora import (
    TARGETS,
    LoRAConfig,
    attach,
    init_adapters,
    load_adapters,
    merge,
    quantize,
    quantize_layers,
    save_adapters,
    weight_shape,
)
from models.storage import LINEAR_INPUTS

LORA = LoRAConfig(rank=3, alpha=5.0)
REFERENCE = "needs peft, transformers and torch: pip install -e '.[reference]'"


def noisy(adapters):
    """Returns adapters of which `b` is not zero."""
    key = jax.random.key(7)
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(key, x.shape), adapters)


@pytest.fixture
def problem():
    model = tiny.decoder()
    return model, noisy(init_adapters(model.config, LORA, jax.random.key(0))), tiny.batch()


def gradient(model, adapters, batch, lora=LORA, **options):
    def loss(adapters):
        return attach(model, adapters, lora).loss(*batch, compute_dtype="float32", **options)

    return jax.jit(jax.value_and_grad(loss))(adapters)


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
def test_gradients_are_those_of_merged_weights(storage, problem, quick_compile):
    model, adapters, batch = problem

    def merged_loss(adapters):
        return merge(model, adapters, LORA).loss(*batch, compute_dtype="float32")

    value, want = jax.jit(jax.value_and_grad(merged_loss))(adapters)
    loss, got = gradient(model, adapters, batch, storage=storage)
    np.testing.assert_allclose(loss, value, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # Float32, over three layers.
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())


def test_adapters_change_nothing_at_first(problem, quick_compile):
    model, _, batch = problem
    adapters = init_adapters(model.config, LORA, jax.random.key(0))
    loss, grads = gradient(model, adapters, batch)
    np.testing.assert_allclose(loss, model.loss(*batch, compute_dtype="float32"), rtol=1e-6)
    for factors in grads["layers"].values():
        assert not np.any(factors["a"])
        assert np.all(np.any(factors["b"], axis=(1, 2)))


def test_targets_alone_have_adapters(problem, quick_compile):
    model, _, batch = problem
    lora = dataclasses.replace(LORA, targets=("v", "down"))
    adapters = noisy(init_adapters(model.config, lora, jax.random.key(0)))
    assert set(adapters["layers"]) == {"v", "down"}
    attached = attach(model, adapters, lora)
    assert isinstance(attached.layers.attention.q.get_value(), actjax.FrozenWeight)
    loss, _ = gradient(model, adapters, batch, lora)
    merged = merge(model, adapters, lora)
    np.testing.assert_allclose(loss, merged.loss(*batch, compute_dtype="float32"), rtol=1e-6)
    np.testing.assert_array_equal(merged.layers.attention.q[...], model.layers.attention.q[...])


def test_attaching_leaves_the_model_alone(problem):
    model, adapters, _ = problem
    before = jax.tree.map(np.asarray, model)
    attach(model, adapters, LORA)
    merge(model, adapters, LORA)
    jax.tree.map(np.testing.assert_array_equal, model, before)


def test_no_product_gives_the_gradient_of_a_frozen_weight(problem):
    """Forward, and of each product one more for the input: two thirds of what all weights take."""
    from train.flops import matmul_flops

    model, adapters, batch = problem
    lora = dataclasses.replace(LORA, rank=1)
    adapters = init_adapters(model.config, lora, jax.random.key(0))

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


def test_dropout_is_of_the_key_and_of_no_evaluation(problem, quick_compile):
    model, adapters, batch = problem
    lora = dataclasses.replace(LORA, dropout=0.5)

    @jax.jit
    def loss(key):
        return attach(model, adapters, lora, key).loss(*batch, compute_dtype="float32")

    first, again, other = (float(loss(jax.random.key(i))) for i in (0, 0, 1))
    assert first == again != other
    exact = attach(model, adapters, lora).loss(*batch, compute_dtype="float32")
    assert float(exact) == float(
        attach(model, adapters, LORA).loss(*batch, compute_dtype="float32")
    )


def test_weights_in_four_bits_are_those_they_decode_to(problem, quick_compile):
    model, adapters, batch = problem
    four = quantize_layers(model)
    assert isinstance(four.layers.mlp.up.get_value(), NF4Weight)
    decoded = merge(four, jax.tree.map(jnp.zeros_like, adapters), LORA)
    loss, got = gradient(four, adapters, batch)
    value, want = gradient(decoded, adapters, batch)
    np.testing.assert_allclose(loss, value, rtol=1e-6)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())


def test_a_model_is_quantized_while_it_is_read(problem, tmp_path):
    model, _, _ = problem
    huggingface.save(model, tmp_path / "model")
    read = huggingface.load(tmp_path / "model", convert=quantize)
    jax.tree.map(np.testing.assert_array_equal, read, quantize_layers(model))


def test_codes_are_of_what_frozen_weights_give(problem, quick_compile):
    """With split adapters the error is that of the frozen part, however large the adapters are."""
    model, adapters, batch = problem
    large = jax.tree.map(lambda x: 30 * x, adapters)
    sites = dict.fromkeys(("q", "k", "v", "gate", "up"), Quantized(4, group=8))
    _, exact = gradient(model, large, batch)
    errors = {}
    for split in (False, True):
        storage = Storage(**REBUILT, **sites, split_adapters=split)
        _, got = gradient(model, large, batch, storage=storage)
        flat, want = (np.concatenate([x.ravel() for x in jax.tree.leaves(t)]) for t in (got, exact))
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


def test_gradients_are_those_of_peft(reference):
    import torch

    theirs, folder = reference
    model = huggingface.load(folder / "base")
    adapters, lora = load_adapters(folder / "adapter", model.config)
    assert (lora.rank, lora.alpha, lora.targets) == (3, 5.0, tuple(TARGETS))
    tokens = np.random.default_rng(0).integers(0, 61, (2, 18))
    inputs, targets = jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:])
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
        one = got["layers"][target]["a" if "lora_A" in name else "b"][layer].T
        want = parameter.grad.numpy()
        assert np.abs(one - want).max() <= 1e-3 * np.abs(want).max(), name
        found += 1
    assert found == 2 * 2 * len(TARGETS)


def test_merged_weights_give_the_same_logits(reference):
    import torch

    theirs, folder = reference
    model = huggingface.load(folder / "base")
    adapters, lora = load_adapters(folder / "adapter", model.config)
    tokens = np.random.default_rng(1).integers(0, 61, (2, 18))
    apart = attach(model, adapters, lora)(jnp.asarray(tokens), compute_dtype="float32")
    merged = merge(model, adapters, lora)(jnp.asarray(tokens), compute_dtype="float32")
    with torch.no_grad():
        want = theirs(torch.asarray(tokens)).logits.numpy()
    assert np.abs(apart - want).max() <= 1e-4
    assert np.abs(merged - want).max() <= 1e-4


def test_peft_reads_what_is_written(reference, tmp_path):
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


def test_adapters_come_back(problem, tmp_path):
    model, adapters, _ = problem
    lora = dataclasses.replace(LORA, dropout=0.25)
    save_adapters(adapters, lora, tmp_path / "adapter", base="somewhere")
    again, settings = load_adapters(tmp_path / "adapter", model.config)
    assert settings == lora
    jax.tree.map(np.testing.assert_array_equal, again, adapters)
    with pytest.raises(FileExistsError, match="is there and not empty"):
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
        ({"r": 4}, r"is \[3, 24\], but the model and the rank make it \[4, 24\]"),
        ({"target_modules": "all-linear"}, "a list of names is needed"),
        ({"target_modules": ["q_proj", "lm_head"]}, "has 'lm_head', which is no weight of a layer"),
        ({"target_modules": ["q_proj"]}, "no adapter takes"),
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
    with pytest.raises(ValueError, match="cut off or damaged"):
        load_adapters(tmp_path / "adapter", model.config)
    given.pop(min(given))
    safetensors.numpy.save_file(given, path)
    with pytest.raises(ValueError, match=r"mlp.down_proj.lora_A.weight' is not there"):
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
        ({"targets": ()}, "are none: name at least one"),
        ({"targets": ("q", "q")}, "has one twice"),
        ({"targets": ("gat",)}, "has 'gat', which is no weight of a layer. Did you mean 'gate'"),
        ({"targets": ("embed",)}, "There are: q, k, v, o, gate, up, down"),
    ],
    ids=str,
)
def test_settings_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        LoRAConfig(**changes)
