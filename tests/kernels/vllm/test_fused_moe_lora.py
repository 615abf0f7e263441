"""vLLM's expert operations: the truth against float64 pair by pair, the kernels against the truth."""

import random
from dataclasses import replace

import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.launching.moe_tuning import OnceConfig, PairConfig
from kernels.vllm import fused_moe_lora as ours
from kernels.vllm.experts import launch, reference
from kernels.vllm.experts.choices import Choices
from kernels.vllm.experts.launch import PersistentConfig
from tests.kernels.stack import DEVICE
from tests.kernels.vllm.moe_step import Step, to_device

STEPS = {
    "gate and up": Step(),
    "not gated": Step(slices=1, tokens=17, rank=16),
    "down, by pair": Step(slices=1, by_pair=True, rank=20, out=70),
    "a slot is disabled": Step(disabled=(2,)),
    "experts elsewhere": Step(expert_map=(1, -1, 0, -1, 3, 2, -1, 4), tokens=10),
    "columns from an offset on": Step(slices=1, offset=13, spare_columns=5),
    "blocks of 64 in parts": Step(tokens=40, topk=1, experts=2, block_size=64, slots=(1,), slices=1),
    "one token": Step(tokens=1, slots=(0,)),
    "rank above a tile": Step(tokens=3, topk=1, rank=70, slices=3, out=9),
    "no slot": Step(slots=(-1,)),
    "no tokens": Step(tokens=0),
}
CONFIGS = {
    "pair": PairConfig(16, 32, 2, False, 4, 2, 32, 4),
    "once": OnceConfig(64, 16, 1, 4, 2, 1),
    "persistent": PersistentConfig(OnceConfig(64, 16, 2, 4, 2, 1), 3),
    "chosen": None,
}
FORMS = {"sorted": True, "unsorted": False}


def random_step(seed: int) -> Step:
    """Any shape; what is tested of it is what is tested of the named ones."""
    of = random.Random(seed)
    max_loras, by_pair = of.randint(1, 4), of.random() < 0.5
    slots = tuple(of.sample(range(-1, max_loras), of.randint(1, max_loras)))
    return Step(
        tokens=of.randint(1, 8), topk=of.randint(1, 3), experts=of.randint(3, 9), max_loras=max_loras,
        slots=slots, disabled=tuple(slot for slot in slots if slot >= 0 and of.random() < 0.2),
        block_size=of.choice([16, 32, 64]), rank=of.randint(1, 40), width=of.randint(1, 60),
        out=of.randint(1, 50), slices=of.randint(1, 3), by_pair=by_pair, offset=of.choice([0, 0, 7]),
        spare_columns=of.choice([0, 3]), seed=seed,
    )  # fmt: skip


def forms_of(steps: dict[str, Step]) -> list[object]:
    """Choices that are sorted, and those that are not; only sorted ones can be of experts elsewhere."""
    return [
        pytest.param(step, is_sorted, id=f"{name}, {form}")
        for name, step in steps.items()
        for form, is_sorted in FORMS.items()
        if is_sorted or step.expert_map is None
    ]


RANDOM = {f"random {seed}": random_step(seed) for seed in range(4)}


@pytest.mark.parametrize(("step", "is_sorted"), forms_of(STEPS | RANDOM))
def test_the_operator_on_the_cpu_is_plain_arithmetic(step: Step, is_sorted: bool) -> None:
    add_inputs = step.seed % 2 == 0
    given, (a, b, x, y) = step.choices(is_sorted), step.layer()
    wanted = step.answer(a, b, x, y, given, add_inputs)
    ours.fused_moe_lora(**step.arguments(a, b, x, y, given, add_inputs=add_inputs))
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)


def choices_of(step: Step, a: list, given: dict, device: str) -> Choices:
    names = (
        "topk_weights", "sorted_token_ids", "expert_ids", "num_tokens_post_padded", "token_lora_mapping",
    )  # fmt: skip
    there = [to_device(given[name], device) for name in names]
    ids, enabled = (to_device(given[name], device) for name in ("lora_ids", "adapter_enabled"))
    return Choices.of(a, *there, step.topk, ids, int(given["num_active_loras"]), enabled, step.block_size)


