"""What a service must have before it listens where others can reach it."""

import ipaddress
from collections.abc import Mapping


def is_loopback(host: str) -> bool:
    """host: a name or an address, in brackets or not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def unmet_beyond_loopback(host: str, settings: Mapping[str, object]) -> str:
    """What is wrong and what to do, when others can reach `host` and one of these flags is not set; or ""."""
    missing = [flag for flag, value in settings.items() if not value]
    if is_loopback(host) or not missing:
        return ""
    return (
        f"--listen: {host} can be reached from outside: set {', '.join(missing)} (`lorafleet certs` makes "
        "certificates), listen on 127.0.0.1, or set --insecure where a proxy or mesh does all that"
    )


def unmatched_pair(cert_flag: str, cert: object, key_flag: str, key: object) -> str:
    """The same for a certificate without its key, or a key without its certificate."""
    if bool(cert) == bool(key):
        return ""
    return f"{cert_flag} and {key_flag} go together: give both, or none"
