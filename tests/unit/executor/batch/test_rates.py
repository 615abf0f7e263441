"""What an executor tells of its speed: smoothed over steps, kept while it idles, and unknown before any."""

from executor.batch.rates import RECOUNT_S, RateMeter, Rates
from executor.batch.sampling import SamplingParams
from executor.batch.sequence import Dispatch, Sequence, StopRules
from executor.events import Status
from executor.wire import Load, load_event


def sequence(prompt: int = 10, most: int = 20, computed: int = 0, new: int = 0) -> Sequence:
    dispatch = Dispatch(
        (0, "a"), "", "", tuple(range(prompt)), (), SamplingParams(), StopRules(max_new_tokens=most)
    )
    made = Sequence(dispatch, 1, 0.0, prompt + most)
    made.computed = computed
    made.token_ids.extend(range(new))
    return made


def test_nothing_is_known_before_the_first_step() -> None:
    assert RateMeter().rates([], 0.0) == Rates()
    load = load_event(Status(), Load(1, 1, 0, 0.0, 0), 0.0).load
    assert load.token_interval_us == load.tokens_per_second == load.page_in_us == load.load_us == 0


def test_rates_follow_steps_and_stay_while_it_idles() -> None:
    meter = RateMeter()
    for _ in range(500):
        meter.step(rows=64, drawn=64, seconds=0.02)
    rates = meter.rates([], now=1000.0)
    assert round(rates.token_interval, 6) == 0.02
    assert round(rates.tokens) == 3200
    assert rates.prompt_tokens == 0.0
    for _ in range(500):
        meter.step(rows=64, drawn=64, seconds=0.01)
    assert abs(meter.rates([], 1000.0).token_interval - 0.01) < 0.001


def test_prompts_count_by_the_steps_that_have_some() -> None:
    meter = RateMeter()
    for _ in range(100):
        meter.step(rows=1016, drawn=16, seconds=0.05)
        meter.step(rows=16, drawn=16, seconds=0.01)
    rates = meter.rates([], 0.0)
    assert round(rates.prompt_tokens) == 20_000
    assert abs(rates.token_interval - 0.03) < 0.001


def test_short_prompts_do_not_tell_how_fast_long_ones_are() -> None:
    """As on an H200: a step with 10 tokens of prompts takes 8.5 ms, one with 2,048 takes 53."""
    meter = RateMeter()
    for _ in range(200):
        meter.step(rows=74, drawn=64, seconds=0.0085)
    assert meter.rates([], 0.0).prompt_tokens == 0.0
    for _ in range(2):
        meter.step(rows=2112, drawn=64, seconds=0.053)
    for _ in range(200):
        meter.step(rows=74, drawn=64, seconds=0.0085)
    assert round(meter.rates([], 0.0).prompt_tokens, -3) == 39_000


def test_one_long_step_among_many_moves_little() -> None:
    meter = RateMeter()
    for _ in range(1000):
        meter.step(rows=8, drawn=8, seconds=0.01)
    meter.step(rows=8, drawn=8, seconds=0.2)
    assert meter.rates([], 0.0).token_interval < 0.012


def test_what_is_left_is_counted_a_few_times_a_second() -> None:
    meter = RateMeter()
    waiting, decoding = sequence(prompt=100, most=20), sequence(prompt=10, most=20, computed=14, new=5)
    assert meter.rates([waiting, decoding], 5.0).prompt_tokens_left == 99
    assert meter.rates([waiting, decoding], 5.0).answer_tokens_left == 20 + 15
    assert meter.rates([decoding], 5.0 + RECOUNT_S / 2).answer_tokens_left == 35
    assert meter.rates([decoding], 5.0 + RECOUNT_S).answer_tokens_left == 15
    assert meter.rates([], 5.1).answer_tokens_left == 0


def test_loads_and_page_ins_are_smoothed_and_told_in_microseconds() -> None:
    meter = RateMeter()
    for _ in range(3):
        meter.paged_in(0.002)
        meter.loaded(0.5)
    meter.loaded(1.0)
    rates = meter.rates([], 0.0)
    load = load_event(Status(rates=rates), Load(1, 1, 0, 0.0, 0), 0.0).load
    assert (load.page_in_us, load.load_us) == (2000, 600_000)


def test_times_beyond_the_wire_are_told_as_an_hour() -> None:
    load = load_event(Status(rates=Rates(load=1e9)), Load(1, 1, 0, 0.0, 0), 0.0).load
    assert load.load_us == 3_600_000_000
