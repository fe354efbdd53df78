"""Tests of train/examples.py: what records become, what of it counts, and what is refused."""

import copy
import gzip
import io
import itertools
import json
import pathlib

import hypothesis
import numpy as np
import pytest
import sentencepiece
from bytes_tokenizer import Bytes
from hypothesis import strategies as st

from train.chat import ChatTemplate
from train.examples import Example, ExampleConfig, Examples, open_examples
from train.tokenizer import (
    END_OF_TEXT,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
    train_bpe,
)

TEXTS = [f"The quick brown fox number {i} asks: why?\nBecause it can.\n" for i in range(50)]
PAIR = {"prompt": "Why?", "completion": " Because."}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Because."},
        {"role": "user", "content": "Really?"},
        {"role": "assistant", "content": "Yes."},
    ]
}
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
INST = """\
{{ bos_token }}{% for message in messages %}
{% if message.role == 'user' %}
{{ '[INST] ' + message.content + ' [/INST]' }}{% else %}
{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}
"""
# As Qwen 3 does: what was thought is written for the last answer alone.
THINKING = CHATML.replace(
    "message.content +",
    "('<think></think>' if loop.last and message.role == 'assistant' else '') + message.content +",
)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    inner = copy.deepcopy(train_bpe(TEXTS, 300)._inner)
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return HuggingFaceTokenizer(inner, eos=END_OF_TEXT)


@pytest.fixture(scope="module")
def pieces() -> Tokenizer:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=model,
        model_type="bpe",
        vocab_size=310,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return SentencePieceTokenizer(model.getvalue())


@pytest.fixture(params=["bytes", "bpe", "pieces"])
def tokenizer(request) -> Tokenizer:
    return Bytes() if request.param == "bytes" else request.getfixturevalue(request.param)


def write(path: pathlib.Path, data: bytes | str) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def write_rows(path: pathlib.Path, rows: list) -> pathlib.Path:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def open_path(path, tokenizer=None, seq_len=1000, folder=None, **options) -> Examples:
    """Opens a file, all of it to train on, and all of it to validate on unless said."""
    if "held_out" not in options:
        options = {"validation": str(path)} | options
    config = ExampleConfig(data=str(path), **options)
    return open_examples(config, tokenizer or Bytes(), seq_len, folder)


@pytest.fixture
def open_rows(tmp_path):
    """Opens records that are given."""

    def opened(rows: list, tokenizer=None, **options) -> Examples:
        return open_path(write_rows(tmp_path / "rows.jsonl", rows), tokenizer, **options)

    return opened


def learnt(example: Example, tokenizer=None) -> list[tuple[str, bool]]:
    """Returns runs of what does not count and what does, as text; special tokens are nothing."""
    tokenizer, runs, end = tokenizer or Bytes(), [], 0
    for counts, group in itertools.groupby(example.counted.tolist()):
        before = tokenizer.decode(example.tokens[:end])
        end += len(list(group))
        runs.append((tokenizer.decode(example.tokens[:end])[len(before) :], counts))
    return runs


def numbered(count: int) -> list[dict]:
    return [{"prompt": f"number {i}?", "completion": f" {i}."} for i in range(count)]


def texts_of(examples, tokenizer=None) -> list[str]:
    return [(tokenizer or Bytes()).decode(example.tokens) for example in examples]


# --- Prompts and completions, texts. ---


def test_a_completion_counts_and_so_does_its_end(tokenizer, open_rows):
    (example,) = open_rows([PAIR], tokenizer).train
    assert learnt(example, tokenizer) == [("Why?", False), (" Because.", True)]
    assert example.tokens[-1] == tokenizer.eos_id
    assert example.counted[-1]
    assert (tokenizer.bos_id is None) == (example.tokens[0] != tokenizer.bos_id)
    assert (example.tokens.dtype, example.counted.dtype) == (np.int32, np.bool_)


def test_a_prompt_has_the_tokens_that_it_has_by_itself(tokenizer, open_rows):
    (example,) = open_rows([{"prompt": "asks: ", "completion": "why"}], tokenizer).train
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    prompt = [*bos, *tokenizer.encode("asks: ")]
    assert example.tokens[: len(prompt)].tolist() == prompt
    assert not example.counted[: len(prompt)].any()


