"""LoRA on a parameter of all experts (`target_parameters`): which one, in which of PEFT's layouts.

A pair is A [experts * r, in], expert by expert, and B [out, r * experts], whose columns have the expert
running fastest. PEFT before 0.19 took a parameter [experts, out, in] for [experts, in, out], so that A had
the width of the output and B of the input: there the two change places. Which parameter a pair is for, and
which layout a file has, follows from the shapes of all its pairs; where they allow both, from peft_version;
and otherwise the file is refused.
"""

import re
from collections.abc import Collection

from adapter_store.errors import IncompatibleAdapter, InvalidAdapter
from adapter_store.manifest import ModuleInfo
from adapter_store.moe_spec import MoESpec
from adapter_store.peft.config import CONFIG_FILE, LoraSettings
from adapter_store.peft.expert_pair import ExpertPair, check_rank
from adapter_store.peft.stacked import Order, StackedHalf, StackedPair

_PARAMETERS = {"w13": "gate_up_proj", "w2": "down_proj"}
_SWAPPED_BEFORE = (0, 19)


def from_fused(
    pair: ExpertPair, swapped: bool, settings: LoraSettings, moe: MoESpec
) -> tuple[ModuleInfo, StackedPair]:
    """`swapped`: what `is_swapped` says of the whole file. Raises InvalidAdapter."""
    (matrix,) = (name for name, other in _readings(pair, moe) if other == swapped)
    pair.check_ranks()
    path = f"{pair.path}.{_PARAMETERS[matrix]}"
    experts = moe.num_experts
    rank = pair.a.shape[0] // experts
    check_rank(pair.a, rank, path, settings)
    in_features, out_features = moe.places[f"experts.{matrix}"]
    columns = Order.COLUMN_BLOCKS if settings.expert_blocks_in_b else Order.COLUMNS
    rows = StackedHalf(Order.ROWS, experts, rank, pair.a.shape[1], {0: pair.a})
    across = StackedHalf(columns, experts, rank, pair.b.shape[0], {0: pair.b})
    name = f"layers.{pair.layer}.experts.{matrix}"
    module = ModuleInfo(name, rank, settings.scale_at(path), in_features, out_features, num_experts=experts)
    return module, StackedPair(across, rows) if swapped else StackedPair(rows, across)


def is_swapped(pairs: Collection[ExpertPair], settings: LoraSettings, moe: MoESpec) -> bool:
    """Whether a file with these pairs is of PEFT before 0.19, for a base where that makes a difference.

    Raises IncompatibleAdapter for a pair that fits no parameter, InvalidAdapter for a file that could be
    either, or is neither.
    """
    possible = {False, True}
    for pair in pairs:
        readings = {swapped for _, swapped in _readings(pair, moe)}
        if not readings or pair.a.shape[0] % moe.num_experts:
            raise IncompatibleAdapter(
                f"tensor {pair.a.name!r} has shape {list(pair.a.shape)} and its lora_B {list(pair.b.shape)}: "
                f"no parameter of the base's {moe.num_experts} experts takes that"
            )
        if not possible & readings:
            raise InvalidAdapter(
                f"tensor {pair.a.name!r} has in and out the other way round than the file's other experts"
            )
        possible &= readings
    if len(possible) == 1 or not pairs:
        return possible == {True}
    version = _version(settings.peft_version)
    if version is None:
        raise InvalidAdapter(
            f"tensor {next(iter(pairs)).a.name!r}: by its shape it may be of PEFT before 0.19 or later, so "
            f"that A and B may mean either: {CONFIG_FILE}: set peft_version to the one that wrote it"
        )
    return version < _SWAPPED_BEFORE


def _readings(pair: ExpertPair, moe: MoESpec) -> list[tuple[str, bool]]:
    """(matrix, with A and B swapped) for each that the pair's widths allow."""
    widths = pair.a.shape[1], pair.b.shape[0]
    found = [(matrix, False) for matrix in _PARAMETERS if moe.places[f"experts.{matrix}"] == widths]
    if not moe.fused:
        swapped = widths[::-1]
        found += [(matrix, True) for matrix in _PARAMETERS if moe.places[f"experts.{matrix}"] == swapped]
    return found


def _version(text: str | None) -> tuple[int, int] | None:
    """None also for development versions, which stand on either side of the change."""
    match = re.fullmatch(r"(\d+)\.(\d+)(?:\.\d+)*(?:\.post\d+)?", text or "")
    return (int(match[1]), int(match[2])) if match else None
