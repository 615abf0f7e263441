"""rank_pattern and alpha_pattern: PEFT's own lookup is the oracle; hostile patterns cost nothing."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from adapter_store.model_spec import module_path
from adapter_store.peft.patterns import BadPattern, Patterns
from tests.support.adapters.peft import DENSE

PATHS = [module_path(f"layers.{i}.{kind}") for i in (0, 1, 11) for kind in DENSE]
PATHS += ["model.embed_tokens", "lm_head"]
PATTERNS = [
    "k_proj",
    "proj",
    "^k_proj",
    "^lm_head",
    "layers.1.self_attn.k_proj",
    "layers\\.1\\.self_attn\\.k_proj",
    "layers\\.[1-9]\\..*k_proj",
    ".*\\.gate_proj",
    "(q_proj|k_proj)",
    "q_proj|k_proj",
    "(model\\.)?layers\\.\\d+\\.mlp\\.(?:gate|up)_proj",
    "model.layers.0.self_attn.q_proj",
    "[qk]_proj",
    ".*",
    "",
]


@given(st.lists(st.sampled_from(PATTERNS), unique=True), st.sampled_from(PATHS))
def test_lookup_is_pefts(patterns: list[str], path: str) -> None:
    values = {pattern: index + 1 for index, pattern in enumerate(patterns)}
    expected = values.get(get_pattern_key(values.keys(), path), 0)
    assert Patterns.compile(values).lookup(path, 0) == expected


@pytest.mark.parametrize(
    ("pattern", "complaint"),
    [
        ("(a+)+", "repeats a group"),
        ("(a|a)*", "repeats a group"),
        ("(?:a?){99}", "repeats a group"),
        ("(?=a)", "look-around"),
        ("(?i)a", "look-around"),
        ("(?P<x>a)(?P=x)", "look-around"),
        ("(a)\\1", "back-reference"),
        (".*.*.*.*", "too many ways"),
        ("a?" * 30, "too many ways"),
        ("x" * 600, "longer than"),
        ("[", "not a regular expression"),
        ("a**", "not a regular expression"),
        (")(", "not a regular expression"),
        ("a{99999999999}", "not a regular expression"),
    ],
)
def test_risky_or_broken_patterns_are_refused(pattern: str, complaint: str) -> None:
    with pytest.raises(BadPattern, match=complaint):
        Patterns.compile({pattern: 1})


def test_the_budget_is_shared_by_all_patterns() -> None:
    with pytest.raises(BadPattern, match="too many ways"):
        Patterns.compile({".*.*.*x" + "y" * i: 1 for i in range(3)})
    Patterns.compile({f"model.layers.{i}.self_attn.q_proj": 1 for i in range(1000)})


@pytest.mark.parametrize("pattern", [".*.*.*!", "[a-z._0-9]*[a-z._0-9]*[a-z._0-9]*!", "_?l?" * 6 + ".*!"])
def test_the_worst_admitted_pattern_ends(pattern: str) -> None:
    patterns = Patterns.compile({pattern: 1})
    paths = [module_path(f"layers.{i}.{kind}") for i in range(100) for kind in DENSE]
    assert not any(
        patterns.lookup(path, 0) for path in paths
    )  # an exponential one would not end in a lifetime


def test_patterns_may_be_shared_by_threads() -> None:
    patterns = Patterns.compile({"k_proj": 2})
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: patterns.lookup("model.layers.0.self_attn.k_proj", 0), range(20))) == {
            2
        }