@hypothesis.given(prompt=st.text(), completion=st.text(min_size=1))
@hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_tokens_decode_to_the_prompt_and_the_completion(tokenizer, open_rows, prompt, completion):
    (example,) = open_rows([{"prompt": prompt, "completion": completion}], tokenizer).train
    assert tokenizer.decode(example.tokens) == prompt + completion


def test_sentencepiece_puts_no_space_between_the_two(pieces, open_rows):
    (example,) = open_rows([{"prompt": "quick", "completion": "fox"}], pieces).train
    assert pieces.decode(example.tokens) == "quickfox"


def test_prompts_count_where_asked(open_rows):
    (example,) = open_rows([PAIR], count_prompts=True).train
    assert learnt(example) == [("", False), ("Why? Because.", True)]


def test_all_of_a_text_counts_but_its_first_token(bpe, open_rows):
    (example,) = open_rows([{"text": "fox number"}], bpe).train
    assert example.counted.tolist() == [False] + [True] * (len(example.tokens) - 1)
    assert bpe.decode(example.tokens) == "fox number"


def test_templates_are_filled_with_the_fields(open_rows):
    row = {"question": "2 + {2}?", "options": ["4", "5"], "price": 0.5, "right": 4}
    (example,) = open_rows(
        [row],
        prompt_template=r"Question:\t{question}\n{options[0]} or {options[1]} for {price:.2f} {{}}",
        completion_template=" {right}",
    ).train
    prompt = "Question:\t2 + {2}?\n4 or 5 for 0.50 {}"
    assert learnt(example) == [(prompt, False), (" 4", True)]


def test_prompt_and_completion_in_templates_are_the_fields_of_these_options(open_rows):
    (example,) = open_rows(
        [{"q": "Why?", "prompt": "not this", "a": "So."}],
        prompt_field="q",
        completion_field="a",
        prompt_template="Q: {prompt} A:",
        completion_template=" {completion}",
    ).train
    assert learnt(example) == [("Q: Why? A:", False), (" So.", True)]


def test_a_backslash_that_is_meant_is_written_twice(open_rows):
    (example,) = open_rows([PAIR], prompt_template=r"\\nabla {prompt}").train
    assert learnt(example)[0] == (r"\nabla Why?", False)


# --- Which format. ---


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (PAIR, "Why? Because."),
        ({"text": "plain"}, "plain"),
        ({**PAIR, "text": "plain"}, "Why? Because."),
    ],
)
def test_the_first_record_says_what_it_is(open_rows, row, text):
    assert texts_of(open_rows([row]).train) == [text]


def test_a_conversation_comes_before_all_else(bpe, open_rows, tmp_path):
    template = write(tmp_path / "chatml.jinja", CHATML)
    (example,) = open_rows([CHAT | PAIR], bpe, chat_template=template).train
    assert "Really?" in bpe.decode(example.tokens)


def test_a_format_can_be_asked_for(open_rows):
    assert texts_of(open_rows([{**PAIR, "text": "plain"}], format="text").train) == ["plain"]


def test_a_record_of_no_format_is_refused(open_rows):
    with pytest.raises(
        ValueError,
        match=r"line 1 of '.*rows.jsonl' has the fields 'question', 'answer': neither 'messages'",
    ):
        open_rows([{"question": "a", "answer": "b"}])


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
def test_files_are_read_as_they_come(tmp_path, name, data):
    examples = open_path(write(tmp_path / name, data))
    assert texts_of(examples.train) == ["one", "two"]
    assert examples.name == name


