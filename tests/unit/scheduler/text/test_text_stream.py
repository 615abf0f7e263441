"""Incremental text against the decoding of the whole: any tokens, chunks, stops, points of resumption."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.text.text_stream import TextStream, Utf8Decoder, _StopMatcher
from scheduler.text.tokenizer import Tokenizer
from tests.support.adapters.tokenizers import byte_fallback, byte_level, write_folder

PROMPT = (40, 41)
STOPS = ["STOP", "stop", "OPOP", "世界", "好", "😀", "\n\n", "aa", "aab", ". ", "�"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(tmp_path_factory.mktemp("tokenizer"), byte_level()))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(
        write_folder(tmp_path_factory.mktemp("sentencepiece"), byte_fallback(), eos="</s>")
    )


def run(stream: TextStream, chunks: list[list[int]]) -> tuple[list[tuple[tuple[int, ...], str]], bool]:
    """All deltas of a stream, and whether a stop ended it."""
    deltas = []
    for chunk in chunks:
        delta = stream.push(chunk)
        if delta is not None:
            deltas.append((delta.token_ids, delta.text))
            if delta.stopped:
                assert stream.finish() is None
                return deltas, True
    rest = stream.finish()
    if rest is not None:
        deltas.append((rest.token_ids, rest.text))
    return deltas, False


def chunked(ids: list[int], cuts: list[int]) -> list[list[int]]:
    borders = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[start:end] for start, end in itertools.pairwise(borders)]


def cut_at_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """The reference: cut before the sequence that ends first (the longest, if several end there)."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


PIECES = ["STOP", "ST", "OP", "世界", "世", "😀", "好", "a", "aab", "\n", ". "]


def draw_tokens(data: st.DataObject, tokenizer: Tokenizer) -> list[int]:
    """Real text, then any ids: parts of characters, special tokens, a few ids that the vocabulary lacks."""
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=20)))
    return tokenizer.encode(text) + data.draw(st.lists(st.integers(0, 425), max_size=30))


def all_tokens(deltas: list[tuple[tuple[int, ...], str]]) -> list[int]:
    return [token_id for tokens, _ in deltas for token_id in tokens]


def all_text(deltas: list[tuple[tuple[int, ...], str]]) -> str:
    return "".join(text for _, text in deltas)


@settings(max_examples=400)
@given(data=st.data(), cuts=st.lists(st.integers(0, 60), max_size=12))
def test_text_equals_the_whole_decoding(tokenizer: Tokenizer, data: st.DataObject, cuts: list[int]) -> None:
    ids = draw_tokens(data, tokenizer)
    deltas, stopped = run(TextStream(tokenizer, PROMPT, ()), chunked(ids, cuts))
    assert not stopped
    assert all_text(deltas) == tokenizer.decode(ids)
    assert all_tokens(deltas) == ids


@settings(max_examples=400)
@given(data=st.data(), cuts=st.lists(st.integers(0, 60), max_size=12))
def test_what_has_left_is_the_text_of_exactly_the_tokens_that_have_left(
    tokenizer: Tokenizer, data: st.DataObject, cuts: list[int]
) -> None:
    ids = draw_tokens(data, tokenizer)
    stops = data.draw(st.lists(st.sampled_from(STOPS), max_size=3))
    deltas, stopped = run(TextStream(tokenizer, PROMPT, stops), chunked(ids, cuts))
    tokens: list[int] = []
    text = ""
    for some, piece in deltas[:-1] if stopped else deltas:
        tokens += some
        text += piece
        assert text == tokenizer.decode(tokens)
        assert tokens == ids[: len(tokens)]


@settings(max_examples=400)
@given(data=st.data(), cuts=st.lists(st.integers(0, 60), max_size=12))
def test_stops_are_found_wherever_the_borders_are(
    tokenizer: Tokenizer, data: st.DataObject, cuts: list[int]
) -> None:
    ids = draw_tokens(data, tokenizer)
    stops = data.draw(st.lists(st.sampled_from(STOPS), min_size=1, max_size=4))
    deltas, stopped = run(TextStream(tokenizer, PROMPT, stops), chunked(ids, cuts))
    expected, expected_stop = cut_at_stop(tokenizer.decode(ids), stops)
    text = all_text(deltas)
    if stopped or not expected_stop:
        assert text == expected
        assert stopped == expected_stop
    else:  # A cut character at the very end is a U+FFFD only once it is known to be cut.
        assert expected == text[: len(expected)]
    delivered = all_tokens(deltas)
    assert delivered == ids[: len(delivered)]
    if stopped:
        assert cut_at_stop(tokenizer.decode(delivered), stops)[1]
        assert not cut_at_stop(tokenizer.decode(delivered[:-1]).removesuffix("�"), stops)[1]


@settings(max_examples=400)
@given(data=st.data(), cuts=st.lists(st.integers(0, 60), max_size=12))
def test_resumed_anywhere_the_rest_is_the_same(
    tokenizer: Tokenizer, data: st.DataObject, cuts: list[int]
) -> None:
    ids = draw_tokens(data, tokenizer)
    stops = data.draw(st.lists(st.sampled_from(STOPS), max_size=3))
    deltas, stopped = run(TextStream(tokenizer, PROMPT, stops), chunked(ids, cuts))
    point = data.draw(st.integers(0, max(0, len(deltas) - 1)))
    sent = all_tokens(deltas[:point])
    other_cuts = data.draw(st.lists(st.integers(0, 60)))
    resumed = TextStream(tokenizer, PROMPT, stops, sent)
    rest, rest_stopped = run(resumed, chunked(ids[len(sent) :], other_cuts))
    assert rest_stopped == stopped
    assert all_text(rest) == all_text(deltas[point:])
    assert all_tokens(rest) == all_tokens(deltas[point:])


