"""Asks all sources again and again who the executors are, and tells the fleet when that has changed."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain

from scheduler.fleet.discovery.dns_source import DnsSource
from scheduler.fleet.discovery.file_source import FileSource
from scheduler.fleet.discovery.flags import DnsName, File, parse
from scheduler.fleet.discovery.source import DiscoveryError, Source
from scheduler.fleet.endpoint import Endpoint

logger = logging.getLogger(__name__)


class Discovery:
    """A source that cannot tell keeps what it told before, and the log says so once, until it says something
    else. What is listed in flags is always there.
    """

    def __init__(
        self,
        flags: Iterable[str],
        interval_s: float,
        settle: Callable[[Sequence[Endpoint]], None],
        failed: Callable[[str], None] = lambda flag: None,
    ) -> None:
        """`settle` gets all executors, on the event loop; `failed` the flag of a source for each time that it
        could not tell. Raises DiscoveryError, and ValueError for a flag that means nothing."""
        parsed = [parse(flag) for flag in flags]
        self._listed = [each for each in parsed if isinstance(each, Endpoint)]
        self._sources: list[Source] = [
            DnsSource(each) if isinstance(each, DnsName) else FileSource(each)
            for each in parsed
            if isinstance(each, DnsName | File)
        ]
        self._interval_s = interval_s
        self._settle = settle
        self._failed = failed
        self._found = {source.flag: tuple(source.first) for source in self._sources}
        self._heard: set[str] = set()  # Those that have told, since they were made.
        self._troubles: dict[str, str] = {}  # Of those that cannot tell now.
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def flags(self) -> list[str]:
        """The flags of what is asked again and again."""
        return [source.flag for source in self._sources]

    def start(self) -> None:
        self._settle(self.endpoints())
        self._tasks = [
            asyncio.create_task(self._follow(source), name=f"discovery of {source.flag}")
            for source in self._sources
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def endpoints(self) -> list[Endpoint]:
        """All executors as far as it is known."""
        return merged([self._listed, *self._found.values()])

    async def look(self, source: Source) -> None:
        """Asks one source."""
        try:
            found = await source.find()
        except DiscoveryError as error:
            self._keep(source, str(error))
        except Exception as error:
            logger.exception("%s: bug in a source of executors", source.flag)
            self._keep(source, repr(error))
        else:
            self._take(source, found)

    async def _follow(self, source: Source) -> None:
        while True:
            await self.look(source)
            await asyncio.sleep(self._interval_s)

    def _keep(self, source: Source, trouble: str) -> None:
        self._failed(source.flag)
        if self._troubles.get(source.flag) != trouble:
            self._troubles[source.flag] = trouble
            logger.warning("%s; keeping the %d executors it had", trouble, len(self._found[source.flag]))

    def _take(self, source: Source, found: Sequence[Endpoint]) -> None:
        if self._troubles.pop(source.flag, None):
            logger.info("%s: tells again", source.flag)
        if source.flag in self._heard and tuple(found) == self._found[source.flag]:
            return
        self._heard.add(source.flag)
        self._found[source.flag] = tuple(found)
        logger.log(logging.INFO if found else logging.WARNING, "%s: %d executors", source.flag, len(found))
        self._settle(self.endpoints())


def merged(answers: Iterable[Iterable[Endpoint]]) -> list[Endpoint]:
    """One executor an address, by the first name of its own that it has; and one a name: a second address
    under the same name is known by itself."""
    by_address: dict[str, Endpoint] = {}
    for endpoint in chain.from_iterable(answers):
        known = by_address.get(endpoint.address)
        if known is None or (endpoint.pod and not known.pod):
            by_address[endpoint.address] = endpoint
    by_name: dict[str, Endpoint] = {}
    for endpoint in by_address.values():
        own = endpoint if endpoint.name not in by_name else replace(endpoint, pod="")
        by_name[own.name] = own
    return list(by_name.values())
