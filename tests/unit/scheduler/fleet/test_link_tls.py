"""A link shows executors the certificate that its files hold when it connects."""

import asyncio
import time
from pathlib import Path

from lorafleet.tls.files import WatchedFiles
from scheduler.fleet.endpoint import Endpoint
from scheduler.fleet.link import ExecutorLink, LinkSettings
from tests.support.services.certificates import make_certificates
from tests.support.services.fakes import FakeExecutor
from tests.support.services.scheduling import until


class Deaf:
    def __getattr__(self, name: str) -> object:
        return lambda *args, **fields: None


async def test_a_new_certificate_is_shown_at_the_next_connection(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    fake = FakeExecutor("f")
    await fake.start(tls=WatchedFiles(made.tls("good")))
    settings = LinkSettings("f", tls=WatchedFiles(made.tls("client")), max_backoff_s=0.01)
    link = ExecutorLink(Endpoint(fake.address), settings, Deaf(), time.monotonic)
    running = asyncio.create_task(link.run())
    await until(lambda: fake.streams == 1)
    first = (tmp_path / "client.crt").read_bytes()
    made.authority.renew("client", 1)
    fake.break_after = 0
    await until(lambda: fake.streams == 2)
    assert fake.callers == [first, (tmp_path / "client.crt").read_bytes()] and first != fake.callers[1]
    running.cancel()
    await fake.stop()


async def test_an_executor_in_clear_is_not_spoken_to(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    fake = FakeExecutor("f")
    await fake.start()
    settings = LinkSettings("f", tls=WatchedFiles(made.tls("client")), max_backoff_s=0.01)
    link = ExecutorLink(Endpoint(fake.address), settings, Deaf(), time.monotonic)
    running = asyncio.create_task(link.run())
    await until(lambda: "does not speak TLS on this port" in link.state.detail)
    assert "leave --executor-ca-file out" in link.state.detail and fake.streams == 0
    running.cancel()
    await fake.stop()


async def test_the_name_that_discovery_found_is_looked_for_in_the_certificate(tmp_path: Path) -> None:
    """An address in a cluster is in no certificate."""
    made = make_certificates(tmp_path)
    made.authority.issue("pod", ["pod-0.fleet.test"], server=True, days=1)
    fake = FakeExecutor("f")
    await fake.start(tls=WatchedFiles(made.tls("pod")))
    settings = LinkSettings("f", tls=WatchedFiles(made.tls("client")), max_backoff_s=0.01)
    for name, served in (("pod-1.fleet.test", False), ("pod-0.fleet.test", True)):
        endpoint = Endpoint(fake.address, "pod", name)
        link = ExecutorLink(endpoint, settings, Deaf(), time.monotonic)
        running = asyncio.create_task(link.run())
        await until(lambda link=link: link.state.limits is not None or link.state.streams > 0)  # type: ignore[misc]
        assert (fake.streams > 0) is served
        running.cancel()
    await fake.stop()
