"""A step's tensors are the reference's, whatever was described before, and at the same addresses."""

import pytest
import torch

from kernels.errors import KernelArgumentError
from kernels.vllm.kernel_meta import LoRAKernelMeta
from kernels.vllm.punica_gpu import PunicaWrapperGPU, captured_lora_counts
from tests.kernels.vllm.steps import (
    MAX_LORAS,
    SLOTS,
    Config,
    Mapping,
    random_mapping,
    reference_meta,
    slot_of,
)

ROWS = 40
LONG = ("token_lora_mapping", "token_indices_sorted_by_lora_ids")


def check(meta: LoRAKernelMeta, slots: torch.Tensor) -> None:
    expected = reference_meta(slots, MAX_LORAS)
    for name, values in expected.items():
        tensor = getattr(meta, name)
        assert tensor.dtype == torch.int32
        assert (tensor[: len(slots)] if name in LONG else tensor).tolist() == values, name
    # What the reference leaves of earlier steps would be taken for an adapter's row by who reads it.
    assert meta.token_lora_mapping[len(slots) :].tolist() == [-1] * (ROWS - len(slots))
    assert bool(meta.no_lora_flag_cpu) == bool((slots == -1).all())


def test_the_running_example() -> None:
    meta = LoRAKernelMeta.make(3, 6, "cpu")
    meta.prepare_tensors(torch.tensor([1, 1, -1, 0, 1]))
    assert meta.token_lora_mapping.tolist() == [1, 1, -1, 0, 1, -1]
    assert meta.token_indices_sorted_by_lora_ids.tolist()[:5] == [2, 3, 0, 1, 4]
    assert meta.active_lora_ids.tolist() == [-1, 0, 1, -1]
    assert meta.num_tokens_per_lora.tolist() == [1, 1, 3, 0]
    assert meta.lora_token_start_loc.tolist() == [0, 1, 2, 5, 0]
    assert (meta.no_lora_flag_cpu.tolist(), meta.num_active_loras_cpu.tolist()) == ([False], [3])
    assert meta.default_num_active_loras_cpu.tolist() == [4]


def test_random_steps_one_after_the_other() -> None:
    meta = LoRAKernelMeta.make(MAX_LORAS, ROWS, "cpu")
    addresses = [tensor.data_ptr() for tensor in meta.meta_args(ROWS, True)]
    for seed in range(60):
        slots = torch.tensor([slot_of(a) for a in random_mapping(seed, ROWS).index_mapping], dtype=torch.long)
        meta.prepare_tensors(slots)
        check(meta, slots)
        assert meta.num_active_loras_cpu.item() == (meta.active_lora_ids != -1).sum() + (
            (slots == -1).any() and not meta.no_lora_flag_cpu
        )
    assert [tensor.data_ptr() for tensor in meta.meta_args(ROWS, True)] == addresses


def test_the_arguments_are_cut_to_the_step_and_say_how_many_groups_a_graph_has() -> None:
    meta = LoRAKernelMeta.make(7, 16, "cpu", captured_lora_counts(7, True))
    meta.prepare_tensors(torch.tensor([4, -1, 2]))
    assert [len(tensor) for tensor in meta.meta_args(3, True)] == [3, 3, 8, 9, 8, 1, 1]
    assert meta.meta_args(3, True)[-1].tolist() == [4]
    assert meta.meta_args(3, False)[-1].tolist() == [8]


