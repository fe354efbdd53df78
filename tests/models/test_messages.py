"""Messages of the errors of `models`: dimensions, storage, checkpoints, adapters and generation."""

import dataclasses
import functools
import json
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny
from messages import assert_messages

from actjax import PointApproximation, Quantized
from models import CompressedResiduals, Decoder, ModelConfig, Remat, Storage, huggingface, preset
from models.checkpoints import find_checkpoint, read_dimensions, stop_ids
from models.folders import atomic_folder
from models.generation import generate
from models.likelihoods import log_likelihoods
from models.lora import LoRAConfig, init_adapters
from models.peft import load_adapters, save_adapters

LORA = LoRAConfig(rank=3, alpha=5.0)


def calls(function, rows, *arguments):
    """Pairs of a call with the keywords of a row, and the message of the row."""
    return [(functools.partial(function, *arguments, **row), text) for row, text in rows]


def test_settings():
    good = {"vocab_size": 8, "hidden_size": 8, "ffn_size": 8, "num_layers": 1, "num_heads": 2}
    dimensions = [
        ({"num_layers": 0}, "`num_layers` must be an integer >= 1, got 0"),
        ({"num_heads": 0}, "must be an integer >= 1"),
        ({"ffn_size": 2.5}, "`ffn_size` must be an integer"),
        ({"num_heads": 4, "num_kv_heads": 3}, "`num_heads` 4 must be a multiple of"),
        ({"num_heads": 3}, "`hidden_size` 8 is not a multiple of `num_heads` 3: pass `head_size`"),
        ({"head_size": 3}, "`head_size` must be even for RoPE, got 3"),
    ]
    adapters = [
        ({"rank": 0}, "`rank` of the adapters must be at least 1, got 0"),
        ({"alpha": 0.0}, "`alpha` of the adapters must be in (0, inf), got 0"),
        ({"alpha": math.inf}, "`alpha` of the adapters must be in (0, inf), got inf"),
        ({"dropout": 1.0}, "`dropout` of the adapters must be in [0, 1)"),
        ({"targets": ()}, "is empty: name at least one"),
        ({"targets": ("q", "q")}, "has duplicates"),
        ({"targets": ("gat",)}, "adapter target 'gat' in `targets`. Did you mean 'gate'"),
        ({"targets": ("embed",)}, "Targets are: q, k, v, o, gate, up, down"),
    ]
    half = {"policy": "dots", "codec": Quantized(4)}
    assert_messages(
        ValueError,
        calls(ModelConfig, [(good | row, text) for row, text in dimensions])
        + calls(LoRAConfig, adapters)
        + calls(Remat, [({"policy": "half"}, ", got 'half'"), (half, "needs policy='full', got")])
        + [
            (lambda: preset("llama_60"), "unknown `--model` 'llama_60'. Did you mean llama_60m"),
            (lambda: preset("xyz"), "'xyz'. There are: llama_3m"),
        ],
    )


def test_storage():
    none = "must be an actjax.Codec, got None"
    former = [
        ({"remat": True}, "no keyword `remat`: use Remat(policy=...)"),
        ({"block": True}, "no keyword `block`: use Remat(codec=...)"),
        ({"residuals": True}, "no keyword `residuals`: use CompressedResiduals"),
        ({"compensate": True}, "no keyword `compensate`: use Storage(split_adapters=...)"),
    ]
    assert_messages(
        TypeError,
        [
            (lambda: Storage(gate=None), f"`Storage.gate` {none}"),
            (lambda: Remat(codec=None), f"`Remat.codec` {none}"),
            (
                lambda: CompressedResiduals(attention_out=None),
                f"`CompressedResiduals.attention_out` {none}",
            ),
            *calls(Storage, former),
        ],
    )
    tokens, random = np.zeros((1, 4), np.int32), Storage(mlp_in=PointApproximation(points=3))
    call = functools.partial(tiny.decoder().loss, tokens, tokens, storage=random)
    assert_messages(ValueError, [(call, "`Storage.mlp_in` is PointApproximation(points=3)")])


