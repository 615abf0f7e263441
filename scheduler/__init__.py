"""The scheduler takes requests and decides which executor runs each, and when. It never imports torch."""

import os

# gRPC reads it while it is imported. By default each connection that is no TLS has a line in the log, as a
# scan of ports makes thousands of; its errors are still there.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