@pytest.mark.parametrize(
    ("slots", "what"),
    [([0, 4], "slot 4"), ([-2], "slot -2"), ([0] * (ROWS + 1), "41 rows")],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(slots: list[int], what: str) -> None:
    meta = LoRAKernelMeta.make(MAX_LORAS, ROWS, "cpu")
    meta.prepare_tensors(torch.tensor([3, 1]))
    with pytest.raises(KernelArgumentError, match=what) as refused:
        meta.prepare_tensors(torch.tensor(slots))
    assert refused.value.argument == "token_lora_mapping"
    check(meta, torch.tensor([3, 1]))


def wrapper(specialize: bool = False) -> PunicaWrapperGPU:
    return PunicaWrapperGPU(ROWS, max_batches=ROWS, device="cpu", lora_config=Config(MAX_LORAS, specialize))


def test_the_wrapper_describes_random_steps_as_the_reference_does() -> None:
    punica, vocab = wrapper(), 1000
    addresses = {name: tensor.data_ptr() for name, tensor in punica._buffers.tensors.items()}
    for seed in range(60):
        mapping = random_mapping(seed, ROWS)
        punica.update_metadata(mapping, SLOTS, MAX_LORAS + 1, vocab)
        rows = torch.tensor([slot_of(adapter) for adapter in mapping.index_mapping], dtype=torch.long)
        prompts = torch.tensor([slot_of(adapter) for adapter in mapping.prompt_mapping], dtype=torch.long)
        check(punica.token_mapping_meta, rows)
        check(punica.prompt_mapping_meta, prompts)
        assert torch.equal(punica.token_lora_indices, rows)
        assert torch.equal(punica.sampler_indices, prompts)
        padded = torch.where(prompts == -1, MAX_LORAS, prompts) * len(prompts) + torch.arange(len(prompts))
        assert torch.equal(punica.sampler_indices_padded, padded)
        offsets = torch.stack([torch.zeros_like(rows), rows.clamp(min=0) * vocab])
        assert torch.equal(punica.embeddings_indices, offsets)
        assert punica.indices_len == [len(rows), len(prompts), len(prompts), len(rows)]
        assert punica.is_prefill == mapping.is_prefill
    assert {name: tensor.data_ptr() for name, tensor in punica._buffers.tensors.items()} == addresses
    # As separate allocations are: compilers assume no less of what they have seen once.
    assert all(address % 256 == next(iter(addresses.values())) % 256 for address in addresses.values())


def test_groups_are_rounded_up_to_what_graphs_were_captured_with() -> None:
    punica = wrapper(specialize=True)
    for adapters, groups in ([(5,), 1], [(5, 0), 2], [(5, 31, 0), 4], [(5, 31, 700, 0), 4], [(0,), 0]):
        punica.update_metadata(Mapping(adapters, adapters[:1]), SLOTS, MAX_LORAS + 1, 10)
        assert punica.token_mapping_meta.meta_args(1, True)[-1].tolist() == [groups]
    assert captured_lora_counts(4, True) == [1, 2, 4, 5]
    assert captured_lora_counts(4, False) == [5]


@pytest.mark.parametrize(
    ("mapping", "slots", "argument"),
    [
        (Mapping((5, 77), (5,)), SLOTS, "index_mapping"),
        (Mapping((5,), (77,)), SLOTS, "prompt_mapping"),
        (Mapping((5,), (5,)), [None] * MAX_LORAS, "index_mapping"),
        (Mapping((0,) * (ROWS + 1), (0,)), SLOTS, "index_mapping"),
        (Mapping((9,), (9,)), [*SLOTS, 9], "token_lora_mapping"),
    ],
)
def test_the_wrapper_refuses_what_does_not_fit_and_keeps_the_last_step(
    mapping: Mapping, slots: list[int | None], argument: str
) -> None:
    punica = wrapper()
    punica.update_metadata(Mapping((5, 31), (31,)), SLOTS, MAX_LORAS + 1, 10)
    with pytest.raises(KernelArgumentError) as refused:
        punica.update_metadata(mapping, slots, MAX_LORAS + 1, 10)
    assert refused.value.argument == argument
    check(punica.token_mapping_meta, torch.tensor([1, 3]))
    assert punica.sampler_indices.tolist() == [3]


def test_a_wrapper_without_a_configuration_is_refused() -> None:
    with pytest.raises(KernelArgumentError, match="lora_config"):
        PunicaWrapperGPU(ROWS, max_batches=1, device="cpu")
