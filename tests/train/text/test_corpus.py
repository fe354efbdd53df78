"""Sources of text: formats, held-out documents, and errors."""

import gzip
import json
import os
import pathlib
import pickle
import subprocess
import sys
from typing import ClassVar

import hypothesis
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow_datasets as tfds
from hypothesis import strategies as st

from tests.train.example_files import write, write_rows
from tests.train.runs import REPOSITORY
from train.text import corpus as corpus_lib
from train.text import standard_library, text_files
from train.text.corpus import Corpus, open_corpus


def texts(column) -> list[str]:
    return [column[i] for i in range(len(column))]


def everything(corpus: Corpus) -> list[str]:
    return texts(corpus.train) + texts(corpus.validation)


def numbered(count: int) -> list[str]:
    return [f"document number {i}" for i in range(count)]


def open_local(path: pathlib.Path, **options) -> Corpus:
    return open_corpus(str(path), path.parent / "data_dir", **options)


# --- The standard library. ---


@pytest.fixture(scope="session")
def stdlib_dir(tmp_path_factory):
    data_dir = tmp_path_factory.mktemp("stdlib")
    open_corpus(None, data_dir)
    return data_dir


def test_standard_library_is_real_text_split_by_file(stdlib_dir):
    corpus = open_corpus("stdlib", stdlib_dir)
    train, validation = texts(corpus.train), texts(corpus.validation)
    source = pathlib.Path(json.__file__).read_text(encoding="utf-8")
    assert source in train + validation
    assert 0.005 < len(validation) / len(train) < 0.05
    assert not set(validation) & {text for text in train if len(text) > 1000}


def test_standard_library_is_prepared_once_by_python_version(stdlib_dir, monkeypatch):
    monkeypatch.setattr(standard_library, "_build_standard_library", lambda _: pytest.fail("again"))
    corpus = open_corpus(None, stdlib_dir)
    copy = pickle.loads(pickle.dumps(corpus))
    assert texts(copy.validation) == texts(corpus.validation)
    assert copy.fingerprint == open_corpus("stdlib", stdlib_dir).fingerprint
    assert [p.name for p in stdlib_dir.iterdir()] == ["python_standard_library"]
    (config,) = (stdlib_dir / "python_standard_library").iterdir()
    assert config.name.endswith("_".join(map(str, sys.version_info[:3])))


def test_tensorflow_is_not_imported(stdlib_dir):
    program = (
        "import sys, pathlib, train.text.corpus as c; "
        f"c.open_corpus(None, pathlib.Path({str(stdlib_dir)!r})).train[0]; "
        "assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True)


@pytest.fixture
def small_stdlib(tmp_path, monkeypatch):
    """A library of 200 files, which is prepared quickly."""
    root = tmp_path / "lib"
    for i in range(200):
        write(root / f"module_{i}.py", f"x = {i}\n")
    write(root / "site-packages" / "foreign.py", "foreign = 1\n")
    write(root / "empty.py", "")
    write(root / "latin.py", b"# \xe9\n")
    monkeypatch.setattr(standard_library.sysconfig, "get_path", lambda name: str(root))
    return tmp_path / "data"


def test_foreign_and_bad_files_are_left_out_and_damaged_data_is_named(small_stdlib):
    modules = sorted(f"x = {i}\n" for i in range(200))
    assert sorted(everything(open_corpus(None, small_stdlib))) == modules
    (shard,) = small_stdlib.glob("*/*/*/*train.array_record*")
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"`--data` is 'stdlib'.*damaged.*Delete that folder"):
        open_corpus(None, small_stdlib)


