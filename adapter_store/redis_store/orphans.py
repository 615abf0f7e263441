"""Finds chunks that no published upload has and that will not expire: what a bug or a hand left."""

from adapter_store.redis_store.index import Claim
from adapter_store.redis_store.keys import Keys
from adapter_store.redis_store.primary import Primary
from adapter_store.redis_store.scan import scan

NO_EXPIRY = -1


def find_orphans(primary: Primary, keys: Keys) -> list[str]:
    """All orphans as "sha256:<hex> (upload <id>)", sorted. Walks all keys of the database."""
    uploads: dict[tuple[str, str], str] = {}  # One of its chunks' keys each.
    for key in scan(primary, f"{keys.namespace}:{{sha256:*"):
        digest, _, upload = key.partition("{")[2].partition("}")[0].rpartition(":")
        uploads.setdefault((digest, upload), key)
    expected = _expected(primary, keys, {digest for digest, _ in uploads})
    suspects = {upload: key for upload, key in uploads.items() if upload not in expected}
    lives = primary.run(*(("TTL", key) for key in suspects.values()))
    orphans = (upload for upload, life in zip(suspects, lives, strict=True) if life == NO_EXPIRY)
    return sorted(f"{digest} (upload {upload})" for digest, upload in orphans)


def _expected(primary: Primary, keys: Keys, digests: set[str]) -> set[tuple[str, str]]:
    """Uploads that are published, and those that are under way or about to be removed."""
    asked = [("HGET", keys.blob(digest), "claim") for digest in sorted(digests)]
    asked += [("HGET", key, "claim") for key in scan(primary, f"{keys.pushes}*")]
    *claims, pending, doomed = primary.run(*asked, ("ZRANGE", keys.pending, 0, -1), ("SMEMBERS", keys.doomed))
    parsed = (Claim.parse(claim.decode()) for claim in [*claims, *pending, *doomed] if claim)
    return {(claim.digest, claim.upload) for claim in parsed}
