"""Tests of models/lora.py and models/peft.py: gradients of merged weights and of PEFT; files."""

import copy
import dataclasses
import functools
import warnings

import jax
import numpy as np
import pytest
import tiny

import actjax
from actjax import NF4Weight, Quantized
from actjax._core.paths import map_named
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
from models.padding import pad, published_shape, without_padding
from models.peft import load_adapters, save_adapters
from models.storage import LINEAR_INPUTS
from train.planning.flops import matmul_flops

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
    key, config = jax.random.key(7), tiny.CONFIG

    def noisy(path, x):
        noise = 0.1 * jax.random.normal(key, published_shape(path, x.shape, config))
        return x + pad(path, noise, config)

    return map_named(noisy, adapters)


@pytest.fixture(scope="module")
def problem():
    return tiny.decoder(), noisy(), tiny.batch()


# A program for each storage or kind of weights.
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


def assert_near(got, want):
    """Raises unless losses and gradients are equal up to sums of float32 over three layers."""
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    for ours, exact in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-4, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize(
    "storage",
    [
        pytest.param(Storage(), id="stored"),
        pytest.param(Storage(**REBUILT), id="rebuilt", marks=pytest.mark.slow),
        pytest.param(Storage(**REBUILT, split_adapters=True), id="split and rebuilt"),
        pytest.param(Storage(split_adapters=True), id="split", marks=pytest.mark.slow),
        pytest.param(Remat(), id="remat"),
        pytest.param(CompressedResiduals(), id="residuals"),
    ],
)
def test_gradients_equal_those_of_merged_weights(storage, problem):
    model, adapters, batch = problem
    got = gradient(model, adapters, batch, storage=storage)
    assert_near(got, merged_gradient()(adapters, model, batch))


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


def test_only_targets_have_adapters_and_the_model_is_unchanged(problem):
    model, _, batch = problem
    before = jax.tree.map(np.asarray, model)
    lora = dataclasses.replace(LORA, targets=("v", "down"))
    adapters = noisy(lora)
    assert set(adapters["layers"]) == {"v", "down"}
    attached = attach(model, adapters, lora)
    assert isinstance(attached.layers.attention.q.get_value(), actjax.FrozenWeight)
    loss, _ = gradient(model, adapters, batch, lora)
    merged, after = jax.jit(lambda model, *x: (merge(model, *x, lora), model))(model, adapters)
    np.testing.assert_allclose(loss, plain_loss(merged, batch), rtol=1e-6)
    q = merged.layers.attention.q.get_value()
    np.testing.assert_array_equal(q, model.layers.attention.q.get_value())
    for unchanged in (model, after):
        jax.tree.map(np.testing.assert_array_equal, unchanged, before)


def test_no_product_gives_the_gradient_of_a_frozen_weight(problem):
    """The backward pass has one product for each input and none for the weights."""
    model, adapters, batch = problem
    lora = dataclasses.replace(LORA, rank=1)
    adapters = initial(lora)

    def loss_of(model):
        return model.loss(*batch, compute_dtype="float32")

    all_weights = matmul_flops(jax.value_and_grad(loss_of), model)
    adapters_only = matmul_flops(
        jax.value_and_grad(lambda adapters: loss_of(attach(model, adapters, lora))), adapters
    )
    config = dataclasses.replace(model.config, ffn_size=model.config.stored_ffn_size)
    shapes = [weight_shape(config, name) for name in TARGETS]
    dense, thin = (config.num_layers * sum(map(size, shapes)) for size in (np.prod, sum))
    head = config.hidden_size * config.vocab_size
    assert all_weights - adapters_only == 2 * batch[0].size * (dense + head - 3 * thin)


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
    without_key, exact = (plain_loss(attach(model, adapters, x), batch) for x in (lora, LORA))
    assert float(without_key) == float(exact)


def test_each_adapter_of_each_layer_has_its_own_dropout(problem):
    model, adapters, _ = problem
    lora = dataclasses.replace(LORA, dropout=0.5)

    @jax.jit
    def keys(key):
        attached = attach(model, adapters, lora, key)
        weights = jax.tree.leaves(attached, is_leaf=lambda x: isinstance(x, actjax.LoRA))
        return [jax.random.key_data(w.key) for w in weights if isinstance(w, actjax.LoRA)]

    drawn = np.concatenate(keys(jax.random.key(0)))
    assert len(drawn) == len(TARGETS) * tiny.CONFIG.num_layers
    assert len(np.unique(drawn, axis=0)) == len(drawn)


