"""The engine alone, for measurements: `python -m executor.bench.piped`, with the executor's settings.

No gRPC and no scheduler: JSON lines come in on stdin and go out on stdout, until stdin ends. Logs: stderr.

in:   {"ask": [{"number": n, "prompt": [ids], "output": tokens, "digest": "sha256:..." or ""}, ...]}
      {"cancel": [n, ...]}   {"drop": [digest, ...]}   {"metrics": true}
out:  {"ready": {what is fixed for the engine's life}}   first
      {"at": seconds, "tokens": [n for each token of the step], "ends": [[n, why it failed or ""], ...]}
      {"metrics": the exposition in the Prometheus text format}

Answers are greedy and end at their length alone. `at` is time.monotonic() of this machine.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from adapter_store import AdapterStoreError, WeightsSource
from executor import wire
from executor.adapters.source import open_source
from executor.batch.sequence import Dispatch
from executor.build import build_engine
from executor.config import ExecutorConfig, load_config
from executor.engine import Engine
from executor.engine_thread import Command, EngineThread
from executor.events import EngineInfo, StepEvents
from executor.metrics import Metrics
from executor.ranks.leader import kill_ranks
from lorafleet.doors.logs import set_up
from lorafleet.doors.settings import ConfigError
from lorafleet.v1 import common_pb2, executor_pb2

STOP_GRACE_S = 30.0

logger = logging.getLogger("executor")


def main() -> int:
    """Exit code 0 at the end of stdin, 1 when the engine ends, 2 when the settings cannot be used."""
    try:
        config = load_config(sys.argv[1:])
        store = open_source(config)
    except (ConfigError, AdapterStoreError) as error:
        sys.stderr.write(f"executor.bench.piped: {error}\n")
        return 2
    set_up(config.log_format, config.log_level)
    _serve(config, store)
    return 0


def _serve(config: ExecutorConfig, store: WeightsSource) -> None:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    metrics = Metrics(registry)
    pipe = _Pipe()
    thread = EngineThread(
        build=lambda wake: build_engine(config, store, metrics=metrics, wake=wake, lost=pipe.end),
        on_ready=pipe.ready,
        on_events=pipe.step,
        on_end=pipe.end,
    )
    thread.start()
    for line in sys.stdin:
        message = json.loads(line)
        if "metrics" in message:
            pipe.write({"metrics": generate_latest(registry).decode()})
        else:
            thread.submit(_command(message))
    thread.stop()
    thread.join(STOP_GRACE_S)


class _Pipe:
    """What goes out, from any thread. An engine that fails takes the process with it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def ready(self, info: EngineInfo) -> None:
        self.write({"ready": asdict(info)})

    def step(self, events: StepEvents) -> None:
        ends = [[int(end.key[1]), ""] for end in events.finished]
        ends += [[int(refused.key[1]), refused.rejection.reason] for refused in events.rejected]
        tokens = [int(token.key[1]) for token in events.tokens]
        if tokens or ends:
            self.write({"at": time.monotonic(), "tokens": tokens, "ends": ends})

    def end(self, error: Exception | None) -> None:
        if error is not None:
            logger.error("the engine ends: %s", error)
            kill_ranks()
            os._exit(1)

    def write(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()


def _command(message: Mapping[str, Any]) -> Command:
    """Raises ValueError for what is no command."""
    match message:
        case {"ask": asked}:
            dispatches = [_dispatch(one) for one in asked]
            return _for_each(Engine.add, dispatches)
        case {"cancel": numbers}:
            return _for_each(Engine.cancel, [_key(number) for number in numbers])
        case {"drop": digests}:
            return _for_each(Engine.drop, digests)
    raise ValueError(f"no such command: {sorted(message)}")


def _for_each(method: Any, arguments: list[Any]) -> Command:
    def command(engine: Engine) -> None:
        for argument in arguments:
            method(engine, argument)

    return command


def _key(number: int) -> tuple[int, str]:
    return (0, str(number))


def _dispatch(asked: Mapping[str, Any]) -> Dispatch:
    """Raises InvalidDispatch."""
    message = executor_pb2.Dispatch(
        dispatch_id=str(asked["number"]),
        request_id=str(asked["number"]),
        digest=asked["digest"],
        prompt_token_ids=asked["prompt"],
        stopping=common_pb2.Stopping(max_new_tokens=asked["output"], ignore_eos=True),
    )
    return wire.dispatch_from(message, stream=0, now=time.monotonic())


if __name__ == "__main__":
    sys.exit(main())
