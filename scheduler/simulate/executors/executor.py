"""A simulated executor: commands in, and what it would say of tokens, copies and room out.

Its heartbeat is that of executor/engine.py: what came since the last step, a plan, a launch, and the end of
the step before. Steps in which those that decode go on and nothing else happens are skipped over, unless
`single_steps` is set: both give the same.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from scheduler.fleet.residency import Residency
from scheduler.fleet.state import Limits, Report
from scheduler.simulate.adapters import MODULES, Catalog
from scheduler.simulate.clock import Clock
from scheduler.simulate.costs import Costs
from scheduler.simulate.executors.batch import Batch
from scheduler.simulate.executors.copies import Copies
from scheduler.simulate.executors.flights import Flight, Flights
from scheduler.simulate.executors.kv import Kv
from scheduler.simulate.executors.messages import Dispatched, Said, Stream, cold_line
from scheduler.simulate.executors.pace import Pace
from scheduler.simulate.executors.rates import RateWatch
from scheduler.simulate.executors.sequence import Sequence
from scheduler.simulate.executors.settings import ExecutorSettings
from scheduler.simulate.executors.slots import Slots
from scheduler.simulate.executors.tiers import Disk, Host, Loads

LOAD_INTERVAL_S = 1.0


class Executor:
    """One process, with its streams, its engine and its loaders."""

    def __init__(
        self,
        clock: Clock,
        name: str,
        settings: ExecutorSettings,
        costs: Costs,
        catalog: Catalog,
        *,
        single_steps: bool = False,
    ) -> None:
        """Raises ValueError where its host memory holds no adapter."""
        if settings.host_bytes < catalog.largest:
            raise ValueError(
                f"host_bytes is {settings.host_bytes}, and the largest adapter takes {catalog.largest}"
            )
        self.name = name
        self.settings = settings
        self.num_page_ins = 0
        self.num_preempted = 0
        self._clock = clock
        self._costs = costs
        self._sizes = catalog.sizes
        self._single_steps = single_steps
        self._slots = Slots(settings.slots, catalog.ranks)
        self._host = Host(settings.host_bytes, catalog.largest, catalog.sizes)
        self._disk = Disk(settings.disk_bytes, catalog.sizes)
        self.loads = Loads(self._host, self._disk, costs.load, settings.loader_threads, catalog.sizes)
        self.batch = Batch(
            Kv(settings.kv_blocks, settings.block_size),
            self._slots,
            max_batched_tokens=settings.max_batched_tokens,
            max_page_ins=settings.page_ins_per_step,
            aging_s=settings.aging_s,
        )
        self._pace = Pace(costs, settings.slots)
        self._streams: list[Stream] = []
        self._of: dict[str, Stream] = {}  # By dispatch.
        self._users: Counter[str] = Counter()  # Adapters of what lives here, or holds something still.
        self._room: list[Sequence] = []  # Was promised a seat, and waits for it.
        self._inbox: list[Sequence] = []
        self._cancelled: list[Sequence] = []
        self._flights = Flights(self.batch, costs)
        self._rates = RateWatch()
        self._copies = Copies(self._slots, self._host, self._disk, catalog.sizes)
        self._beat_at: float | None = None
        self._beat_number = 0
        self._arrivals = 0
        self._told: tuple[int, int, tuple[tuple[str, float], ...]] | None = None
        clock.at(clock.now + LOAD_INTERVAL_S, self._watch)

    # What schedulers do.

    @property
    def limits(self) -> Limits:
        chosen = self.settings
        return Limits(
            chosen.max_model_len, chosen.max_rank, MODULES, chosen.slots, chosen.seats, knows_waits=True
        )

    def preload(self, digests: Iterable[str]) -> None:
        """Before anybody is connected: adapters are in host memory, and in slots as far as there are any."""
        for digest in digests:
            self._disk.read(digest)
            self._host.put(digest, ())
            if self._slots.num_empty:
                self._slots.assign(digest)
        self._copies.take_delta()

    def connect(self, take: Callable[[Said], None]) -> Stream:
        """A new stream, with a first report on its way."""
        stream = Stream(take)
        self._streams.append(stream)
        self._clock.at(self._clock.now, self._tell_load, stream)
        return stream

    def close(self, stream: Stream) -> None:
        """Ends what it has here."""
        self._streams.remove(stream)
        for dispatch_id in list(stream.live):
            self._drop(stream, dispatch_id)
        self._wake()

    def snapshot(self) -> Residency:
        """What was told so far."""
        return Residency.from_snapshot(self._copies.number, self._copies.told)

    def receive(self, stream: Stream, dispatches: list[Dispatched]) -> None:
        now = self._clock.now
        untold = list[Sequence]()
        for each in dispatches:
            stream.received += 1
            self._arrivals += 1
            sequence = Sequence(
                each.dispatch_id,
                each.digest,
                each.known,
                each.left,
                (each.accepted_at, self._arrivals),
                now,
                each.session,
                each.shared,
            )
            (self._room if stream.received <= stream.promised else untold).append(sequence)
            stream.live[each.dispatch_id] = sequence
            self._of[each.dispatch_id] = stream
            if each.digest:
                self._users[each.digest] += 1
                stream.cold.pop(each.digest, None)
        self._told = None
        self._seat(untold)
        self._wake()

    def cancel(self, stream: Stream, dispatch_id: str) -> None:
        if dispatch_id in stream.live:
            self._drop(stream, dispatch_id)
            self._tell_room()
            self._wake()

    def hint(self, digest: str, need_by_s: float, uses: int) -> None:
        self.loads.hint(digest, self._clock.now + need_by_s, uses)
        self._wake()

    def tell_wait(self, stream: Stream, digest: str, uses: int, waiting_s: float, lasts_s: float) -> None:
        now = self._clock.now
        if not waiting_s:
            stream.cold.pop(digest, None)
        else:
            is_new = digest not in stream.cold
            stream.waits(digest, now - waiting_s, now + lasts_s)
            if is_new:
                self.hint(digest, 0.0, uses)
        self._tell_room()

    # Seats.

    @property
    def free_seats(self) -> int:
        return max(0, self.settings.seats - len(self._of))

    @property
    def free_slots(self) -> int:
        return max(0, self.settings.slots - len(self._users))

    @property
    def num_loads(self) -> int:
        return self.loads.num_loads

    @property
    def num_steps(self) -> int:
        return self._flights.num_steps

    def _seat(self, untold: list[Sequence]) -> None:
        """Those that have a seat now, then those that were told of none: they are handed back without one."""
        taken = len(self._of) - len(untold) - len(self._room)
        free = max(0, self.settings.seats - taken)
        self._inbox += self._room[:free] + untold
        del self._room[:free]

    def _drop(self, stream: Stream, dispatch_id: str) -> None:
        sequence = stream.live.pop(dispatch_id)
        del self._of[dispatch_id]
        for place in (self._room, self._inbox):
            if sequence in place:
                place.remove(sequence)
                self._release(sequence)
                return
        self._cancelled.append(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.digest:
            self._users[sequence.digest] -= 1
            if not self._users[sequence.digest]:
                del self._users[sequence.digest]

    # Beats.

    def _wake(self) -> None:
        """Something came: there is a beat at the end of the step that runs, or now."""
        now = self._clock.now
        if not self._flights:
            self._beat_once(now)
        elif self._flights.is_quiet:
            self._beat_once(self._flights.landing_after(now))

    def _beat_once(self, at: float) -> None:
        if self._beat_at is None or at < self._beat_at:
            self._beat_at = at
            self._beat_number += 1
            self._clock.at(at, self._beat, self._beat_number)

    def _beat(self, number: int) -> None:
        if number != self._beat_number:
            return
        now, self._beat_at = self._clock.now, None
        said: dict[int, Said] = {}
        self._flights.catch_up(now)
        while flight := self._flights.land(now):
            self._land(flight, said)
        self._take_commands(said)
        while not self._flights.is_full and self._launch(now):
            pass
        self._emit(said)
        self._schedule(now)

    def _launch(self, now: float) -> bool:
        """Plans a step, and has its adapters paged in. Whether there is anything to do."""
        batch = self.batch
        self.loads.collect(batch.wanted() if batch.waiting else [], self._slots, now)
        plan = batch.plan(now, self._host, self._most_tokens())
        self.num_preempted += len(plan.preempted)
        if plan.is_empty:
            return False
        paged_in = [digest for _, digest, _ in plan.page_ins]
        for digest in paged_in:
            self._host.use(digest)
        self.num_page_ins += len(paged_in)
        page_in_s = sum(self._costs.page_in.seconds(self._sizes[digest]) for digest in paged_in)
        self._flights.launch(plan, now, page_in_s)
        return True

    def _most_tokens(self) -> int | None:
        batch = self.batch
        if not batch.prompts and not batch.waiting:
            return None
        uncomputed = [each.uncomputed for each in batch.prompts]
        page_ins = min(batch.max_page_ins, self._slots.num_idle)
        for each in batch.waiting:
            if each.digest and self._slots.find(each.digest) is None:
                if not page_ins or each.digest not in self._host:
                    continue
                page_ins -= 1
            uncomputed.append(each.uncomputed)
        return self._pace.most_tokens(
            batch.num_decoding, batch.decoding_tokens, len(uncomputed), sum(uncomputed), self._slots.used_rank
        )

    def _land(self, flight: Flight, said: dict[int, Said]) -> None:
        for sequence in flight.drawing:
            if stream := self._of.get(sequence.dispatch_id):
                tokens = sequence.tokens(flight.step)
                self._say(said, stream).tokens.append((sequence.dispatch_id, tokens))
        if self._single_steps:
            self._tell_tokens(said, self._flights.landed)
        ended, gone = self.batch.landed(flight.step)
        for sequence in (*ended, *gone):
            self._release(sequence)
        for sequence in ended:
            if stream := self._of.pop(sequence.dispatch_id, None):
                del stream.live[sequence.dispatch_id]
                self._say(said, stream).finished.append((sequence.dispatch_id, sequence.cached))
        if ended and self._room:
            self._seat([])

    def _take_commands(self, said: dict[int, Said]) -> None:
        batch = self.batch
        for sequence in self._cancelled:
            if sequence.dispatch_id in batch.sequences and batch.remove(sequence, self._flights.landed):
                self._release(sequence)
        self._cancelled.clear()
        for sequence in self._inbox:
            if len(batch.sequences) < self.settings.seats:
                batch.add(sequence)
                continue
            stream = self._of.pop(sequence.dispatch_id)
            del stream.live[sequence.dispatch_id]
            self._say(said, stream).rejected.append(sequence.dispatch_id)
            self._release(sequence)
        self._inbox.clear()

    def _schedule(self, now: float) -> None:
        """When the next beat is."""
        load_ends_at = self.loads.next_end
        if not self._flights:
            if load_ends_at is not None:
                self._beat_once(max(now, load_ends_at))
            return
        if self._single_steps:
            self._beat_once(self._flights.next_landing())
            return
        landing = self._flights.last_quiet_landing()
        if load_ends_at is not None and load_ends_at < landing:
            landing = self._flights.landing_after(load_ends_at)
        self._beat_once(landing)

    # What is said.

    def _say(self, said: dict[int, Said], stream: Stream) -> Said:
        return said.setdefault(id(stream), Said())

    def _tell_tokens(self, said: dict[int, Said], landed: int) -> None:
        for stream in self._streams:
            tokens = [
                (dispatch_id, sequence.tokens(landed))
                for dispatch_id, sequence in stream.live.items()
                if sequence.decodes and sequence.began < landed
            ]
            if tokens:
                self._say(said, stream).tokens += tokens

    def _emit(self, said: dict[int, Said]) -> None:
        delta = self._copies.take_delta()
        room = (self.free_seats, self.free_slots, self._cold_line())
        tells_room = room != self._told
        self._told = room
        for stream in self._streams:
            told = said.get(id(stream))
            if told is None:
                if not delta and not tells_room:
                    continue
                told = Said()
            told.delta = delta
            if tells_room:
                told.report = self._report(stream)
            stream.take(told)

    def _tell_room(self) -> None:
        if (self.free_seats, self.free_slots, self._cold_line()) != self._told:
            self._tell_loads()

    def _tell_loads(self) -> None:
        self._told = (self.free_seats, self.free_slots, self._cold_line())
        for stream in self._streams:
            self._tell_load(stream)

    def _tell_load(self, stream: Stream) -> None:
        stream.take(Said(report=self._report(stream)))

    def _report(self, stream: Stream) -> Report:
        running = len(self.batch.running)
        free_seats = self.free_seats
        stream.promised = max(stream.promised, stream.received + free_seats)
        return Report(
            free_seats=free_seats,
            free_slots=self.free_slots,
            free_kv_blocks=self.batch.kv.num_free,
            waiting=max(0, len(self._of) - running),
            running=running,
            received=stream.received,
            cold=self._cold_line(),
            rates=self._rates.rates(self._flights, self.batch, self._clock.now),
        )

    def _cold_line(self) -> tuple[tuple[str, float], ...]:
        return cold_line(self._streams)

    def _watch(self) -> None:
        """Once a second: a report to each scheduler, and the tokens of those that decode."""
        now = self._clock.now
        self._clock.at(now + LOAD_INTERVAL_S, self._watch)
        if not self._streams:
            return
        for stream in self._streams:
            stream.lapse(now)
        said: dict[int, Said] = {}
        if not self._single_steps:
            self._tell_tokens(said, self._flights.landed_by(now))
        for stream in self._streams:
            told = said.get(id(stream)) or Said()
            told.report = self._report(stream)
            stream.take(told)
