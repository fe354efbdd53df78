"""Files of records: formats, folders, and errors that name the record."""

import functools
import gzip

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from bytes_tokenizer import Bytes

from tests.train.example_files import (
    CHAT,
    CHATML,
    PAIR,
    numbered,
    open_path,
    texts_of,
    write,
    write_rows,
)
from train.settings.data import ExampleConfig
from train.text.examples import open_examples

# --- Files. ---


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", b'{"text": "one"}\n{"text": "two"}\n'),
        ("a.jsonl", b'{"text": "one"}\n\n{"text": "two"}'),
        ("a.jsonl", b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "two"}\r\n'),
        ("a.jsonl.gz", gzip.compress(b'{"text": "one"}\n{"text": "two"}\n', mtime=0)),
        ("a.json", b'\xef\xbb\xbf [{"text": "one"},\r\n {"text": "two"}]'),
        ("a.json", b'{"text": "one"}\n{"text": "two"}\n'),
        ("a.json.gz", gzip.compress(b'[{"text": "one"}, {"text": "two"}]', mtime=0)),
    ],
)
def test_every_kind_of_file_is_read(tmp_path, name, data):
    examples = open_path(write(tmp_path / name, data))
    assert texts_of(examples.train) == ["one", "two"]
    assert examples.name == name


def write_arrow(path, table, new=pyarrow.ipc.new_stream):
    with new(path, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize(
    ("name", "write_table"),
    [
        ("a.parquet", lambda path, table: pyarrow.parquet.write_table(table, path)),
        ("a.arrow", write_arrow),
        ("a.arrow", functools.partial(write_arrow, new=pyarrow.ipc.new_file)),
        ("saved/data-00000-of-00001.arrow", write_arrow),
    ],
)
def test_tables_are_read(bpe, tmp_path, name, write_table):
    # A table has all fields in all rows, so that some are null.
    second = {"messages": [{**CHAT["messages"][1], "name": "Al"}, CHAT["messages"][2]]}
    path = write(tmp_path / name, "")
    write_table(path, pyarrow.Table.from_pylist([CHAT, second]))
    if path.parent != tmp_path:  # As `datasets` saves them.
        path = write(path.parent / "dataset_info.json", "{}").parent
        write(path / "state.json", "{}")
    template = write(tmp_path / "chatml.jinja", CHATML)
    lines = write_rows(tmp_path / "a.jsonl", [CHAT, {"messages": CHAT["messages"][1:3]}])
    texts = [texts_of(open_path(x, bpe, chat_template=template).train, bpe) for x in (path, lines)]
    assert texts[0] == texts[1]
    write(tmp_path / "dataset_dict.json", "{}")
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match=r"has several data sets: name one of .*/other"):
        open_path(tmp_path)


