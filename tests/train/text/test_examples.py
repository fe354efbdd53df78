"""Examples: their tokens, which of them count, which are held out, and their lengths."""

import hypothesis
import numpy as np
import pytest
from bytes_tokenizer import Bytes
from hypothesis import strategies as st

from tests.train.example_files import (
    CHAT,
    CHATML,
    PAIR,
    learnt,
    numbered,
    texts_of,
    write,
    write_rows,
)
from train.settings.data import ExampleConfig
from train.text.tokenizer import Tokenizer


@pytest.fixture(params=["bytes", "bpe", "pieces"])
def tokenizer(request) -> Tokenizer:
    return Bytes() if request.param == "bytes" else request.getfixturevalue(request.param)


# --- Prompts and completions, texts. ---


def test_a_completion_and_its_end_token_count(tokenizer, open_rows):
    (example,) = open_rows([PAIR], tokenizer).train
    assert learnt(example, tokenizer) == [("Why?", False), (" Because.", True)]
    assert example.tokens[-1] == tokenizer.eos_id
    assert example.counted[-1]
    assert (tokenizer.bos_id is None) == (example.tokens[0] != tokenizer.bos_id)
    assert (example.tokens.dtype, example.counted.dtype) == (np.int32, np.bool_)


def test_a_prompt_has_the_same_tokens_without_its_completion(tokenizer, open_rows):
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


def test_sentencepiece_adds_no_space_between_prompt_and_completion(pieces, open_rows):
    (example,) = open_rows([{"prompt": "quick", "completion": "fox"}], pieces).train
    assert pieces.decode(example.tokens) == "quickfox"


def test_prompts_count_on_request(open_rows):
    (example,) = open_rows([PAIR], count_prompts=True).train
    assert learnt(example) == [("", False), ("Why? Because.", True)]


def test_all_of_a_text_counts_except_its_first_token(bpe, open_rows):
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


def test_prompt_and_completion_in_templates_are_the_named_fields(open_rows):
    (example,) = open_rows(
        [{"q": "Why?", "prompt": "not this", "a": "So."}],
        prompt_field="q",
        completion_field="a",
        prompt_template="Q: {prompt} A:",
        completion_template=" {completion}",
    ).train
    assert learnt(example) == [("Q: Why? A:", False), (" So.", True)]


def test_a_literal_backslash_is_written_twice(open_rows):
    (example,) = open_rows([PAIR], prompt_template=r"\\nabla {prompt}").train
    assert learnt(example)[0] == (r"\nabla Why?", False)


# --- Formats. ---


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (PAIR, "Why? Because."),
        ({"text": "plain"}, "plain"),
        ({**PAIR, "text": "plain"}, "Why? Because."),
    ],
)
def test_the_format_is_that_of_the_first_record(open_rows, row, text):
    assert texts_of(open_rows([row]).train) == [text]


def test_a_conversation_takes_precedence_over_other_formats(bpe, open_rows, tmp_path):
    template = write(tmp_path / "chatml.jinja", CHATML)
    (example,) = open_rows([CHAT | PAIR], bpe, chat_template=template).train
    assert "Really?" in bpe.decode(example.tokens)


def test_a_given_format_is_used(open_rows):
    assert texts_of(open_rows([{**PAIR, "text": "plain"}], format="text").train) == ["plain"]


def test_a_record_without_a_known_format_is_refused(open_rows):
    with pytest.raises(
        ValueError,
        match=r"line 1 of '.*rows.jsonl' has the fields 'question', 'answer': neither 'messages'",
    ):
        open_rows([{"question": "a", "answer": "b"}])


# --- Held-out records. ---


def test_adding_records_does_not_move_held_out_ones(open_rows):
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
    with pytest.raises(ValueError, match=r"it has 2 record\(s\), all equal, .*`--validation`"):
        open_rows([PAIR, PAIR], held_out=0.05)


def test_validation_records_can_come_from_another_file(open_rows, tmp_path):
    other = write_rows(tmp_path / "other.jsonl", [{"prompt": "x", "completion": "y"}])
    examples = open_rows(numbered(10), validation=str(other))
    assert len(examples.train) == 10
    assert texts_of(examples.validation) == ["xy"]


