"""Turns tokens into text, piece by piece: never a split character, never part of a stop string."""

import codecs
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, cast

from scheduler.text.tokenizer import Tokenizer

# An unfinished character is at most three bytes long, and a token that adds text adds at least one.
MAX_UNFINISHED_BYTES = 3
PROMPT_TAIL = 8
Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class TextDelta(NamedTuple):
    """Tokens that go to the client now, and all the text they complete. Nothing follows once `stopped`."""

    token_ids: tuple[int, ...]
    text: str
    stopped: bool = False


class TextStream:
    """The text of one answer. Time and memory are linear in its length.

    A token leaves together with all of its text. It is held back while its text ends within a character, or
    reaches into what may become a stop string. So at any point the text that has left is the text of exactly
    the tokens that have left, and these are all that is needed to go on elsewhere: `resumed_token_ids`
    rebuild decoder and stop state, and neither they nor their text leave again.

    Of several stop sequences the one that ends first counts, wherever the borders between tokens are. The
    text ends before it; the tokens include the one that completes it. `silent_token_ids` (stop tokens) are
    counted but add no text. The prompt adds no text either, but a character that it leaves unfinished is
    completed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop_sequences: Iterable[str],
        resumed_token_ids: Sequence[int] = (),
        *,
        silent_token_ids: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._text_of = tokenizer.texts.__getitem__
        self._silent = frozenset(silent_token_ids)
        self._utf8 = Utf8Decoder(errors="replace")
        self._stops = _StopMatcher(stop_sequences)
        self._stopped = False
        # Tokens and text that have not left yet, and how many of each had left or were cut before them.
        self._token_ids: list[int] = []
        self._text = ""
        self._tokens_before = 0
        self._chars_before = 0
        # Points between whole characters: (tokens, chars) from the start of the answer, in order.
        self._borders: deque[tuple[int, int]] = deque()
        self._utf8.decode(_last_bytes(tokenizer, prompt_token_ids))
        if resumed_token_ids:
            self._resume(resumed_token_ids)
        # Whether tokens of whole characters may leave as they come.
        self._lets_pass = self._holds_nothing()

    @property
    def stopped(self) -> bool:
        """Whether a stop sequence is complete, in resumed tokens too: the answer is at its end."""
        return self._stopped

    def push(self, token_ids: Sequence[int]) -> TextDelta | None:
        """What can leave after these tokens; None when that is nothing. After a stop nothing is taken in."""
        if self._stopped:
            return TextDelta((), "", stopped=True)
        if self._lets_pass and self._silent.isdisjoint(token_ids):
            texts = list(map(self._text_of, token_ids))
            if None not in texts:
                return self._pass(token_ids, "".join(cast(list[str], texts)))
        for token_id in token_ids:
            match_start = self._feed(token_id)
            if match_start is not None:
                return self._stop(match_start)
        delta = self._take(self._chars_before + len(self._text) - self._stops.held)
        self._lets_pass = self._holds_nothing()
        return delta

    def finish(self) -> TextDelta | None:
        """All that was held back, at the end of the answer. A cut character becomes U+FFFD."""
        if self._stopped:
            return None
        self._text += self._utf8.decode(b"", final=True)
        end = self._chars_before + len(self._text)
        self._borders.append((self._tokens_before + len(self._token_ids), end))
        return self._take(end)

    def _holds_nothing(self) -> bool:
        """Nor ever has to, for a stop sequence."""
        return not (self._token_ids or self._stops or self._utf8.getstate()[0])

    def _pass(self, token_ids: Sequence[int], text: str) -> TextDelta:
        """Lets tokens go with their text though nothing was taken in: nothing of it may have to be held."""
        self._tokens_before += len(token_ids)
        self._chars_before += len(text)
        return TextDelta(tuple(token_ids), text)

    def _resume(self, token_ids: Sequence[int]) -> None:
        """All at once: a hundred thousand of them, one by one, would stop every other stream for seconds."""
        text = self._utf8.decode(b"".join(map(self._piece, token_ids)))
        self._stopped = self._stops.begin(text)
        self._tokens_before, self._chars_before = len(token_ids), len(text)

    def _feed(self, token_id: int) -> int | None:
        """Takes a token in. Returns where a stop sequence starts that it completes."""
        self._token_ids.append(token_id)
        text = self._utf8.decode(self._piece(token_id))
        before = self._chars_before + len(self._text)
        self._text += text
        if not self._utf8.getstate()[0]:
            self._borders.append((self._tokens_before + len(self._token_ids), before + len(text)))
        match = self._stops.feed(text)
        return None if match is None else before + match

    def _piece(self, token_id: int) -> bytes:
        return b"" if token_id in self._silent else self._tokenizer.token_bytes(token_id)

    def _stop(self, match_start: int) -> TextDelta:
        self._stopped = True
        # After a resumption that took another way, a stop sequence may start in text that has left already.
        text = self._text[: max(0, match_start - self._chars_before)]
        return TextDelta(tuple(self._token_ids), text, stopped=True)

    def _take(self, safe: int) -> TextDelta | None:
        """Lets everything go that lies before the last border at or before char `safe`."""
        border = None
        while self._borders and self._borders[0][1] <= safe:
            border = self._borders.popleft()
        if border is None or border[0] == self._tokens_before:
            return None
        return self._release(*border)

    def _release(self, tokens: int, chars: int) -> TextDelta:
        num_tokens, num_chars = tokens - self._tokens_before, chars - self._chars_before
        delta = TextDelta(tuple(self._token_ids[:num_tokens]), self._text[:num_chars])
        del self._token_ids[:num_tokens]
        self._text = self._text[num_chars:]
        self._tokens_before, self._chars_before = tokens, chars
        return delta


def _last_bytes(tokenizer: Tokenizer, token_ids: Sequence[int]) -> bytes:
    """The end of a prompt's text, in which the character lies that it may leave unfinished."""
    tail = b""
    for token_id in reversed(token_ids[-PROMPT_TAIL:]):
        tail = tokenizer.token_bytes(token_id) + tail
        if len(tail) >= MAX_UNFINISHED_BYTES:
            break
    return tail


