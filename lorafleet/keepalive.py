"""gRPC channel arguments that find a peer which vanished without a word."""


def keepalive(time_s: float, timeout_s: float) -> list[tuple[str, int]]:
    """A peer that says nothing for `time_s` is pinged; the connection and its calls end when it does not
    answer for `timeout_s`.

    gRPC of today waits for the answer for ping_timeout, a minute by default, whatever keepalive_timeout is;
    that of before does the reverse.
    """
    timeout_ms = round(timeout_s * 1000)
    return [
        ("grpc.keepalive_time_ms", round(time_s * 1000)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
    ]