def test_several_files_are_read_with_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, count in (("a.jsonl", 30), ("b:2.jsonl", 10)):
        write_rows(tmp_path / name, numbered(count))
    for data, shares in (
        (("a.jsonl", "b:2.jsonl"), []),
        (("a.jsonl:0.7", "b:2.jsonl:0.3"), [(30, 0.7), (10, 0.3)]),
        (("b:2.jsonl:3",), [(10, 3.0)]),
    ):
        config = ExampleConfig(data=data, validation="a.jsonl")
        assert open_examples(config, Bytes(), 1000).shares == shares
    for data, match in (
        (("a.jsonl:0.7", "b:2.jsonl"), "some files have a weight and some have none: give each"),
        (("a.jsonl:0",), "`--data` 'a.jsonl:0': the weight 0 must be above 0"),
        (("a.jsonl:nan",), "the weight nan must be above 0"),
        (("a.jsonl:x",), "`--data` is 'a.jsonl:x': there is no such path"),
        ((), "`--data` is missing: name a file"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=match):
            open_examples(ExampleConfig(data=data), Bytes(), 1000)


def test_line_separators_within_a_text_are_kept(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "one\u2028two"}\n')
    assert texts_of(open_path(path).train) == ["one\u2028two"]


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    write_rows(tmp_path / "b.jsonl", [{"text": "two"}])
    write(tmp_path / "a" / "x.json", '[{"text": "one"}]')
    write_rows(tmp_path / ".hidden.jsonl", [{"text": "hidden"}])
    write(tmp_path / "README.md", "not a record")
    assert texts_of(open_path(tmp_path).train) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "data", "match"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text" "b"}\n', r"line 2 of '.*' is not JSON: Exp.* 9\."),
        ("a.jsonl", '{"text": "a"}\n\n{"te', r"line 3 of '.*' is not JSON: .*Correct or remove it"),
        ("a.json", '[{"text": "a"},\n{"text" "b"}]', r"line 2 of '.*a.json' is not JSON: .* 9\."),
        ("a.json", '[{"text": "a"}', r"line 1 of '.*a.json' is not JSON"),
        ("a.jsonl", "[" * 100_000, r"line 1 of '.*' is not JSON"),
        ("a.jsonl", '{"text": "a"}\n["b"]', r"line 2 of '.*a.jsonl' is list, not an object"),
        ("a.json", '[{"text": "a"}, 3]', r"record 2 of '.*a.json' is int, not an object"),
        ("a.jsonl", "", r"`--data` is '.*a.jsonl': it has no records. Give a .jsonl file"),
        ("a.json", "[]", r"it has no records"),
        ("a.csv", "PAR1", r"`--data` is '.*a.csv', which is not a file of records"),
        ("a.parquet", "PAR1", r"`--data`: '.*a.parquet': Parquet file size is 4 bytes.* Corr"),
        ("a.arrow", "ARROW1", r"`--data`: '.*a.arrow': .* Correct or remove the file"),
        ("a.jsonl", b"\xff", r"'.*a.jsonl' is not UTF-8"),
        ("a.jsonl.gz", gzip.compress(b"{}", mtime=0)[:-3], r"is not a complete gzip file"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path, name, data, match):
    with pytest.raises(ValueError, match=match):
        open_path(write(tmp_path / name, data))


@pytest.mark.parametrize("data", ["", "/none/such.jsonl"])
def test_a_missing_file_is_refused(data):
    with pytest.raises(FileNotFoundError, match=f"`--data` is '{data}': there is no such path"):
        open_path(data)


def test_a_missing_validation_file_is_refused(open_rows):
    with pytest.raises(FileNotFoundError, match="`--validation` is '/none': there is no such"):
        open_rows([PAIR], validation="/none")


# --- Records. ---


@pytest.mark.parametrize(
    ("row", "options", "match"),
    [
        ({"completion": "b"}, {}, r"there is no field 'prompt', only 'completion' \(flags that"),
        ({}, {"format": "text"}, r"there is no field 'text', only an empty object"),
        ({"text": 3}, {"format": "text"}, r"field 'text' is int, not text\. Correct or remove it"),
        ({"prompt": None, "completion": ""}, {}, r"field 'prompt' is NoneType, not text or a num"),
        ({"prompt": "a", "completion": ["b"]}, {}, r"field 'completion' is list, not text or a n"),
        ({"prompt": "a", "completion": "\ud800"}, {}, r"surrogates not allowed"),
        ({"prompt": "a\ufdd0", "completion": "b"}, {}, r"it holds the noncharacter U\+FDD0, which"),
        ({"a": ["b"]}, {"prompt_template": "{a[1]}", "completion_template": "{a[0]}"},
         r"`--prompt-template` does not fit it \(list index out of range\)"),
        ({"a": [["b"]]}, {"prompt_template": "{a[0]}", "completion_template": "x"},
         r"field 'a\[0\]' is list, not text or a number"),
        ({**PAIR, "n": "x"}, {"prompt_template": "{n:d}"}, "Unknown format code 'd' for object of"),
    ],
)  # fmt: skip
def test_malformed_records_are_refused(bpe, open_rows, row, options, match):
    options = {"format": "completion"} | options
    good = {**PAIR, "text": "a", "a": [1, 2], "n": 1, "messages": []}
    with pytest.raises(ValueError, match=rf"`--data`: line 2 of '.*rows.jsonl': .*{match}"):
        open_rows([good, row], bpe, **options)


def test_malformed_conversations_are_refused(bpe, open_rows, tmp_path):
    template = write(tmp_path / "chatml.jinja", CHATML)
    with pytest.raises(ValueError, match=r"line 2 of .*field 'messages' is str, not a list"):
        open_rows([{"messages": []}, {"messages": "hi"}], bpe, chat_template=template)


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{prompt", r"`--prompt-template` is '{prompt': expected '}' before end of string\. Write"),
        ("{}", r"`--prompt-template` is '{}': each {} needs the name of a field"),
        ("{0}", r"each {} needs the name"),
    ],
)
def test_malformed_templates_are_refused(open_rows, template, match):
    with pytest.raises(ValueError, match=match):
        open_rows([PAIR], prompt_template=template)
