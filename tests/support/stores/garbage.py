"""What a store keeps that it should not: nothing that stays for good may be left by a crash."""

from adapter_store.redis_store.index import Claim
from tests.support.stores.media import DiskMedium, Medium, RedisMedium


def garbage(medium: Medium) -> list[str]:
    """In words; of a store that was opened since the crash."""
    if isinstance(medium, DiskMedium):
        return _in_folder(medium)
    if isinstance(medium, RedisMedium):
        return _in_redis(medium)
    raise TypeError(f"a medium of no known kind: {medium!r}")


def _in_folder(medium: DiskMedium) -> list[str]:
    left = [f"{path.name} is left in tmp" for path in (medium.root / "tmp").iterdir()]
    named = {digest for digest in medium.digests() if any(digest in name for name in _records(medium))}
    pushes = (path.name for path in (medium.root / "pushes").iterdir())
    unnamed = [*(medium.digests() - named), *(each for each in pushes if not _is_named(medium, each))]
    return left + [f"no record names {each}" for each in unnamed]


def _is_named(medium: DiskMedium, push: str) -> bool:
    """By the record of whom it belongs to."""
    tenant, name, files = push.split("+")
    record = medium.root / "names" / tenant / f"{name}.json"
    return record.exists() and files in record.read_text()


def _records(medium: DiskMedium) -> list[str]:
    return [path.read_text() for path in (medium.root / "names").glob("*/*.json")]


def _in_redis(medium: RedisMedium) -> list[str]:
    """Each chunk is a published one's, expires by itself, or belongs to a claim that will fall due."""
    problems = []
    indexes = [*map(medium.index, medium.digests()), *map(medium.pushed_index, medium.push_keys())]
    published = {chunk for index in indexes for chunk in chunks_of(medium, index.claim)}
    problems += [f"no record names {key}" for key in medium.push_keys() if not _names(medium, key)]
    stored = chunk_keys(medium)
    problems += [f"chunk {key} is gone" for key in published - stored]
    with medium.server.client() as client:
        claims = client.zrange(medium.keys.pending, 0, -1) + list(client.smembers(medium.keys.doomed))
        claimed = {chunk for text in claims for chunk in chunks_of(medium, Claim.parse(text.decode()))}
        for key in published & stored:
            if client.ttl(key) != -1:
                problems.append(f"published chunk {key} expires")
            if key in claimed:
                problems.append(f"published chunk {key} is claimed")
        for key in stored - published:
            if client.ttl(key) <= 0 and key not in claimed:
                problems.append(f"chunk {key} belongs to nobody")
    return problems


def _names(medium: RedisMedium, push: str) -> bool:
    owner, _, files = push.removeprefix(medium.keys.pushes).partition(":")
    tenant, _, name = owner.partition("/")
    with medium.server.client() as client:
        record = client.get(medium.keys.record(tenant, name))
    return record is not None and files in record.decode()


def chunk_keys(medium: RedisMedium) -> set[str]:
    return {key for key in medium.all_keys() if ":{sha256:" in key}


def chunks_of(medium: RedisMedium, claim: Claim) -> set[str]:
    return {medium.keys.chunk(claim.digest, claim.upload, number) for number in range(claim.num_chunks)}
