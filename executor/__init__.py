"""The executor serves one base model on its device: process, wire, engine, and the heartbeat of steps."""

import os

# gRPC reads it while it is imported. By default each connection that is no TLS has a line in the log, as a
# scan of ports makes thousands of; its errors are still there.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
