"""The name of a base model, which lies under another path on every machine."""

import re
from pathlib import PurePosixPath

# Where huggingface_hub keeps what it downloads: its folders are named by commits.
_CACHED = re.compile(r"(?:^|/)models--(?:[^/]+--)?(?P<name>[^/]+)/snapshots/[^/]+$")
_DOT = "___"  # ModelScope's cache writes a dot so


def model_name(path: str) -> str:
    """The last part of a repository's name, or of a folder's path; empty when there is none."""
    plain = str(PurePosixPath(path.replace("\\", "/")))
    cached = _CACHED.search(plain)
    return (cached["name"] if cached else PurePosixPath(plain).name).replace(_DOT, ".")
