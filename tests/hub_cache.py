"""A cache of the Hugging Face Hub for tests, which never ask the Hub."""

import os
import pathlib

import huggingface_hub
import pytest
from huggingface_hub import constants


def use(monkeypatch: pytest.MonkeyPatch, cache: pathlib.Path) -> None:
    """Makes a folder the cache, and every download an error."""

    def refuse(*_, **__):
        raise AssertionError("a test asked the Hub")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


def put(cache: pathlib.Path, repository: str, source: pathlib.Path) -> pathlib.Path:
    """Writes the files of a folder as the main revision of a repository, as links to blobs."""
    root = cache / f"models--{repository.replace('/', '--')}"
    snapshot = root / "snapshots" / "0123abc"
    for folder in (snapshot, root / "refs", root / "blobs"):
        folder.mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(snapshot.name)
    for file in (path for path in source.iterdir() if path.is_file()):
        (root / "blobs" / file.name).write_bytes(file.read_bytes())
        os.symlink(f"../../blobs/{file.name}", snapshot / file.name)
    return snapshot
