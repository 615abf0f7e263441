"""Chat templates: Jinja with the helpers that transformers gives them, in a sandbox.

The sandbox keeps a template away from Python's insides, but not from burning time or memory. So a template
that came with an adapter is rendered by this module run as a program of its own (see main), which has limits
on both. It imports nothing of ours.
"""

import datetime
import functools
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDERED_CHARS = 4 * 1024 * 1024
MAX_ERROR_CHARS = 500
MEMORY_LIMIT_BYTES = 512 * 1024 * 1024
# Frames on the pipe: the length in 4 bytes, then that much JSON.
FRAME_HEADER = struct.Struct("<I")
READY = b"ready"
NICENESS = 5  # A template that burns its time burns none that the event loop wants.


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


def main(cpu_limit_s: float) -> None:
    """Serves render() over stdin and stdout until stdin ends.

    A job that takes more CPU time than `cpu_limit_s` ends the process: SIGPROF is not handled, and no code in
    C can put it off. CPU time, because a busy machine must not fail honest templates.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    os.nice(NICENESS)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    _compile("")  # What is loaded late is loaded now, outside of the first job's time.
    _write(sink, READY)
    while (job := _read(source)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
        try:
            answer = {"text": render(**json.loads(job))}
        except TemplateFailed as error:
            answer = {"error": str(error)[:MAX_ERROR_CHARS], "kind": type(error).__name__}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(sink, json.dumps(answer).encode())


def _read(source: IO[bytes]) -> bytes | None:
    header = source.read(FRAME_HEADER.size)
    if len(header) < FRAME_HEADER.size:
        return None
    return source.read(FRAME_HEADER.unpack(header)[0])


def _write(sink: IO[bytes], data: bytes) -> None:
    sink.write(FRAME_HEADER.pack(len(data)) + data)
    sink.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