def test_line_separators_within_a_text_stay(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "one\u2028two"}\n')
    assert texts_of(open_path(path).train) == ["one\u2028two"]


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    write_rows(tmp_path / "b.jsonl", [{"text": "two"}])
    write(tmp_path / "a" / "x.json", '[{"text": "one"}]')
    write_rows(tmp_path / ".hidden.jsonl", [{"text": "hidden"}])
    write(tmp_path / "README.md", "no record")
    assert texts_of(open_path(tmp_path).train) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "data", "match"),
    [
        (
            "a.jsonl",
            '{"text": "a"}\n{"text" "b"}\n',
            r"line 2 of '.*a.jsonl' is no JSON: Exp.* 9\.",
        ),
        ("a.jsonl", '{"text": "a"}\n\n{"te', r"line 3 of '.*' is no JSON: .*Correct it, or leave"),
        ("a.json", '[{"text": "a"},\n{"text" "b"}]', r"line 2 of '.*a.json' is no JSON: .* 9\."),
        ("a.json", '[{"text": "a"}', r"line 1 of '.*a.json' is no JSON"),
        ("a.jsonl", "[" * 100_000, r"line 1 of '.*' is no JSON"),
        ("a.jsonl", '{"text": "a"}\n["b"]', r"line 2 of '.*a.jsonl' is list, not an object"),
        ("a.json", '[{"text": "a"}, 3]', r"record 2 of '.*a.json' is int, not an object"),
        ("a.jsonl", "", r"`--data` is '.*a.jsonl': there is no record in it. Give a .jsonl file"),
        ("a.json", "[]", r"there is no record in it"),
        ("a.parquet", "PAR1", r"`--data` is '.*a.parquet', which is not read. Give a .jsonl"),
        ("a.jsonl", b"\xff", r"'.*a.jsonl' is not UTF-8"),
        ("a.jsonl.gz", gzip.compress(b"{}", mtime=0)[:-3], r"is not a whole gzip file"),
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
        ({"completion": "b"}, {}, r"there is no field 'prompt', only 'completion' \(the options"),
        ({}, {"format": "text"}, r"there is no field 'text', only none"),
        ({"text": 3}, {"format": "text"}, r"field 'text' is int, not text\. Correct it, or leave"),
        ({"prompt": None, "completion": ""}, {}, r"field 'prompt' is NoneType, not text or a num"),
        ({"prompt": "a", "completion": ["b"]}, {}, r"field 'completion' is list, not text or a n"),
        ({"prompt": "a", "completion": "\ud800"}, {}, r"surrogates not allowed"),
        (
            {"a": ["b"]},
            {"prompt_template": "{a[1]}", "completion_template": "{a[0]}"},
            r"`--prompt-template` does not fit it \(list index out of range\)",
        ),
        (
            {"a": [["b"]]},
            {"prompt_template": "{a[0]}", "completion_template": "x"},
            r"field 'a\[0\]' is list, not text or a number",
        ),
        (
            {**PAIR, "n": "x"},
            {"prompt_template": "{n:d}"},
            r"Unknown format code 'd' for object of",
        ),
        ({"messages": "hi"}, {"format": "chat"}, r"field 'messages' is str, not a list"),
    ],
)
def test_records_that_do_not_fit_are_refused(bpe, open_rows, tmp_path, row, options, match):
    template = write(tmp_path / "chatml.jinja", CHATML)
    options = {"format": "completion", "chat_template": template} | options
    good = {**PAIR, "text": "a", "a": [1, 2], "n": 1, "messages": []}
    with pytest.raises(ValueError, match=rf"`--data`: line 2 of '.*rows.jsonl': .*{match}"):
        open_rows([good, row], bpe, **options)


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{prompt", r"`--prompt-template` is '{prompt': expected '}' before end of string\. Write"),
        ("{}", r"`--prompt-template` is '{}': each {} needs the name of a field in it"),
        ("{0}", r"each {} needs the name"),
    ],
)
def test_templates_that_are_none_are_refused(open_rows, template, match):
    with pytest.raises(ValueError, match=match):
        open_rows([PAIR], prompt_template=template)


# --- Held-out records. ---


def test_a_share_is_held_out_and_no_more_records_move_it(open_rows):
    few, more = (open_rows(numbered(n), held_out=0.1) for n in (200, 400))
    assert 5 < len(few.validation) < 40
    assert len(few.train) + len(few.validation) == 200
    assert set(texts_of(few.validation)) < set(texts_of(more.validation))
    assert set(texts_of(few.train)) < set(texts_of(more.train))


def test_copies_and_reordered_fields_of_a_record_stay_together(open_rows):
    rows = [*numbered(20), *(dict(reversed(row.items())) for row in numbered(20))]
    examples = open_rows(rows, held_out=0.3)
    assert not set(texts_of(examples.train)) & set(texts_of(examples.validation))


@pytest.mark.parametrize("share", [1e-9, 1 - 1e-9])
def test_both_sides_get_a_record(open_rows, share):
    examples = open_rows(numbered(5), held_out=share)
    assert sorted([len(examples.train), len(examples.validation)]) == [1, 4]


