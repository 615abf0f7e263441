"""Executors under a name in DNS: pods with names of their own by SRV records, or addresses alone."""

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from scheduler.fleet.discovery.flags import DnsName, join
from scheduler.fleet.discovery.source import DiscoveryError, bounded
from scheduler.fleet.endpoint import Endpoint

if TYPE_CHECKING:
    import dns.asyncresolver
    import dns.resolver

SERVICE = "_grpc._tcp"
"""What a Service of Kubernetes has SRV records under where its port is named grpc."""
TRY_S = 1.0
LIFETIME_S = 4.0
AT_ONCE = 32  # Pods whose addresses are asked for where the answer with their names did not bring them.


class DnsSource:
    """Asks for SRV records, and where there are none for addresses: IPv4, or else IPv6, since a pod that has
    both is one executor. Raises DiscoveryError when made without dnspython, or a name server to ask.

    That there is no such name, or nothing under it, is an answer: a headless Service without pods says so.
    Some name servers can never tell SRV records: that counts as none until there were some, for else
    executors would change their names.
    """

    first: Sequence[Endpoint] = ()

    def __init__(self, name: DnsName) -> None:
        self.flag = name.flag
        self._name = name
        host = name.name.removesuffix(".")
        self._of_pods = host.split(".", 2)[2] if name.is_service and host.count(".") > 1 else host
        self._resolver = _resolver(name)
        self._had_pods = name.is_service

    async def find(self) -> Sequence[Endpoint]:
        name, port = self._name.name, self._name.port
        service = name if self._name.is_service else f"{SERVICE}.{name}"
        pods, trouble = await self._try(service)
        if pods:
            self._had_pods = True
            return bounded(await self._pods(pods), self.flag)
        hosts = [] if self._name.is_service else await self._hosts(name)
        if trouble and not hosts:
            raise trouble
        tls_name = name.removesuffix(".")
        return bounded([Endpoint(join(host, port), tls_name=tls_name) for host in hosts], self.flag)

    async def _try(self, service: str) -> "tuple[dns.resolver.Answer | None, DiscoveryError | None]":
        """SRV records, or why they cannot be told."""
        try:
            return await self._ask(service, "SRV"), None
        except DiscoveryError as error:
            if self._had_pods:
                raise
            return None, error

    async def _pods(self, answer: "dns.resolver.Answer") -> list[Endpoint]:
        """Known by the first part of their names, as Kubernetes calls them; one that has gone since is left
        out. Their certificates have that part before the name that was asked for, as far as that was written:
        what a search list adds is known only in the cluster."""
        brought, turns = _brought(answer), asyncio.Semaphore(AT_ONCE)

        async def endpoint(target: str, port: int) -> Endpoint | None:
            async with turns:
                hosts = brought.get(target) or await self._hosts(target)
            pod, long = target.partition(".")[0], target.removesuffix(".")
            short = f"{pod}.{self._of_pods}"
            tls_name = short if f"{long}.".startswith(f"{short}.") else long
            return Endpoint(join(hosts[0], port), pod, tls_name) if hosts else None

        pods = sorted({(record.target.to_text(), record.port) for record in answer} - {(".", 0)})
        found = await asyncio.gather(*(endpoint(*pod) for pod in pods))
        return [each for each in found if each]

    async def _hosts(self, name: str) -> list[str]:
        for kind in ("A", "AAAA"):
            if answer := await self._ask(name, kind):
                return sorted(record.address for record in answer)
        return []

    async def _ask(self, name: str, kind: str) -> "dns.resolver.Answer | None":
        """None where there is no such name, or no such record of it."""
        from dns.exception import DNSException
        from dns.resolver import NXDOMAIN

        try:
            answer = await self._resolver.resolve(name, kind, raise_on_no_answer=False)
        except NXDOMAIN:
            return None
        except (DNSException, OSError) as error:
            raise DiscoveryError(f"{self.flag}: {kind} of {name}: {_plain(error)}") from error
        return answer if answer.rrset else None


def _brought(answer: "dns.resolver.Answer") -> Mapping[str, list[str]]:
    """Addresses by name that came with an answer, of each name as `_hosts` has them."""
    found: dict[str, list[str]] = {}
    by_kind = sorted(answer.response.additional, key=lambda records: int(records.rdtype))  # A before AAAA.
    for records in by_kind:
        addresses = sorted(record.address for record in records if hasattr(record, "address"))
        if addresses:
            found.setdefault(records.name.to_text(), addresses)
    return found


def _plain(error: Exception) -> str:
    """The same text each time for the same trouble: what dnspython says has times and tries in it."""
    kinds = {"LifetimeTimeout": "no answer", "NoNameservers": "the name server cannot tell"}
    return kinds.get(type(error).__name__, f"{type(error).__name__}: {error}")


def _resolver(name: DnsName) -> "dns.asyncresolver.Resolver":
    try:
        asyncresolver: Any = importlib.import_module("dns.asyncresolver")
        nameserver: Any = importlib.import_module("dns.nameserver")
    except ModuleNotFoundError as error:
        raise DiscoveryError(
            f"{name.flag}: names are looked up with dnspython, which is not installed: "
            "pip install 'lorafleet[scheduler]'"
        ) from error
    try:
        resolver: dns.asyncresolver.Resolver = asyncresolver.Resolver(configure=name.server is None)
    except Exception as error:  # No resolv.conf, or one that cannot be used.
        raise DiscoveryError(f"{name.flag}: this machine names no name server ({error})") from error
    if name.server:
        host, port = name.server
        resolver.nameservers = [nameserver.Do53Nameserver(host, port)]
    resolver.use_search_by_default = True
    resolver.timeout, resolver.lifetime = TRY_S, LIFETIME_S
    return resolver
