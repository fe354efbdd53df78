"""Tests of models/huggingface: the numbers of `transformers`, and the bytes of saved files."""

import dataclasses
import json
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny

from models import Decoder, ModelConfig, huggingface, preset
from models.padding import published_shape, without_padding

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 500.0,
}
FAMILIES = {
    "llama2": ("LlamaConfig", {"rms_norm_eps": 1e-5}),
    "llama3": (
        "LlamaConfig",
        {"num_key_value_heads": 2, "rope_parameters": LLAMA3, "tie_word_embeddings": True},
    ),
    "linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "mistral": ("MistralConfig", {"num_key_value_heads": 2, "sliding_window": None}),
    "mistral_window": ("MistralConfig", {"num_key_value_heads": 2, "sliding_window": 5}),
    "qwen2_5": ("Qwen2Config", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"num_key_value_heads": 2, "head_dim": 16}),
}
REFERENCE = "needs transformers and torch: pip install -e '.[reference]'"


# The gradients of these families have all the parts of the others'.
WITH_GRADIENTS = ("llama3", "mistral_window", "qwen2_5", "qwen3")
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 23))
INPUTS, TARGETS = TOKENS[:, :-1], TOKENS[:, 1:]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    """A family, its random model of `transformers`, and a folder of that model."""
    transformers = pytest.importorskip("transformers", reason=REFERENCE)
    torch = pytest.importorskip("torch", reason=REFERENCE)
    name, fields = FAMILIES[request.param]
    config = getattr(transformers, name)(**SIZES, **fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Initial biases are zero, norms one and scores nearly equal.
            parameter.add_(torch.randn_like(parameter) * 0.2)
    folder = tmp_path_factory.mktemp(request.param) / "checkpoint"
    model.save_pretrained(folder)
    return request.param, model, folder


@jax.jit
def logits_of(model):
    return model(INPUTS, compute_dtype="float32")


@jax.jit
def logits_and_gradient_of(model):
    def loss(model):
        return model.loss(INPUTS, TARGETS, compute_dtype="float32")

    return logits_of(model), *jax.value_and_grad(loss)(model)


def test_logits_and_gradients_equal_those_of_transformers(checkpoint):
    import torch

    family, theirs, folder = checkpoint
    ours = huggingface.load(folder)
    output = theirs(torch.asarray(INPUTS)).logits
    if family not in WITH_GRADIENTS:
        assert np.abs(logits_of(ours) - output.detach().numpy()).max() <= 1e-4
        return
    logits, value, gradient = logits_and_gradient_of(ours)
    assert np.abs(logits - output.detach().numpy()).max() <= 1e-4
    targets = torch.asarray(TARGETS).flatten()
    loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), targets)
    theirs.zero_grad()
    loss.backward()
    assert abs(value - loss.item()) <= 1e-5 * loss.item()
    parameters = dict(theirs.named_parameters())
    for row in huggingface.table(ours.config):
        arrays = huggingface.parameter_of(gradient, row.parameter).get_value()
        arrays = without_padding(row.parameter, arrays, ours.config)
        for layer, array in enumerate(arrays if row.stacked else arrays[None]):
            want = parameters.pop(row.tensor.format(layer)).grad.numpy()
            array = array.T if row.transposed else array
            assert np.abs(array - want).max() <= 1e-3 * np.abs(want).max(), row
    assert not parameters


@pytest.mark.parametrize("with_origin", [True, False])
def test_transformers_loads_a_saved_model(checkpoint, with_origin, tmp_path):
    """Without its origin, `config.json` is written from the dimensions."""
    import torch
    import transformers

    _, theirs, folder = checkpoint
    like = folder if with_origin else None
    huggingface.save(huggingface.load(folder), tmp_path / "saved", like=like)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    kinds = (theirs.config.model_type, *["llama"] * (not with_origin))
    assert again.config.model_type in kinds
    before, after = theirs.state_dict(), again.state_dict()
    assert after.keys() == before.keys() or not with_origin
    assert all(torch.equal(after[name], before[name]) for name in after)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, theirs(tokens).logits)


# Without transformers.


