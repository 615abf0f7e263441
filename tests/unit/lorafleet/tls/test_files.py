"""PEM files are checked before gRPC has them, and replaced while connections run."""

import logging
import os
import shutil
import ssl
import stat
from pathlib import Path

import pytest

from lorafleet.tls.authority import Authority
from lorafleet.tls.files import Tls, TlsError, WatchedFiles, read
from tests.support.services.certificates import Certificates, make_certificates


@pytest.fixture
def made(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path)


def test_a_certificate_needs_its_key() -> None:
    with pytest.raises(ValueError, match="go together"):
        Tls(cert="a.crt")


def test_what_is_read_is_what_the_files_hold(made: Certificates) -> None:
    pem = read(made.tls("good"))
    assert (pem.ca, pem.cert) == (made.ca.read_bytes(), (made.folder / "good.crt").read_bytes())
    assert read(Tls()).ca is None


@pytest.mark.parametrize("damage", ["missing", "empty", "half", "noise"])
@pytest.mark.parametrize("file", ["ca.crt", "good.crt", "good.key"])
def test_unusable_files_are_named(made: Certificates, file: str, damage: str) -> None:
    path = made.folder / file
    content = path.read_bytes()
    match damage:
        case "missing":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "half":
            path.write_bytes(content[: len(content) // 2])
        case "noise":
            path.write_bytes(bytes(range(256)))
    with pytest.raises(TlsError, match=file):
        read(made.tls("good"))


def test_another_certificates_key_is_found_out(made: Certificates) -> None:
    with pytest.raises(TlsError, match="is not the key of"):
        read(Tls(cert=made.folder / "good.crt", key=made.folder / "client.key"))


def test_a_changed_pair_is_taken_and_a_broken_one_is_told_once(
    made: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    files = WatchedFiles(made.tls("good"))
    first = files.pem
    assert files.pem is first
    kept = (made.folder / "good.key").read_bytes()
    made.authority.renew("good", 1)
    new = (made.folder / "good.key").read_bytes()
    (made.folder / "good.key").write_bytes(kept)
    with caplog.at_level(logging.INFO):
        assert [files.pem, files.pem] == [first, first]
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        (made.folder / "good.key").write_bytes(new)
        assert files.pem.key == new
        assert files.pem is files.pem
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]


def test_a_link_to_other_files_is_a_change(made: Certificates) -> None:
    """As Kubernetes replaces a mounted secret."""
    versions = [made.folder / "v1", made.folder / "v2"]
    for version, name in zip(versions, ("good", "other-name"), strict=True):
        version.mkdir()
        for end in ("crt", "key"):
            shutil.copy(made.folder / f"{name}.{end}", version / f"tls.{end}")
    data = made.folder / "data"
    data.symlink_to("v1")
    files = WatchedFiles(Tls(cert=data / "tls.crt", key=data / "tls.key"))
    first = files.pem
    (made.folder / "next").symlink_to("v2")
    os.replace(made.folder / "next", data)
    assert files.pem.cert == (versions[1] / "tls.crt").read_bytes() != first.cert


def test_keys_are_their_owners_alone_and_nothing_is_overwritten(made: Certificates) -> None:
    assert stat.S_IMODE((made.folder / "good.key").stat().st_mode) == 0o600
    assert stat.S_IMODE((made.folder / "ca.key").stat().st_mode) == 0o600
    before = (made.folder / "good.key").read_bytes()
    with pytest.raises(FileExistsError, match=r"good\.key"):
        made.authority.issue("good", ["localhost"], server=True, days=1)
    with pytest.raises(FileExistsError, match=r"ca\.key"):
        Authority.make(made.folder, "ca", "again", 1)
    assert (made.folder / "good.key").read_bytes() == before


def test_a_renewed_certificate_has_the_names_of_the_old_one(made: Certificates) -> None:
    def told() -> dict[str, object]:
        return dict(ssl._ssl._test_decode_cert(made.folder / "good.crt"))  # type: ignore[attr-defined]

    before = told()
    made.authority.renew("good", 30)
    after = told()
    assert after["subjectAltName"] == before["subjectAltName"] and after["notAfter"] != before["notAfter"]
    assert after["serialNumber"] != before["serialNumber"]
    assert made.authority.issued() == ["client", "expired", "expired-client", "good", "other-name"]