def test_errors_in_the_validation_file_name_it(open_rows, tmp_path):
    other = write_rows(tmp_path / "other.jsonl", [{"text": "x"}])
    with pytest.raises(ValueError, match=r"`--validation`: line 1 of '.*other.jsonl': there is no"):
        open_rows(numbered(10), validation=str(other))


def test_a_share_that_is_out_of_range_or_without_effect_is_refused():
    for share in (0.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match=rf"`--held-out` must be in \(0, 1\), got {share}"):
            ExampleConfig(held_out=share)
    with pytest.raises(ValueError, match=r"`--held-out 0.5` has no effect with `--validation`"):
        ExampleConfig(held_out=0.5, validation="other.jsonl")


# --- Lengths. ---

# Counts are over both files, which are the same here.

LONG = {"prompt": "ab", "completion": "cdefgh"}
ENDLESS = {"prompt": "prompt " * 10, "completion": "x"}


def test_long_examples_lose_their_end(open_rows):
    examples = open_rows([PAIR, LONG], seq_len=5)
    assert texts_of(examples.train) == ["Why? ", "abcde"]
    assert [len(example.tokens) for example in examples.train] == [6, 6]
    assert (examples.cut, examples.dropped) == (4, 0)


def test_an_example_of_the_largest_length_is_not_cut(open_rows):
    examples = open_rows([LONG], seq_len=9)
    assert (examples.cut, examples.dropped) == (0, 0)
    assert len(examples.train[0].tokens) == 10


def test_examples_whose_completion_is_cut_off_are_dropped(open_rows):
    examples = open_rows([LONG, ENDLESS], seq_len=5)
    assert texts_of(examples.train) == ["abcde"]
    assert (examples.cut, examples.dropped) == (2, 2)


def test_long_examples_are_dropped_on_request(open_rows):
    short = {"prompt": "a", "completion": "b"}
    examples = open_rows([LONG, short], seq_len=5, long="drop")
    assert texts_of(examples.train) == ["ab"]
    assert (examples.cut, examples.dropped) == (0, 2)


def test_rows_of_one_token_have_two_tokens(open_rows):
    (example,) = open_rows([{"prompt": "", "completion": "abc"}], seq_len=1).train
    assert example.tokens.tolist() == [256, ord("a")]


@pytest.mark.parametrize(
    ("seq_len", "match"),
    [(0, "`--seq-len` must be at least 1"), (4, "all 1 .* to train on")],
)
def test_sequences_too_short_are_refused(open_rows, seq_len, match):
    with pytest.raises(ValueError, match=match):
        open_rows([ENDLESS], seq_len=seq_len)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"prompt_template": "{a}"}, r"line 1 of .*'a'"),
        ({"completion_field": "b"}, r"line 1 of .*'b'"),
        (
            {"prompt_field": "a", "format": "text"},
            "`--prompt-field a` is for `--format completion`",
        ),
        ({"text_field": "a", "format": "chat"}, "`--text-field a` is for `--format text` and has"),
        (
            {"prompt_field": "a", "messages_field": "c"},
            "`--prompt-field` and `--messages-field` are for different formats",
        ),
    ],
)
def test_flags_of_a_format_are_never_ignored(open_rows, options, match):
    row = {"text": "abc", "prompt": "d", "messages": []}
    with pytest.raises(ValueError, match=match):
        open_rows([row], **options)


def test_flags_of_a_format_choose_it(open_rows):
    row = {"prompt": "a", "completion": "b", "body": "cd"}
    assert texts_of(open_rows([row], text_field="body").train) == ["cd"]


def test_nothing_left_to_validate_on_is_refused(open_rows, tmp_path):
    other = write_rows(tmp_path / "other.jsonl", [ENDLESS])
    with pytest.raises(
        ValueError, match=r"`--validation` is '.*': all 1 record\(s\) to validate on"
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
def test_settings_that_change_the_examples_change_the_fingerprint(open_rows, options):
    assert open_rows(numbered(20)).fingerprint != open_rows(numbered(20), **options).fingerprint


def test_another_record_gives_another_fingerprint(open_rows):
    assert open_rows(numbered(20)).fingerprint != open_rows(numbered(21)).fingerprint