FIELDS = huggingface.fields_of(tiny.CONFIG, "bfloat16")
SLIDING = {"model_type": "mistral", "sliding_window": 4}
WINDOWED = {
    "model_type": "qwen3", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0
}  # fmt: skip
NO_WINDOW = {"sliding_window": None}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
    "original_max_position_embeddings": 16,
}  # fmt: skip
FULL = ["full_attention"] * 2
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def test_dimensions_of_checkpoints():
    rows = [
        ({"model_type": "gpt2"}, "unsupported `model_type` 'gpt2': supported are llama"),
        ({"hidden_act": "gelu"}, "`hidden_act` is 'gelu': only 'silu' is supported"),
        ({"quantization_config": {"bits": 4}}, "Use the checkpoint that is not quantized"),
        ({"attention_bias": True}, "`attention_bias` is true"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "unsupported RoPE scaling 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "lacks low_freq_factor, high"),
        ({"hidden_size": ...}, "`hidden_size` is missing"),
        ({"hidden_size": "24"}, "`hidden_size` must be an integer in [0, "),
        ({"num_attention_heads": None}, "`num_attention_heads` must be an integer"),
        ({"head_dim": [4]}, "got [4]"),
        ({"head_dim": 0}, "`head_dim` must be an integer in [1, "),
        ({"num_key_value_heads": 0}, "`num_key_value_heads` must be an integer in [1, "),
        ({"vocab_size": 10**30}, "`vocab_size` must be an integer in"),
        ({"model_type": ["llama"]}, "unsupported `model_type` ['llama']"),
        ({"rope_scaling": 7}, "the parameters of RoPE must be a JSON object, got 7"),
        ({"rope_theta": -1.0}, "`rope_theta` must be at least 1, got -1.0"),
        ({"rope_theta": 1e-30}, "`rope_theta` must be at least 1, got 1e-30"),
        ({"eos_token_id": "2"}, "`eos_token_id` must be an id or a list of ids, got '2'"),
        ({"eos_token_id": [1, True]}, "`eos_token_id` must be an id or a list of ids, got [1, T"),
        ({"eos_token_id": [1, 10**9]}, "but `vocab_size` is "),
        ({"pad_token_id": 0.5}, "`pad_token_id` must be an id or a list of ids, got 0.5"),
        ({"bos_token_id": -2}, "`bos_token_id` must be an id or a list of ids, got -2"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "`factor` of the RoPE scaling"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1}}, "must be above `low_freq_factor` 1.0"),
        ({"tie_word_embeddings": "false"}, "`tie_word_embeddings` must be true or false, got 'fal"),
        ({"rope_theta": "x"}, "`rope_theta` must be a number, got 'x'"),
        ({"initializer_range": 10**60}, "`initializer_range` must be a number"),
        ({"initializer_range": float("nan")}, "`initializer_range` must be a number, got nan"),
        ({**SLIDING, "sliding_window": "a"}, "`sliding_window` must be an integer"),
        ({**SLIDING, "layer_types": 1}, "`layer_types` must be a list of 3, each"),
        ({**SLIDING, "layer_types": ["full_attention"]}, "`layer_types` must be a list of 3, each"),
        ({"layer_types": ["chunked_attention"] * 3}, "full_attention or sliding_attention, got"),
        (
            {**SLIDING, "layer_types": ["full_attention"] * 3},
            "gives 0 of 3 layers a window, but the",
        ),
        ({**WINDOWED, "layer_types": [*FULL, "sliding_attention"]}, "1 of 3 layers have"),
        ({**WINDOWED, "max_window_layers": 1}, "2 of 3 layers have"),
        ({**WINDOWED, **NO_WINDOW, "layer_types": ["sliding_attention"] * 3}, "give 0 of them"),
        ({"sliding_window": 4}, "`sliding_window` is 4, but the model type llama has no window"),
        ({"rms_norm_eps": -1}, "`norm_eps` must be in [0, 1), got -1"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2, "mscale": 2}},
            "RoPE: `mscale` is 2",
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "`partial_rotary_factor` is 0.5: only",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "RoPE: `full_attention` is"),
        ({"quantization_config": {"quant_method": "gptq"}}, "`quant_method` is 'gptq': only 'fp8'"),
        ({"quantization_config": FP8 | {"activation_scheme": "static"}}, "`activation_scheme` is"),
        ({"quantization_config": FP8 | {"weight_block_size": None}}, "`weight_block_size` must be"),
        ({"quantization_config": FP8 | {"modules_in_int4": ["q"]}}, "`modules_in_int4` is ['q']"),
        (
            {"quantization_config": 8},
            "`quantization_config` is not supported: it must be an object",
        ),
    ]
    # Fields of other models, of other libraries, and of files with programs.
    unknown = {
        "attention_multiplier": 0.5, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
        "residual_multiplier": 0.22, "final_logit_softcapping": 30.0, "no_rope_layers": [1, 0, 1],
        "attn_logit_softcapping": 50.0, "mlp_bias": True, "use_mrope": True, "qk_layernorm": True,
        "rope_interleaved": True, "auto_map": {"AutoModel": "modeling.Model"}, "num_experts": 8,
        "quantization": {"bits": 4}, "clip_qkv": 8, "scale_emb": 12, "mtp_layers": 1,
    }  # fmt: skip
    rows += [({name: value}, f"`{name}` is ") for name, value in unknown.items()]

    def read(changes):
        huggingface.config_of({k: v for k, v in (FIELDS | changes).items() if v is not ...})

    assert_messages(
        ValueError, [(functools.partial(read, changes), text) for changes, text in rows]
    )


