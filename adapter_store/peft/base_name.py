"""Whether an adapter's config names the base that is served: one model has a path on every machine."""

import re
from pathlib import PurePosixPath

from adapter_store.model_spec import ModelSpec

# Where huggingface_hub keeps what it downloads: its folders are named by commits.
_CACHED = re.compile(r"(?:^|/)models--(?:[^/]+--)?(?P<name>[^/]+)/snapshots/[^/]+$")
_DOT = "___"  # ModelScope's cache writes a dot so


def model_name(path: str) -> str:
    """The model's own name, of a repository or of a folder on any machine; empty when there is none."""
    plain = str(PurePosixPath(path.replace("\\", "/")))
    cached = _CACHED.search(plain)
    return (cached["name"] if cached else PurePosixPath(plain).name).replace(_DOT, ".")


def is_name_of(path: str, spec: ModelSpec) -> bool:
    """Also for a config that names no base. Capitals do not count: trainers write names in small letters."""
    return model_name(path).casefold() in ("", name_of(spec).casefold())


def name_of(spec: ModelSpec) -> str:
    return model_name(spec.name if spec.folder is None else str(spec.folder))
