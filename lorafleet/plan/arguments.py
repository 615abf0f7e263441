"""What the arguments of `lorafleet plan` come to: a load, goals, and the room for a fleet."""

import argparse
from dataclasses import dataclass

from lorafleet.bench.errors import BenchError
from lorafleet.bench.lengths import Lengths
from lorafleet.plan.cards import memory_of
from lorafleet.plan.load import Description, Load, Ranks, described, traced
from lorafleet.plan.report import Sizes
from lorafleet.plan.search import Goals, Room
from lorafleet.plan.simulator import Question
from lorafleet.plan.sizes import ModelSizes, Settings
from lorafleet.terminal import size

# As an executor counts slots (executor/slot_count.py).
SLOT_COUNTS = (8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 192, 256, 384, 512)
# More of them take hours.
_MAX_REQUESTS = 1_000_000
# Host memory is tried for all adapters of the load, for half of them, and so on; in whole pieces.
_HOST_PIECE = 1 << 28


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that the arguments say, checked."""

    args: argparse.Namespace
    model: ModelSizes
    load: Load
    goals: Goals
    room: Room
    sizes: Sizes
    settings: Settings

    @classmethod
    def of(cls, args: argparse.Namespace) -> "Plan":
        """Raises BenchError, OSError."""
        memory = memory_of(args.card)
        model = ModelSizes.of(args.model, attention_only=args.attention_only)
        load, settings = _load(args), Settings(seats=args.seats)
        if load.seconds <= args.warm_up:
            raise BenchError(
                f"no request comes after the --warm-up of {args.warm_up:g} s: the last comes at "
                f"{load.seconds:g} s"
            )
        if load.longest > model.max_model_len:
            raise BenchError(f"a request of {load.longest} tokens: {model.name} takes {model.max_model_len}")
        slots = _slots_that_fit(model, memory, load, settings, args.card)
        sizes = Sizes(
            load.max_rank,
            model.slot_bytes(load.max_rank),
            model.adapter_bytes(load.max_rank),
            {each: model.kv_tokens(memory, each, load.max_rank, settings) for each in slots},
        )
        room = Room(args.most_executors, slots, _host_bytes(model, load, args.most_host_memory))
        goals = Goals(args.ttft_ms / 1e3, args.stream_tokens_s)
        return cls(args, model, load, goals, room, sizes, settings)

    def question(self, costs: str) -> Question:
        rank_bytes = self.sizes.adapter_bytes // self.load.max_rank
        return Question(
            costs=costs,
            load=self.load,
            rank_bytes=rank_bytes,
            store_bytes_s=self.args.store_rate,
            seats=self.settings.seats,
            step_tokens=self.settings.step_tokens,
            counted_from_s=self.args.warm_up,
            seed=self.args.seed,
        )


def _load(args: argparse.Namespace) -> Load:
    if not 0 <= args.warm_up < float("inf"):
        raise BenchError(f"--warm-up {args.warm_up:g} is no number of seconds from 0 on")
    ranks = Ranks.parse(args.ranks)
    if args.trace is None:
        description = Description(
            args.rate,
            args.warm_up + args.seconds,
            Lengths.parse(args.prompt_tokens),
            Lengths.parse(args.output_tokens),
            args.popularity,
            args.adapters,
            ranks,
            args.burstiness,
        )
        if description.rate * description.seconds > _MAX_REQUESTS:
            raise BenchError(
                f"--rate and --seconds are more than {_MAX_REQUESTS:,} requests: lower one of them"
            )
        return described(description, args.seed)
    return traced(args.trace, ranks)


def _slots_that_fit(model: ModelSizes, memory: int, load: Load, settings: Settings, card: str) -> list[int]:
    """Up to a slot for each adapter of the load, as many as leave the KV cache its floor."""
    enough = next((each for each in SLOT_COUNTS if each >= len(load.ranks)), SLOT_COUNTS[-1])
    floor = model.kv_floor(settings)
    fitting = [
        each
        for each in SLOT_COUNTS
        if each <= enough and model.kv_tokens(memory, each, load.max_rank, settings) >= floor
    ]
    if not fitting:
        slot, weights = size(model.slot_bytes(load.max_rank)), size(model.weight_bytes)
        raise BenchError(
            f"{model.name} does not fit a {card} with {SLOT_COUNTS[0]} slots of rank {load.max_rank} ({slot} "
            f"each) beside weights of {weights} and a KV cache for --seats {settings.seats}: lower ranks, "
            "--attention-only or fewer seats make room"
        )
    return fitting


def _host_bytes(model: ModelSizes, load: Load, most: int) -> list[int]:
    """In ascending order; at least for two adapters, as one is read while another is copied."""
    largest = model.adapter_bytes(load.max_rank)
    wanted = [max(2 * largest, sum(map(model.adapter_bytes, load.ranks.values())))]
    while wanted[-1] > 2 * largest:
        wanted.append(max(2 * largest, wanted[-1] // 2))
    pieces = {-(-each // _HOST_PIECE) * _HOST_PIECE for each in wanted}
    if min(pieces) > most:
        raise BenchError(f"--most-host-memory {size(most)} is less than two adapters of {size(largest)} take")
    return sorted({min(each, most) for each in pieces})
