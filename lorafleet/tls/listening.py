"""What a service must have before it listens where others can reach it."""

import ipaddress


def is_loopback(host: str) -> bool:
    """host: a name or an address, in brackets or not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
