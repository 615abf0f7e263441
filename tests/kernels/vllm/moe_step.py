"""A step of vLLM's experts with random choices and weights, and its answer pair by pair in float64."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.vllm.experts import reference


@dataclass(frozen=True)
class Step:
    """Pairs of `tokens` x `topk`; of each slice A is [slots, experts, rank, width] and B [.., out, rank]."""

    tokens: int = 9
    topk: int = 2
    experts: int = 5
    max_loras: int = 3
    slots: tuple[int, ...] = (-1, 0, 2)
    disabled: tuple[int, ...] = ()
    expert_map: tuple[int, ...] | None = None
    block_size: int = 16
    rank: int = 6
    width: int = 40
    out: int = 21
    slices: int = 2
    by_pair: bool = False
    offset: int = 0
    spare_columns: int = 0
    seed: int = 0
    dtype: torch.dtype = torch.float32

    def choices(self, is_sorted: bool) -> dict[str, object]:
        """What vLLM hands over: tables of its alignment or, unsorted, the choices themselves."""
        generator = torch.Generator().manual_seed(self.seed)
        everywhere = len(self.expert_map or ()) or self.experts
        order = torch.rand(self.tokens, max(everywhere, self.topk), generator=generator)
        topk_ids = order.topk(self.topk, dim=1).indices.to(torch.int32)
        picked = torch.randint(len(self.slots), (self.tokens,), generator=generator)
        mapping = torch.tensor(self.slots, dtype=torch.int32)[picked]
        enabled = torch.ones(self.max_loras + 1, dtype=torch.int32)
        enabled[list(self.disabled)] = 0
        lora_ids = torch.full((self.max_loras + 1,), -1, dtype=torch.int32)
        active = mapping.unique()
        lora_ids[: len(active)] = active
        tables = (None, topk_ids.view(-1), None)
        if is_sorted:
            tables = self._aligned(topk_ids, mapping, enabled, lora_ids, everywhere)
        return {
            "topk_weights": torch.rand(self.tokens, self.topk, generator=generator),
            **dict(zip(("sorted_token_ids", "expert_ids", "num_tokens_post_padded"), tables, strict=True)),
            "token_lora_mapping": mapping, "top_k_num": self.topk, "lora_ids": lora_ids,
            "num_active_loras": torch.tensor([self.max_loras + 1], dtype=torch.int32),
            "adapter_enabled": enabled, "topk_ids": topk_ids,
        }  # fmt: skip

    def _aligned(self, topk_ids: Tensor, mapping: Tensor, enabled: Tensor, lora_ids: Tensor, experts: int):
        pairs, size = topk_ids.numel(), self.block_size
        places = pairs * size if pairs < experts else pairs + experts * (size - 1)
        blocks = -(-places // size)
        out = [
            torch.full(shape, -9, dtype=torch.int32)
            for shape in ((self.max_loras, places), (self.max_loras, blocks), (self.max_loras,))
        ]
        to = None if self.expert_map is None else torch.tensor(self.expert_map, dtype=torch.int32)
        reference.moe_lora_align_block_size(
            topk_ids, mapping, experts, size, self.max_loras, places, blocks, *out, enabled, lora_ids, to
        )
        return out

    def layer(self) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
        """(A, B, x, output); slots that nothing may read are NaN."""
        rand = partial(torch.randn, generator=torch.Generator().manual_seed(self.seed + 1))
        stack = self.max_loras, self.experts
        a = [rand(*stack, self.rank, self.width) / self.width**0.5 for _ in range(self.slices)]
        b = [rand(*stack, self.out, self.rank) / self.rank**0.5 for _ in range(self.slices)]
        for weight in (*a, *b):
            for slot in set(range(self.max_loras)) - (set(self.slots) - set(self.disabled)):
                weight[slot] = torch.nan
        rows = self.tokens * self.topk if self.by_pair else self.tokens
        columns = self.offset + self.slices * self.out + self.spare_columns
        x, y = rand(rows, self.width), rand(self.tokens, self.topk, columns)
        return (
            [w.to(self.dtype) for w in a],
            [w.to(self.dtype) for w in b],
            x.to(self.dtype),
            y.to(self.dtype),
        )

    def answer(
        self,
        a: list[Tensor],
        b: list[Tensor],
        x: Tensor,
        y: Tensor,
        given: dict[str, object],
        add: bool = True,
    ) -> Tensor:
        """float64 [tokens, topk, columns]: the output, pair by pair."""
        wanted, ids, weights = y.double(), given["topk_ids"], given["topk_weights"].double()
        for t in range(self.tokens):
            slot = int(given["token_lora_mapping"][t])
            for k in range(self.topk):
                expert = int(ids[t, k])
                if self.expert_map is not None:
                    expert = self.expert_map[expert]
                if slot < 0 or slot in self.disabled or not 0 <= expert < self.experts:
                    continue
                row = x[t * self.topk + k if self.by_pair else t].double()
                for s in range(self.slices):
                    delta = b[s][slot, expert].double() @ (a[s][slot, expert].double() @ row)
                    delta = delta * weights[t, k] if self.by_pair else delta
                    start = self.offset + s * self.out
                    before = wanted[t, k, start : start + self.out] if add else 0
                    wanted[t, k, start : start + self.out] = before + delta
        return wanted

    def arguments(self, a, b, x, y, given: dict[str, object], **options: object) -> dict[str, object]:
        """All arguments of fused_moe_lora; vLLM's block sizes, but for the alignment's, say nothing to us."""
        sizes = {
            f"{op}_{name}": 1
            for op in ("shrink", "expand")
            for name in ("block_size_n", "block_size_k", "group_size_m", "num_warps", "num_stages", "split_k")
        }
        given = {name: value for name, value in given.items() if name != "topk_ids"}
        return {
            "output": y, "qcurr_hidden_states": x, "lora_a_stacked": a, "lora_b_stacked": b, **given,
            "max_lora_rank": self.rank, "shrink_block_size_m": self.block_size,
            "expand_block_size_m": self.block_size, **sizes, "mul_routed_weight": self.by_pair,
            "offset": self.offset, **options,
        }  # fmt: skip


def to_device(value: object, device: str) -> object:
    """Tensors there, but for the number of lists, which stays with the host."""
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, list):
        return [to_device(each, device) for each in value]
    return value