def test_weights_in_four_bits_equal_the_decoded_weights(problem):
    model, adapters, batch = problem
    four = quantized()(model)
    assert isinstance(four.layers.mlp.up.get_value(), NF4Weight)
    no_adapters = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), adapters)
    decoded = jax.jit(lambda model: merge(model, no_adapters, LORA))(four)
    assert_near(gradient(four, adapters, batch), gradient(decoded, adapters, batch))


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


def test_logits_and_gradients_equal_those_of_peft(reference):
    import torch

    theirs, folder = reference
    model = huggingface.load(folder / "base")
    adapters, lora = load_adapters(folder / "adapter", model.config)
    assert (lora.rank, lora.alpha, lora.targets) == (3, 5.0, tuple(TARGETS))
    tokens = np.random.default_rng(0).integers(0, 61, (2, 18))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    @jax.jit
    def logits(model, adapters):
        models = attach(model, adapters, lora), merge(model, adapters, lora)
        return [x(inputs, compute_dtype="float32") for x in models]

    output = theirs(torch.asarray(inputs)).logits
    for ours in logits(model, adapters):
        assert np.abs(ours - output.detach().numpy()).max() <= 1e-4
    loss, grads = gradient(model, adapters, (inputs, targets), lora)
    wanted = torch.nn.functional.cross_entropy(
        output.flatten(0, 1), torch.asarray(targets).flatten()
    )
    wanted.backward()
    assert abs(loss - wanted.item()) <= 1e-5 * wanted.item()
    named = {name: x for name, x in theirs.named_parameters() if "lora_" in name}
    assert len(named) == 2 * 2 * len(TARGETS)
    for name, parameter in named.items():
        parts = name.split(".")
        target, layer = parts[-4].removesuffix("_proj"), int(parts[4])
        factor = "a" if "lora_A" in name else "b"
        ours = grads["layers"][target][factor]
        ours = without_padding(f"{target}.{factor}", ours, model.config)[layer].T
        want = parameter.grad.numpy()
        assert np.abs(ours - want).max() <= 1e-3 * np.abs(want).max(), name


def test_peft_loads_what_is_saved(reference, tmp_path):
    import peft
    import torch
    import transformers

    theirs, folder = reference
    config = huggingface.read_config(folder / "base")
    adapters, lora = load_adapters(folder / "adapter", config)
    save_adapters(adapters, lora, tmp_path / "ours", config, base=str(folder / "base"))
    base = transformers.LlamaForCausalLM.from_pretrained(folder / "base")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "ours")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, theirs(tokens).logits)


CASES = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "dora and rslora": {"use_dora": True, "use_rslora": True},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "eva": {"init_lora_weights": "eva"},
    "mica": {"init_lora_weights": "mica"},
    "no initial values": {"init_lora_weights": False},
    "a regular expression": {"target_modules": r".*\.(q|down)_proj"},
    "all linear but k": {"target_modules": "all-linear", "exclude_modules": ["k_proj"]},
    "one layer": {"layers_to_transform": 1, "layers_pattern": "layers"},
    "patterns": {
        "rank_pattern": {"v_proj": 6, r".*layers\.1\.mlp\.up_proj": 2},
        "alpha_pattern": {"q_proj": 9, "model.layers.0.mlp.down_proj": 1},
        "use_rslora": True,
    },
}


def with_adapters(reference, folder, *, trained=True, **options):
    """Returns a model with adapters of PEFT, saved in a folder."""
    import peft
    import torch
    import transformers

    _, origin = reference
    base = transformers.LlamaForCausalLM.from_pretrained(origin / "base")
    options = {
        "r": 4,
        "lora_alpha": 5.0,
        "target_modules": ["q_proj", "v_proj", "up_proj"],
    } | options
    with warnings.catch_warnings():  # EVA has no data, and values of a pattern may be unused.
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, peft.LoraConfig(**options, task_type="CAUSAL_LM"))
    model.peft_config["default"].base_model_name_or_path = None
    model.save_pretrained(folder / "initial")
    if trained:
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data += torch.randn_like(parameter) * 0.2
    model.save_pretrained(folder / "adapter")
    return model


def merged_weights(model):
    """Returns the linear weights of a model of PEFT, [L, d, n] each."""
    layers = copy.deepcopy(model).merge_and_unload().model.layers
    return {
        target: np.stack(
            [layer.get_submodule(f"{owner}.{target}_proj").weight.detach().T for layer in layers]
        )
        for target, owner in ((name, "self_attn" if name in "qkvo" else "mlp") for name in TARGETS)
    }


