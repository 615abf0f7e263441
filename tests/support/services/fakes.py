"""Stand-ins for tests: an executor without a model behind a real gRPC server, and a clock."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import grpc

from lorafleet.tls.credentials import add_port
from lorafleet.tls.files import WatchedFiles
from lorafleet.v1 import adapters_pb2, common_pb2, executor_pb2, executor_pb2_grpc

SLOT = adapters_pb2.RESIDENCY_TIER_SLOT


class ManualClock:
    """A monotonic clock that moves when told to."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def next_token(dispatch: executor_pb2.Dispatch, index: int) -> int:
    """The default "model": depends on prompt, seed and position alone, as the real noise does."""
    return (31 * sum(dispatch.prompt_token_ids) + 7 * index + dispatch.sampling.seed) % 97 + 3


class FakeExecutor(executor_pb2_grpc.ExecutorServicer):
    """Makes one token a step for each dispatch, and reports its room after each step.

    What it does is changed by setting its attributes at any time; what came in can be read from them.
    """

    def __init__(self, fingerprint: str, *, seats: int = 8, step_s: float = 0.005) -> None:
        self.hello = executor_pb2.Hello(
            protocol_version=1,
            instance_id="fake",
            model_fingerprint=fingerprint,
            max_model_len=4096,
            max_rank=16,
            modules=["q_proj", "v_proj"],
            max_loras=4,
            max_seats=seats,
            tells_drops=True,
            knows_waits=True,
            knows_constraints=True,
        )
        self.step_s = step_s
        self.token_at: Callable[[executor_pb2.Dispatch, int], int] = next_token
        self.frozen = False  # Reports, but makes no tokens.
        self.ends_with_steps = False  # Tells ends as executors do that know of StepTokens.finished.
        self.mute = False  # Says nothing at all.
        self.crashes_on: Callable[[executor_pb2.Dispatch], bool] = lambda dispatch: (
            False
        )  # Its stream breaks.
        self.crashes = 0
        self.break_after: int | None = None  # Ends the stream once, when it has made this many tokens.
        self.load_state = executor_pb2.LOAD_STATE_READY
        self.tells_rates = False  # How fast it is, as executors do that have run.
        self.reject: Callable[[executor_pb2.Dispatch], executor_pb2.Rejected | None] = lambda dispatch: None
        self.edit_step: Callable[[executor_pb2.StepTokens], None] = lambda step: None
        self.extra_events: list[executor_pb2.ExecutorEvent] = []  # Sent with the next step.
        self.dispatches: list[executor_pb2.Dispatch] = []
        self.cancelled: list[str] = []
        self.commands: list[executor_pb2.ExecutorCommand] = []
        self.pages = False  # Tells of copies: what it runs or pins is in a slot, until it is dropped.
        self.copies: dict[str, executor_pb2.ResidencyEntry] = {}  # By digest, when it pages.
        self.loading: set[str] = set()  # Of what a load is under way, so that no drop is done.
        self.dropped: list[int] = []  # Drops that are done, to be told.
        self.pins: dict[str, dict[str, int]] = {}  # Tiers by digest and adapter.
        self.streams = 0
        self.callers: list[bytes] = []  # The certificate of each stream.
        self.running: dict[str, tuple[executor_pb2.Dispatch, int]] = {}  # With the next output index.
        self.address = ""  # Once started.
        self._unpaged: list[executor_pb2.ExecutorCommand] = []
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0, host: str = "127.0.0.1", tls: WatchedFiles | None = None) -> None:
        """Serves on a loopback port, any free one by default."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        executor_pb2_grpc.add_ExecutorServicer_to_server(self, self._server)
        self.address = f"{host}:{add_port(self._server, f'{host}:{port}', tls)}"
        await self._server.start()

    async def stop(self) -> None:
        """Dies: all streams break. gRPC may take long to end a server that somebody connects to again all the
        time, so that is not waited for."""
        if self._server:
            await asyncio.wait([asyncio.ensure_future(self._server.stop(None))], timeout=5.0)

    async def Describe(
        self, request: executor_pb2.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.Hello:
        return self.hello

    async def Execute(
        self, commands: AsyncIterator[executor_pb2.ExecutorCommand], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[executor_pb2.ExecutorEvent]:
        self.streams += 1
        self.callers.append(context.auth_context().get("x509_pem_cert", [b""])[0])
        self.running = {}
        del self.hello.residency[:]
        self.hello.residency.extend(self.copies.values())
        told = dict(self.copies)
        self.hello.residency_number = number = 0
        received = len(self.dispatches)
        reader = asyncio.create_task(self._read(commands))
        try:
            yield executor_pb2.ExecutorEvent(hello=self.hello)
            while self.break_after is None or self.break_after > 0:
                if any(self.crashes_on(dispatch) for dispatch, _ in self.running.values()):
                    self.crashes += 1
                    return
                if self.pages and not self.mute and (delta := self._page(told)):
                    number += 1
                    delta.number = number
                    yield executor_pb2.ExecutorEvent(residency=delta)
                while self.dropped:
                    done = executor_pb2.Dropped(number=self.dropped.pop(0))
                    yield executor_pb2.ExecutorEvent(dropped=done)
                if not self.mute:
                    for event in self._step(received):
                        yield event
                await asyncio.sleep(self.step_s)
            self.break_after = None
        finally:
            reader.cancel()

    async def _read(self, commands: AsyncIterator[executor_pb2.ExecutorCommand]) -> None:
        async for command in commands:
            self.commands.append(command)
            self._unpaged.append(command)
            for dispatch in command.dispatch.dispatches:
                self.dispatches.append(dispatch)
                self.running[dispatch.dispatch_id] = (dispatch, len(dispatch.output_token_ids))
            for dispatch_id in command.cancel.dispatch_ids:
                self.cancelled.append(dispatch_id)
                self.running.pop(dispatch_id, None)

    def _page(self, told: dict[str, executor_pb2.ResidencyEntry]) -> executor_pb2.ResidencyDelta | None:
        """What is not told yet, if anything."""
        in_use = {dispatch.digest for dispatch, _ in self.running.values()} - {""}
        for digest in in_use - self.copies.keys():
            self.copies[digest] = executor_pb2.ResidencyEntry(digest=digest, tier=SLOT, num_bytes=100)
        for command in self._unpaged:
            self._take_pins(command)
        needed = in_use | self.loading
        drops = [command.drop for command in self._unpaged if command.HasField("drop")]
        self._unpaged = [c for c in self._unpaged if c.HasField("drop") and c.drop.digest in needed]
        for drop in drops:
            if drop.digest not in needed:
                if drop.digest not in self.pins:
                    self.copies.pop(drop.digest, None)
                self.dropped += [drop.number] if self.hello.tells_drops and drop.number else []
        delta = executor_pb2.ResidencyDelta(
            added=[entry for digest, entry in self.copies.items() if told.get(digest) != entry],
            removed=[entry for digest, entry in told.items() if digest not in self.copies],
        )
        told.clear()
        told.update(self.copies)
        return delta if delta.added or delta.removed else None

    def _take_pins(self, command: executor_pb2.ExecutorCommand) -> None:
        if command.HasField("pin"):
            digest = command.pin.digest
            self.pins.setdefault(digest, {})[command.pin.adapter] = command.pin.tier
        elif command.HasField("unpin"):
            digest = command.unpin.digest
            self.pins.get(digest, {}).pop(command.unpin.adapter, None)
        elif command.HasField("drop"):
            digest = command.drop.digest
            pins = self.pins.get(digest, {})
            pins.pop(command.drop.adapter, None) if command.drop.adapter else pins.clear()
        else:
            return
        if not self.pins.get(digest):
            self.pins.pop(digest, None)
        if digest in self.copies or digest in self.pins:
            pinned = digest in self.pins
            self.copies[digest] = executor_pb2.ResidencyEntry(digest=digest, tier=SLOT, pinned=pinned)

    def _step(self, received_before: int) -> Iterator[executor_pb2.ExecutorEvent]:
        step = executor_pb2.StepTokens()
        ends: list[executor_pb2.ExecutorEvent] = []
        for dispatch_id, (dispatch, index) in list(self.running.items()):
            if rejected := self.reject(dispatch):
                rejected.dispatch_id = dispatch_id
                ends.append(executor_pb2.ExecutorEvent(rejected=rejected))
                del self.running[dispatch_id]
            elif not self.frozen:
                self._make_token(step, dispatch, index)
                self.running[dispatch_id] = (dispatch, index + 1)
                if index + 1 >= dispatch.stopping.max_new_tokens:
                    reason = common_pb2.FINISH_REASON_LENGTH
                    end = executor_pb2.Finished(dispatch_id=dispatch_id, reason=reason)
                    if self.ends_with_steps:
                        step.finished.append(end)
                    else:
                        ends.append(executor_pb2.ExecutorEvent(finished=end))
                    del self.running[dispatch_id]
        if step.dispatch_ids:
            self.edit_step(step)
            yield executor_pb2.ExecutorEvent(step=step)
        yield from ends
        yield from self.extra_events
        self.extra_events = []
        yield executor_pb2.ExecutorEvent(load=self._load(len(self.dispatches) - received_before))

    def _make_token(self, step: executor_pb2.StepTokens, dispatch: executor_pb2.Dispatch, index: int) -> None:
        step.dispatch_ids.append(dispatch.dispatch_id)
        step.first_output_index.append(index)
        step.token_counts.append(1)
        step.token_ids.append(self.token_at(dispatch, index))
        if self.break_after is not None:
            self.break_after -= 1

    def _load(self, received: int) -> executor_pb2.Load:
        digests = {dispatch.digest for dispatch, _ in self.running.values()} - {""}
        return executor_pb2.Load(
            state=self.load_state,
            free_seats=max(0, self.hello.max_seats - len(self.running)),
            free_slots=max(0, self.hello.max_loras - len(digests)),
            running=len(self.running),
            received_dispatches=received,
            token_interval_us=round(self.step_s * 1e6) if self.tells_rates else 0,
        )