def test_a_single_record_cannot_be_held_out(open_rows):
    with pytest.raises(ValueError, match=r"it has 2 record\(s\), all the same, .*`--validation`"):
        open_rows([PAIR, PAIR], held_out=0.05)


def test_another_file_is_validated_on(open_rows, tmp_path):
    other = write_rows(tmp_path / "other.jsonl", [{"prompt": "x", "completion": "y"}])
    examples = open_rows(numbered(10), validation=str(other), held_out=0.5)
    assert len(examples.train) == 10
    assert texts_of(examples.validation) == ["xy"]


def test_errors_in_the_other_file_name_it(open_rows, tmp_path):
    other = write_rows(tmp_path / "other.jsonl", [{"text": "x"}])
    with pytest.raises(ValueError, match=r"`--validation`: line 1 of '.*other.jsonl': there is no"):
        open_rows(numbered(10), validation=str(other))


@pytest.mark.parametrize("share", [0.0, 1.0, float("nan")])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(ValueError, match=rf"`--held-out` must be in \(0, 1\), got {share}"):
        ExampleConfig(held_out=share)


# --- Lengths. ---

# Numbers are of both files together, which are the same one here.

LONG = {"prompt": "ab", "completion": "cdefgh"}
ENDLESS = {"prompt": "prompt " * 10, "completion": "x"}


def test_long_examples_lose_their_end(open_rows):
    examples = open_rows([PAIR, LONG], seq_len=5)
    assert texts_of(examples.train) == ["Why? ", "abcde"]
    assert [len(example.tokens) for example in examples.train] == [6, 6]
    assert (examples.cut, examples.dropped) == (4, 0)


def test_an_example_that_just_fits_is_not_cut(open_rows):
    examples = open_rows([LONG], seq_len=9)
    assert (examples.cut, examples.dropped) == (0, 0)
    assert len(examples.train[0].tokens) == 10


def test_examples_whose_completion_is_cut_off_are_dropped(open_rows):
    examples = open_rows([LONG, ENDLESS], seq_len=5)
    assert texts_of(examples.train) == ["abcde"]
    assert (examples.cut, examples.dropped) == (2, 2)


def test_long_examples_are_dropped_where_asked(open_rows):
    short = {"prompt": "a", "completion": "b"}
    examples = open_rows([LONG, short], seq_len=5, long="drop")
    assert texts_of(examples.train) == ["ab"]
    assert (examples.cut, examples.dropped) == (0, 2)


def test_rows_of_one_token_hold_two(open_rows):
    (example,) = open_rows([{"prompt": "", "completion": "abc"}], seq_len=1).train
    assert example.tokens.tolist() == [256, ord("a")]


@pytest.mark.parametrize(
    ("seq_len", "match"), [(0, "`--seq-len` is 0"), (4, "of 1 .* to train on")]
)
def test_sequences_too_short_are_refused(open_rows, seq_len, match):
    with pytest.raises(ValueError, match=match):
        open_rows([ENDLESS], seq_len=seq_len)


def test_nothing_left_to_validate_on_is_refused(open_rows, tmp_path):
    other = write_rows(tmp_path / "other.jsonl", [ENDLESS])
    with pytest.raises(
        ValueError, match=r"`--validation` is '.*': of 1 record\(s\) to validate on"
    ):
        open_rows([PAIR], seq_len=8, validation=str(other))


# --- Fingerprints. ---


def test_the_same_examples_have_the_same_fingerprint(open_rows):
    assert open_rows(numbered(9)).fingerprint == open_rows(numbered(9)).fingerprint


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_template": "Q: {prompt}"},
        {"count_prompts": True},
        {"held_out": 0.3},
        {"seq_len": 11},
        {"prompt_field": "completion"},
    ],
)
def test_whatever_shapes_the_examples_shapes_the_fingerprint(open_rows, options):
    assert open_rows(numbered(20)).fingerprint != open_rows(numbered(20), **options).fingerprint


def test_another_record_gives_another_fingerprint(open_rows):
    assert open_rows(numbered(20)).fingerprint != open_rows(numbered(21)).fingerprint


# --- Conversations. ---


def open_chat(open_rows, tmp_path, tokenizer, template: str, rows=(CHAT,), **options) -> Examples:
    path = write(tmp_path / "template.jinja", template)
    return open_rows(list(rows), tokenizer, chat_template=path, **options)


