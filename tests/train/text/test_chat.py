"""Conversations: chat templates, and the turns that are learned."""

import json
import pathlib

import pytest

from tests.train.example_files import CHAT, CHATML, learned, texts_of, write
from train.text.chat import ChatTemplate
from train.text.examples import Examples

INST = """\
{{ bos_token }}{% for message in messages %}
{% if message.role == 'user' %}
{{ '[INST] ' + message.content + ' [/INST]' }}{% else %}
{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}
"""
# Like Qwen 3's: thoughts are written for the last answer only.
THINKING = CHATML.replace(
    "message.content +",
    "('<think></think>' if loop.last and message.role == 'assistant' else '') + message.content +",
)


@pytest.fixture
def open_chat(open_rows, tmp_path):
    """Returns a function that opens conversations with a template."""

    def opened(tokenizer, template: str, rows=(CHAT,), **options) -> Examples:
        path = write(tmp_path / "template.jinja", template)
        return open_rows(list(rows), tokenizer, chat_template=path, **options)

    return opened


def test_turns_of_the_assistant_count_and_special_tokens_are_those_of_the_template(bpe, open_chat):
    (example,) = open_chat(bpe, CHATML).train
    assert learned(example, bpe) == [
        ("system\nBe brief.\nuser\nWhy?\nassistant\n", False),
        ("Because.", True),
        ("\nuser\nReally?\nassistant\n", False),
        ("Yes.", True),
        ("\n", False),
    ]
    start, end = (bpe._inner.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>"))
    assert (example.tokens == start).sum() == 5
    assert example.counted[example.tokens == end].tolist() == [False, False, True, False, True]
    assert not example.counted[example.tokens == start].any()
    (every,) = open_chat(bpe, CHATML, count_prompts=True).train
    assert every.counted.tolist() == [False] + [True] * (len(every.tokens) - 1)


def test_only_the_template_adds_tokens_around_a_conversation(pieces, open_chat):
    row = {"messages": CHAT["messages"][1:]}
    (example,) = open_chat(pieces, INST, [row]).train
    tokens = example.tokens.tolist()
    assert (tokens[0], tokens.count(pieces.bos_id)) == (pieces.bos_id, 1)
    assert (tokens[-1], tokens.count(pieces.eos_id)) == (pieces.eos_id, 2)
    # sentencepiece adds a space before the second "[INST]", as at the beginning of every text.
    text = "[INST] Why? [/INST] Because. [INST] Really? [/INST] Yes."
    assert pieces.decode(tokens) == text


def test_an_empty_turn_adds_no_space(pieces, open_chat):
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    roles = ("user", "assistant", "user", "assistant")
    texts = ("quick", "", "fox", "number")
    turns = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
    (example,) = open_chat(pieces, template, [{"messages": turns}]).train
    assert pieces.decode(example.tokens) == "quickfoxnumber"


def test_only_what_is_up_to_the_last_answer_is_used(bpe, open_chat):
    thanks = {"messages": [*CHAT["messages"], {"role": "user", "content": "Thanks."}]}
    unanswered = {"messages": CHAT["messages"][:2]}
    examples = open_chat(bpe, CHATML, [thanks, unanswered, {"messages": []}])
    (example,) = examples.train
    assert "Thanks" not in bpe.decode(example.tokens)
    assert examples.dropped == 4
    (line,) = examples.remarks
    assert line.startswith("4 dropped. 4 have no counted token whatever their length")


def test_turns_that_a_template_changes_later_become_separate_examples(bpe, open_chat):
    first, second = open_chat(bpe, THINKING).train
    before = "system\nBe brief.\nuser\nWhy?\nassistant\n"
    empty, end = "<think></think>", ("\n", False)  # Words of the template are not learned.
    assert learned(first, bpe) == [(before + empty, False), ("Because.", True), end]
    before += "Because.\nuser\nReally?\nassistant\n"
    assert learned(second, bpe) == [(before + empty, False), ("Yes.", True), end]


def each(change) -> dict:
    return {"messages": [{**message, **change(message)} for message in CHAT["messages"]]}


CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
CALLS = CHATML.replace("message.content +", "message.content + (message.tool_calls | tojson if "
                       "message.tool_calls else '') +")  # fmt: skip
SHARED = {"user": "human", "assistant": "gpt", "system": "system"}
FORMS = [
    {"conversations": [
        {"from": SHARED[m["role"]], "value": m["content"]} for m in CHAT["messages"]]},
    {"conversations": CHAT["messages"]},
    each(lambda m: {"content": [{"type": "text", "text": m["content"]}]}),
    each(lambda m: {"content": [*m["content"]]}),
    each(lambda m: {"tool_calls": None, "unknown": [], "timestamp": "now", "weight": 1}),
    {**CHAT, "tools": None, "id": 3, "weight": 1, "functions": []},
]  # fmt: skip


def test_forms_of_a_conversation_have_the_same_tokens(bpe, open_chat):
    assert {open_chat(bpe, CHATML, [form]).fingerprint for form in [CHAT, *FORMS]} == {
        open_chat(bpe, CHATML).fingerprint
    }


MARKED = CHATML.replace("+ message.content + '<|im_end|>\\n' }}", """}}{% if message.role == 'assistant'
 %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}
{{- message.content + '<|im_end|>\\n' }}{% endif %}""")  # fmt: skip  # noqa: E501


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["plain", "marked"])
def test_answers_without_weight_are_not_learned(bpe, open_chat, template):
    for weights in (0, 1), (1, 0), (0, 0):
        weight = dict(zip(("Because.", "Yes."), weights, strict=True))
        row = each(lambda m, weight=weight: {"weight": weight.get(m["content"])})
        *weighted, _ = open_chat(bpe, template, [row, CHAT]).train
        texts = [text for x in weighted for text, counts in learned(x, bpe) if counts]
        assert texts == [text for text in weight if weight[text]]


