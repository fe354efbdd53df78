"""Digests of files and tensors."""

import json
import struct
import time

import numpy as np
import pytest
import safetensors.numpy

from models import digests


def flip(path, place: int, bit: int = 0) -> None:
    """Changes one bit of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


@pytest.fixture
def folder(tmp_path):
    """A folder with digests of three files, one of them empty."""
    (tmp_path / "inner").mkdir()
    files = [tmp_path / "a.bin", tmp_path / "inner" / "b.bin", tmp_path / "empty"]
    for path, size in zip(files, (1000, 8, 0), strict=True):
        path.write_bytes(np.random.default_rng(size).bytes(size))
    (tmp_path / "other").write_text("has no digest")
    digests.write(tmp_path, files)
    return tmp_path


def test_what_was_written_is_found_as_it_was(folder):
    assert digests.check(folder)
    assert digests.differing(folder) == []
    assert not digests.check(folder / "inner")
    (folder / "other").write_text("changed")
    assert digests.check(folder)


def test_a_file_is_read_ahead_once_and_again_if_it_was_written_since(tmp_path, monkeypatch):
    unfinished, folder = tmp_path / "unfinished", tmp_path / "folder"
    unfinished.mkdir()
    for name in ("same", "appended", "overwritten", "replaced", "gone"):
        (unfinished / name).write_bytes(name.encode())
    seen, read = set(), digests._of_file

    def of_file(path):
        seen.add(path.name)
        return read(path)

    monkeypatch.setattr(digests, "_of_file", of_file)
    ahead, began = digests.Ahead(unfinished.iterdir), time.monotonic()
    while len(seen) < 5 and time.monotonic() - began < 60:
        time.sleep(0.01)
    ahead.stop()
    unfinished.rename(folder)
    with (folder / "appended").open("ab") as file:
        file.write(b"more")
    (folder / "overwritten").write_bytes(b"overWritten")
    (folder / "new").write_bytes(b"replaced")
    (folder / "new").replace(folder / "replaced")
    (folder / "gone").unlink()
    seen.clear()
    digests.write(folder, folder.iterdir(), ahead=ahead)
    assert seen == {"appended", "overwritten", "replaced"}
    assert digests.differing(folder) == []


@pytest.mark.parametrize("name", ["a.bin", "inner/b.bin", "empty"])
def test_every_change_of_a_file_is_found(folder, name):
    path = folder / name
    before = path.read_bytes()
    for change in (lambda: path.write_bytes(before + b"\0"), path.unlink):
        change()
        with pytest.raises(ValueError, match=rf"{name} is damaged.*Copy it again"):
            digests.check(folder)
    for place in range(0, len(before), 7):
        path.write_bytes(before)
        flip(path, place, place % 8)
        assert digests.differing(folder) == [name]
    path.write_bytes(before)
    assert digests.differing(folder) == []


def test_every_process_looks_at_a_share(folder):
    (folder / "a.bin").unlink()
    (folder / "empty").unlink()
    first, second = (digests.differing(folder, (i, 2)) or [] for i in range(2))
    assert sorted([*first, *second]) == ["a.bin", "empty"]


def test_damaged_digests_are_named(folder):
    path = folder / digests.FILE
    whole = path.read_bytes()
    for place in range(len(whole) - 1):  # The last byte ends a line.
        path.write_bytes(whole)
        flip(path, place)
        # A space for another blank has the same meaning.
        if json_of(path) != json.loads(whole):
            with pytest.raises(ValueError, match=digests.FILE):
                digests.check(folder)
    path.write_text(json.dumps({"xxh3_128": {}}))
    with pytest.raises(ValueError, match="is damaged: it is not what was written"):
        digests.check(folder)


def json_of(path):
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        return None


def test_a_tensor_has_the_digest_of_its_bytes_shape_and_dtype(tmp_path):
    one, two = np.arange(6, dtype=np.float32), np.ones((2, 3), np.int8)
    for name, tensors in {
        "whole": {"one": one, "two": two},
        "first": {"one": one},
        "second": {"two": two},
        "others": {"one": one.reshape(2, 3), "two": two.view(np.uint8)},
    }.items():
        safetensors.numpy.save_file(tensors, tmp_path / name, metadata={"format": "pt"})
    whole = digests.of_tensors([tmp_path / "whole"])
    assert set(whole) == {"one", "two"}
    assert (
        digests.changed(whole, digests.of_tensors([tmp_path / "second", tmp_path / "first"])) == ""
    )
    assert digests.of_tensors([tmp_path / "others"]).keys() == whole.keys()
    assert not set(digests.of_tensors([tmp_path / "others"]).values()) & set(whole.values())
    data = (tmp_path / "whole").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entry = json.loads(data[8 : 8 + length])["one"]
    flip(tmp_path / "whole", 8 + length + entry["data_offsets"][1] - 1)
    damaged = digests.of_tensors([tmp_path / "whole"])
    assert digests.changed(whole, damaged) == "one changed"
    assert digests.changed(whole, {}) == "one and 1 more of 2 tensors changed"


def test_a_file_of_tensors_has_its_digest_and_every_changed_bit_is_found(tmp_path):
    path = tmp_path / "model.safetensors"
    arrays = {"one": np.arange(6, dtype=np.float32), "empty": np.zeros((0, 3), np.float32)}
    digests.save_tensors(arrays, path, base="something")
    assert digests.metadata_of(path)["base"] == "something"
    assert digests.check_tensors(path)
    for name, array in safetensors.numpy.load_file(path).items():
        np.testing.assert_array_equal(array, arrays[name])
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole)
        flip(path, place, place % 8)
        try:
            digests.check_tensors(path)
        except ValueError:
            continue
        # The name of the digest, or a blank: the tensors are what was written.
        for name, array in safetensors.numpy.load_file(path).items():
            np.testing.assert_array_equal(array, arrays[name])
    safetensors.numpy.save_file(arrays, path)  # By another program.
    assert not digests.check_tensors(path)
