"""`python stand_in_service.py NAME --listen HOST:PORT ...`: health and logs of a service, and nothing else.

STAND_IN_<NAME> makes it misbehave: "die" ends it with status 3 after a last log line, "load" never gets
ready, "linger" takes 60 s to end.
"""

import argparse
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


def main(name: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--listen")
    parser.add_argument("--health-port")
    args, rest = parser.parse_known_args()
    mode = os.environ.get(f"STAND_IN_{name.upper()}", "")
    server = grpc.server(ThreadPoolExecutor(2))
    servicer = health.HealthServicer()
    if mode != "load":
        service = {"scheduler": "lorafleet.v1.Inference", "executor": "lorafleet.v1.Executor"}[name]
        servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(args.listen)
    if args.health_port:
        server.add_insecure_port(f"127.0.0.1:{args.health_port}")
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda signum, frame: stopped.set())
    sys.stderr.write(f"{os.getpid()} {' '.join(rest)}\n")
    sys.stderr.flush()
    server.start()  # from here on it is ready, and may be told to end
    if mode == "die":
        sys.stderr.write("out of luck\n")
        sys.exit(3)
    while not stopped.wait(0.2):  # a signal that arrives just before an endless wait would not end it
        pass
    sys.stderr.write("draining\n")
    sys.stderr.flush()
    if mode == "linger":
        threading.Event().wait(60)
    server.stop(None)