@pytest.fixture
def folder(tmp_path):
    """A folder with a small model in bfloat16."""
    huggingface.save(tiny.decoder(dtype="bfloat16"), tmp_path / "model")
    return tmp_path / "model"


def written(path, content, read):
    """Returns a call that writes a file and reads its folder."""

    def call():
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return read(path.parent)

    return call


def test_checkpoints_that_do_not_fit(folder, tmp_path):
    load, config, file = huggingface.load, folder / "config.json", folder / "model.safetensors"
    whole, tensors = file.read_bytes(), safetensors.numpy.load_file(file)
    rows = [
        ({"rope_theta": "x"}, "config.json: `rope_theta` must be a number, got 'x'"),
        ({"num_hidden_layers": 1}, "no parameter for the tensor 'model.layers.1."),
        ({"num_hidden_layers": 4}, "no tensor for `layers.attention_norm`: 'model.layers.3."),
        ({"intermediate_size": 8}, "gate_proj.weight' has the shape ["),
        ({"tie_word_embeddings": False, "model_type": "qwen3"}, "no tensor for"),
        ({"tie_word_embeddings": True}, "ties lm_head.weight to the embeddings, but "),
        (
            {"num_hidden_layers": 10_000_000},
            "describes 10000000 layers, but there are only 30 tens",
        ),
    ]
    texts = [
        (b"[]", "config.json: expected a JSON object, got list"),
        (b'{"a', "config.json: it is not JSON (Unterminated"),
        (b"\xff", "config.json: it is not JSON ('utf-8' codec"),
        (b"[" * 100_000, "config.json: its JSON is nested too deeply"),
    ]
    assert_messages(
        ValueError,
        [
            (written(config, FIELDS | changes, read), text)
            for changes, text in rows
            for read in (load, huggingface.check)
        ]
        + [(written(config, content, load), text) for content, text in texts]
        + [
            (
                written(folder / "generation_config.json", {"eos_token_id": ["</s>"]}, stop_ids),
                "generation_config.json: `eos_token_id` must be an id",
            ),
            *(
                (
                    written(config, FIELDS | {name: value}, read_dimensions),
                    f"config.json: `{name}` must be float32, float16, bfloat16 or float64, got",
                )
                for name, value in (("torch_dtype", "a"), ("dtype", 16), ("torch_dtype", [""]))
            ),
        ],
    )
    for dtype, expected in (("float64", "float32"), (None, "float32"), ("bfloat16", "bfloat16")):
        config.write_text(json.dumps(FIELDS | {"torch_dtype": dtype}))
        assert read_dimensions(folder)[1] == expected
    config.write_text(json.dumps(FIELDS))

    def holding(value, dtype):
        changed = {name: np.asarray(x, np.dtype(dtype)) for name, x in tensors.items()}
        changed["model.norm.weight"].flat[-1] = value
        safetensors.numpy.save_file(changed, file)
        huggingface.load(folder)

    bfloat16 = tensors["model.norm.weight"].dtype
    assert_messages(
        ValueError,
        [
            (functools.partial(holding, value, dtype), "'model.norm.weight' has infinities or NaN")
            for value in (np.nan, -np.inf)
            for dtype in ("float32", bfloat16, "float16")
        ]
        + [
            (written(file, whole[:length], load), "model.safetensors cannot be read")
            for length in (len(whole) - 1, len(whole) // 2, 20, 4, 0)
        ],
    )
    first, other, norm = "model.layers.0.mlp.up_proj.weight", "lm_head.weight", "model.norm.weight"

    def renamed(change):
        return {change(name): x for name, x in tensors.items()}

    changes = [
        (
            tensors | {first: tensors[first].astype(np.int8)},
            f"{first!r} is I8, but weights must be",
        ),
        (tensors | {first[:-6] + "qweight": np.ones(2, np.int32)}, "qweight' is I32, but weights"),
        (tensors | {first: np.ones((44, 24), bool)}, f"{first!r} is BOOL, but weights must be"),
        (
            tensors | {first: np.ones((44, 24), jnp.float8_e4m3fn)},
            f"{first!r} is F8_E4M3, which needs",
        ),
        (tensors | {first: np.ones((44, 24), jnp.float8_e5m2)}, f"{first!r} is F8_E5M2, but"),
        (
            renamed(lambda x: x if x == norm else f"text.{x}"),
            "with 'text.model.', but the name of",
        ),
        (tensors | {f"module.{norm}": tensors[norm]}, f"'module.{norm}' are both '{norm}'"),
        (tensors | {"score.weight": tensors[norm]}, "no parameter for the tensor 'score.weight'"),
        ({x: a for x, a in tensors.items() if x != other}, "The model was saved without its head"),
    ]

    def changed(content):
        safetensors.numpy.save_file(content, file)
        load(folder)

    assert_messages(
        ValueError, [(functools.partial(changed, content), text) for content, text in changes]
    )
    file.unlink()
    os.mkfifo(file)
    assert_messages(ValueError, [(lambda: load(folder), "model.safetensors is not a file")])
    file.unlink()
    stray = {
        "consolidated.safetensors": "but consolidated.safetensors: copy the index too",
        "adapter_model.safetensors": "but an adapter: name the folder of its base model",
    }
    for name, text in stray.items():
        (folder / name).write_bytes(whole)
        assert_messages(FileNotFoundError, [(lambda: load(folder), text)])
        (folder / name).unlink()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert_messages(
        FileNotFoundError,
        [
            (lambda: load(folder), "holds neither model.safetensors nor"),
            (lambda: load(tmp_path / "nowhere"), "no such folder"),
            (lambda: load(tmp_path), "no config.json in it"),
        ],
    )
    run = (lambda: find_checkpoint(tmp_path / "run"), "a run without an exported model")
    assert_messages(ValueError, [run])
    pickle = written(folder / "pytorch_model.bin", whole, load)
    assert_messages(ValueError, [(pickle, "pytorch_model.bin, a pickle, and reading a pickle can")])


def test_an_index_that_does_not_fit(tmp_path):
    folder = tmp_path / "several"
    huggingface.save(tiny.decoder(), folder, max_shard_bytes=5000)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())["weight_map"]
    first, second = sorted(set(index.values()))[:2]
    moved = next(name for name, file in index.items() if file == second)
    rows = [
        (index | {moved: first}, f"has no '{moved}'"),
        (index | {moved: f"../several/{second}"}, f"names '../several/{second}', which is not in"),
        (None, "`weight_map` must be an object with a file by"),
        ([first], "`weight_map` must be an object with a file by"),
        (index | {moved: [first]}, "`weight_map` must be an object with a file by"),
    ]
    load = huggingface.load
    assert_messages(
        ValueError, [(written(path, {"weight_map": files}, load), text) for files, text in rows]
    )
    stored = (folder / second).read_bytes()
    double = safetensors.numpy.load_file(folder / first) | {moved: np.ones(2, np.float32)}
    single = safetensors.numpy.save(double)
    (folder / first).write_bytes(single)
    both = written(path, {"weight_map": index}, load)
    assert_messages(
        ValueError, [(both, f"{first} and {second} both have {moved!r}, and they diff")]
    )
    (folder / "model.safetensors").write_bytes(stored)
    single = "model.safetensors is read, not the files of model.safetensors.index.json"
    assert_messages(ValueError, [(both, single)])
    (folder / "model.safetensors").unlink()
    (folder / second).unlink()
    missing = written(path, {"weight_map": index}, load)
    assert_messages(FileNotFoundError, [(missing, "does not exist, but ")])


