"""All versions of each tenant as sorted lines in memory, kept up to date by the names that change."""

import bisect
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from adapter_store.record import News
from adapter_store.summary import after_line


class Lines(Protocol):
    def names(self, tenant: str) -> list[str]:
        """All of a tenant's names."""
        ...

    def lines(self, tenant: str, name: str) -> tuple[str, ...]:
        """The lines of one name, sorted; none when it is unknown or unreadable."""
        ...


class Listing:
    """Not thread-safe. About 400 bytes a version."""

    def __init__(
        self, tenant: str, source: Lines, number: int = -1, lines: Mapping[str, tuple[str, ...]] | None = None
    ) -> None:
        """`lines`: of all names, if they were read already, after change `number`."""
        self._tenant, self._source = tenant, source
        self._number = number
        self._take(lines or {})

    def update(self, news_since: Callable[[int], News]) -> None:
        """Reads what changed since the last time; everything at first, and when too much has."""
        news = news_since(self._number)
        if news.names is None:
            self._read_all()
        else:
            self._read(name for tenant, name in news.names if tenant == self._tenant)
        self._number = news.number

    def count(self) -> int:
        return sum(map(len, self._lines.values()))

    def page(self, name: str | None, after: str, limit: int, keep: Callable[[str], bool]) -> list[str]:
        """The first lines that `keep` accepts whose keys are greater than `after`, of all names or of one."""
        bound = after_line(after) if after else ""
        lines = (line for each in self._names(name, after) for line in self._lines[each] if line > bound)
        return list(itertools.islice(filter(keep, lines), limit))

    def _names(self, name: str | None, after: str) -> Iterator[str]:
        if name is not None:
            yield from (name,) if name in self._lines else ()
            return
        before, sign, _ = after.partition("@")  # Of "chat@..." that name, of "chat" all that begin so, too.
        first = bisect.bisect_left(self._order, before + sign)
        for at in range(first, len(self._order)):
            yield self._order[at][:-1]

    def _read_all(self) -> None:
        names = self._source.names(self._tenant)
        self._take({name: self._source.lines(self._tenant, name) for name in names})

    def _take(self, found: Mapping[str, tuple[str, ...]]) -> None:
        self._lines = {name: lines for name, lines in found.items() if lines}
        # "name@" of each name with lines: names sort by it, as lines do
        self._order = sorted(f"{name}@" for name in self._lines)

    def _read(self, names: Iterable[str]) -> None:
        for name in names:
            lines = self._source.lines(self._tenant, name)
            if lines and name not in self._lines:
                bisect.insort(self._order, f"{name}@")
            if lines:
                self._lines[name] = lines
            elif name in self._lines:
                del self._lines[name]
                self._order.remove(f"{name}@")


class Listings:
    """One for each tenant, made when somebody asks for it. Thread-safe."""

    def __init__(self, source: Lines, news_since: Callable[[int], News]) -> None:
        self._source, self._news_since = source, news_since
        self._listings: dict[str, Listing] = {}
        self._mutex = threading.Lock()  # guards it, and the listings in it

    def prepare(self, tenant: str, number: int, lines: Mapping[str, tuple[str, ...]]) -> None:
        """Begins with all lines of a tenant, as they were after change `number`."""
        with self._mutex:
            self._listings[tenant] = Listing(tenant, self._source, number, lines)

    def page(
        self, tenant: str, name: str | None, after: str, limit: int, keep: Callable[[str], bool]
    ) -> list[str]:
        with self._mutex:
            return self._updated(tenant).page(name, after, limit, keep)

    def count(self, tenant: str) -> int:
        with self._mutex:
            return self._updated(tenant).count()

    def _updated(self, tenant: str) -> Listing:
        listing = self._listings.setdefault(tenant, Listing(tenant, self._source))
        listing.update(self._news_since)
        return listing