def test_turns_of_the_assistant_count(bpe, open_rows, tmp_path):
    (example,) = open_chat(open_rows, tmp_path, bpe, CHATML).train
    assert learnt(example, bpe) == [
        ("system\nBe brief.\nuser\nWhy?\nassistant\n", False),
        ("Because.\n", True),
        ("user\nReally?\nassistant\n", False),
        ("Yes.\n", True),
    ]


def test_special_tokens_of_the_template_are_special_tokens(bpe, open_rows, tmp_path):
    (example,) = open_chat(open_rows, tmp_path, bpe, CHATML).train
    start, end = (bpe._inner.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>"))
    assert (example.tokens == start).sum() == 5
    assert example.counted[example.tokens == end].tolist() == [False, False, True, False, True]
    assert not example.counted[example.tokens == start].any()


@pytest.mark.parametrize(("kind", "template"), [("bpe", CHATML), ("pieces", INST)])
def test_what_asks_for_a_turn_has_the_tokens_that_it_has_by_itself(
    request, open_rows, tmp_path, kind, template
):
    tokenizer, messages = request.getfixturevalue(kind), CHAT["messages"][1:]
    row = {"messages": messages}
    (example,) = open_chat(open_rows, tmp_path, tokenizer, template, [row]).train
    for index in (1, 3):
        asked = ChatTemplate(template, tokenizer).render(
            messages[:index], add_generation_prompt=True
        )
        ids = tokenizer.encode_with_special(asked)
        assert example.tokens[: len(ids)].tolist() == ids
        assert example.counted[len(ids) - 1 : len(ids) + 1].tolist() == [False, True]


def test_only_the_template_puts_tokens_around_a_conversation(pieces, open_rows, tmp_path):
    row = {"messages": CHAT["messages"][1:]}
    (example,) = open_chat(open_rows, tmp_path, pieces, INST, [row]).train
    tokens = example.tokens.tolist()
    assert (tokens[0], tokens.count(pieces.bos_id)) == (pieces.bos_id, 1)
    assert (tokens[-1], tokens.count(pieces.eos_id)) == (pieces.eos_id, 2)
    # sentencepiece puts a space in front of the second "[INST]", as of all that begins a text.
    text = "[INST] Why? [/INST] Because. [INST] Really? [/INST] Yes."
    assert pieces.decode(tokens) == text


def test_all_counts_but_the_first_token_where_asked(bpe, open_rows, tmp_path):
    (example,) = open_chat(open_rows, tmp_path, bpe, CHATML, count_prompts=True).train
    assert example.counted.tolist() == [False] + [True] * (len(example.tokens) - 1)


def test_what_follows_the_last_answer_is_left_out(bpe, open_rows, tmp_path):
    row = {"messages": [*CHAT["messages"], {"role": "user", "content": "Thanks."}]}
    (example,) = open_chat(open_rows, tmp_path, bpe, CHATML, [row]).train
    assert "Thanks" not in bpe.decode(example.tokens)


def test_a_conversation_without_an_answer_is_dropped(bpe, open_rows, tmp_path):
    examples = open_chat(
        open_rows,
        tmp_path,
        bpe,
        CHATML,
        [CHAT, {"messages": CHAT["messages"][:2]}, {"messages": []}],
    )
    assert (len(examples.train), examples.dropped) == (1, 4)


def test_turns_that_are_written_otherwise_later_get_examples_of_their_own(bpe, open_rows, tmp_path):
    first, second = open_chat(open_rows, tmp_path, bpe, THINKING).train
    before = "system\nBe brief.\nuser\nWhy?\nassistant\n"
    answer = ("<think></think>Because.\n", True)
    assert learnt(first, bpe) == [(before, False), answer]
    before += "Because.\nuser\nReally?\nassistant\n"
    assert learnt(second, bpe) == [(before, False), ("<think></think>Yes.\n", True)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", CHATML),
        ("tokenizer_config.json", json.dumps({"chat_template": CHATML})),
        (
            "tokenizer_config.json",
            json.dumps(
                {
                    "chat_template": [
                        {"name": "tool_use", "template": "no"},
                        {"name": "default", "template": CHATML},
                    ]
                }
            ),
        ),
    ],
)
def test_the_template_beside_the_tokenizer_is_the_default(bpe, open_rows, tmp_path, name, content):
    want = open_chat(open_rows, tmp_path, bpe, CHATML).fingerprint
    path = write(tmp_path / "tokenizer" / name, content)
    assert open_rows([CHAT], bpe, folder=path.parent).fingerprint == want
    other = write(tmp_path / "tokenizer" / "tokenizer.json", "{}")
    assert open_rows([CHAT], bpe, folder=other).fingerprint == want
    assert open_rows([CHAT], bpe, chat_template=path).fingerprint == want


