"""Checkpoints by their name at the Hugging Face Hub. Nothing is downloaded or compiled."""

import dataclasses
import json
import pathlib

import hub_cache
import huggingface_hub
import pytest
import tiny
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects

from models import hub
from models.checkpoints import find_checkpoint, load_checkpoint, read_dimensions
from models.huggingface import fields_of

NAME = "org/Tiny-1.5B"
CONFIG = dataclasses.replace(tiny.CONFIG, max_seq_len=64)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    hub.download.cache_clear()
    hub_cache.use(monkeypatch, tmp_path / "hub")
    yield tmp_path / "hub"
    hub.download.cache_clear()


def source(folder: pathlib.Path, *files: str, shards: tuple[str, ...] = ()) -> pathlib.Path:
    """Writes the files of a repository; those without a content are empty."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields_of(CONFIG, "float32")))
    for file in files:
        (folder / file).touch()
    if shards:
        index = {"weight_map": {f"tensor {shard}": shard for shard in shards}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_names_of_repositories():
    for name in (NAME, "Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M", "a/b"):
        assert hub.is_repository(name)
    for path in ("a", "/a/b", "a/b/c", "../a", "a/..", "./a", "~/a", "a/b--c", "a/.b", "a b/c", ""):
        assert not hub.is_repository(path)


def test_a_repository_in_the_cache_is_found_and_a_folder_goes_first(cache, tmp_path, monkeypatch):
    snapshot = hub_cache.put(cache, NAME, source(tmp_path / "files", "model.safetensors"))
    assert find_checkpoint(NAME) == snapshot
    assert read_dimensions(NAME)[0] == CONFIG
    monkeypatch.chdir(tmp_path)
    pathlib.Path(NAME).mkdir(parents=True)
    assert find_checkpoint(NAME) == pathlib.Path(NAME)
    assert find_checkpoint(tmp_path / NAME, download=True) == tmp_path / NAME


def test_a_repository_that_the_cache_lacks_is_refused_with_what_to_do(cache):
    message = (
        f"'{NAME}' is no folder and is not in the Hugging Face cache ({cache}): add `--download`,"
        f" or run `hf download {NAME}`."
    )
    for find in (find_checkpoint, load_checkpoint, read_dimensions):
        with pytest.raises(FileNotFoundError) as refused:
            find(NAME)
        assert str(refused.value) == message


@pytest.mark.parametrize(
    ("files", "shards", "missing"),
    [
        ((), (), "model.safetensors"),
        (("model-1.safetensors",), ("model-1.safetensors", "model-2.safetensors"),
         "model-2.safetensors"),
    ],
)  # fmt: skip
def test_a_missing_file_is_named(cache, tmp_path, monkeypatch, files, shards, missing):
    snapshot = hub_cache.put(cache, NAME, source(tmp_path / "files", *files, shards=shards))
    with pytest.raises(FileNotFoundError) as refused:
        find_checkpoint(NAME)
    assert str(refused.value) == (
        f"'{NAME}' is incomplete: {snapshot} has no {missing}: add `--download`, or run"
        f" `hf download {NAME}`."
    )
    assert find_checkpoint(NAME, weights=False) == snapshot
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(snapshot))
    with pytest.raises(FileNotFoundError, match=f"has no {missing}. Weights must be safetensors"):
        find_checkpoint(NAME, download=True)


def test_a_link_without_its_blob_and_a_pickle(cache, tmp_path):
    snapshot = hub_cache.put(cache, NAME, source(tmp_path / "files", "model.safetensors"))
    (cache / f"models--{NAME.replace('/', '--')}" / "blobs" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors"):
        find_checkpoint(NAME)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match="a pickle"):
        load_checkpoint(NAME)


def test_a_download_fetches_what_is_read_once(cache, tmp_path, monkeypatch):
    wanted = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json",
              "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json",
              "merges.txt", "generation_config.json", "chat_template.jinja")  # fmt: skip
    others = ("pytorch_model.bin", "consolidated.safetensors", "onnx/model.safetensors",
              "training_args.bin", "README.md", "original/tokenizer.model")  # fmt: skip
    calls = []

    def download(repository, **patterns):
        calls.append(repository)
        kept = list(filter_repo_objects([*wanted, *others], **patterns))
        is_weights = [name for name in kept if "safetensors" in name]
        assert is_weights in ([], [*wanted[:2]])
        assert set(kept) == {*wanted[2:], *is_weights}
        files = source(tmp_path / str(len(calls)), *(["model.safetensors"] if is_weights else []))
        return str(hub_cache.put(cache / str(len(calls)), repository, files))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for weights in (False, True, True, False):
        folder = find_checkpoint(NAME, download=True, weights=weights)
        assert (folder / "model.safetensors").exists() == weights
    assert calls == [NAME, NAME]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (errors.GatedRepoError, rf"gated: accept its terms on https://huggingface\.co/{NAME}, then"
         " log in with `hf auth login`"),
        (errors.RepositoryNotFoundError, f"has no repository '{NAME}', or it is private: correct"),
        (errors.HfHubHTTPError, f"'{NAME}' cannot be downloaded: HfHubHTTPError. Check the net"),
        (errors.LocalEntryNotFoundError, f"'{NAME}' cannot be downloaded: LocalEntryNotFoundError"),
        (ConnectionError, f"'{NAME}' cannot be downloaded: ConnectionError. Check the network"),
        (RuntimeError, f"'{NAME}' cannot be downloaded: RuntimeError. Check the network"),
    ],
)  # fmt: skip
def test_a_download_that_fails_is_one_line(cache, monkeypatch, kind, message):
    def fail(*_, **__):
        raise kind.__new__(kind)  # The arguments of these classes depend on the version.

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(OSError, match=message) as refused:
        find_checkpoint(NAME, download=True)
    assert len(str(refused.value).splitlines()) == 1
