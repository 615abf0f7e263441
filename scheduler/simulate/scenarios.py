"""The named scenarios, those of the promises about placement first."""

from collections.abc import Mapping
from dataclasses import replace

from lorafleet.bench.lengths import Lengths
from scheduler.simulate.executors.settings import ExecutorSettings
from scheduler.simulate.scenario import Change, Scenario
from scheduler.simulate.traffic import Sessions, Traffic

_SMALL = ExecutorSettings(seats=64, slots=16)
_TWICE = 272.0  # Requests a second; 4 executors do 136 with the committed coefficients.

ZIPF = Scenario(
    "zipf200x8x16",
    "200 adapters by Zipf 1 over 8 executors of 16 slots, each with room for all in host memory.",
    executor=replace(_SMALL, host_bytes=20_000_000_000),
    traffic=Traffic(100.0),
)
HOT_ONE = Scenario(
    "hot-one",
    "One adapter at 100 requests/s on 8 executors.",
    adapters=1,
    executor=_SMALL,
    traffic=Traffic(100.0, popularity="one"),
    seconds=60.0,
)
HOT_TWICE = Scenario(
    "hot-2x",
    "Twice as many adapters as 8 executors have slots, all equally hot, at 80 % of what they do resident.",
    adapters=256,
    executor=replace(_SMALL, host_bytes=25_000_000_000),
    traffic=Traffic(188.0, popularity="uniform"),  # They do 238 resident.
)
SESSIONS = Scenario(
    "sessions",
    "1,000 conversations of 8 turns on 8 adapters by Zipf 1, which 8 executors share.",
    adapters=8,
    executor=replace(_SMALL, host_bytes=20_000_000_000),
    sessions=Sessions(at_once=1000),
    seconds=120.0,
    warm_s=40.0,
)
OVERLOAD = Scenario(
    "overload",
    "Twice the capacity of 4 executors, whose callers wait for 2 to 20 s.",
    executors=4,
    adapters=64,
    executor=replace(_SMALL, host_bytes=20_000_000_000),
    traffic=Traffic(_TWICE, deadline_s=(2.0, 20.0)),
    seconds=60.0,
)
DEADLINES = replace(
    OVERLOAD,
    name="deadlines",
    about="Twice the capacity of 4 executors, whose callers wait for 10 s; all adapters are equally hot.",
    traffic=Traffic(_TWICE, popularity="uniform", deadline_s=(10.0, 10.0)),
    seconds=90.0,
)
DEADLINES_ZIPF = replace(
    DEADLINES,
    name="deadlines-zipf",
    about="The same by Zipf 1: rare adapters are served in time all the same.",
    traffic=Traffic(_TWICE, deadline_s=(10.0, 10.0)),
)
DEADLINES_ONE = replace(
    DEADLINES,
    name="deadlines-one",
    about="The same with one adapter: all wait in one line.",
    adapters=1,
    traffic=Traffic(_TWICE, popularity="one", deadline_s=(10.0, 10.0)),
)
JOIN = replace(
    ZIPF,
    name="join",
    about="One of 8 executors joins after 60 s.",
    changes=(Change(60.0, "join", "executor-7"),),
)
LEAVE = replace(
    ZIPF,
    name="leave",
    about="One of 8 executors leaves after 60 s, and ends what it runs.",
    changes=(Change(60.0, "leave", "executor-3"),),
)
LOSS = replace(
    ZIPF,
    name="loss",
    about="One of 8 executors is lost after 60 s, with what it runs.",
    changes=(Change(60.0, "lose", "executor-3"),),
)
LARGE = Scenario(
    "large",
    "100 executors, 100,000 adapters by Zipf 1, 1,000 requests/s for 10 minutes.",
    executors=100,
    adapters=100_000,
    ranks=(8, 8, 8, 16, 8, 8, 16, 8, 16, 32),
    executor=ExecutorSettings(seats=128, slots=64, max_rank=32, host_bytes=32_000_000_000),
    traffic=Traffic(1000.0),
    seconds=600.0,
    warm_s=60.0,
)
SHORT = replace(
    LARGE,
    name="large-short",
    about="A quarter of a minute of a tenth of it.",
    executors=10,
    adapters=10_000,
    seconds=15.0,
    warm_s=5.0,
    traffic=Traffic(100.0),
)
ONE_CARD = Scenario(
    "one-card",
    "128 adapters by Zipf 1 over the 16 slots of one executor, as it is run on an H200 to compare.",
    executors=1,
    adapters=128,
    executor=ExecutorSettings(seats=256, slots=16, max_model_len=2048),
    traffic=Traffic(20.0, prompt=Lengths("uniform", 64, 448), output=Lengths("uniform", 32, 224)),
    seconds=60.0,
    warm_s=0.0,
    preloaded=True,
)

SCENARIOS: Mapping[str, Scenario] = {
    each.name: each
    for each in (
        *(ZIPF, HOT_ONE, HOT_TWICE, SESSIONS, OVERLOAD, JOIN, LEAVE, LOSS, LARGE, SHORT, ONE_CARD),
        *(DEADLINES, DEADLINES_ZIPF, DEADLINES_ONE),
    )
}