def kernels_answer(step: Step, is_sorted: bool, config, add_inputs: bool = True) -> list[torch.Tensor]:
    """(of the kernels, of the truth)."""
    given, layer = step.choices(is_sorted), step.layer()
    outputs = []
    for form, device, options in ((launch, DEVICE, {"config": config}), (reference, "cpu", {})):
        a, b, x, y = (to_device(each, device) for each in layer)
        choices = choices_of(step, a, given, device)
        routed = to_device(given["topk_weights"], device) if step.by_pair else None
        form.fused(
            y.view(choices.num_pairs, y.shape[2]), x, a, b, choices, 1 if step.by_pair else step.topk,
            step.offset, routed, add_inputs, **options,
        )  # fmt: skip
        outputs.append(y.cpu())
    return outputs


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(("step", "is_sorted"), forms_of({"down": STEPS["down, by pair"]}))
def test_forms(step: Step, is_sorted: bool, config: PairConfig | OnceConfig | None) -> None:
    torch.testing.assert_close(*kernels_answer(step, is_sorted, config), rtol=1e-5, atol=1e-5)


def one_form_of_each() -> list[object]:
    """Sorted and unsorted in turn, which is what the interpreter has time for."""
    both = forms_of({name: step for name, step in (STEPS | RANDOM).items() if step.expert_map is None})
    return [both[2 * i + i % 2] for i in range(len(both) // 2)] + forms_of(
        {"experts elsewhere": STEPS["experts elsewhere"]}
    )


@pytest.mark.parametrize(("step", "is_sorted"), one_form_of_each())
def test_kernels_of_any_shape(step: Step, is_sorted: bool) -> None:
    config = CONFIGS["once"] if step.out % 2 and step.rank <= 64 else CONFIGS["pair"]
    add_inputs = step.seed % 2 == 0
    torch.testing.assert_close(*kernels_answer(step, is_sorted, config, add_inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [CONFIGS["pair"], CONFIGS["once"]], ids=["pair", "once"])
@pytest.mark.parametrize("is_sorted", FORMS.values(), ids=FORMS)
def test_kernels_in_half_precision(is_sorted: bool, config: PairConfig | OnceConfig) -> None:
    step = replace(STEPS["gate and up"], dtype=torch.float16)
    torch.testing.assert_close(*kernels_answer(step, is_sorted, config), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("is_sorted", FORMS.values(), ids=FORMS)
def test_experts_that_share_a_weight(is_sorted: bool) -> None:
    """Gate's and up's A, or down's B, once for all experts: a view whose experts are no stride apart."""
    step = STEPS["gate and up"]
    given, (a, b, x, y) = step.choices(is_sorted), step.layer()
    # As are rows that are padded for the base model.
    x = torch.cat([x, torch.full((len(x), 8), torch.nan)], 1)
    shared = [weight[:, :1].to(DEVICE).expand(-1, step.experts, -1, -1) for weight in a]
    wanted = step.answer([weight.cpu() for weight in shared], b, x[:, : step.width], y, given)
    assert shared[0].stride(1) == 0
    choices, out = choices_of(step, a, given, DEVICE), to_device(y, DEVICE)
    b, x = to_device(b, DEVICE), to_device(x, DEVICE)
    flat = out.view(choices.num_pairs, -1)
    launch.fused(flat, x, shared, b, choices, step.topk, 0, None, True, config=CONFIGS["pair"])
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-5, atol=1e-5)
    ours.fused_moe_lora(**step.arguments([w.cpu() for w in shared], to_device(b, "cpu"), x.cpu(), y, given))
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)


def unused(step: Step) -> dict[str, object]:
    """Arguments of the two halves that shapes say again."""
    names = (
        "N", "M", "EM", "K", "num_tokens", "num_experts", "num_slices", "block_size_n", "block_size_k",
        "group_size_m", "num_warps", "num_stages", "split_k",
    )  # fmt: skip
    return {"device": torch.device("cpu"), "block_size_m": step.block_size, **dict.fromkeys(names, 1)}


def halves(step: Step, given: dict[str, object], by_place: bool) -> dict[str, object]:
    """Arguments that both halves take."""
    given = {name: value for name, value in given.items() if name != "topk_ids"}
    return {**given, **unused(step), "mul_routed_weight": step.by_pair, "use_tma": by_place}


@pytest.mark.parametrize("by_place", [False, True], ids=["by pair", "by place"])
@pytest.mark.parametrize("step", [STEPS["gate and up"], STEPS["down, by pair"]], ids=["gate and up", "down"])
def test_shrink_and_expand_by_themselves(step: Step, by_place: bool) -> None:
    """As operators, and as the kernels that serve them on a GPU, which get and leave the same cache."""
    given, (a, b, x, y) = step.choices(True), step.layer()
    wanted = step.answer(a, b, x, y, given)
    places = given["sorted_token_ids"].shape
    rows = places if by_place else (step.tokens, step.topk)
    cache = torch.zeros(step.slices, *rows, step.rank)
    ours.fused_moe_lora_shrink(cache, x, a, **halves(step, given, by_place))
    theirs = torch.zeros_like(cache, device=DEVICE)
    there, divide = choices_of(step, a, given, DEVICE), 1 if step.by_pair else step.topk
    on = [to_device(each, DEVICE) for each in (x, a, b, y, given["topk_weights"])]
    launch.shrink(theirs.flatten(1, 2), on[0], on[1], there, divide, by_place)
    torch.testing.assert_close(theirs.cpu(), cache, rtol=1e-5, atol=1e-5)
    sizes = {"max_lora_rank": step.rank, "w1_output_dim_size": step.out, "offset": step.offset}
    ours.fused_moe_lora_expand(y, cache, b, **halves(step, given, by_place), **sizes)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
    again = {**halves(step, given, by_place), **sizes, "add_inputs": False}
    ours.fused_moe_lora_expand(y.fill_(torch.nan), cache, b, **again)
    alone = step.answer(a, b, x, torch.full_like(y, torch.nan), given, add=False)
    torch.testing.assert_close(y.double(), alone, rtol=1e-5, atol=1e-5, equal_nan=True)
    routed = on[4] if step.by_pair else None
    launch.expand(
        on[3].view(there.num_pairs, -1),
        theirs.flatten(1, 2),
        on[2],
        there,
        step.offset,
        routed,
        True,
        by_place,
    )
    torch.testing.assert_close(on[3].cpu().double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("column_parallel", [True, False], ids=["gate and up", "down"])
def test_two_gpus_that_each_have_a_share(column_parallel: bool) -> None:
    """Fully sharded: A by rank and h gathered, or A by inputs and h added up; B by outputs either way."""
    step = Step(slices=1, rank=8, width=24, out=20, tokens=6)
    given, (a, b, x, y) = step.choices(True), step.layer()
    wanted = step.answer(a, b, x, y, given) - y.double()
    dim = 2 if column_parallel else 3
    caches = []
    for share in range(2):
        mine = a[0].chunk(2, dim)[share]
        own = x if column_parallel else x.chunk(2, 1)[share]
        caches.append(torch.zeros(1, step.tokens, step.topk, mine.shape[2]))
        ours.fused_moe_lora_shrink(caches[-1], own, [mine], **halves(step, given, False))
    cache = torch.cat(caches, -1) if column_parallel else caches[0] + caches[1]
    for share in range(2):
        columns = slice(share * 10, share * 10 + 10)
        y = torch.zeros(step.tokens, step.topk, 10 if column_parallel else 20)
        sizes = {"max_lora_rank": 8, "w1_output_dim_size": 10, "offset": 0 if column_parallel else share * 10}
        ours.fused_moe_lora_expand(y, cache, [b[0].chunk(2, 2)[share]], **halves(step, given, False), **sizes)
        got = y if column_parallel else y[..., columns]
        torch.testing.assert_close(got.double(), wanted[..., columns], rtol=1e-5, atol=1e-5)
        assert column_parallel or not y[..., 10 - share * 10 : 20 - share * 10].any()


@pytest.mark.parametrize(
    ("operator", "written"),
    [
        (ours.fused_moe_lora, "output"),
        (ours.fused_moe_lora_shrink, "a_intermediate_cache1"),
        (ours.fused_moe_lora_expand, "output"),
    ],
    ids=["fused", "shrink", "expand"],
)
def test_operators_declare_what_they_write(operator, written: str) -> None:
    arguments = operator.default._schema.arguments
    assert [argument.name for argument in arguments if argument.is_write] == [written]


def test_the_operator_lives_in_a_compiled_graph() -> None:
    step = STEPS["gate and up"]
    given, (a, b, x, y) = step.choices(True), step.layer()
    wanted = step.answer(a, b, x, y, given)

    def layer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ours.fused_moe_lora(**step.arguments(a, b, x * 1, y, given))
        return y * 1

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, y).double(), wanted, rtol=1e-5, atol=1e-5)


