"""Chat templates: Jinja with the helpers that transformers gives them, in a sandbox.

The sandbox keeps a template away from Python's insides, but not from burning time or memory. So a template
that came with an adapter is rendered by this module run as a worker (scheduler/workers), which has limits on
both.
"""

import datetime
import functools
import json
import resource
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from scheduler.workers.program import serve

MAX_RENDERED_CHARS = 4 * 1024 * 1024
MAX_ERROR_CHARS = 500
MEMORY_LIMIT_BYTES = 512 * 1024 * 1024


class TemplateFailed(Exception):
    """The template cannot render the conversation, or writes too much; the text is for the client."""


class InvalidTemplate(TemplateFailed):
    """It is no template at all, for no conversation."""


class RefusedConversation(TemplateFailed):
    """The template works, and says by itself (raise_exception) that it does not take this conversation."""


class _Refusal(jinja2.TemplateError):
    """By raise_exception."""


class GenerationBlocks(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here its body is just rendered."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(template: str, messages: Sequence[Mapping[str, str]], special_tokens: Mapping[str, str]) -> str:
    """The conversation as a prompt that ends where the assistant's answer begins. Raises TemplateFailed."""
    try:
        pieces = _compile(template).generate(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **special_tokens,
        )
        return _join(pieces)
    except TemplateFailed:
        raise
    except jinja2.TemplateSyntaxError as error:
        text = f"the chat template is not valid in line {error.lineno}: {error.message}"
        raise InvalidTemplate(text) from error
    except _Refusal as error:
        raise RefusedConversation(f"the chat template says: {error.message}") from error
    except jinja2.TemplateError as error:
        text = f"the chat template fails: {error.message or type(error).__name__}"
        raise TemplateFailed(text) from error
    except (
        Exception
    ) as error:  # A template can provoke any: ZeroDivisionError, RecursionError, MemoryError...
        raise TemplateFailed(f"the chat template fails with {type(error).__name__}") from error


def _join(pieces: Any) -> str:
    parts: list[str] = []
    total = 0
    for piece in pieces:
        total += len(piece)
        if total > MAX_RENDERED_CHARS:
            raise TemplateFailed(f"the chat template writes more than {MAX_RENDERED_CHARS} characters")
        parts.append(piece)
    text = "".join(parts)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TemplateFailed("the chat template writes half a character (a lone surrogate)") from error
    return text


@functools.lru_cache(maxsize=64)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter it does not escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise _Refusal(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _answer(job: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return {"text": render(**job)}
    except TemplateFailed as error:
        return {"error": str(error)[:MAX_ERROR_CHARS], "kind": type(error).__name__}


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    _compile("")
    serve(_answer, float(sys.argv[1]))
