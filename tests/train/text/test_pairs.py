"""Pairs of preference: where the prompt of a response comes from."""

import pytest
from bytes_tokenizer import Bytes

from tests.train.example_files import CHATML
from train.text.chat import ChatTemplate
from train.text.encoder import Encoder
from train.text.pairs import write_pair
from train.text.records import FieldTemplate

SYSTEM, ASKED = {"role": "system", "content": "S"}, {"role": "user", "content": "Q"}
GOOD, BAD = {"role": "assistant", "content": "A"}, {"role": "assistant", "content": "B"}


def written(**fields):
    tokenizer = Bytes()
    template = ChatTemplate(CHATML, tokenizer)
    return write_pair(
        fields, Encoder(tokenizer), FieldTemplate("--prompt-template", "{prompt}", {}), template
    )


@pytest.mark.parametrize(
    ("prompt", "chosen", "rejected"),
    [
        ([SYSTEM, ASKED], [GOOD], [BAD]),
        ([SYSTEM, ASKED], [SYSTEM, ASKED, GOOD], [SYSTEM, ASKED, BAD]),
        (None, [SYSTEM, ASKED, GOOD], [SYSTEM, ASKED, BAD]),
        ("Q", [SYSTEM, ASKED, GOOD], [SYSTEM, ASKED, BAD]),  # The text of a message.
        ([SYSTEM, ASKED], [GOOD], [SYSTEM, ASKED, BAD]),
    ],
)
def test_lists_of_messages_follow_the_prompt_or_repeat_it(prompt, chosen, rejected):
    parts = written(prompt=prompt, chosen=chosen, rejected=rejected)
    want = written(prompt=None, chosen=[SYSTEM, ASKED, GOOD], rejected=[SYSTEM, ASKED, BAD])
    assert parts == want
    for part, answer in zip(parts, "AB", strict=True):
        ((start, stop),) = part.learned
        assert part.text[start:stop].startswith(answer)
        assert "S" in part.text[:start]


@pytest.mark.parametrize(
    ("prompt", "chosen", "match"),
    [
        # Otherwise the system's message would be lost without a word.
        ([SYSTEM, ASKED], [ASKED, GOOD], "'chosen' begins with a message of the user, but not"),
        ("another", [ASKED, GOOD], "leave out the prompt there, or repeat all of it"),
        (None, [ASKED], "the last message of 'chosen' is not the assistant's"),
        (None, 3, "field 'chosen' is int, not text or messages"),
    ],
)
def test_pairs_without_a_clear_prompt_or_response_are_refused(prompt, chosen, match):
    with pytest.raises(ValueError, match=match):
        written(prompt=prompt, chosen=chosen, rejected=[ASKED, BAD])


def test_texts_follow_the_text_of_the_prompt():
    good, bad = written(prompt="Q:", chosen=" A", rejected=" B")
    assert (good.text, good.learned) == ("Q: A", [(2, 4)])
    assert (bad.text, bad.learned) == ("Q: B", [(2, 4)])
