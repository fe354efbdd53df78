"""The program that runs chat templates: Jinja in a sandbox, in a process with limits."""

import datetime
import functools
import json
from typing import Any, ClassVar, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from train.text.limited import serve

_LONGEST = 2**28
"""Letters of the longest text."""
_TODAY = datetime.date(2024, 7, 26)
"""The date that templates get, Llama 3's default. With the present date the tokens would change
from day to day, and a run could not be resumed on the next day."""
BEGIN, END = "\ufdd2", "\ufdd3"
"""Enclose the text of `{% generation %}` blocks until their places are known."""


class _Generation(jinja2.ext.Extension):
    """Encloses the text of `{% generation %}`, which marks the assistant's text, in `BEGIN`."""

    tags: ClassVar = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        ends = [jinja2.nodes.Output([jinja2.nodes.TemplateData(x)], lineno=line) for x in _ENDS]
        return [ends[0], *body, ends[1]]


_ENDS = (BEGIN, END)


class _Objects:
    """`dict(...)` in templates, without the methods of the class."""

    def __call__(self, *args: Any, **values: Any) -> dict[str, Any]:
        return dict(*args, **values)


@functools.cache
def _chat_environment() -> jinja2.Environment:
    """Returns the environment that `transformers.apply_chat_template` gives to templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _TODAY.strftime
    environment.globals["dict"] = _Objects()
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    **options: Any,
) -> str:
    """Returns JSON without the HTML escapes of Jinja's filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **options
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


@functools.lru_cache
def _template(source: str) -> jinja2.Template:
    return _chat_environment().from_string(source)


def answer(request: tuple[str, dict[str, Any] | None]) -> dict[str, str]:
    """Returns the text of a template with arguments, or what is wrong with it.

    Args:
      request: the template, and its arguments; None only to read it.
    """
    source, values = request
    try:
        template = _template(source)
        text = "" if values is None else template.render(**values)
    except MemoryError:
        raise
    except jinja2.TemplateSyntaxError as error:
        return {"error": f"line {error.lineno} of the template: {error.message}"}
    except RecursionError:
        return {"error": "the template is nested too deeply"}
    except Exception as error:  # It is a program: it may raise anything.
        return {"error": f"{type(error).__name__}: {error}"}
    if len(text) > _LONGEST:
        return {"error": f"the template writes more than {_LONGEST:,} letters"}
    return {"text": text}


if __name__ == "__main__":
    serve(answer)