class _StopMatcher:
    """Finds stop sequences in a text that arrives in pieces (Knuth-Morris-Pratt, a state per sequence)."""

    def __init__(self, stop_sequences: Iterable[str]) -> None:
        self._stops = tuple(stop_sequences)
        self._fallbacks = tuple(_fallbacks(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)

    def __bool__(self) -> bool:
        """Whether there are any sequences to find."""
        return bool(self._stops)

    @property
    def held(self) -> int:
        """How many chars at the end of the text may be the start of a stop sequence."""
        return max(self._matched, default=0)

    def begin(self, text: str) -> bool:
        """Takes the first piece in. Whether it has a complete sequence; nothing is to be fed then."""
        if any(stop in text for stop in self._stops):
            return True
        longest = max(map(len, self._stops), default=0)
        self.feed(text[max(0, len(text) - longest) :])  # What a sequence begins with lies in there.
        return False

    def feed(self, text: str) -> int | None:
        """Where the first completed sequence starts, from the start of `text`, so maybe negative."""
        if not self._stops:
            return None
        for index, char in enumerate(text):
            completed = self._step(char)
            if completed:
                return index + 1 - completed
        return None

    def _step(self, char: str) -> int:
        """Length of the longest sequence that ends with this char; 0 if none does."""
        completed = 0
        for which, stop in enumerate(self._stops):
            matched, fallbacks = self._matched[which], self._fallbacks[which]
            while matched and stop[matched] != char:
                matched = fallbacks[matched - 1]
            if stop[matched] == char:
                matched += 1
            self._matched[which] = matched
            if matched == len(stop):
                completed = max(completed, matched)
        return completed


def _fallbacks(stop: str) -> tuple[int, ...]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = table[length - 1]
        if stop[i] == stop[length]:
            length += 1
        table[i] = length
    return tuple(table)