def test_a_character_of_several_tokens_leaves_whole(tokenizer: Tokenizer) -> None:
    ids = [byte_token(tokenizer, byte) for byte in "🇨".encode()]
    stream = TextStream(tokenizer, PROMPT, ())
    assert [stream.push([token_id]) for token_id in ids[:-1]] == [None] * 3
    delta = stream.push(ids[-1:])
    assert delta is not None
    assert (delta.token_ids, delta.text, delta.stopped) == (tuple(ids), "🇨", False)


def test_a_possible_stop_holds_its_tokens_and_no_others(tokenizer: Tokenizer) -> None:
    x, s, t, o, p = (byte_token(tokenizer, byte) for byte in b"xSTOP")
    stream = TextStream(tokenizer, PROMPT, ["STOP"])
    delta = stream.push([x, s, t])
    assert delta is not None
    assert (delta.token_ids, delta.text) == ((x,), "x")
    assert stream.push([o]) is None
    stop = stream.push([p, x])
    assert stop is not None
    assert (stop.token_ids, stop.text, stop.stopped) == ((s, t, o, p), "", True)


def test_a_stop_that_does_not_come_lets_the_held_tokens_go(tokenizer: Tokenizer) -> None:
    x, s, t, o = (byte_token(tokenizer, byte) for byte in b"xSTO")
    stream = TextStream(tokenizer, PROMPT, ["STOP"])
    assert stream.push([s, t, o]) is None
    delta = stream.push([x])
    assert delta is not None
    assert (delta.token_ids, delta.text) == ((s, t, o, x), "STOx")


def test_special_and_silent_tokens_are_counted_without_text(tokenizer: Tokenizer) -> None:
    x, y = (byte_token(tokenizer, byte) for byte in b"xy")
    stream = TextStream(tokenizer, PROMPT, (), silent_token_ids={y})
    delta = stream.push([x, 2, y])
    assert delta is not None
    assert (delta.token_ids, delta.text) == ((x, 2, y), "x")


def test_the_prompt_s_unfinished_character_is_completed(tokenizer: Tokenizer) -> None:
    first, *rest = (byte_token(tokenizer, byte) for byte in "好".encode())
    delta = TextStream(tokenizer, [first], ()).push(rest)
    assert delta is not None
    assert delta.text == "好"


@settings(max_examples=400)
@given(
    prompt=st.lists(st.sampled_from("aé好😀\n".encode() + b"\xff"), min_size=1, max_size=12),
    answer=st.lists(st.sampled_from("é好😀".encode()), min_size=1, max_size=4),
)
def test_any_prompt_leaves_the_character_that_it_ends_in(
    tokenizer: Tokenizer, prompt: list[int], answer: list[int]
) -> None:
    whole = Utf8Decoder(errors="replace")
    whole.decode(bytes(prompt))
    stream = TextStream(tokenizer, [byte_token(tokenizer, byte) for byte in prompt], ())
    deltas, _ = run(stream, [[byte_token(tokenizer, byte) for byte in answer]])
    assert all_text(deltas) == whole.decode(bytes(answer), final=True)


def test_a_resumption_after_a_complete_stop_has_nothing_to_add(tokenizer: Tokenizer) -> None:
    ids = [byte_token(tokenizer, byte) for byte in b"xSTOP"]
    stream = TextStream(tokenizer, PROMPT, ["STOP"], ids)
    delta = stream.push(ids)
    assert delta is not None
    assert (delta.token_ids, delta.text, delta.stopped) == ((), "", True)


def test_a_long_resumption_is_not_walked_through(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It happens on the event loop, between the tokens of all others."""
    x, s, t, o, p = (byte_token(tokenizer, byte) for byte in b"xSTOP")
    with monkeypatch.context() as patch:
        fed: list[str] = []
        step = _StopMatcher._step
        patch.setattr(_StopMatcher, "_step", lambda self, char: fed.append(char) or step(self, char))
        stream = TextStream(tokenizer, PROMPT, ["STOP", "y" * 256], [x] * 20_000 + [s, t])
        assert len(fed) <= 256
    delta = stream.push([o, p])
    assert delta is not None
    assert (delta.token_ids, delta.text, delta.stopped) == ((o, p), "", True)


def test_sentencepiece_keeps_spaces_and_joins_bytes(sentencepiece: Tokenizer) -> None:
    tokens = ["▁the", "▁a", "<0xE4>", "<0xB8>", "<0xAD>", "▁stop"]
    ids = [sentencepiece_id(sentencepiece, token) for token in tokens]
    deltas, _ = run(TextStream(sentencepiece, PROMPT, ()), [[token_id] for token_id in ids])
    assert [text for _, text in deltas] == [" the", " a", "中", " stop"]
    assert all_text(deltas).removeprefix(" ") == sentencepiece.decode(ids)


def test_bytes_that_never_make_a_character_stay_linear(tokenizer: Tokenizer) -> None:
    """No delta before the end, but nothing is decoded twice either: the held text is what it should be."""
    ids = [byte_token(tokenizer, byte) for byte in bytes([0xE4, 0xB8])] * 2000
    deltas, _ = run(TextStream(tokenizer, PROMPT, ["STOP"]), [[token_id] for token_id in ids])
    assert all_text(deltas) == tokenizer.decode(ids)


def byte_token(tokenizer: Tokenizer, byte: int) -> int:
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == bytes([byte]))


def sentencepiece_id(tokenizer: Tokenizer, token: str) -> int:
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token(i) == token)