def assert_merged(folder, base, model):
    """Checks the merged weights of a saved adapter."""
    ours = huggingface.load(base)
    adapters, lora = load_adapters(folder, ours.config)
    merged, attached = merge(ours, adapters, lora), attach(ours, adapters, lora)
    for target, want in merged_weights(model).items():
        owner = "attention" if target in "qkvo" else "mlp"
        got, held = (
            getattr(getattr(x.layers, owner), target).get_value() for x in (merged, attached)
        )
        got = without_padding(target, got, ours.config)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        if "magnitude" in adapters["layers"].get(target, {}):
            np.testing.assert_array_equal(without_padding(target, held, ours.config), got)
        elif isinstance(held, actjax.LoRA):
            assert held.scale == lora.scale
    return adapters, lora


@pytest.mark.parametrize("case", CASES)
def test_merged_weights_equal_those_of_peft(case, reference, tmp_path):
    model = with_adapters(reference, tmp_path, **CASES[case])
    base = reference[1] / "base"
    adapters, lora = assert_merged(tmp_path / "adapter", base, model)
    save_adapters(adapters, lora, tmp_path / "again", huggingface.read_config(base))
    assert_merged(tmp_path / "again", base, model)


@pytest.mark.parametrize("init", ["olora", "pissa", "pissa_niter_2"])
def test_adapters_that_change_the_base_are_refused_and_read_when_converted(
    init, reference, tmp_path
):
    model = with_adapters(reference, tmp_path, init_lora_weights=init)
    config = huggingface.read_config(reference[1] / "base")
    with pytest.raises(ValueError, match="changes the base weights, so the adapter does not fit"):
        load_adapters(tmp_path / "adapter", config)
    # PEFT rewrites the settings of the initial adapter while it converts.
    model.save_pretrained(
        tmp_path / "converted", path_initial_model_for_weight_conversion=tmp_path / "initial"
    )
    assert_merged(tmp_path / "converted", reference[1] / "base", model)


def test_saved_adapters_are_read_back(problem, tmp_path):
    model, adapters, _ = problem
    lora = dataclasses.replace(LORA, dropout=0.25, rslora=True)
    save_adapters(adapters, lora, tmp_path / "adapter", model.config, base="somewhere")
    again, settings = load_adapters(tmp_path / "adapter", model.config)
    assert settings == lora
    jax.tree.map(np.testing.assert_array_equal, again, adapters)
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        save_adapters(adapters, lora, tmp_path / "adapter", model.config)


def test_the_factor_of_rank_stabilized_adapters():
    assert LoRAConfig(rank=4, alpha=6.0).scale == 1.5
    assert LoRAConfig(rank=4, alpha=6.0, rslora=True).scale == 3.0


@pytest.fixture(scope="module")
def with_magnitudes(problem):
    """Adapters of q with magnitudes, and their settings."""
    _, adapters, _ = problem
    factors = adapters["layers"]["q"]
    magnitude = 1 + np.square(factors["b"][:, 0])
    lora = dataclasses.replace(LORA, dropout=0.5, targets=("q",))
    return {"layers": {"q": {**factors, "magnitude": magnitude}}}, lora


def test_columns_have_the_norms_of_their_magnitudes(problem, with_magnitudes, tmp_path):
    (model, adapters, _), (dora, lora) = problem, with_magnitudes
    save_adapters(dora, lora, tmp_path / "adapter", model.config)
    read, settings = load_adapters(tmp_path / "adapter", model.config)
    assert settings == lora
    jax.tree.map(np.testing.assert_array_equal, read, dora)
    got, plain = (
        np.float64(merge(model, x, LORA).layers.attention.q.get_value()) for x in (read, adapters)
    )
    magnitude = dora["layers"]["q"]["magnitude"]
    want = plain / np.linalg.norm(plain, axis=1, keepdims=True) * magnitude[:, None]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
    held = attach(model, read, lora).layers.attention.q.get_value()
    np.testing.assert_array_equal(held, np.float32(got))


def test_dropout_of_adapters_with_magnitudes_is_refused(problem, with_magnitudes):
    with pytest.raises(ValueError, match="the adapter of 'q' has a magnitude"):
        attach(problem[0], *with_magnitudes, jax.random.key(0))
