"""gRPC channel arguments that bound what connections take of a server, tried with grpcio 1.85."""

import json

MAX_STREAMS = 100
MAX_CONNECTIONS = 2048


def connection_limits(max_streams: int, max_connections: int) -> list[tuple[str, int]]:
    """The options of a server: `max_streams` at once on one connection, and `max_connections` in all."""
    return [
        # Calls that the event loop has not taken yet wait in one line of the whole server, and when it is too
        # long gRPC ends any of them as CANCELLED: so one connection, which opens streams or opens and resets
        # them, decides about all others. A stream that is reset counts until the loop has seen it.
        ("grpc.max_concurrent_streams", max_streams),
        # Streams beyond that are refused, by default even those of a client that has just been told that one
        # of its streams has ended. Such a client is within its right.
        ("grpc.http.overload_protection", 0),
        # Those beyond are closed as soon as they are made.
        ("grpc.max_allowed_incoming_connections", max_connections),
        # A body that nobody reads waits in a window of 64 KiB; measuring a fast connection would make it
        # megabytes. It grows to the message that is being read all the same.
        ("grpc.http2.bdp_probe", 0),
    ]


def more_connections(most: int) -> list[tuple[str, int | str]]:
    """The options of a client: so many connections for one channel, made when a server takes no more streams
    on the ones that there are. grpcio before 1.80 knows nothing of it and waits until a stream has ended."""
    scaling = {"connectionScaling": {"maxConnectionsPerSubchannel": most}}
    return [
        ("grpc.service_config", json.dumps(scaling)),
        ("grpc.max_connections_per_subchannel_cap", most),
    ]
