"""A whole fleet over a Redis store: it answers as over a folder, and stands the store's absence."""

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from lorafleet import Unavailable
from tests.support.services.cluster import Cluster, Pair, wait_until
from tests.support.stores.redis_server import RedisServer

PROMPT = [17, 29, 31, 43] * 4
SLOTS = ("--max-loras", "2", "--max-lora-rank", "16")


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), "--requirepass", "hunter2") as server:
        yield server


@pytest.fixture(scope="module")
def redis_secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("secret") / "password"
    file.write_text("hunter2\n")
    return file


@pytest.fixture(scope="module")
def redis_cluster(
    cluster: Cluster, redis_server: RedisServer, redis_secret: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("redis-cluster")
    url = f"redis://127.0.0.1:{redis_server.port}?timeout=2&password_file={redis_secret}"
    with Cluster(cluster.model, folder, store_url=url) as redis_cluster:
        yield redis_cluster


@pytest.fixture(scope="module")
def fleet(redis_cluster: Cluster) -> Pair:
    """2 slots, a host tier for one adapter, and a cache folder."""
    cache = ("--cache-dir", str(redis_cluster.folder / "cache"), "--cache-bytes", "100000000")
    return redis_cluster.pair("redis", (*SLOTS, "--host-memory-bytes", "200000", *cache))


def tokens(pair: Pair, ref: str | None, token: str | None = None) -> tuple[int, ...]:
    with pair.client(token) as client:
        return tuple(client.generate(PROMPT, adapter=ref, max_new_tokens=24, ignore_eos=True).token_ids)


def test_answers_equal_those_over_a_folder(fleet: Pair, main: Pair, adapter: Callable[..., Path]) -> None:
    for name in ("redis-1", "redis-2", "redis-3"):
        with fleet.client() as here, main.client("ops") as there:
            pushed = here.adapters.push(adapter(name), name).version
            assert pushed.digest == there.adapters.push(adapter(name), name).version.digest
        assert tokens(fleet, name) == tokens(main, name, "ops") != tokens(fleet, None)


def test_aliases_move_and_old_versions_stay(
    fleet: Pair, adapter: Callable[..., Path], tmp_path: Path
) -> None:
    with fleet.client() as client:
        old = client.adapters.push(adapter("redis-1"), "book").version.digest
        before = tokens(fleet, "book")
        client.adapters.push(adapter("redis-2"), "book")
        assert tokens(fleet, "book") != before == tokens(fleet, f"book@{old}")
        client.adapters.pull("book", tmp_path / "pulled")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "pulled" / name).read_bytes() == (adapter("redis-2") / name).read_bytes()


def test_settings_and_passwords_that_change_need_no_restart(
    fleet: Pair, redis_server: RedisServer, redis_secret: Path, adapter: Callable[..., Path]
) -> None:
    with fleet.client() as client, redis_server.client(password="hunter2") as server:
        version = client.adapters.push(adapter("redis-1"), "rotating").version
        server.config_set("maxmemory-policy", "allkeys-lru")
        wait_until(lambda: fleet.scheduler.gauge("store_refuses_changes") == 1, "it is noticed")
        with pytest.raises(Unavailable, match="maxmemory-policy"):
            client.adapters.set_alias("rotating@prod", version.digest)
        server.config_set("maxmemory-policy", "noeviction")
        redis_secret.write_text("hunter3\n")
        server.config_set("requirepass", "hunter3")
        server.execute_command("CLIENT", "KILL", "SKIPME", "yes")
        client.adapters.set_alias("rotating@prod", version.digest)
        client.adapters.push(adapter("redis-2"), "rotating")
        assert tokens(fleet, "rotating@prod") == tokens(fleet, f"rotating@{version.digest}")
        wait_until(lambda: fleet.scheduler.gauge("store_refuses_changes") == 0, "it is well again")
        redis_secret.write_text("hunter2")
        server.config_set("requirepass", "hunter2")