def test_data_of_a_killed_process_is_prepared_again(small_stdlib, monkeypatch):
    def killed(data_dir: str) -> None:
        write(pathlib.Path(data_dir, "python_standard_library", "x", "1.0.0", "part"), "half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(standard_library, "_build_standard_library", killed)
        with pytest.raises(KeyboardInterrupt):
            open_corpus(None, small_stdlib)
    assert len(everything(open_corpus(None, small_stdlib))) == 200


def test_of_two_preparing_processes_the_later_uses_the_copy_of_the_first(small_stdlib, monkeypatch):
    build = standard_library._build_standard_library

    def overtaken(data_dir: str) -> None:
        build(data_dir)
        monkeypatch.setattr(standard_library, "_build_standard_library", build)
        open_corpus(None, small_stdlib)  # The other process.

    monkeypatch.setattr(standard_library, "_build_standard_library", overtaken)
    assert len(everything(open_corpus(None, small_stdlib))) == 200
    assert [p.name for p in small_stdlib.iterdir()] == ["python_standard_library"]


def test_python_without_sources_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(
        standard_library.sysconfig, "get_path", lambda name: str(tmp_path / "nothing")
    )
    with pytest.raises(ValueError, match=r"`--data` is 'stdlib'.*without its sources.*--data PATH"):
        open_corpus(None, tmp_path)


# --- Prepared TFDS data sets. ---


class TinyWeb(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A data set like C4: configurations, and a validation split in one of them."""

    VERSION = tfds.core.Version("2.0.0")
    BUILDER_CONFIGS: ClassVar = [
        tfds.core.BuilderConfig(name="en", description="With a validation split."),
        tfds.core.BuilderConfig(name="whole", description="Without."),
        tfds.core.BuilderConfig(name="single", description="Without, and too small."),
    ]
    code_path = tfds.core.Path(__file__)

    def _info(self):
        features = {"text": tfds.features.Text(), "label": tfds.features.Text()}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        sizes = {"en": {"train": 20, "validation": 3}, "whole": {"train": 50}}
        wanted = sizes.get(self.builder_config.name, {"train": 1})
        return {split: self._generate_examples(split, n) for split, n in wanted.items()}

    def _generate_examples(self, split, count):
        for i in range(count):
            yield i, {"text": f"{split} é {i}", "label": f"label {i}"}


@pytest.fixture(scope="session")
def tfds_dir(tmp_path_factory):
    data_dir = tmp_path_factory.mktemp("tfds")
    for config in ("en", "whole", "single"):
        builder = TinyWeb(config=config, data_dir=str(data_dir), file_format="array_record")
        builder.download_and_prepare()
    return data_dir


def test_a_prepared_data_set_has_its_own_splits_or_some_of_train_is_held_out(tfds_dir):
    corpus = open_corpus("tiny_web/en", tfds_dir)
    assert sorted(texts(corpus.train)) == sorted(f"train é {i}" for i in range(20))
    assert sorted(texts(corpus.validation)) == sorted(f"validation é {i}" for i in range(3))
    assert corpus.name == "tiny_web/en"
    whole = open_corpus("tiny_web/whole", tfds_dir)
    assert (len(whole.train), len(whole.validation)) == (49, 1)
    assert sorted(everything(whole)) == sorted(f"train é {i}" for i in range(50))
    assert texts(pickle.loads(pickle.dumps(whole)).train) == texts(whole.train)
    # A version can be named, and a field of text chosen.
    labels = open_corpus("tiny_web/en:2.0.0", tfds_dir, text_field="label")
    assert "label 7" in texts(labels.train)
    assert len({x.fingerprint for x in (corpus, whole, labels)}) == 3
    assert corpus.fingerprint == open_corpus("tiny_web/en", tfds_dir).fingerprint


@pytest.mark.parametrize(
    "name", ["", "c4/en", "tiny_web/en:1.0.0", "tiny_web", "https://x.org/a.txt"]
)
def test_an_unknown_name_is_refused_with_the_prepared_data_sets(tfds_dir, name):
    with pytest.raises(FileNotFoundError) as error:
        open_corpus(name, tfds_dir)
    message = str(error.value)
    assert message.startswith(f"`--data` is '{name}': there is no such file or folder")
    assert "tiny_web/en, tiny_web/single, tiny_web/whole" in message
    assert "tfds build" in message
    assert ".parquet" in message


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("en", {"text_field": "body"}, r"'tiny_web/en': it has no feature 'body', only.*label"),
        ("single", {}, r"'tiny_web/single': it has 1 document.*at least two"),
    ],
)
def test_bad_options_are_refused(tfds_dir, name, options, match):
    with pytest.raises(ValueError, match=match):
        open_corpus(f"tiny_web/{name}", tfds_dir, **options)


def test_data_set_in_another_format_is_refused(tfds_dir, tmp_path):
    (source,) = tfds_dir.glob("tiny_web/en/2.0.0")
    target = tmp_path / "tiny_web" / "en" / "2.0.0"
    for file in source.iterdir():
        write(target / file.name, file.read_bytes().replace(b'"array_record"', b'"tfrecord"'))
    with pytest.raises(ValueError, match=r"stored as .*TFRECORD.*--file_format=array_record"):
        open_corpus("tiny_web/en", tmp_path)


# --- Local files. ---


def test_text_file_is_split_at_blank_lines_without_loss(tmp_path):
    paragraphs = [f"Paragraph {i}. " + "word " * 100 + "\n\n" for i in range(100)]
    corpus = open_local(write(tmp_path / "book.txt", "".join(paragraphs)))
    documents = everything(corpus)
    assert sorted("".join(documents)) == sorted("".join(paragraphs))
    assert all(text.startswith("Paragraph") for text in documents)
    assert len(corpus.train) > 5
    assert len(corpus.validation) >= 1


@hypothesis.given(st.text(alphabet="ab \n\t", max_size=200))
def test_paragraph_groups_join_to_the_text(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "DOCUMENT_CHARS", 10)
        groups = text_files.group_paragraphs(text)
    assert "".join(groups) == text
    assert all(len(group) >= 10 for group in groups[:-1])


def test_bom_and_crlf_are_no_text_and_a_single_document_is_held_out_by_its_end(tmp_path):
    path = write(tmp_path / "dos.txt", b"\xef\xbb\xbfone\r\ntwo\rthree\n" + b"x" * 100)
    assert "".join(everything(open_local(path))) == "one\ntwo\nthree\n" + "x" * 100
    corpus = open_local(write(tmp_path / "line.txt", "ab" * 50))
    assert (texts(corpus.train), texts(corpus.validation)) == (["ab" * 49], ["ab"])


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_jsonl_rows_are_documents_and_gzipped_files_are_read(tmp_path, suffix):
    def written(name: str, text: str) -> pathlib.Path:
        data = text.encode()
        return write(tmp_path / f"{name}{suffix}", gzip.compress(data, mtime=0) if suffix else data)

    # U+2028 is a line separator for str.splitlines, and a character for JSON.
    rows = [{"text": f"line\u2028{i}\nsecond"} for i in range(30)]
    path = written("a.jsonl", "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    assert sorted(everything(open_local(path))) == sorted(row["text"] for row in rows)
    assert "".join(everything(open_local(written("a.txt", "some text " * 10)))) == "some text " * 10


def test_parquet_rows_are_documents_and_nulls_are_dropped(tmp_path):
    table = pyarrow.table({"body": [*numbered(20), None, ""], "other": list(range(22))})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    corpus = open_local(tmp_path / "a.parquet", text_field="body")
    assert sorted(everything(corpus)) == sorted(numbered(20))


def test_folder_gathers_accepted_files_and_skips_others(tmp_path):
    folder = tmp_path / "folder"
    write(folder / "a.txt", "a text")
    write(folder / "deep" / "b.md", "a note")
    write_rows(folder / "c.jsonl", [{"text": "row one"}, {"text": "row two"}])
    write(folder / "picture.png", b"\x89PNG\xff")
    write(folder / ".hidden" / "d.txt", "hidden")
    write(folder / "blank.txt", " \n")
    corpus = open_local(folder)
    assert sorted(everything(corpus)) == ["a note", "a text", "row one", "row two"]


def test_held_out_documents_are_stable_and_the_fingerprint_is_of_the_text(tmp_path):
    rows = [{"text": text} for text in numbered(400)]
    few = open_local(write_rows(tmp_path / "few.jsonl", rows[:300]))
    many = open_local(write_rows(tmp_path / "many.jsonl", rows))
    assert set(texts(few.validation)) <= set(texts(many.validation))
    assert set(texts(few.train)) <= set(texts(many.train))
    moved = open_local(write_rows(tmp_path / "elsewhere" / "two.jsonl", rows))
    assert many.fingerprint == moved.fingerprint != few.fingerprint


@hypothesis.given(
    st.lists(st.text("abc", min_size=1, max_size=3), min_size=2, max_size=20),
    st.floats(0.001, 0.999),
)
def test_both_sides_get_a_document_without_loss(documents, fraction):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_lib, "HELD_OUT", fraction)
        train, validation = corpus_lib._hold_out(documents, pathlib.Path("x"))
    assert train
    assert validation
    assert sorted(train + validation) == sorted(documents)
    if len(set(documents)) == len(documents):
        assert not set(train) & set(validation)


@pytest.mark.parametrize(
    ("name", "data", "match"),
    [
        ("a.txt", b"", r"`--data` is '.*a.txt': it has no text"),
        ("a.txt", b" \n\n ", "it has no text"),
        ("a.txt", b"x", "a single document of 1 characters is too short"),
        ("a.txt", b"good \xff", r"a.txt' is not UTF-8 at byte 5 \(invalid start byte\)"),
        ("a.txt", b"\xef\xbb\xbfgood \xff", "is not UTF-8 at byte 8"),
        ("a.txt.gz", gzip.compress(b"text" * 99, mtime=0)[:-9], "is not a complete gzip file"),
        ("a.txt.gz", b"plain", "is not a complete gzip file"),
        ("a.json", b"[]", ".json files are not read. Write one JSON object per line"),
        ("a.jsonl", b"", "it has no text"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": ',
            r"line 2 of '.*a.jsonl' is not JSON: .* column 10",
        ),
        ("a.jsonl", b'{"text": "a"}\n\n[1]\n', "line 3 of '.*a.jsonl' is list, not an object"),
        ("a.jsonl", b'{"body": "a", "id": 1}', "there is no field 'text', only body, id"),
        ("a.jsonl", b'{"text": 3}', "line 1 .*: field 'text' is int, not text"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1 .*surrogates not allowed"),
        ("a.jsonl", b"[" * 100_000, "line 1 of .* is not JSON: maximum recursion depth"),
        ("a.parquet", b"PAR1 and no more", "`--data`: '.*a.parquet': .*Correct or remove the file"),
        ("folder/a.png", b"x", "it has no text. Accepted: a .txt"),
    ],
)
def test_bad_files_are_refused(tmp_path, name, data, match):
    path = write(tmp_path / name, data)
    with pytest.raises(ValueError, match=match):
        open_local(path.parent if "/" in name else path)


def test_parquet_without_the_text_is_refused(tmp_path):
    for table, message in (
        ({"body": ["a"]}, "there is no column 'text', only body"),
        ({"text": [1]}, "column 'text' is int64, not text"),
    ):
        pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
        with pytest.raises(ValueError, match=message):
            open_local(tmp_path / "a.parquet")


def test_data_dir_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(OSError, match="data"):
        open_corpus(None, write(tmp_path / "data", "a file") / os.curdir)
