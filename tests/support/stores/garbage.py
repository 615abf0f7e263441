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
    return left + [f"no record names {digest}" for digest in medium.digests() - named]


def _records(medium: DiskMedium) -> list[str]:
    return [path.read_text() for path in (medium.root / "names").glob("*/*.json")]


def _in_redis(medium: RedisMedium) -> list[str]:
    """Each chunk is a published one's, expires by itself, or belongs to a claim that will fall due."""
    problems = []
    published = {
        chunk for digest in medium.digests() for chunk in chunks_of(medium, medium.index(digest).claim)
    }
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


def chunk_keys(medium: RedisMedium) -> set[str]:
    return {key for key in medium.all_keys() if ":{sha256:" in key}


def chunks_of(medium: RedisMedium, claim: Claim) -> set[str]:
    return {medium.keys.chunk(claim.digest, claim.upload, number) for number in range(claim.num_chunks)}
