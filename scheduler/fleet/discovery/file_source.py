"""Executors from a file with one a line: `host:port`, and after a space the name it is known by."""

import asyncio
from collections.abc import Sequence

from scheduler.fleet.discovery.flags import File, address, check_name
from scheduler.fleet.discovery.source import DiscoveryError, bounded
from scheduler.fleet.endpoint import Endpoint

MAX_BYTES = 4 << 20


class FileSource:
    """Reads the file each time it is asked. Raises DiscoveryError when made of one that cannot be used.

    A file without an executor is one that is half written: it is no answer.
    """

    def __init__(self, file: File) -> None:
        self.flag = file.flag
        self._path = file.path
        self.first = self._read()

    async def find(self) -> Sequence[Endpoint]:
        return await asyncio.to_thread(self._read)

    def _read(self) -> Sequence[Endpoint]:
        try:
            with self._path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise DiscoveryError(f"{self.flag}: is larger than {MAX_BYTES >> 20} MiB")
            lines = content.decode().splitlines()
        except OSError as error:
            raise DiscoveryError(f"{self.flag}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise DiscoveryError(f"{self.flag}: is no text in UTF-8") from error
        return bounded(endpoints(lines, self.flag), self.flag)


def endpoints(lines: Sequence[str], flag: str) -> list[Endpoint]:
    """`#` begins a comment. Raises DiscoveryError, which names the line."""
    found = list[Endpoint]()
    seen = dict[str, int]()  # Addresses and names, and their lines.
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{flag}: line {number}"
        if len(words) > 2:
            raise DiscoveryError(f"{where}: has more than an address and a name")
        try:
            endpoint = Endpoint(address(words[0]), *(check_name(word, word) for word in words[1:]))
        except ValueError as error:
            raise DiscoveryError(f"{where}: {error}") from error
        for what in {endpoint.address, endpoint.name} & seen.keys():
            raise DiscoveryError(f"{where}: {what} is in line {seen[what]}, too")
        seen[endpoint.address] = seen[endpoint.name] = number
        found.append(endpoint)
    if not found:
        raise DiscoveryError(f"{flag}: names no executor")
    return found
