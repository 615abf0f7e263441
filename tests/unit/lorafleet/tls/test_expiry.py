"""The ends of certificates are those that a whole X.509 library reads from the same files."""

import datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from lorafleet.tls.expiry import ends
from lorafleet.tls.files import Tls, WatchedFiles, read
from tests.support.services.certificates import make_certificates

Key = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey
KEYS: dict[str, Key] = {
    "ec": ec.generate_private_key(ec.SECP384R1()),
    "ed25519": ed25519.Ed25519PrivateKey.generate(),
    "rsa": rsa.generate_private_key(65537, 2048),
}
# Some before and after 2050, from when on the year is written in another way.
ENDS = ("1999-12-31T23:59:59", "2049-12-31T23:59:59", "2050-01-01T00:00:00", "9999-12-31T23:59:59")


def certificate(key: Key, end: datetime.datetime, *, num_names: int = 1) -> bytes:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a" * 64)] * num_names)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(1990, 1, 1))
        .not_valid_after(end)
    )
    signed = builder.sign(key, None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("end", ENDS)
def test_an_end_is_what_the_certificate_says(key: str, end: str) -> None:
    for num_names in (1, 5, 1000):  # Lengths of one byte, of two and of three.
        pem = certificate(KEYS[key], datetime.datetime.fromisoformat(end), num_names=num_names)
        expected = x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()
        assert ends(b"a note\n" + pem) == [expected]


def test_of_a_chain_the_first_end_counts_and_of_cas_the_last(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    leaf, ca, other = ((tmp_path / f"{name}.crt").read_bytes() for name in ("good", "ca", "other"))
    early = certificate(KEYS["ec"], datetime.datetime(2001, 1, 1))
    (tmp_path / "good.crt").write_bytes(leaf + early)
    (tmp_path / "ca.crt").write_bytes(early + ca + other)
    pem = read(made.tls("good"))
    assert pem.cert_end == ends(early)[0] and pem.ca_end == max(ends(ca + other))
    assert read(Tls()).cert_end is None


def test_a_renewed_certificate_is_followed(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    files = WatchedFiles(made.tls("expired"))
    told = dict(files.expiries("own", "ca"))
    first = told["own"]()
    made.authority.renew("expired", 3)
    assert told["own"]() > first and told["ca"]() == ends(made.ca.read_bytes())[0]
    assert dict(WatchedFiles(made.tls("good", None)).expiries("own", "ca")).keys() == {"own"}


@pytest.mark.parametrize("content", [b"", b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"])
def test_what_is_no_certificate_is_told(content: bytes) -> None:
    with pytest.raises(ValueError, match="no certificate"):
        ends(content)
