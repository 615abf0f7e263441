"""A small certificate authority in a folder: <name>.crt beside <name>.key, in PEM form."""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CLOCK_SKEW = datetime.timedelta(hours=1)
"""For how long certificates are valid before they are made: clocks differ."""
_TEMPORARY = ".new"


class Authority:
    """A CA's certificate and key, in files that are there."""

    def __init__(self, folder: Path, name: str) -> None:
        """Raises OSError, and ValueError for files that hold something else."""
        self._folder = folder
        self.cert = x509.load_pem_x509_certificate((folder / f"{name}.crt").read_bytes())
        key = serialization.load_pem_private_key((folder / f"{name}.key").read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ValueError(f"{folder / name}.key: is not a key that was made here")
        self._key = key

    @classmethod
    def make(cls, folder: Path, name: str, subject: str, days: float) -> "Authority":
        """A new one. Raises FileExistsError, OSError."""
        key = ec.generate_private_key(ec.SECP256R1())
        usage = _key_usage(signs_certificates=True)
        builder = (
            _builder(_named(subject), _named(subject), key, days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        _write(folder, name, builder.sign(key, hashes.SHA256()), key, replace=False)
        return cls(folder, name)

    def issue(self, name: str, hosts: Sequence[str], *, server: bool, days: float) -> Path:
        """A certificate for a server that is reached by these names and addresses, or for a client that is
        called so. Raises FileExistsError, OSError."""
        names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
        usage = ExtendedKeyUsageOID.SERVER_AUTH if server else ExtendedKeyUsageOID.CLIENT_AUTH
        return self._issue(
            name, _named(hosts[0][:64]), names, x509.ExtendedKeyUsage([usage]), days, replace=False
        )

    def renew(self, name: str, days: float) -> Path:
        """The same certificate with a new key and new dates, in the place of the old one. Who reads both
        files between the two replacements finds that they do not fit. Raises OSError."""
        old = x509.load_pem_x509_certificate((self._folder / f"{name}.crt").read_bytes())
        names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        usage = old.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        return self._issue(name, old.subject, names, usage, days, replace=True)

    def issued(self) -> list[str]:
        """The names of this CA's certificates in its folder, without its own."""
        found = []
        for file in self._folder.glob("*.crt"):
            cert = x509.load_pem_x509_certificate(file.read_bytes())
            if cert.issuer == self.cert.subject and cert.subject != self.cert.subject:
                found.append(file.stem)
        return sorted(found)

    def _issue(
        self,
        name: str,
        subject: x509.Name,
        names: x509.SubjectAlternativeName,
        usage: x509.ExtendedKeyUsage,
        days: float,
        *,
        replace: bool,
    ) -> Path:
        key = ec.generate_private_key(ec.SECP256R1())
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = (
            _builder(subject, self.cert.subject, key, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(usage, critical=False)
            .add_extension(names, critical=False)
            .add_extension(authority, critical=False)
        )
        return _write(self._folder, name, builder.sign(self._key, hashes.SHA256()), key, replace=replace)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    """days: from now; an end in the past is an expired certificate."""
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, end) - CLOCK_SKEW)
        .not_valid_after(end)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _named(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.UniformResourceIdentifier(host) if "://" in host else x509.DNSName(host)


def _write(
    folder: Path, name: str, cert: x509.Certificate, key: ec.EllipticCurvePrivateKey, *, replace: bool
) -> Path:
    """The certificate's file. Raises FileExistsError unless the two may be replaced."""
    targets = folder / f"{name}.key", folder / f"{name}.crt"
    for target in targets:
        if target.exists() and not replace:
            raise FileExistsError(f"{target} is there already")
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for target, content, mode in zip(targets, (private, cert.public_bytes(pem)), (0o600, 0o644), strict=True):
        temporary = target.with_name(target.name + _TEMPORARY)
        temporary.unlink(missing_ok=True)
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        temporary.replace(target)
    return targets[1]
