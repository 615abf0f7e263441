"""`lorafleet chat`: a conversation in the terminal."""

import argparse
import sys
from contextlib import closing

from lorafleet.client import Client
from lorafleet.commands import connection
from lorafleet.commands.failure import explain
from lorafleet.commands.generate import add_sampling_arguments, sampling_options
from lorafleet.commands.near import near
from lorafleet.commands.parsing import Subparsers, add_command
from lorafleet.errors import LoraFleetError
from lorafleet.requests import Options
from lorafleet.terminal import note, say

_HELP = (
    "/adapter NAME  ask that adapter (no name: the base model)\n/reset  forget the conversation\n/exit  leave"
)


def add_parser(commands: Subparsers) -> None:
    parser = add_command(
        commands,
        "chat",
        "talk to the base model or to an adapter",
        "Talk to the base model or to an adapter. Ctrl-C stops an answer, or leaves when none is under way.\n"
        "Lines that begin with a slash are commands:\n"
        + "\n".join(f"  {line}" for line in _HELP.splitlines()),
        "  lorafleet chat\n  lorafleet chat --adapter acme/support --temperature 0.7 --system 'Be brief.'",
        run,
    )
    parser.add_argument("--adapter", metavar="REF", help="whom to ask first (default: the base model)")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_sampling_arguments(parser)
    connection.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """1 when a question of a script failed; a person has seen it."""
    if sys.stdin.isatty():
        import readline  # noqa: F401, gives `input` its line editing

        note("/help lists the commands; Ctrl-D leaves")
    with connection.connect(args) as client:
        conversation = Conversation(client, args)
        while (line := _read_line(conversation.adapter)) is not None:
            if line and not conversation.handle(line):
                break
    return 1 if conversation.failed and not sys.stdin.isatty() else 0


def _read_line(adapter: str | None) -> str | None:
    """The next line; None at the end of input."""
    try:
        return input(f"{adapter or 'base'}> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


class Conversation:
    """The messages so far and whom the next one goes to."""

    def __init__(self, client: Client, args: argparse.Namespace) -> None:
        self.adapter: str | None = args.adapter
        self._client = client
        self._target: str = args.target
        self._options = sampling_options(args)
        self._start = [{"role": "system", "content": args.system}] if args.system else []
        self._messages = list(self._start)
        self.failed = False

    def handle(self, line: str) -> bool:
        """Obey a command or answer a message; False ends the conversation."""
        command, _, argument = line.partition(" ")
        match command:
            case "/exit":
                return False
            case "/reset":
                self._messages = list(self._start)
            case "/adapter":
                self.adapter = argument.strip() or None
            case _ if line.startswith("/"):
                note(_HELP)
            case _:
                self._answer(line)
        return True

    def _answer(self, text: str) -> None:
        """Stream the answer and remember it, whole or as far as it came; a failed question is forgotten."""
        messages = [*self._messages, {"role": "user", "content": text}]
        answer = ""
        options: Options = {**self._options, "adapter": self.adapter}
        try:
            with closing(self._client.stream(messages, **options)) as chunks:
                for chunk in chunks:
                    answer += chunk.text
                    say(chunk.text, end="")
        except LoraFleetError as error:
            self.failed = True
            note(f"error: {explain(error, self._target, near(error, self._client))}")
        except KeyboardInterrupt:
            note("(stopped)")
        if answer:
            say("")
            self._messages = [*messages, {"role": "assistant", "content": answer}]