@pytest.mark.parametrize(
    ("messages", "template", "text"),
    [
        ([{"role": "assistant", "content": "Hi."}], CHATML, "Hi."),
        ([{"role": "assistant", "content": "Hi."}, *CHAT["messages"][1:2]], MARKED, "Hi."),
        ([*CHAT["messages"][:2], CALL], CALLS, '[{"function": {"name": "f"}}]'),
        ([CALL, {"role": "tool", "content": "4"}, *CHAT["messages"][1:3]], CALLS, "Because."),
    ],
)
def test_the_assistant_may_begin_and_call(bpe, open_chat, messages, template, text):
    (example,) = open_chat(bpe, template, [{"messages": messages}]).train
    assert [run for run, counts in learned(example, bpe) if counts][-1] == text


def test_arguments_of_a_template_come_from_the_flag_and_before_it_from_the_record(bpe, open_chat):
    template = "{{ quoted }}{{ n + 1 }}{{ mood }}" + CHATML
    flags = {"template_argument": ("n=1", "mood=a = b", 'quoted="x"')}
    own = {**CHAT, "chat_template_kwargs": {"n": 2}}
    texts = texts_of(open_chat(bpe, template, [CHAT, own], **flags).train, bpe)
    assert [text.partition("system")[0] for text in texts] == ["x2a = b", "x3a = b"]
    for argument in ("n", "=1", "a b=1"):
        with pytest.raises(ValueError, match="`--template-argument` must be name=value, such as"):
            open_chat(bpe, template, template_argument=(argument,))


BY_USE = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", CHATML),
        ("tokenizer_config.json", json.dumps({"chat_template": CHATML})),
        ("tokenizer_config.json", json.dumps({"chat_template": BY_USE})),
        ("tokenizer_config.json", json.dumps({"chat_template": {"default": CHATML, "rag": "no"}})),
        ("chat_template.json", json.dumps({"chat_template": CHATML})),
    ],
    ids=["file", "configuration", "several", "object", "own file"],
)
def test_the_template_of_the_tokenizer_is_the_default(
    bpe, open_chat, open_rows, tmp_path, name, content
):
    want = open_chat(bpe, CHATML).fingerprint
    path = write(tmp_path / "tokenizer" / name, content)
    assert open_rows([CHAT], bpe, folder=path.parent).fingerprint == want
    other = write(tmp_path / "tokenizer" / "tokenizer.json", "{}")
    assert open_rows([CHAT], bpe, folder=other).fingerprint == want
    assert open_rows([CHAT], bpe, chat_template=path).fingerprint == want