def test_while_the_store_is_away_digests_go_on_and_aliases_do_not(
    fleet: Pair, redis_server: RedisServer, adapter: Callable[..., Path]
) -> None:
    with fleet.client() as client:
        digest = client.adapters.push(adapter("redis-3"), "away").version.digest
        cold = client.adapters.push(adapter("redis-4"), "cold").version.digest
        by_digest = f"away@{digest}"
        expected, base = tokens(fleet, by_digest), tokens(fleet, None)
        client.tokenize("hello", adapter=f"cold@{cold}")  # the scheduler has seen it, no executor has
        fleet.scheduler.wait_for_news()  # what is known was read after that of the pushes
        stream = client.stream(PROMPT, adapter="away", max_new_tokens=400, ignore_eos=True)
        streamed = [*next(stream).token_ids]

        redis_server.kill()
        wait_until(lambda: not _answers(fleet, "away"), "what is known of aliases is too old")
        with ThreadPoolExecutor(5) as pool:  # Together, for each is tried for some seconds.
            refs = ("away", "away@latest", "never-seen", f"cold@{cold}")
            asked: list[Future[object]] = [pool.submit(tokens, fleet, ref) for ref in refs]
            asked.append(pool.submit(client.adapters.push, adapter("redis-5"), "away"))
            for each in asked:
                with pytest.raises(Unavailable):
                    each.result()
        for chunk in stream:
            streamed += chunk.token_ids
        assert len(streamed) == 400
        assert tokens(fleet, by_digest) == expected
        assert tokens(fleet, None) == base

        # The cache folder outlives the process; so does what it knows when the store is back.
        redis_server.start()
        wait_until(lambda: _answers(fleet, "away"), "aliases are served again")
        assert tokens(fleet, "away") == expected
        assert tokens(fleet, f"cold@{cold}") != base


def test_a_restarted_executor_needs_no_fetch(fleet: Pair, redis_cluster: Cluster) -> None:
    entries = redis_cluster.folder / "cache" / "entries"
    before = {path: path.stat().st_ino for path in entries.iterdir()}
    expected = tokens(fleet, "redis-1")
    fleet.executor.kill()
    fleet.executor.start().wait_ready()
    wait_until(lambda: _answers(fleet, "redis-1"), "the executor is found again")
    assert tokens(fleet, "redis-1") == expected
    assert {path: path.stat().st_ino for path in entries.iterdir()} == before


def test_a_cleaner_that_empties_the_cache_under_load(
    fleet: Pair, redis_cluster: Cluster, adapter: Callable[..., Path]
) -> None:
    """What is gone from this machine is fetched again, and the executor lives."""
    names = [f"cleaned-{number}" for number in range(1, 6)]  # One fits into host memory.
    with fleet.client() as client:
        for name in names:
            client.adapters.push(adapter(name, rank=16), name)
    expected = {name: tokens(fleet, name) for name in names}
    done, cleaned = threading.Event(), [0]

    def clean() -> None:
        while not done.wait(0.005):
            for entry in (redis_cluster.folder / "cache" / "entries").iterdir():
                shutil.rmtree(entry, ignore_errors=True)
                cleaned[0] += 1

    cleaner = threading.Thread(target=clean)
    cleaner.start()
    try:
        with ThreadPoolExecutor(6) as pool:
            asked = [names[number % len(names)] for number in range(90)]
            for name, found in zip(asked, pool.map(lambda name: tokens(fleet, name), asked), strict=True):
                assert found == expected[name]
    finally:
        done.set()
        cleaner.join()
    assert cleaned[0] > len(names)


def test_no_log_has_the_password(fleet: Pair) -> None:
    for node in (fleet.scheduler, fleet.executor):
        assert node.log() and "hunter2" not in node.log()


def _answers(pair: Pair, ref: str) -> bool:
    try:
        tokens(pair, ref)
    except Unavailable:
        return False
    return True