def test_no_template_is_refused(bpe, open_rows, tmp_path):
    with pytest.raises(ValueError, match=r"no chat template in '.*'.*Give `--chat-template FILE`"):
        open_rows([CHAT], bpe, folder=tmp_path)
    with pytest.raises(FileNotFoundError, match="`--chat-template` is '/none': there is no such"):
        open_rows([CHAT], bpe, chat_template=pathlib.Path("/none"))
    empty = write(tmp_path / "tokenizer_config.json", "{}")
    with pytest.raises(
        ValueError, match=r"`--chat-template`: '.*': there is no 'chat_template' in"
    ):
        open_rows([CHAT], bpe, folder=empty)


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{% for %}", r"`--chat-template`: '.*template.jinja': line 1 of the template: Expected"),
        (
            "{{ raise_exception('No system!') }}",
            r"line 1 of '.*rows.jsonl': the chat template fails at it \(TemplateError: No sys",
        ),
        ("{{ messages[9].role }}", r"the chat template fails at it \(UndefinedError: list object"),
        ("{{ messages.append(1) }}", r"the chat template fails at it \(SecurityError"),
        (
            CHATML.replace("assistant\\n", "assistant\\n<think>"),
            r"does not go on from '.*<think>', which asks for message 3, but writes it after '.*B",
        ),
    ],
)
def test_templates_that_fail_are_refused(bpe, open_rows, tmp_path, template, match):
    with pytest.raises(ValueError, match=match):
        open_chat(open_rows, tmp_path, bpe, template)


@pytest.mark.parametrize(
    ("message", "match"),
    [
        ("hi", r"message 1 is str, not an object"),
        ({"role": "gpt", "content": "a"}, r"message 1 has the role 'gpt', not one of 'system',"),
        ({"content": "a"}, r"message 1 has the role None"),
        ({"role": "user"}, r"the 'content' of message 1 is NoneType, not text"),
        ({"role": "user", "content": [{"type": "text"}]}, r"the 'content' of message 1 is list, n"),
    ],
)
def test_messages_that_are_none_are_refused(bpe, open_rows, tmp_path, message, match):
    with pytest.raises(ValueError, match=rf"line 1 of '.*': {match}"):
        open_chat(open_rows, tmp_path, bpe, CHATML, [{"messages": [message]}])


TEMPLATES = [
    CHATML,
    INST,
    THINKING,
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m | tojson }}\n"
    "{% endfor %}{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}",
    "  {%- set ns = namespace(n=0) -%}\n  {% for m in messages %}\n  {% generation %}\n"
    "{{ m.content | trim }}é<&>{% endgeneration %}\n{% set ns.n = ns.n + 1 %}\n{% endfor %}"
    "{{ ns.n }}{{ eos_token }}{{ pad_token }}{% if strftime_now is defined %}!{% endif %}\n\n",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("tools", [None, [{"name": "é<f>", "n": 1}]])
def test_conversations_are_written_as_transformers_writes_them(
    pieces, template, add_generation_prompt, tools
):
    library = pytest.importorskip("transformers.utils.chat_template_utils")
    options = {"add_generation_prompt": add_generation_prompt, "tools": tools}
    (want,), _ = library.render_jinja_template(
        [CHAT["messages"]], chat_template=template, bos_token="<s>", eos_token="</s>", **options
    )
    assert ChatTemplate(template, pieces).render(CHAT["messages"], **options) == want


def test_the_template_of_transformers_tokenizer_gives_the_same_tokens(bpe, open_rows, tmp_path):
    transformers = pytest.importorskip("transformers")
    bpe.save(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    want = theirs.apply_chat_template(CHAT["messages"], chat_template=CHATML, return_dict=False)
    (example,) = open_chat(open_rows, tmp_path, bpe, CHATML).train
    assert example.tokens.tolist() == want