def tensors(folder) -> dict[str, np.ndarray]:
    return {
        name: x
        for path in folder.glob("*.safetensors")
        for name, x in safetensors.numpy.load_file(path).items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a small model in bfloat16."""
    folder = tmp_path_factory.mktemp("small") / "model"
    huggingface.save(tiny.decoder(dtype="bfloat16"), folder)
    return folder


@pytest.mark.parametrize("shard", [1, 5000, 10**9])
def test_saved_bytes_are_read_back(folder, tmp_path, shard):
    model = huggingface.load(folder)
    assert model.layers.attention.q.get_value().dtype == jnp.bfloat16
    huggingface.save(model, tmp_path / "again", max_shard_bytes=shard)
    before, after = (
        {name: (x.dtype, x.shape, x.tobytes()) for name, x in tensors(place).items()}
        for place in (folder, tmp_path / "again")
    )
    assert before == after
    files = list((tmp_path / "again").glob("*.safetensors"))
    assert (len(files) == 1) == (shard == 10**9)
    for file in files:
        sizes = [x.nbytes for x in safetensors.numpy.load_file(file).values()]
        assert len(sizes) == 1 or sum(sizes) <= shard
    # Other users can read the folder.
    assert (tmp_path / "again").stat().st_mode & 0o777 == 0o755
    if len(files) > 1:
        index = json.loads((tmp_path / "again/model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(len(data) for *_, data in before.values())
    once_more = huggingface.load(tmp_path / "again")
    jax.tree.map(np.testing.assert_array_equal, once_more, model)


def test_other_files_are_copied_and_weights_written_again(folder, tmp_path):
    origin, again = tmp_path / "origin", tmp_path / "again"
    shutil.copytree(folder, origin)
    (origin / "tokenizer.json").write_text("{}")
    (origin / "pytorch_model.bin").write_bytes(b"a pickle")
    config = json.loads((folder / "config.json").read_text())
    (origin / "config.json").write_text(
        json.dumps({**config, "transformers_version": "5.0"}, indent=2) + "\n"
    )
    huggingface.save(huggingface.load(origin), again, like=origin)
    names = {path.name for path in again.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    for name in names:
        assert (again / name).read_bytes() == (origin / name).read_bytes()


def test_weights_are_cast_converted_and_put(folder):
    model = huggingface.load(folder, dtype="float32")
    assert {x.dtype for x in jax.tree.leaves(model)} == {jnp.dtype("float32")}
    seen = []

    def convert(path, array):
        seen.append((path, array.shape))
        return {"half": array[..., ::2]} if path == "layers.mlp.up" else array

    def put(path, value):
        return jax.tree.map(np.negative, value)

    changed = huggingface.load(folder, convert=convert, put=put)
    up = model.layers.mlp.up.get_value()
    half = changed.layers.mlp.up.get_value()["half"]
    np.testing.assert_array_equal(np.float32(half), -np.asarray(up)[..., ::2])
    assert seen.count(("layers.mlp.up", up.shape[1:])) == tiny.CONFIG.num_layers


def test_no_second_copy_is_in_memory(tmp_path):
    """NumPy's memory holds one parameter at a time, and one layer of it."""
    config = ModelConfig(64, 64, 512, num_layers=16, num_heads=2)
    shapes = jax.eval_shape(lambda: Decoder(config, jax.random.key(0)))
    model = jax.tree.map(lambda x: jax.device_put(np.ones(x.shape, x.dtype)), shapes)
    huggingface.save(model, tmp_path / "model", max_shard_bytes=400_000)
    model_bytes = sum(x.nbytes for x in jax.tree.leaves(model))
    largest = model.layers.mlp.up.get_value().nbytes
    tracemalloc.start()
    try:
        # Nothing is kept: arrays of NumPy may share memory with those of JAX.
        huggingface.load(tmp_path / "model", put=lambda _, value: jax.tree.map(np.shape, value))
        _, loading = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        huggingface.save(model, tmp_path / "again", max_shard_bytes=400_000)
        _, saving = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert loading < largest * (1 + 2 / 16) + 500_000 < model_bytes / 2
    assert saving < 2 * 400_000 + 500_000 < model_bytes / 2


def test_tied_embeddings_and_frequencies_of_old_files(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    file, config = tmp_path / "model/model.safetensors", tmp_path / "model/config.json"
    arrays, model = tensors(folder), huggingface.load(folder)
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4)}
    safetensors.numpy.save_file(arrays | frequencies, file)
    jax.tree.map(np.testing.assert_array_equal, huggingface.load(file.parent), model)
    tied = {**json.loads(config.read_text()), "tie_word_embeddings": True}
    config.write_text(json.dumps(tied))
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    safetensors.numpy.save_file(arrays, file)
    assert huggingface.load(file.parent).output is None


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A folder with a small model whose head is its embeddings, and its tensors."""
    config = dataclasses.replace(tiny.CONFIG, num_layers=2, tie_embeddings=True)
    model = jax.eval_shape(lambda: Decoder(config, jax.random.key(0)))
    random, arrays = np.random.default_rng(0), {}
    for row in huggingface.table(config):
        stored = huggingface.parameter_of(model, row.parameter).get_value().shape
        shape = published_shape(row.parameter, stored, config)
        shape = shape[1:] if row.stacked else shape
        for layer in range(config.num_layers if row.stacked else 1):
            array = random.normal(size=shape[::-1] if row.transposed else shape)
            arrays[row.tensor.format(layer)] = array.astype(np.float32)
    folder = tmp_path_factory.mktemp("tied")
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(huggingface.fields_of(config, "float32")))
    return folder, arrays


def write(folder, origin, arrays, **fields):
    """Writes tensors into a folder, with the `config.json` of another and changed fields."""
    folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    config = json.loads((origin / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


PREFIXES = {
    "model.": ["module.model.", "_orig_mod.model.", "language_model.model.", "model.model.", "",
               "text_model.", "model.language_model.", "base_model.model.model.",
               "_orig_mod.module.model."],
    "mlp.": ["mlp._checkpoint_wrapped_module."],
    "layers.0.": ["layers.0._orig_mod."],
}  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new"), [(old, new) for old, names in PREFIXES.items() for new in names]
)
def test_names_may_have_a_common_prefix(tied, old, new, tmp_path):
    origin, arrays = tied
    model = huggingface.load(origin)
    renamed = {name.replace(old, new, 1): x for name, x in arrays.items()}
    write(tmp_path, origin, renamed)
    assert_same(huggingface.load(tmp_path), model)
    # A head that is stored too, beside the prefix or after the wrappers.
    for head in ("lm_head.weight", new[: new.rfind(".", 0, -1) + 1] + "lm_head.weight"):
        if old == "model.":
            write(tmp_path, origin, renamed | {head: arrays["model.embed_tokens.weight"]})
            assert_same(huggingface.load(tmp_path), model)


def test_a_tied_model_may_have_its_head_alone(tied, tmp_path):
    origin, arrays = tied
    arrays = {name.replace("model.embed_tokens", "lm_head"): x for name, x in arrays.items()}
    write(tmp_path, origin, arrays)
    assert_same(huggingface.load(tmp_path), huggingface.load(origin))


def test_weights_in_float64_are_read_in_float32(tied, tmp_path):
    origin, arrays = tied
    write(tmp_path, origin, {name: x.astype(np.float64) for name, x in arrays.items()})
    model = huggingface.load(origin)
    assert_same(huggingface.load(tmp_path, put=lambda _, x: x), model)
    assert_same(
        huggingface.load(tmp_path, dtype="bfloat16"), huggingface.load(origin, dtype="bfloat16")
    )
    arrays["model.norm.weight"] = np.full_like(arrays["model.norm.weight"], 1e30)
    write(tmp_path, origin, arrays)
    huggingface.load(tmp_path, dtype="bfloat16")
    with pytest.raises(ValueError, match="has numbers beyond the range of float16"):
        huggingface.load(tmp_path, dtype="float16")


def in_fp8(arrays, rows, columns):
    """Returns tensors with the linear weights in FP8 blocks, and the decoded tensors."""
    stored, decoded = dict(arrays), dict(arrays)
    for name, x in arrays.items():
        if "_proj" in name:
            shape = -(-x.shape[0] // rows), -(-x.shape[1] // columns)
            scale = np.random.default_rng(0).uniform(0.1, 0.2, shape).astype(jnp.bfloat16)
            by_weight = np.kron(np.float32(scale), np.ones((rows, columns), np.float32))
            by_weight = by_weight[: x.shape[0], : x.shape[1]]
            stored[name] = (x / by_weight).astype(jnp.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
            decoded[name] = np.float32(stored[name]) * by_weight
    return stored, decoded


def test_weights_in_blocks_of_fp8_are_decoded(tied, tmp_path):
    origin, arrays = tied
    stored, decoded = in_fp8(arrays, 16, 12)
    quantization = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
        "weight_block_size": [16, 12], "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    renamed = {f"module.{name}": x for name, x in stored.items()}
    write(tmp_path, origin, renamed, quantization_config=quantization, torch_dtype="bfloat16")
    write(tmp_path / "decoded", origin, decoded)
    want = huggingface.load(tmp_path / "decoded")
    assert_same(huggingface.load(tmp_path, dtype="float32"), want)
    model = huggingface.load(tmp_path)
    assert model.layers.mlp.up.get_value().dtype == jnp.bfloat16
    assert model.embedding.get_value().dtype == np.float32
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    mixed = stored | {name[:-10]: decoded[name[:-10]]}
    write(tmp_path, origin, mixed, quantization_config=quantization)
    with pytest.raises(ValueError, match="weight' is F32, but has scales for F8_E4M3"):
        huggingface.load(tmp_path)
    write(tmp_path, origin, stored | {name: stored[name].T}, quantization_config=quantization)
    with pytest.raises(ValueError, match=r"requires \[3, 2\]"):
        huggingface.load(tmp_path)


def test_the_files_that_transformers_reads_are_read(tied, tmp_path):
    origin, _ = tied
    model, folder = huggingface.load(origin), tmp_path / "several"
    huggingface.save(model, folder, max_shard_bytes=5000)
    shards = sorted(folder.glob("*.safetensors"))
    # A tensor that two files have, and files that the index does not name.
    double = safetensors.numpy.load_file(shards[0]) | safetensors.numpy.load_file(shards[1])
    safetensors.numpy.save_file(double, shards[1])
    for name in ("adapter_model.safetensors", "consolidated.safetensors"):
        (folder / name).write_bytes(b"damaged")
    assert_same(huggingface.load(folder), model)
    # The single file comes first.
    (folder / "model.safetensors").write_bytes((origin / "model.safetensors").read_bytes())
    shards[0].unlink()
    assert_same(huggingface.load(folder), model)


@pytest.mark.parametrize("name", ["llama3_1b", "qwen2_5_0_5b", "qwen3_8b", "llama_60m"])
def test_dimensions_are_read_back(name):
    config = preset(name)
    fields = huggingface.fields_of(config, "bfloat16")
    assert huggingface.config_of(json.loads(json.dumps(fields))) == config


def test_the_head_size_of_qwen3_is_128_by_default():
    # hidden_size / num_attention_heads is 64.
    config = preset("qwen3_0_6b")
    fields = huggingface.fields_of(config, "bfloat16")
    del fields["head_dim"]
    assert huggingface.config_of(fields).head_size == config.head_size == 128


def test_rope_of_old_and_new_files_is_read():
    config = preset("llama3_1b")
    fields = huggingface.fields_of(config, "bfloat16")
    rope = {**fields.pop("rope_scaling"), "rope_theta": fields.pop("rope_theta")}
    assert huggingface.config_of({**fields, "rope_parameters": rope}) == config


def test_empty_fields_and_fields_without_effect_are_read():
    fields = huggingface.fields_of(tiny.CONFIG, "bfloat16")
    empty = {
        "logits_scaling": None, "mlp_bias": False, "rope_interleaved": False, "pruned_heads": {},
        "resid_pdrop": 0.0, "num_experts": 0, "no_rope_layers": [], "quantization_config": None,
    }  # fmt: skip
    harmless = {
        "attention_dropout": 0.1, "pretraining_tp": 2, "id2label": {"0": "a"}, "temperature": 0.6,
        "eos_token_id": [1, 2], "partial_rotary_factor": 1.0, "layer_types": ["full_attention"] * 3,
    }  # fmt: skip
    assert huggingface.config_of({**fields, **empty, **harmless}) == tiny.CONFIG


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_missing_fields_have_the_values_of_transformers(kind):
    transformers = pytest.importorskip("transformers", reason=REFERENCE)
    sizes = {
        "vocab_size": 61, "hidden_size": 256, "intermediate_size": 44, "num_hidden_layers": 2,
        "num_attention_heads": 32,
    }  # fmt: skip
    theirs = transformers.AutoConfig.for_model(kind, **sizes)
    ours = huggingface.config_of({"model_type": kind, **sizes})
    assert ours == huggingface.config_of({**theirs.to_dict(), **sizes})
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.max_seq_len == theirs.max_position_embeddings
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert ours.tie_embeddings == theirs.tie_word_embeddings