def refused() -> dict[str, tuple[str, object]]:
    """By what is wrong: (the argument that is named, its value or what makes it)."""
    return {
        "x of another type": ("qcurr_hidden_states", lambda g: g["qcurr_hidden_states"].half()),
        "x too narrow": ("qcurr_hidden_states", lambda g: g["qcurr_hidden_states"][:, 1:]),
        "x in columns": ("qcurr_hidden_states", lambda g: g["qcurr_hidden_states"].T.contiguous().T),
        "output without pairs": ("output", lambda g: g["output"].flatten(0, 1)),
        "output in columns": ("output", lambda g: g["output"].transpose(0, 1).contiguous().transpose(0, 1)),
        "columns beyond output": ("offset", lambda g: 1000),
        "slices that differ": (
            "lora_a_stacked[1]",
            lambda g: [g["lora_a_stacked"][0], g["lora_a_stacked"][1][1:]],
        ),
        "rank outermost": (
            "lora_b_stacked[0]",
            lambda g: [w.mT.contiguous().mT for w in g["lora_b_stacked"]],
        ),
        "another rank": ("max_lora_rank", lambda g: 5),
        "another topk": ("topk_weights", lambda g: g["topk_weights"][:, :1]),
        "tables of int64": ("sorted_token_ids", lambda g: g["sorted_token_ids"].long()),
        "tables of one kind": ("num_tokens_post_padded", lambda g: None),
        "flags of fewer slots": ("adapter_enabled", lambda g: g["adapter_enabled"][:1]),
        "lists of int64": ("lora_ids", lambda g: g["lora_ids"].long()),
        "blocks of 24": ("shrink_block_size_m", lambda g: 24),
        "a share that is not added": ("add_inputs", lambda g: False),
    }


@pytest.mark.parametrize("what", refused())
def test_what_does_not_fit_is_named(what: str) -> None:
    step = STEPS["gate and up"]
    given, (a, b, x, y) = step.choices(True), step.layer()
    arguments = step.arguments(a, b, x, y, given)
    named, wrong = refused()[what]
    argument = named.partition("[")[0]
    sharded = {"fully_sharded": True} if argument == "add_inputs" else {}
    before = y.clone()
    with pytest.raises(KernelArgumentError) as caught:
        ours.fused_moe_lora(**{**arguments, argument: wrong(arguments), **sharded})
    assert caught.value.argument == named
    assert torch.equal(y, before)


def test_a_block_size_is_refused_as_the_reference_does() -> None:
    step = STEPS["gate and up"]
    given, (a, b, x, y) = step.choices(True), step.layer()
    with pytest.raises(AssertionError, match="shrink_block_size_m"):
        ours.fused_moe_lora(**{**step.arguments(a, b, x, y, given), "shrink_block_size_m": 24})
