"""Credentials of gRPC from TLS files. gRPC itself speaks TLS 1.2 and 1.3, and nothing before."""

import grpc

from lorafleet.tls.files import Pem, Tls, WatchedFiles, read


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """The credentials of what the files hold now: a channel goes on with it. Raises TlsError."""
    return channel_credentials_of(read(tls))


def channel_credentials_of(pem: Pem) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)


def server_credentials(files: WatchedFiles) -> grpc.ServerCredentials:
    """Each new connection gets what the files hold then; running ones stay as they are. With a CA, who has no
    certificate of it is not let in."""
    used = files.pem

    def newer() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC, on a thread of its own, for each connection."""
        nonlocal used
        now = files.pem
        if now is used:
            return None
        used = now
        return _configuration(now)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used), newer, require_client_authentication=used.ca is not None
    )


def add_port(server: grpc.aio.Server, address: str, files: WatchedFiles | None) -> int:
    """The port that was bound; in clear without files, and never when there are some. Raises RuntimeError."""
    if files is None:
        return int(server.add_insecure_port(address))
    return int(server.add_secure_port(address, server_credentials(files)))


def spoken(files: WatchedFiles | None) -> str:
    """What a port with these files speaks, for the log."""
    if files is None:
        return "in clear"
    return "TLS" if files.tls.ca is None else "mutual TLS"


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca)