def test_a_missing_template_is_refused(bpe, open_rows, tmp_path):
    with pytest.raises(ValueError, match=r"no chat template in '.*'.*Give `--chat-template FILE`"):
        open_rows([CHAT], bpe, folder=tmp_path)
    with pytest.raises(FileNotFoundError, match="`--chat-template` is '/none': there is no such"):
        open_rows([CHAT], bpe, chat_template=pathlib.Path("/none"))
    empty = write(tmp_path / "tokenizer_config.json", "{}")
    with pytest.raises(ValueError, match=r"there is no chat template in .*, as beside a model"):
        open_rows([CHAT], bpe, folder=empty)
    for bad, match in (
        (["a"], "it has no 'chat_template' that is a text, or has one by name"),
        ({"rag": "x"}, "its 'chat_template' has 'rag', and none is named 'default'"),
        ([{"name": "rag", "template": "x"}], "has 'rag', and none is named 'default'"),
        ({"default": 3}, "it has no 'chat_template' that is a text"),
        ("{{ " + "(" * 3000, "the template is nested too deeply"),
    ):
        write(empty, json.dumps({"chat_template": bad}))
        with pytest.raises(ValueError, match=match):
            open_rows([CHAT], bpe, folder=tmp_path)
    empty.unlink()
    write(tmp_path / "additional_chat_templates" / "rag.jinja", CHATML)
    with pytest.raises(ValueError, match="no default chat template, only rag: choose one"):
        open_rows([CHAT], bpe, folder=tmp_path)


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{% for %}", r"`--chat-template`: '.*template.jinja': line 1 of the template: Expected"),
        (
            "{{ raise_exception('No system!') }}",
            r"line 1 of '.*rows.jsonl': message 3: the chat template .* fails .*\(TemplateErr",
        ),
        (
            "{{ messages[9].role }}",
            r"the chat template .* fails .*\(UndefinedError: list object",
        ),
        (
            "{{ messages.append(1) }}",
            r"the chat template .* fails .*\(SecurityError",
        ),
        (
            CHATML.replace("assistant\\n", "assistant\\n<think>"),
            r"does not continue '.*<think>', which asks for message 3, but writes it after '.*B",
        ),
    ],
)
def test_templates_that_fail_are_refused(bpe, open_chat, template, match):
    with pytest.raises(ValueError, match=match):
        open_chat(bpe, template)


@pytest.mark.parametrize(
    ("message", "match"),
    [
        ("hi", r"message 1 is str, not an object"),
        ({"role": "gpt", "content": "a"}, r"message 1 has the role 'gpt', not one of 'system',"),
        ({"content": "a"}, r"message 1 has the role None"),
        ({"role": "user"}, r"the 'content' of message 1 is NoneType, not text"),
        ({"role": "user", "content": [{"type": "text"}]}, "a part of the 'content' of message 1"),
        ({"role": "user", "content": [{"type": "image"}]}, "a part of the 'content' of message 1"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "the 'content' of message 1 is"),
        ({"from": "nobody", "value": "a"}, "message 1 is from 'nobody', not from one of 'human',"),
        ({"role": "assistant", "content": "a", "weight": 0.5}, "the 'weight' of message 1 is 0.5"),
        ({"role": "user", "content": "a", "loss": True}, "field 'loss' of message 1 has no mean"),
        ({"from": "gpt", "value": "a", "masked": 1}, "field 'masked' of message 1 has no meaning"),
    ],
)
def test_malformed_messages_are_refused(bpe, open_chat, message, match):
    with pytest.raises(ValueError, match=rf"line 1 of '.*': {match}"):
        open_chat(bpe, CHATML, [{"messages": [message]}])


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
def test_conversations_are_rendered_like_transformers(
    pieces, template, add_generation_prompt, tools
):
    library = pytest.importorskip("transformers.utils.chat_template_utils")
    options = {"add_generation_prompt": add_generation_prompt, "tools": tools}
    (want,), _ = library.render_jinja_template(
        [CHAT["messages"]], chat_template=template, bos_token="<s>", eos_token="</s>", **options
    )
    assert ChatTemplate(template, pieces).render(CHAT["messages"], **options) == want
