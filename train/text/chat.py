"""Chat templates of Hugging Face, in Jinja: they turn a conversation into text."""

import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from models.json_files import read_object
from models.plain_files import read_text
from train.text.limited import AtLimitError, Limited
from train.text.template_process import BEGIN, END
from train.text.tokenizer import CONFIG, Tokenizer

_RENDERER = Limited("train.text.template_process", seconds=5, gib=2)
_DEFAULT = "default"


class ChatTemplate:
    """A template that writes a conversation as text.

    Templates come with models. They run in a sandbox in a separate process with limits of time and
    memory (`train.text.limited`), and see only their arguments.

    Attributes:
      source: the template.
      marks_answers: whether `{% generation %}` encloses the answers of the assistant.
    """

    def __init__(
        self, source: str, tokenizer: Tokenizer, arguments: Mapping[str, Any] | None = None
    ) -> None:
        """Reads the template.

        Args:
          source: the template, in Jinja.
          tokenizer: gives the names of the special tokens.
          arguments: further arguments of the template, such as `enable_thinking`.

        Raises:
          ValueError: the source is not Jinja, or cannot be read within the limits.
        """
        self.source, self._slow = source, ""
        self._run(None)
        self.marks_answers = re.search(r"{%-?\s*generation\s*-?%}", source) is not None
        names = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        tokens = {name: token for name, token in names.items() if token is not None}
        self._arguments = {**tokens, **(arguments or {})}

    def _run(self, values: Mapping[str, Any] | None) -> str:
        """Returns the text of the template; None only reads it."""
        if self._slow:  # Otherwise each of a million records would take this long.
            raise ValueError(self._slow)
        try:
            answer = _RENDERER.ask((self.source, values))
        except AtLimitError as error:
            reason = f"the template {error}"
            self._slow = reason if error.is_slow else ""
            raise ValueError(reason) from error
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["text"]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Any = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns a conversation as text; see `render_answers`."""
        return self.render_answers(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, arguments=arguments
        )[0]

    def render_answers(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Any = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Returns a conversation as text, and the places of its `{% generation %}` blocks.

        Args:
          messages: each with `role` and `content`.
          add_generation_prompt: whether to end with the beginning of an answer of the assistant.
          tools: descriptions of functions that the assistant may call.
          arguments: further arguments, before those of the template.

        Raises:
          ValueError: the template refuses the conversation, fails, or is at a limit.
        """
        values = {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            given = self._arguments | dict(arguments or {})
            if same := values.keys() & given.keys():
                raise ValueError(
                    f"{', '.join(sorted(same))}: every template gets these from the conversation"
                )
            text = self._run(values | given)
        except ValueError as error:
            raise ValueError(
                f"the chat template (`--chat-template`) fails on it ({error})"
            ) from error
        places, letters, length = list[int](), [], 0
        for part in re.split(f"[{BEGIN}{END}]", text):
            letters.append(part)
            length += len(part)
            places.append(length)
        inner = places[:-1]
        return "".join(letters), list(zip(inner[::2], inner[1::2], strict=False))


def open_chat_template(
    path: pathlib.Path | None,
    tokenizer_path: pathlib.Path | None,
    tokenizer: Tokenizer,
    arguments: Mapping[str, Any] | None = None,
) -> ChatTemplate:
    """Reads a template from `path`, or from the folder of the tokenizer if `path` is None.

    In the folder, `chat_template.jinja` comes before the "chat_template" of
    `tokenizer_config.json`, which is one template, a list of named ones, or an object of them; of
    several, the one named "default".

    Args:
      path: a file with the template, or a .json file with a "chat_template".
      tokenizer_path: a folder with the files of a tokenizer, or a file in that folder.
      tokenizer: as for `ChatTemplate`.
      arguments: as for `ChatTemplate`.

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: there is no template, or it is not Jinja.
    """
    if path is None:
        path = _template_beside(tokenizer_path)
    elif not path.expanduser().is_file():
        raise FileNotFoundError(f"`--chat-template` is '{path}': there is no such file.")
    try:
        source = read_text(path.expanduser())
        if path.suffix == ".json":
            config = json.loads(source)
            source = _default_of(config.get("chat_template") if isinstance(config, dict) else None)
        return ChatTemplate(source, tokenizer, arguments)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`--chat-template`: '{path}': {error}. Give another template.") from error


def _default_of(templates: Any) -> str:
    """Returns the template of a "chat_template": a text, a list of named ones, or an object."""
    if isinstance(templates, list) and all(isinstance(x, Mapping) for x in templates):
        templates = {x.get("name"): x.get("template") for x in templates}
    if isinstance(templates, Mapping):
        named = ", ".join(map(repr, templates)) or "none"
        if _DEFAULT not in templates:
            raise ValueError(f"its 'chat_template' has {named}, and none is named 'default'")
        templates = templates[_DEFAULT]
    if not isinstance(templates, str):
        raise ValueError("it has no 'chat_template' that is a text, or has one by name")
    return templates


def _template_beside(tokenizer_path: pathlib.Path | None) -> pathlib.Path:
    if tokenizer_path is not None:
        path = tokenizer_path.expanduser()
        folder = path if path.is_dir() else path.parent
        for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
            file = folder / name
            if file.exists() and (name != CONFIG or "chat_template" in read_object(file)):
                return file
        others = sorted(folder.glob("additional_chat_templates/*.jinja"))
        if others:
            raise ValueError(
                f"'{folder}' has no default chat template, only {', '.join(x.stem for x in others)}"
                f": choose one, such as `--chat-template {others[0]}`."
            )
    raise ValueError(
        f"there is no chat template in '{tokenizer_path}', as beside a model that learned no chats:"
        " neither a chat_template.jinja nor a 'chat_template' in its tokenizer_config.json. Give"
        " `--chat-template FILE`, or records with prompts and completions."
    )


def template_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Returns the values of `--template-argument name=value`: JSON, or else text.

    Raises:
      ValueError: an argument without name or value.
    """
    arguments = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name.isidentifier() and equals):
            raise ValueError(
                f"`--template-argument` must be name=value, such as enable_thinking=false, got"
                f" {text!r}."
            )
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return arguments
