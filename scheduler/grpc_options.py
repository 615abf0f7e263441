"""gRPC channel arguments of the scheduler, as a server and as a client of executors."""

MAX_MESSAGE_BYTES = 16 * 1024 * 1024

_MESSAGES: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_MESSAGES,
    ("grpc.so_reuseport", 0),  # A second server on the port is an error, not a silent half of the traffic.
    # Clients may ping every 10 s, also while a call is silent: the default is GOAWAY too_many_pings.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # And we find dead clients.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]

EXECUTOR_OPTIONS: list[tuple[str, int]] = [
    *_MESSAGES,
    # A new channel resolves and connects anew instead of sharing a connection to where the executor was.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
