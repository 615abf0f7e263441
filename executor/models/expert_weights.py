"""Where the tensors of a layer's experts go: one for each expert's matrix, or one for all experts'."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import Tensor

from executor.layers.fused_moe import FusedMoE

# gate, up and down of one expert, as checkpoints call them.
_LEAVES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


@dataclass(frozen=True, slots=True)
class ExpertTarget:
    """A whole tensor [experts, rows, columns], [experts, rows] or, of one expert, without that dimension.

    Taken are these `experts` of it (None: it is one expert's), and of each these ranges of its rows, one
    under the other, and these columns. `transposed`: in the file, rows and columns are swapped.
    """

    memory: Tensor
    shape: tuple[int, ...]
    experts: range | None
    rows: tuple[range, ...]
    columns: range | None = None
    transposed: bool = False

    def pairs(self, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(memory, what belongs there): views that together are all of the memory."""
        if self.experts is not None:
            tensor = tensor[self.experts.start : self.experts.stop]
        axis = 0 if self.experts is None else 1
        if self.transposed:
            tensor = tensor.transpose(axis, axis + 1)
        if self.columns is not None:
            tensor = tensor[..., self.columns.start : self.columns.stop]
        before = (slice(None),) * axis
        start = 0
        for rows in self.rows:
            taken = (*before, slice(rows.start, rows.stop, rows.step))
            yield self.memory[(*before, slice(start, start + len(rows)))], tensor[taken]
            start += len(rows)


def expert_targets(path: str, module: FusedMoE, names: Collection[str]) -> dict[str, ExpertTarget]:
    """Every tensor that fills `module` on this rank, in the layout that a checkpoint of these `names` has."""
    for leaves in _LEAVES:
        if f"{path}.0.{leaves[0]}.weight" in names:
            return dict(_one_by_one(path, module, leaves))
    return dict(_all_in_one(path, module))


def foreign_experts(path: str, module: FusedMoE) -> set[str]:
    """Tensors of experts that other ranks have."""
    others = set(range(module.config.num_experts)) - set(module.expert_range)
    return {f"{path}.{expert}.{leaf}.weight" for expert in others for leaves in _LEAVES for leaf in leaves}


def _one_by_one(
    path: str, module: FusedMoE, leaves: tuple[str, str, str]
) -> Iterator[tuple[str, ExpertTarget]]:
    gate, up, down = (f"{leaf}.weight" for leaf in leaves)
    hidden, whole = range(module.hidden_size), module.config.intermediate_size
    own = module.intermediate_range
    for place, expert in enumerate(module.expert_range):
        w1, w3 = module.w13[place].chunk(2)
        yield f"{path}.{expert}.{gate}", ExpertTarget(w1, (whole, len(hidden)), None, (own,))
        yield f"{path}.{expert}.{up}", ExpertTarget(w3, (whole, len(hidden)), None, (own,))
        w2 = module.w2[place]
        yield f"{path}.{expert}.{down}", ExpertTarget(w2, (len(hidden), whole), None, (hidden,), own)


def _all_in_one(path: str, module: FusedMoE) -> Iterator[tuple[str, ExpertTarget]]:
    """Qwen and Mixtral hold [experts, out, in], gpt-oss [experts, in, out]."""
    experts, own, rows = module.expert_range, module.intermediate_range, module.gate_up_ranges
    hidden, swapped = range(module.hidden_size), module.config.interleaved
    count, wide, narrow = module.config.num_experts, len(hidden), module.config.intermediate_size

    def shape(out: int, into: int) -> tuple[int, ...]:
        return (count, into, out) if swapped else (count, out, into)

    w13 = ExpertTarget(module.w13, shape(2 * narrow, wide), experts, rows, transposed=swapped)
    w2 = ExpertTarget(module.w2, shape(wide, narrow), experts, (hidden,), own, transposed=swapped)
    yield f"{path}.gate_up_proj", w13
    yield f"{path}.down_proj", w2
    if module.w13_bias is not None and module.w2_bias is not None:
        yield f"{path}.gate_up_proj_bias", ExpertTarget(module.w13_bias, (count, 2 * narrow), experts, rows)
        yield f"{path}.down_proj_bias", ExpertTarget(module.w2_bias, (count, wide), experts, (hidden,))