def test_folders_that_are_not_empty(folder, tmp_path):
    model = tiny.decoder()

    def fill():
        with atomic_folder(folder):
            pass

    assert_messages(
        FileExistsError,
        [
            (fill, "is not empty: name another folder"),
            (lambda: huggingface.save(model, folder), "exists and is not empty"),
        ],
    )
    model.layers.mlp.up.set_value({"no": "array"})
    call = functools.partial(huggingface.save, model, tmp_path / "other")
    assert_messages(TypeError, [(call, "`layers.mlp.up` must be an array")])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_adapters_that_do_not_fit(tmp_path):
    shapes = jax.eval_shape(lambda: init_adapters(tiny.CONFIG, LORA, jax.random.key(0)))
    folder = tmp_path / "adapter"
    ones = tiny.zero_padding(jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes))
    save_adapters(ones, LORA, folder, tiny.CONFIG)
    config, file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    fields, whole = json.loads(config.read_text()), file.read_bytes()
    tensors = safetensors.numpy.load_file(file)
    load = functools.partial(load_adapters, config=tiny.CONFIG)
    rows = [
        ({"peft_type": "LOHA"}, "`peft_type` is 'LOHA': only 'LORA' is supported"),
        ({"task_type": "SEQ_CLS"}, "`task_type` is 'SEQ_CLS': only 'CAUSAL_LM' is supported"),
        ({"use_dora": True}, "q_proj.lora_magnitude_vector' is missing"),
        ({"use_dora": True, "layers_to_transform": 1}, "`use_dora` is True, but only some layers"),
        ({"use_dora": "yes"}, "`use_dora` must be true or false, got 'yes'"),
        ({"bias": "all"}, "`bias` is 'all'"),
        ({"r": "3"}, "`r` must be a number, got '3'"),
        ({"r": 2.5}, "`r` must be an integer of at least 1, got 2.5"),
        ({"lora_alpha": [16]}, "`lora_alpha` must be a number, got [16]"),
        ({"lora_alpha": 10**400}, "`lora_alpha` must be a number"),
        ({"lora_dropout": None}, "`lora_dropout` must be a number, got None"),
        ({"target_modules": ["q_proj", 1]}, "`target_modules` must be a list of names"),
        ({"r": 4}, "shape [3, 24], but the model and the rank require [4, 24]"),
        ({"target_modules": 7}, "`target_modules` must be a list of names or a regular expression"),
        ({"target_modules": "(q"}, "`target_modules`: '(q' is no regular expression (missing )"),
        ({"target_modules": None}, "`target_modules` None names no linear weight of the model"),
        ({"target_modules": ["lm_head"]}, "`target_modules` ['lm_head'] names no linear weight"),
        ({"target_modules": ["q_proj"]}, "no adapter for the tensor"),
        ({"exclude_modules": ["mlp.up_proj"]}, "no adapter for the tensor"),
        ({"layers_to_transform": ["1"]}, "`layers_to_transform` must be a list of layers"),
        ({"layers_pattern": "h"}, "`layers_pattern` is 'h': only 'layers' is supported"),
        ({"rank_pattern": {"q_proj": 4}}, "require [4, 24]"),
        ({"rank_pattern": {"q_proj": 0}}, "`rank_pattern` must be an integer of at least 1, got 0"),
        ({"rank_pattern": {"q_proj": 2**30}}, "require [1073741824, 24]"),
        ({"rank_pattern": ["q_proj"]}, "`rank_pattern` must be an object of numbers by module"),
        ({"alpha_pattern": {"q_proj": "8"}}, "`alpha_pattern` must be a number, got '8'"),
        ({"alpha_pattern": {"*": 8}}, "`alpha_pattern`: '(.*\\\\.)?(*)$' is no regular expression"),
    ]
    converted, merged = "convert it to plain LoRA in PEFT", "merge it in PEFT"
    for init, advice in {
        "olora": converted, "OLoRA": converted, "pissa": converted, "pissa_niter_4": converted,
        "corda": converted, "lora_ga": converted, "loftq": merged, "nonsense": "but supported are",
        "true": "but supported are", 1: "but supported are", "dora": "but supported are",
    }.items():  # fmt: skip
        rows.append(({"init_lora_weights": init}, f"`init_lora_weights` is {init!r}, "))
        rows.append(({"init_lora_weights": init}, advice))
    # Fields of PEFT 0.21, and fields that no version has.
    refused = {
        "modules_to_save": ["lm_head"], "trainable_token_indices": [1, 2], "lora_bias": True,
        "fan_in_fan_out": True, "alora_invocation_tokens": [5], "layer_replication": [[0, 2]],
        "use_qalora": True, "velora_config": {"num_groups": 64}, "kasa_config": {"beta": 1e-4},
        "monteclora_config": {"num_samples": 8}, "arrow_config": {"top_k": 3},
        "use_bdlora": {"nblocks": 2}, "target_parameters": ["experts.up"],
        "megatron_config": {"tp": 2}, "use_vera": True, "shared_a": 0.5, "gate": "sigmoid",
    }  # fmt: skip
    rows += [({name: value}, f"`{name}` is ") for name, value in refused.items()]
    assert_messages(
        ValueError, [(written(config, fields | changes, load), text) for changes, text in rows]
    )
    config.write_text(json.dumps(fields))
    first = min(tensors)
    damaged = [tensors | {first: np.full_like(tensors[first], value)} for value in (np.nan, np.inf)]
    removed = {name: x for name, x in tensors.items() if name != first}
    finite = "must hold finite floating point numbers"
    assert_messages(
        ValueError,
        [(written(file, whole[:-1], load), "truncated or damaged")]
        + [(written(file, safetensors.numpy.save(x), load), finite) for x in damaged]
        + [(written(file, safetensors.numpy.save(removed), load), "' is missing")],
    )
    integers = tensors | {first: tensors[first].astype(np.int8)}
    whole_number = written(file, safetensors.numpy.save(integers), load)
    assert_messages(
        ValueError, [(whole_number, f"{first!r} is I8, but adapters must be one of F64")]
    )
    file.unlink()
    missing = functools.partial(load, folder)
    assert_messages(FileNotFoundError, [(missing, "no adapter_model.safetensors in it")])
    (folder / "adapter_model.bin").touch()
    assert_messages(FileNotFoundError, [(missing, "adapter_model.bin is a pickle")])


