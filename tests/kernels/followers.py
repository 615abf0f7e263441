"""Steps and inputs of the fused followers, and the delta that every one of them must add."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.metadata.launch_plan import LaunchPlan
from kernels.metadata.meta import LoRAKernelMeta
from kernels.metadata.work_list import Run
from tests.kernels.stack import Stack, make_stack, row_slots

RANKS = [1, 2, 3, 5, 8, 12, 16, 0, 24, 40]
STEPS: dict[str, list[Run]] = {
    "one token": [(6, 1)],
    "distinct, base between": [(3, 1), (-1, 1), (9, 1), (0, 1), (-1, 2), (7, 1), (1, 1)],
    "shared, base between": [(-1, 3), (4, 33), (2, 1), (-1, 18), (9, 2), (4, 2)],
    "no base": [(1, 17), (8, 20)],
    "one high rank": [(0, 1), (1, 1), (-1, 1), (0, 1), (1, 1), (9, 1)],
    "one high rank, shared": [(0, 20), (1, 9), (9, 1)],
    "no adapter": [(-1, 9)],
    "zero rows": [],
}
# Under one plan, as a captured graph replays them: other adapters than at capture, or none.
PLANS = [LaunchPlan.for_graph(36, 10, rows_per_item=rows, block_rank=8) for rows in (1, 16)]
REPLAYED: list[list[Run]] = [[(0, 36)], [(slot, 1) for slot in range(10)] + [(-1, 26)], [(-1, 36)]]
PREFILL: list[Run] = [(1, 300), (-1, 70), (0, 230)]
# Of the largest output: one rounding of it, and of h where it enters a matrix product.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 3e-3, torch.bfloat16: 2.4e-2}


@dataclass(frozen=True)
class Step:
    """One step over a stack, and h as a shrink would leave it: undefined (NaN) where it writes nothing."""

    stack: Stack
    runs: list[Run]
    h: Tensor
    plan: LaunchPlan | None = None

    @property
    def rows(self) -> int:
        return len(row_slots(self.runs))

    def meta(self, device: str, max_rows: int = 640) -> LoRAKernelMeta:
        meta = LoRAKernelMeta.make(self.stack.ranks.shape[1], max_rows, device)
        meta.slot_ranks[:] = self.stack.ranks.amax(0).tolist()
        meta.prepare_tensors(self.runs, self.plan)
        return meta

    def delta(self, s: int) -> Tensor:
        """float64 [rows, out_s]: what the adapters add, row by row."""
        order = self.meta("cpu").token_indices_sorted_by_lora_ids.tolist()
        slots, out = row_slots(self.runs), torch.zeros(self.rows, self.stack.lora_b[s].shape[2]).double()
        for place, row in enumerate(order[: self.rows]):
            rank = int(self.stack.ranks[s, slots[row]]) if slots[row] >= 0 else 0
            b = self.stack.lora_b[s][slots[row], :rank].double()
            out[row] = self.h[s, place, :rank].double() @ b
        return out


def make_step(
    runs: list[Run], widths: Sequence[int], dtype: torch.dtype, plan: LaunchPlan | None = None
) -> Step:
    torch.manual_seed(0)
    turned = [[*RANKS[turn:], *RANKS[:turn]] for turn in range(len(widths))]
    stack = make_stack(turned, 4, widths, max_rank=40, dtype=dtype)
    step = Step(stack, runs, torch.full((len(widths), len(row_slots(runs)), 40), torch.nan), plan)
    order, slots = step.meta("cpu").token_indices_sorted_by_lora_ids.tolist(), row_slots(runs)
    for s in range(len(widths)):
        for place in range(step.rows):
            slot = slots[order[place]]
            rank = int(stack.ranks[s, slot]) if slot >= 0 else 0
            step.h[s, place, :rank] = torch.randn(rank)
    return step


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    bound = TOLERANCE[dtype] * (1 + expected.abs().max().item() if expected.numel() else 1)
    torch.testing.assert_close(got.cpu().double(), expected.double(), rtol=0, atol=bound)
