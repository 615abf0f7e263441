"""gRPC channel arguments of the scheduler, as a server and as a client of executors."""

from lorafleet.doors.options import connection_limits
from lorafleet.keepalive import keepalive

MAX_MESSAGE_BYTES = 16 * 1024 * 1024

_MESSAGES: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]

# gRPC ends calls as CANCELLED, without a reason, that it cannot hand to the event loop: beyond a number (at
# random from the first bound on, all from the second) or a time. By default those are 1000, 3000 and 30 s,
# which a pause of the loop reaches while clients still wait. What is too much is refused by admission
# instead, with a reason; these only bound the memory that waiting calls take, 13 to 33 KB each.
_UNTAKEN_CALLS: list[tuple[str, int]] = [
    ("grpc.server.max_pending_requests", 4096),
    ("grpc.server.max_pending_requests_hard_limit", 8192),
    ("grpc.server_max_unrequested_time_in_server", 120),
]

_SERVER: list[tuple[str, int]] = [
    *_MESSAGES,
    *_UNTAKEN_CALLS,
    ("grpc.so_reuseport", 0),  # A second server on the port is an error, not a silent half of the traffic.
    # Clients may ping every 10 s, also while a call is silent: the default is GOAWAY too_many_pings.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


def server_options(keepalive_time_s: float, max_streams: int, max_connections: int) -> list[tuple[str, int]]:
    """A client that says nothing for `keepalive_time_s` is pinged, in and out of calls, however silent they
    are; its connection and calls end when it does not answer for half as long. `max_streams` at once on one
    connection, `max_connections` in all."""
    pings = keepalive(keepalive_time_s, keepalive_time_s / 2)
    return [*_SERVER, *pings, *connection_limits(max_streams, max_connections)]


EXECUTOR_OPTIONS: list[tuple[str, int | str]] = [
    *_MESSAGES,
    *keepalive(10.0, 5.0),
    # A new channel resolves and connects anew instead of sharing a connection to where the executor was.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
