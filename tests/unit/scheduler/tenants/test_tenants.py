"""The file of tenants: what it may say, and that a change of it counts."""

import os
from pathlib import Path

import pytest

from scheduler.tenants.limits import TenantLimits
from scheduler.tenants.tenants import Tenants
from scheduler.watched_file import InvalidFile

DEFAULTS = TenantLimits(max_queued=7)


def written(path: Path, text: str) -> Path:
    """With another time than any file before, however fast they follow each other."""
    times = path.stat().st_mtime_ns + 1_000_000 if path.exists() else None
    path.write_text(text, encoding="utf-8")
    if times:
        os.utime(path, ns=(times, times))
    return path


def test_without_a_file_all_have_the_defaults() -> None:
    tenants = Tenants(DEFAULTS)
    tenants.look()
    assert tenants.limits("acme") == DEFAULTS


def test_a_tenant_overrides_the_file_s_defaults_key_by_key(tmp_path: Path) -> None:
    text = "[default]\nrequests_per_minute = 60\nweight = 2\n[tenants.acme]\nweight = 3.5\n"
    tenants = Tenants(DEFAULTS, written(tmp_path / "tenants.toml", text))
    assert tenants.limits("other") == TenantLimits(max_queued=7, requests_per_minute=60, weight=2)
    assert tenants.limits("acme") == TenantLimits(max_queued=7, requests_per_minute=60, weight=3.5)
    assert tenants.weight("acme") == 3.5 and tenants.max_queued("acme") == 7


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[default]\nmax_stream = 1", "default.max_stream"),
        ("[tenants.acme]\nrequests = 1", "tenants.acme.requests"),
        ("[tenants.acme]\nmax_streams = 1.5", "tenants.acme.max_streams"),
        ("[tenants.acme]\nmax_streams = true", "tenants.acme.max_streams"),
        ("[tenants.acme]\nweight = 'much'", "tenants.acme.weight"),
        ("[tenants.acme]\nweight = 0", "tenants.acme.weight"),
        ("[default]\nrequests_per_minute = -1", "default.requests_per_minute"),
        ("[default]\nrequests_per_minute = nan", "default.requests_per_minute"),
        ("[default]\nburst_seconds = inf", "default.burst_seconds"),
        (f"[default]\nrequests_per_minute = 1{'0' * 400}", "default.requests_per_minute"),
        (f"[default]\nmax_streams = 1{'0' * 400}", "default.max_streams"),
        ("[default]\nprompt_tokens_per_minute = 1e-320", "default.prompt_tokens_per_minute"),
        ("[tenants.acme]\nweight = 1e-320", "tenants.acme.weight"),
        ("[tenants]\nacme = 3", "tenants.acme"),
        ("tenants = 3", "tenants"),
        ("default = 3", "default"),
        ("[tenant.acme]\nweight = 1", "tenant"),
        ("[default", "tenants.toml"),
    ],
)
def test_what_is_wrong_is_named(text: str, names: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidFile, match=r"tenants\.toml: .*") as error:
        Tenants(DEFAULTS, written(tmp_path / "tenants.toml", text))
    assert names in str(error.value)


def test_a_change_counts_at_the_next_look_and_a_broken_file_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = written(tmp_path / "tenants.toml", "[default]\nmax_streams = 1\n")
    tenants = Tenants(DEFAULTS, file)
    written(file, "[default]\nmax_streams = 2\n")
    tenants.look()
    written(file, "[default]\nmax_streams = -2\n")
    for _ in range(3):
        tenants.look()
    assert tenants.limits("acme").max_streams == 2
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
    written(file, "[default]\nmax_streams = 3\n")
    tenants.look()
    assert tenants.limits("acme").max_streams == 3
