"""Which tokens come out: those that transformers and PEFT give, whatever was before or comes after."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from adapter_store import DiskStore, Ref
from executor.batch.sampling import SamplingParams
from tests.support.adapters.peft import load_adapter, load_base
from tests.support.engines.driver import PROMPTS, Driver, greedy, in_both_modes

Make = Callable[..., Driver]
pytestmark = in_both_modes


def test_greedy_tokens_are_those_of_transformers_and_peft(
    make_engine: Make, digests: list[str], tiny_base: Path, tiny_store: DiskStore, tmp_path: Path
) -> None:
    driver = make_engine()
    dispatches = [greedy(f"{i}", PROMPTS[i % 4], digest=d) for i, d in enumerate(["", *digests])]
    got = driver.run(*dispatches)
    for dispatch, tokens in zip(dispatches, got, strict=True):
        model = load_base(tiny_base)
        if dispatch.digest:
            name = f"a{digests.index(dispatch.digest)}"
            folder = tmp_path / name
            tiny_store.export(Ref.parse(name, "default"), folder)
            model = load_adapter(model, folder)
        expected = model.generate(
            torch.tensor([dispatch.prompt_token_ids]), max_new_tokens=16, min_new_tokens=16, do_sample=False
        )
        assert tokens == expected[0, len(dispatch.prompt_token_ids) :].tolist()
    assert driver.metric("page_ins_total") == 5


def test_preempted_sequences_go_on_where_they_were(make_engine: Make, digests: list[str]) -> None:
    dispatches = [greedy(f"{i}", PROMPTS[i], digest=digests[i], max_new_tokens=24) for i in (0, 1)]
    expected = make_engine(prefix_cache=False).run(*dispatches)
    tight = make_engine(num_kv_blocks=8, prefix_cache=False)
    assert tight.run(*dispatches) == expected
    assert tight.metric("preemptions_total") > 0


def test_prefixes_are_reused_within_one_adapter_only(make_engine: Make, digests: list[str]) -> None:
    prompt = list(range(5, 53))
    plan = ["", digests[3], digests[4], digests[3], ""]
    cold = [make_engine().run(greedy("c", prompt, digest=d))[0] for d in plan]
    driver = make_engine()
    warm = [driver.run(greedy(f"w{i}", prompt, digest=d))[0] for i, d in enumerate(plan)]
    assert warm == cold
    assert [driver.cached[0, f"w{i}"] for i in range(5)] == [0, 0, 0, 40, 40]
    together = driver.run(*(greedy(f"t{i}", prompt, digest=d) for i, d in enumerate(plan)))
    assert together == cold
    salted = driver.run(greedy("s", prompt, cache_salt=b"other"))
    assert salted == cold[:1]
    assert driver.cached[0, "s"] == 0


def test_a_resumed_dispatch_goes_on_after_what_was_delivered(make_engine: Make, digests: list[str]) -> None:
    whole = replace(
        greedy("whole", PROMPTS[0], digest=digests[3]), sampling=SamplingParams(temperature=1.0, seed=11)
    )
    tokens = make_engine().run(whole)[0]
    driver = make_engine()
    rest = driver.run(replace(whole, key=(0, "rest"), output_token_ids=tuple(tokens[:7])))[0]
    assert rest == tokens[7:]
    assert driver.tokens[0, "rest"][0].output_index == 7


def test_one_slot_serves_every_adapter_in_turn_without_leftovers(
    make_engine: Make, digests: list[str]
) -> None:
    cold = {d: make_engine().run(greedy("c", PROMPTS[0], digest=d))[0] for d in digests}
    driver = make_engine(max_loras=1)
    for number, digest in enumerate([digests[4], digests[1], digests[4], digests[2], digests[1], ""]):
        tokens = driver.run(greedy(f"{number}", PROMPTS[0], digest=digest))[0]
        if digest:
            assert tokens == cold[digest]
    base = make_engine().run(greedy("b", PROMPTS[0]))[0]
    assert tokens == base


def test_prompt_logprobs_come_once_with_the_first_token(make_engine: Make, tiny_base: Path) -> None:
    prompt = PROMPTS[2]
    driver = make_engine(max_batched_tokens=16)
    driver.run(greedy("warm", prompt), greedy("p", prompt, prompt_logprobs=3, logprobs=2))
    first, second = driver.tokens[0, "p"][:2]
    assert not second.prompt_scores and first.wants_logprobs
    assert [score.token_id for score in first.prompt_scores] == prompt
    with torch.no_grad():
        logprobs = load_base(tiny_base)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert first.prompt_scores[0].logprob is None
    got = torch.tensor([score.logprob for score in first.prompt_scores[1:]])
    expected = logprobs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert [len(score.top) for score in first.prompt_scores] == [0, *[3] * 32]
