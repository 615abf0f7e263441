"""A record of the usage ledger, and its line: JSON whose first field is a checksum of what follows it."""

import json
import zlib
from dataclasses import dataclass

# How answers end well, as clients are told; all other outcomes are names of gRPC codes.
FINISHED = frozenset({"STOP", "LENGTH", "TIME_LIMIT"})
# The client left or was lost, or the server ended: the answer may go on elsewhere, and perhaps nobody saw an
# end of it. Any other code was the server's last word.
UNSEEN = frozenset({"CANCELLED", "UNAVAILABLE"})

_BEGIN, _END_OF_SUM = b'{"crc":"', b'",'
_SUM = slice(len(_BEGIN), len(_BEGIN) + 8)
_REST = _SUM.stop + len(_END_OF_SUM)
_KEY_DIGITS = 32
_KEY = slice(_REST + len(b'"key":"'), _REST + len(b'"key":"') + _KEY_DIGITS)


@dataclass(frozen=True, slots=True)
class Record:
    """What one scheduler knows of one answer, or of its part of it.

    key: 32 hex digits, which all parts of an answer share. part: 0 at first, and one more at each resumption.
    time: of its end there, in unix seconds. adapter ("tenant/name") and digest are "" for the base model.
    prompt, cached and output are tokens: output counts from the answer's beginning, and `resumed` of them
    were brought by the client from an earlier part. outcome: one of FINISHED, or the name of a gRPC code.
    """

    key: str
    part: int
    time: float
    tenant: str
    adapter: str
    digest: str
    prompt: int
    cached: int
    output: int
    resumed: int
    outcome: str


def encode(record: Record) -> bytes:
    """One line, with its end."""
    fields = {name: getattr(record, name) for name in _FIELDS}
    rest = _write(fields).encode()[1:]
    return b"%s%08x%s%s\n" % (_BEGIN, zlib.crc32(rest), _END_OF_SUM, rest)


def is_whole(line: bytes) -> bool:
    """Whether all of it is as it was written: a crash tears the last line of a file."""
    return (
        line.startswith(_BEGIN)
        and line.endswith(b"}\n")
        and line[_SUM] == b"%08x" % zlib.crc32(memoryview(line)[_REST:-1])
    )


def key_of(line: bytes) -> bytes:
    """The key of a whole line, which is not read for it."""
    return line[_KEY]


def decode(line: bytes) -> Record:
    """The record of a whole line. Fields that a later version may add are left out; raises ValueError when
    one is missing."""
    fields = json.loads(line)
    try:
        return Record(*[fields[name] for name in _FIELDS])
    except KeyError as error:
        raise ValueError(f"a record without {error}") from None


_write = json.JSONEncoder(separators=(",", ":")).encode
_FIELDS = tuple(Record.__dataclass_fields__)
