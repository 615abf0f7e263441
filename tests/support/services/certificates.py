"""Certificates for tests: a CA for the front, one for the fleet, and what is wrong in one way each."""

from dataclasses import dataclass
from pathlib import Path

from lorafleet.tls.authority import Authority
from lorafleet.tls.files import Tls

LOOPBACK = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Certificates:
    """In `folder`: good.*, expired.* and other-name.* of the CA "ca" for servers on loopback, client.* and
    expired-client.* for clients, foreign.* and foreign-client.* of the CA "other"."""

    folder: Path

    @property
    def authority(self) -> Authority:
        return Authority(self.folder, "ca")

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    def tls(self, name: str | None, ca: str | None = "ca") -> Tls:
        """name: of the certificate. ca: of whom the other side's is to be."""
        return Tls(
            ca=self.folder / f"{ca}.crt" if ca else None,
            cert=self.folder / f"{name}.crt" if name else None,
            key=self.folder / f"{name}.key" if name else None,
        )

    def flags(self, name: str, *, prefix: str = "tls", ca: str | None = None) -> list[str]:
        """Of a service. prefix: "tls" or "executor". ca: for the CA flag, which differs between them."""
        flags = [
            f"--{prefix}-cert-file", str(self.folder / f"{name}.crt"),
            f"--{prefix}-key-file", str(self.folder / f"{name}.key"),
        ]  # fmt: skip
        flag = "--tls-client-ca-file" if prefix == "tls" else "--executor-ca-file"
        return [*flags, flag, str(self.folder / f"{ca}.crt")] if ca else flags


def make_certificates(folder: Path) -> Certificates:
    folder.mkdir(exist_ok=True)
    ca = Authority.make(folder, "ca", "a CA for tests", 2)
    other = Authority.make(folder, "other", "another CA", 2)
    ca.issue("good", LOOPBACK, server=True, days=1)
    ca.issue("expired", LOOPBACK, server=True, days=-1)
    ca.issue("other-name", ["elsewhere.test"], server=True, days=1)
    ca.issue("client", ["client"], server=False, days=1)
    ca.issue("expired-client", ["client"], server=False, days=-1)
    other.issue("foreign", LOOPBACK, server=True, days=1)
    other.issue("foreign-client", ["client"], server=False, days=1)
    return Certificates(folder)
