"""The decoder against transformers (eager, float32), teacher-forced."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from executor.models import CausalLM, load_model
from executor.step.inputs import SequenceRows, build_step
from tests.support.adapters.tiny_models import VARIANTS, make_model, reference_logits, save_variant
from tests.support.engines.stepping import Track, make_cache, run_tracks

LENGTH = 60  # past original_max_position (24), past windows (8), over 4 blocks of 16
PROMPTS = [[(7 * i * i + 3 * i + seed * i + seed) % 128 for i in range(LENGTH)] for seed in (1, 2, 3)]
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    name: str
    model: CausalLM
    expected: list[torch.Tensor]


@pytest.fixture(scope="module", params=VARIANTS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = save_variant(request.param, tmp_path_factory.mktemp(request.param))
    model = load_model(folder, torch.float32, "cpu")
    return Case(request.param, model, [reference_logits(folder, prompt) for prompt in PROMPTS])


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


def test_whole_prompt_equals_transformers(case: Case) -> None:
    cache = make_cache(case.model, num_blocks=4, block_size=16)
    (logits,) = run_tracks(case.model, cache, [Track(PROMPTS[0], [2, 0, 3, 1], [LENGTH])])
    assert_close(logits, case.expected[0])


@pytest.mark.parametrize("block_size", [4, 16])
def test_mixed_chunks_and_decode_equal_transformers(case: Case, block_size: int) -> None:
    """Three sequences, interleaved blocks: one in uneven chunks, one token by token, one that starts late."""
    blocks = -(-LENGTH // block_size)
    cache = make_cache(case.model, 3 * blocks, block_size)
    chunks = [[7, 1, 1, 20, 31], [1] * LENGTH, [0, 0, 0, 17, 3, 0, 30, *[1] * 10]]
    tracks = [Track(PROMPTS[i], range(i, 3 * blocks, 3), chunks[i]) for i in range(3)]
    for actual, expected in zip(run_tracks(case.model, cache, tracks), case.expected, strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("llama", "llama-linear"),
        ("llama", "llama-llama3"),
        ("llama", "llama-yarn"),
        ("llama-yarn", "llama-yarn-mscale"),
        ("mistral-no-window", "mistral-window"),
        ("qwen2", "qwen2-window"),
        ("llama-tied", "smollm3"),
        ("llama", "granite"),
        ("llama", "olmo2"),
        ("phi3", "phi4-mini"),
        ("phi3", "phi3-partial"),
        ("glm4", "glm4-unbiased"),
        ("gemma2", "gemma2-uncapped-biased"),
        ("gemma3", "gemma3-capped-untied"),
    ],
)
def test_switches_show_in_the_reference(one: str, other: str, tmp_path: Path) -> None:
    """Otherwise the comparisons above would pass with the switch ignored."""
    first, second = (
        reference_logits(save_variant(name, tmp_path / name), PROMPTS[0]) for name in (one, other)
    )
    assert (first - second).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3"])
def test_bfloat16_stays_near_transformers_in_bfloat16(name: str, tmp_path: Path) -> None:
    """Rounds where transformers rounds: no farther from the float32 truth than its bfloat16 is."""
    folder = save_variant(name, tmp_path)
    model = load_model(folder, torch.bfloat16, "cpu")
    truth = reference_logits(folder, PROMPTS[0])
    (ours,) = run_tracks(model, make_cache(model, 4, 16), [Track(PROMPTS[0], range(4), [LENGTH])])
    theirs = reference_logits(folder, PROMPTS[0], torch.bfloat16)
    assert ours.dtype == torch.float32
    assert (ours - truth).abs().mean() < 1.2 * (theirs.float() - truth).abs().mean()


def test_parameters_have_the_asked_dtype_and_need_no_gradient(tmp_path: Path) -> None:
    make_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.bfloat16, "cpu")
    assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {(torch.bfloat16, False)}
    assert torch.get_default_dtype() == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_compute_logits_wants_all_rows(tmp_path: Path) -> None:
    model = load_model(save_variant("llama", tmp_path), torch.float32, "cpu")
    token_ids, ctx = build_step([SequenceRows([1, 2, 3], 0, [0], -1, [2])], make_cache(model, 1, 4), None)
    hidden = model(token_ids, ctx)
    assert model.compute_logits(hidden, ctx).shape == (1, 128)
    with pytest.raises(ValueError, match="1 rows, but the step has 3"):
        model.compute_logits(hidden[ctx.logits_rows], ctx)