def test_generation():
    config = dataclasses.replace(tiny.CONFIG, max_seq_len=21)
    model = jax.eval_shape(functools.partial(Decoder, config), jax.random.key(0))
    two_keys = {"temperature": 1.0, "key": jax.random.split(jax.random.key(0), 2)}
    rows = [
        ([[1], []], {}, "`prompts[1]` is empty: give at least one token"),
        ([[1, 61]], {}, "`prompts[0]` has the id 61, but the vocabulary"),
        ([[-1, 2]], {}, "`prompts[0]` has the id -1"),
        ([[1]], {"stop": [99]}, "`stop` has the id 99"),
        ([[1]], {"max_new_tokens": 0}, "`max_new_tokens` must be at least 1, got 0"),
        ([[1] * 30], {}, "`prompts[0]` has 30 tokens, and with"),
        ([[1]], {"temperature": -1}, "`temperature` must be at least 0"),
        ([[1]], {"temperature": float("nan")}, "`temperature` must be at least 0 and finite"),
        ([[1]], {"top_p": 0.0}, "`top_p` must be above 0 and at most 1, got 0.0"),
        ([[1]], {"top_p": 1.5}, "`top_p` must be above 0 and at most 1, got 1.5"),
        ([[1]], {"top_k": -1}, "`top_k` must be at least 0"),
        ([[1]], {"temperature": 1.0}, "draws random numbers, but got key=None: pass `key`"),
        ([[1]], two_keys, "one for each of the 1 `prompts`, got keys of shape (2,)"),
    ]
    continuations = [
        ([[1]], [[1], [2]], "`continuations` has 2 entries and `prompts` 1"),
        ([[1]], [[]], "`continuations[0]` is empty"),
        ([[1, 1]], [[2] * 21], "`prompts[0]` has 2 tokens"),
    ]
    assert_messages(
        ValueError,
        [
            (functools.partial(generate, model, prompts, **{"max_new_tokens": 12, **options}), text)
            for prompts, options, text in rows
        ]
        + [
            (functools.partial(log_likelihoods, model, prompts, texts), message)
            for prompts, texts, message in continuations
        ],
    )
