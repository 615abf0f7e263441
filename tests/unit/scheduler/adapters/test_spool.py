"""The folders of pushes and pulls: what tenants have of them, and what a killed scheduler leaves behind."""

import subprocess
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lorafleet.v1 import adapters_pb2 as pb
from scheduler.adapters.spool import PREFIX, Spool
from scheduler.adapters.transfer import Patience, receive_files
from scheduler.errors import TooMuchHeld

_PROGRAM = """
import sys
from pathlib import Path
from scheduler.adapters.spool import Spool
place = Spool(Path(sys.argv[1]), 100, lambda tenant: 100).place("acme")
(place.folder / "weights").write_text("half of them")
print(place.folder.parent.name, flush=True)
sys.stdin.read()
"""


def _spool(folder: Path) -> Spool:
    return Spool(folder, 100, lambda tenant: 70)


def test_a_killed_scheduler_s_folder_is_swept_and_no_other(tmp_path: Path) -> None:
    living = _spool(tmp_path)
    kept = living.place("acme").folder
    foreign = tmp_path / "lorafleet-demo-1"
    foreign.mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(foreign)
    (tmp_path / f"{PREFIX}file").touch()
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        left = tmp_path / other.stdout.readline().strip()
        _spool(tmp_path).close()
        assert left.is_dir()  # Its scheduler lives.
        other.kill()
    assert list(left.glob("*/weights"))
    own = _spool(tmp_path)
    names = {f"{PREFIX}link", f"{PREFIX}file", foreign.name, living.folder.name, own.folder.name}
    assert {each.name for each in tmp_path.iterdir()} == names
    assert kept.is_dir()
    own.close()
    living.close()
    assert not living.folder.exists()


async def test_a_tenant_has_so_many_bytes_and_is_refused_before_more_is_written(tmp_path: Path) -> None:
    async def parts(*sizes: int) -> AsyncIterator[pb.PushRequest]:
        for size in sizes:
            yield pb.PushRequest(chunk=pb.FileChunk(name="README.md", data=b"x" * size))

    spool = _spool(tmp_path)
    one, two, other = spool.place("acme"), spool.place("acme"), spool.place("rival")
    with ThreadPoolExecutor(1) as pool:
        patience = Patience(lambda: 0.0)
        await receive_files(parts(30, 10), one, 1000, pool, patience)
        with pytest.raises(TooMuchHeld, match="at most 70 at once") as caught:
            await receive_files(parts(30, 10), two, 1000, pool, patience)
        assert caught.value.reason == "SPOOL_FULL"
        assert [(two.folder / "README.md").stat().st_size] == [30]
        with pytest.raises(TooMuchHeld, match="there are too many bytes"):
            await receive_files(parts(30, 10), other, 1000, pool, patience)
        one.give_back()
        await receive_files(parts(10), spool.place("acme"), 1000, pool, patience)
    two.give_back()
    other.give_back()
    assert not other.folder.exists()
    spool.close()
