"""Around each test: a stream goes on, and versions, aliases and files are what they were before."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lorafleet.v1 import adapters_pb2 as pb
from tests.support.adapters.broken import CONFIG, WEIGHTS, Files
from tests.support.services.cluster import Cluster
from tests.support.services.failures import Stubs, bearer
from tests.support.services.streams import Witness


@pytest.fixture(autouse=True)
def unharmed(watched: Witness, stubs: Stubs, cluster: Cluster) -> Iterator[None]:
    """Versions, aliases and files are after a failure what they were before."""

    def state() -> tuple[Any, ...]:
        listed = [
            str(call(request(tenant=tenant), metadata=bearer("ops")))
            for tenant in ("default", "acme")
            for call, request in (
                (stubs.adapters.List, pb.ListAdaptersRequest),
                (stubs.adapters.ListAliases, pb.ListAliasesRequest),
            )
        ]
        deleted = pb.ListAdaptersRequest(summary=True, deleted=True, page_size=1000)
        gone = {
            version.digest.removeprefix("sha256:")
            for version in stubs.adapters.List(deleted, metadata=bearer("ops")).versions
            if version.state == pb.VERSION_STATE_DELETED
        }
        blobs = sorted(path.name for path in (cluster.store / "blobs").iterdir() if path.name not in gone)
        return listed, blobs, list((cluster.store / "tmp").iterdir())

    before = state()
    yield
    watched.moves_on()
    assert state() == before


@pytest.fixture
def files(adapter: Callable[..., Path]) -> Files:
    folder = adapter("quiet")
    return {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}
